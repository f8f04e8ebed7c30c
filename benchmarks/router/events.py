"""What KV events take from the router's loop: `python -m benchmarks.router.events`.

The same requests go through two routers, some to each in turn: one with events and a subscriber,
one without. What is timed is `Router.receive`, all that a request needs. Their prompts are new, so
that all their blocks have to be published.
"""

from __future__ import annotations

import json
import random
import socket
import time

import click

from benchmarks.report import about
from benchmarks.router.decision import BLOCK_SIZE
from kvrelay.cluster.events.publisher import EventPublisher
from kvrelay.cluster.events.section import EventsSection
from kvrelay.engine.host import settle_memory
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.lab.bench.load import percentile
from kvrelay.router.messages import Submit, WorkerUp
from kvrelay.router.router import Router

WORKER, FINGERPRINT = "decode-0", b"f" * 32
ROUND = 20  # requests to one router, before the other one gets them
IDLE_MS = 300


def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


class Served:
    """A router with one worker, which computes what it is given at once."""

    def __init__(self, publisher: EventPublisher | None) -> None:
        events = publisher.source("m", lambda need: "") if publisher is not None else None
        self.router = Router("router-0", watcher=events)
        self.seq = 0
        info = WorkerInfo(
            worker=WORKER, role=Role.DECODE, epoch=1, num_blocks=1 << 20, block_size=BLOCK_SIZE,
            bytes_per_block=1 << 20, max_model_len=200_000, max_num_batched_tokens=8192,
            fingerprint=FINGERPRINT,
        )  # fmt: skip
        for message in (WorkerUp(info), KVSnapshot(WORKER, 1, 0, ())):
            self.router.receive(0.0, message)

    def request(self, name: str, tokens: tuple[int, ...]) -> float:
        """Returns the seconds that it took."""
        self.seq += 1
        stored = tuple(hash_blocks(FINGERPRINT, UNSALTED, tokens, BLOCK_SIZE))
        delta = TokenDelta(name, 1, len(tokens), (1,), finish=FinishReason.STOP)
        messages = (
            Submit(name, SamplingParams(max_tokens=1), "api", tokens, 60.0),
            KVEvents(WORKER, 1, self.seq, stored, ()),
            TokenDeltas(WORKER, 1, (delta,)),
        )
        began = time.perf_counter()
        for message in messages:
            self.router.receive(1.0, message)
        return time.perf_counter() - began


@click.command()
@click.option("--requests", default=1000)
@click.option("--tokens", default=8000, help="of each prompt")
@click.option("--pause-ms", default=20.0, help="between two requests")
def main(requests: int, tokens: int, pause_ms: float) -> None:
    import zmq

    section = EventsSection(endpoint(), endpoint())
    publisher = EventPublisher(section, "router-0", 0, 1)
    publisher.start()
    both = {"without": Served(None), "with": Served(publisher)}
    settle_memory()
    times: dict[str, list[float]] = {name: [] for name in both}
    rng = random.Random(1)
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(section.endpoint)
        for first in range(0, requests, ROUND):
            prompts = [
                tuple(rng.choices(range(1 << 17), k=tokens)) for _ in range(min(ROUND, requests))
            ]
            for name in sorted(both, reverse=first // ROUND % 2 == 0):
                for number, prompt in enumerate(prompts, first):
                    times[name].append(both[name].request(f"r{number}", prompt))
                    time.sleep(pause_ms / 1000)
                while sub.poll(IDLE_MS):  # so that nothing is published while the other is timed
                    sub.recv_multipart()
    publisher.close()
    found = {
        name: {f"p{q}_ms": round(1000 * (percentile(each, q) or 0.0), 3) for q in (50, 99)}
        for name, each in times.items()
    }
    ratio = sum(times["with"]) / sum(times["without"])
    counts = {"ratio": round(ratio, 3), "batches": publisher.counts["batches"]}
    print(json.dumps(about() | {"tokens": tokens, **found, **counts}, indent=1))


if __name__ == "__main__":
    main()
