"""A router with events, and one who subscribes as an index of others does: it applies what comes,
sees gaps, and asks for what it has missed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest

from kvrelay.cluster.events.form import number_of
from kvrelay.cluster.events.publisher import EventPublisher
from kvrelay.cluster.events.section import EventsSection
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.needs import Need
from kvrelay.engine.request import RequestSpec, SamplingParams, needing
from kvrelay.router.index.prefix_index import PrefixIndex

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install 'kvrelay[events]'")

MODEL, SIZE, FINGERPRINT = "some/model", 16, b"f" * 32
WAIT_S = 20.0
END = (1 << 64) - 1
Names = Sequence[bytes]


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def names_of(tokens: Sequence[int], spec: RequestSpec) -> list[bytes]:
    return hash_blocks(FINGERPRINT, spec.scope, tokens, SIZE)


def spec_of(scope: Any = UNSALTED, need: Need | None = None) -> RequestSpec:
    return RequestSpec("r", SamplingParams(max_tokens=1), **needing(need, scope))


class Publishing:
    """A router's index with workers that say what they hold, and its publisher."""

    def __init__(
        self, endpoints: tuple[str, str] | None = None, most_workers: int = 4, **changes: Any
    ) -> None:
        self.endpoints = endpoints or (free_endpoint(), free_endpoint())
        section = EventsSection(self.endpoints[0], self.endpoints[1], **changes)
        self.publisher = EventPublisher(section, "router-0", 0, most_workers)
        self.events = self.publisher.source(MODEL, lambda need: need.source)
        self.index = self.events.index = PrefixIndex()
        self.index.watcher = self.events
        self._seqs: dict[str, int] = {}

    def start(self) -> None:
        self.publisher.start()

    def up(self, *workers: str, epoch: int = 1) -> None:
        for worker in workers:
            self.index.add(worker, epoch)
            self._seqs[worker] = 0
            self.index.apply(0.0, KVSnapshot(worker, epoch, 0, ()))

    def say(
        self, worker: str, stored: Names = (), removed: Names = (), tier: Tier = Tier.DEVICE
    ) -> None:
        self._seqs[worker] += 1
        about = worker, self.index.views[worker].epoch, self._seqs[worker]
        stored, removed = tuple(stored), tuple(removed)
        if tier is Tier.DEVICE:
            event = KVEvents(*about, stored, removed)
        else:
            event = KVEvents(*about, (), (), (TierHashes(tier, stored, removed),))
        self.index.apply(0.0, event)

    def name(self, tokens: Sequence[int], spec: RequestSpec | None = None) -> list[bytes]:
        """A request with these tokens goes to some worker."""
        spec = spec or spec_of()
        names = names_of(tokens, spec)
        self.events.named(spec, tokens, b"".join(names), SIZE)
        return names

    def settle(self) -> int:
        """Returns the number of the next batch, once all that was handed over is published."""
        for _ in range(2):  # what a round has taken is published before the next one takes
            is_taken = threading.Event()
            self.publisher.put(0, lambda blocks, said=is_taken: said.set())
            assert is_taken.wait(WAIT_S)
            wait_for(lambda: not self.publisher._blocks._dirty)
        return self.publisher._seq


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, "not within the deadline"
        time.sleep(0.001)


class Peer:
    """Invariant: `held` is what has been said up to batch `last`, by rank and medium: the tokens
    of each block, and its parent."""

    def __init__(self, publishing: Publishing, topic: str = "kv@", **options: int) -> None:
        self.context = zmq.Context()
        self.sub, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for sock in (self.sub, self.dealer):
            sock.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.sub.setsockopt(getattr(zmq, name), value)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.sub.connect(publishing.endpoints[0])
        self.dealer.connect(publishing.endpoints[1])
        self.last = -1
        self.held: dict[tuple[int, str], dict[int, tuple[int | None, list[int]]]] = {}
        self.topics: dict[int, str] = {}
        self.replayed: list[int] = []
        self.events: list[Any] = []

    def close(self) -> None:
        self.context.destroy(linger=0)

    def follow(self, publishing: Publishing) -> None:
        """Up to what has been published when it is called."""
        until = publishing.settle() - 1
        deadline = time.monotonic() + WAIT_S
        while self.last < until:
            assert time.monotonic() < deadline, f"at {self.last} of {until}"
            if self.sub.poll(200):
                topic, seq, payload = self.sub.recv_multipart()
                self._take(topic, int.from_bytes(seq, "big"), payload)
            else:
                self.ask(self.last + 1)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        if seq > self.last + 1:
            self.ask(self.last + 1)
        if seq > self.last:
            self._apply(payload, topic)
            self.last = seq

    def ask(self, start: int) -> None:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert self.dealer.poll(WAIT_S * 1000), "no end of the replay"
            empty, seq_bytes, payload = self.dealer.recv_multipart()
            assert (empty, len(seq_bytes)) == (b"", 8)
            seq = int.from_bytes(seq_bytes, "big")
            if seq == END:
                assert payload == b""
                return
            assert seq >= max(self.last, start)
            self.last = seq
            self.replayed.append(seq)
            self._apply(payload)

    def _apply(self, payload: bytes, topic: bytes = b"") -> None:
        ts, events, rank = msgpack.unpackb(payload)
        assert abs(ts - time.time()) < 600
        if topic:
            self.topics[rank] = topic.decode()
        self.events += events
        for tag, *own in events:
            if tag == "AllBlocksCleared":
                for held in [place for place in self.held if place[0] == rank]:
                    self.held[held].clear()
            elif tag == "BlockRemoved":
                for name in own[0]:
                    del self.held[rank, own[1]][name]
            else:
                self._store(rank, *own)

    def _store(
        self, rank: int, names: list[int], parent: int | None, tokens: list[int], size: int,
        _: int | None, medium: str, *others: Any,
    ) -> None:  # fmt: skip
        held = self.held.setdefault((rank, medium), {})
        assert len(tokens) == size * len(names)
        media = [medium] if medium == "GPU" else ["GPU", "CPU", "DISK"]
        known = [name for each in media for name in self.held.get((rank, each), ())]
        assert parent is None or parent in known
        for at, name in enumerate(names):
            assert name not in held
            held[name] = parent, tokens[at * size : (at + 1) * size]
            parent = name

    def has(self, rank: int, medium: str = "GPU") -> set[int]:
        return {*self.held.get((rank, medium), ())}


def numbers(names: Names) -> set[int]:
    return {number_of(name) for name in names}
