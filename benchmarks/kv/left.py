"""How soon a survivor finds the KV of a stream whose worker has died, where much else was left.

    python -m benchmarks.kv.left [--left 40000] [--tokens 100000] [--rounds 3]

A process holds host memory with the blocks of a long session, and then those of others, and is
killed. The node, the thread and the agent of a survivor are those of a worker; the model is not
there. Printed are the time from the kill until the stream goes on, how much of its prefix it has
then, how long until everything that was left is known, and how long the node was busy at once: what
any other message had to wait. The stream's own messages, by which its whole context is hashed,
planned and taken over, are apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.host import settle_memory
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.node import Effect
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role, RouterUp
from kvrelay.kvtransfer.agent import CopyBlocks, CopyDone, FindStored, StoreFound, StoreIndex
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.movers.left import LIST_S, LeftMover
from kvrelay.kvtransfer.store.arena import HostArena
from kvrelay.kvtransfer.transfer_loop import TransferLoop
from kvrelay.worker.node import Worker

BLOCK_SIZE, BYTES = 16, 1024  # bytes do not matter: what is found are names
WRITTEN_AT_ONCE = 1000
TICK_S = 0.25


class Found(NamedTuple):
    """Seconds from the kill, but for the last."""

    prefix_s: float
    num_tokens: int  # they need not be computed
    all_s: float
    longest_s: float  # that the node was busy with one message, beside the stream's own
    own_s: float  # with one that begins or ends the read of its whole context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.rounds):
        found = one_round(args.left, args.tokens)
        print(
            f"prefix of {found.num_tokens:,} tokens found after {found.prefix_s:.3f} s, all"
            f" {args.left:,} blocks after {found.all_s:.2f} s; the node's longest message"
            f" {found.longest_s * 1e3:.1f} ms, of the stream's own {found.own_s * 1e3:.1f} ms"
        )


def one_round(num_left: int, num_tokens: int) -> Found:
    """The session is the oldest of what is left."""
    tokens = tuple(i % 50_000 for i in range(num_tokens))
    session = BlockChain(b"f", UNSALTED, BLOCK_SIZE).extend(tokens)
    others = (xxh3_128_digest(number.to_bytes(8)) for number in range(num_left - len(session)))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        place = Path(folder) / "places"
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        given = place / "dead", [*session, *others], ready
        dead = context.Process(target=_hold, args=given, daemon=True)
        dead.start()
        ready.wait(60.0)
        survivor = Survivor(place, num_left + len(session))
        try:
            settle_memory()  # as a worker does
            survivor.run(until=lambda: False, timeout_s=1.5 * LIST_S)  # it sees the other's lock
            assert dead.pid is not None
            os.kill(dead.pid, signal.SIGKILL)
            return survivor.take_over(tokens, num_left)
        finally:
            survivor.loop.close()
            dead.join()


def _hold(folder: Path, names: Sequence[bytes], ready: Any) -> None:
    arena = HostArena.open(
        folder, identity={}, bytes_per_block=BYTES, num_slots=len(names), lock_timeout_s=1.0
    )
    arena.reserve([len(names) - 1])
    (checksum,) = checksum_blocks(arena.memory, [0])
    for at in range(0, len(names), WRITTEN_AT_ONCE):
        some = enumerate(names[at : at + WRITTEN_AT_ONCE], start=at)
        records = tuple(DiskRecord(slot, name, checksum, 3600.0) for slot, name in some)
        arena.update(StoreIndex(put=records, tier=Tier.HOST))
    ready.set()
    time.sleep(600.0)


class Survivor:
    """A worker's node and its thread, as far as they have to do with what others have left."""

    def __init__(self, place: Path, num_blocks: int) -> None:
        config = WorkerConfig(
            node_id="decode-1",
            role=Role.DECODE,
            epoch=1,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=num_blocks * BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_waiting=8,
            bytes_per_block=BYTES,
            fingerprint=b"f",
            num_host_blocks=1024,
            host_outlives=True,
            reads_left_kv=True,
        )
        self.node = Worker(config, ROLES)
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pool = np.zeros((num_blocks, BYTES), np.uint8)
        agent = LeftMover("decode-1", place, None, {Tier.DEVICE: pool})
        copies = TransferExecutor("decode-1", 1, agent, {Tier.DEVICE: pool})
        self.loop = TransferLoop(copies, self.messages.put, store=agent)
        self.longest_s = self.own_s = 0.0
        self._receive(RouterUp("router"))

    def take_over(self, tokens: tuple[int, ...], num_left: int) -> Found:
        killed_at = time.perf_counter()
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        work = Decode("a", sampling, 1, "router", tokens, len(tokens) - 9, 60.0)
        self.messages.put(work)
        counters = self.node.core.counters
        self.longest_s = 0.0
        self.run(until=lambda: "left_kv_found" in counters, timeout_s=2.0)
        prefix_s = time.perf_counter() - killed_at
        (seq,) = self.node.core.seqs.values()
        tiers = self.node.exchange.tiers
        num_tokens = len(tiers.find(seq.block_hashes)) * BLOCK_SIZE
        self.run(until=lambda: tiers.num_blocks(Tier.LEFT) >= num_left, timeout_s=30.0)
        all_s = time.perf_counter() - killed_at
        return Found(prefix_s, num_tokens, all_s, self.longest_s, self.own_s)

    def run(self, until: Any, timeout_s: float) -> None:
        deadline = time.perf_counter() + timeout_s
        while not until() and time.perf_counter() < deadline:
            try:
                self._receive(self.messages.get(timeout=0.005))
            except queue.Empty:
                continue

    def _receive(self, message: Any) -> None:
        began = time.perf_counter()
        effects: list[Effect] = self.node.receive(began, message)
        busy_s = time.perf_counter() - began
        ends = isinstance(message, StoreFound) and message.was_asked_for and not message.has_more
        if ends or isinstance(message, Decode | CopyDone):
            self.own_s = max(self.own_s, busy_s)
        else:
            self.longest_s = max(self.longest_s, busy_s)
        for effect in effects:
            if isinstance(effect, FindStored):
                self.loop.submit(effect)
            elif isinstance(effect, CopyBlocks) and effect.src_tier is Tier.LEFT:
                self.loop.submit(replace(effect, timeout_s=60.0))


if __name__ == "__main__":
    main()
