"""Whole routing decisions, timed: the part of `routing` that asks a dispatcher."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.router.load import RoutingLoad
from kvrelay.engine.host import settle_memory
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role, WorkerInfo, WorkerStats
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Submit
from kvrelay.router.record import RequestRecord

BLOCK_SIZE = 16
NUM_DECISIONS = 100
Samples = dict[str, list[float]]  # seconds of each call, by what was asked


def role_of(number: int) -> Role:
    return Role.PREFILL if number % 2 else Role.DECODE


def name_of(number: int) -> str:
    return f"{role_of(number).value}-{number}"


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def start_workers(dispatcher: Dispatcher, num_workers: int) -> None:
    """All up, all idle, with the rates of an 8B model on a large GPU."""
    for number in range(num_workers):
        info = WorkerInfo(
            worker=name_of(number), role=role_of(number), epoch=1, num_blocks=1 << 20,
            block_size=BLOCK_SIZE, bytes_per_block=2 << 20, max_model_len=200_000,
            max_num_batched_tokens=8192, fingerprint=b"routing",
        )  # fmt: skip
        stats = WorkerStats(
            worker=info.worker, epoch=1, num_free_blocks=1 << 20, num_cached_blocks=0,
            num_waiting=0, num_running=0, num_handoffs=0, pending_prefill_tokens=0,
            prefill_tokens_per_s=20_000.0, decode_step_s=0.02, read_bytes_per_s=20e9,
        )  # fmt: skip
        dispatcher.on_worker_up(0.0, info)
        dispatcher.on_stats(0.0, stats)


def decision(dispatcher: Dispatcher, load: RoutingLoad, num_blocks: int) -> dict[str, Samples]:
    """Seconds of whole routing decisions through the dispatcher, for prompts that a worker holds
    and for new ones: naming the blocks, and everything else."""
    rng = random.Random(load.seed)
    found: dict[str, Samples] = {}
    settle_memory()  # as a server does
    for kind in ("hit", "miss"):
        times: Samples = {"names": [], "rest": []}
        records = []
        for n in range(NUM_DECISIONS):
            tokens = tuple(rng.randrange(1 << 17) for _ in range(num_blocks * BLOCK_SIZE + 1))
            submit = Submit(f"{kind} {num_blocks} {n}", SamplingParams(), "api", tokens, 60.0)
            record = RequestRecord(submit, submit.sampling, n, 0.0, 60.0, 0.0)
            holder = dispatcher.endpoint(name_of(1 + n % (load.num_workers - 1)), 1)
            assert holder is not None
            times["names"].append(timed(lambda: record.packed_hashes(holder.info)))  # noqa: B023
            if kind == "hit":
                slot = dispatcher.index.views[holder.worker].slot
                dispatcher.index.table.change(slot, record.packed_hashes(holder.info), add=1)
            records.append(record)
        for record in records:
            began = time.perf_counter()
            attempt = dispatcher.place(0.0, record)
            times["rest"].append(time.perf_counter() - began)
            dispatcher.release(attempt, record.request_id)  # type: ignore[arg-type]
        found[kind] = times
    return found
