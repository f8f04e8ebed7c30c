"""The sockets of KV events, and the thread that owns them.

Life of a change: the router hands it over, and goes on; the thread works out what it is to others,
numbers the batch, sends it to all who subscribe, and keeps it for those who ask for a replay. Who
is too slow loses batches, sees a gap in the numbers, and asks. A replay of what is no longer kept
begins with all that is published instead. Where the thread does not keep up with the router, what
waits is dropped, and it starts over with what the router's index knows.

Numbers begin with the time in microseconds: those of a router that was started again are higher
than all before, so who has listened to the one before it sees a gap too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvrelay.cluster.events.form import END, SEQ_BYTES, batches, cleared, topic_of
from kvrelay.cluster.events.held import Origin, PublishedBlocks
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.needs import Need, key_of
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import RequestSpec

if TYPE_CHECKING:
    import zmq

    from kvrelay.cluster.events.section import EventsSection
    from kvrelay.router.index.prefix_index import PrefixIndex

log = logging.getLogger("kvrelay.events")

POLL_MS = 20  # what comes meanwhile is one batch for each worker
BIND_S = 0.5  # between two tries: the router before this one may still be there
CLOSE_S = 2.0
PAUSE_S = 0.0001  # in which the router's loop gets Python's lock; after 0 s it would not
TAKE_S = 0.1  # before what has changed is published
MAX_WAITING = 64 << 20  # bytes of names and tokens that the thread has not taken
CALL_BYTES = 200  # about what a call takes beside those
MAX_BUFFER = 64 << 20  # bytes of batches that are kept
MAX_REPLAYS = 16  # at once
REPLAY_S = 10.0  # who takes nothing of a replay for so long gets no more of it
REPLAY_AT_ONCE = 256  # batches, between two looks at what else there is
COUNTED = (
    "batches",  # that were published
    "replays",  # that were asked for
    "states",  # all that is held, in answer to one that began too early
    "dropped",  # times that what waited was, and the thread started over
)
Call = Callable[[PublishedBlocks], None]


def endpoint_of(endpoint: str, number: int) -> str:
    """That of the router of this number: at the port after those before it, or with its number
    behind the name of a file."""
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{number}" if number and endpoint else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}"


class CacheEvents:
    """What the router of one model hands over: its `CacheWatcher`."""

    def __init__(
        self, publisher: EventPublisher, model: str, name_of: Callable[[Need], str]
    ) -> None:
        """`name_of`: what clients call what a request needs."""
        self._publisher, self.model, self._name_of = publisher, model, name_of
        self.index: PrefixIndex | None = None  # that it starts over with

    def changed(self, worker: NodeId, tier: Tier, stored: bytes, removed: bytes) -> None:
        size = len(stored) + len(removed)
        self._publisher.put(size, lambda blocks: blocks.changed(worker, tier, stored, removed))

    def forgotten(self, worker: NodeId) -> None:
        self._publisher.put(0, lambda blocks: blocks.forgotten(worker))

    def named(
        self, spec: RequestSpec, tokens: Sequence[int], block_hashes: bytes, block_size: int
    ) -> None:
        origin, size = self._origin(spec, block_size), len(block_hashes) + 8 * len(tokens)
        self._publisher.put(size, lambda blocks: blocks.named(origin, tokens, block_hashes))

    def start_over(self) -> None:
        """Hand over all that the index knows."""
        for worker in list(self.index.views) if self.index is not None else ():
            assert self.index is not None
            export = self.index.export(worker)
            for tier, names in export.tiers.items() if export is not None else ():
                self.changed(worker, tier, names, b"")

    def _origin(self, spec: RequestSpec, block_size: int) -> Origin:
        scope, need = spec.scope, spec.need
        name = self._name_of(need) if need is not None else None
        keys = [name] if name else []
        if scope.salt and (need is None or scope != need.scoped(CacheScope())):
            keys.append(self._publisher.settings.salt_prefix + salt_tag(scope.salt))
        number = key_of(need.digest) >> 33 if need is not None else None
        num_public = scope.num_public_tokens // block_size
        return Origin(self.model, block_size, number, name, tuple(keys), num_public)


def salt_tag(salt: bytes) -> str:
    """Tells blocks of different salts apart, and does not say the salt."""
    return blake2b(salt, digest_size=16, person=b"kvrelay-events").hexdigest()


@dataclass(slots=True, eq=False)
class _Waiting:
    """What the thread has not done yet."""

    calls: deque[tuple[int, Call]] = field(default_factory=deque)
    num_put: int = 0  # bytes, counted by the loop
    num_taken: int = 0  # likewise, by the thread


@dataclass(slots=True, eq=False)
class _Replay:
    client: bytes
    left: deque[tuple[bytes, bytes]]  # numbers, and batches
    took_at: float


class EventPublisher:
    """Owned by a router's process, whose loop calls `put`; what is below `_run` is the thread's.
    Invariant: `_kept` are the last batches, without a gap, up to number `_seq - 1`."""

    def __init__(
        self, settings: EventsSection, router: NodeId, number: int, most_workers: int
    ) -> None:
        """`number` of the router. `most_workers`: that there may be: what a router before this one
        has said of so many counts no more."""
        self.settings, self._router = settings, router
        self._endpoint = endpoint_of(settings.endpoint, number)
        self._replay_endpoint = endpoint_of(settings.replay_endpoint, number)
        self._most_workers = most_workers
        self._waiting, self._starts_over = _Waiting(), False
        self._sources: list[CacheEvents] = []
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self._seq = self._first = time.time_ns() // 1000
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._replays: list[_Replay] = []
        self._blocks = PublishedBlocks(settings.max_blocks, lambda: time.sleep(PAUSE_S))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def source(self, model: str, name_of: Callable[[Need], str]) -> CacheEvents:
        """Returns what the router of a model is to call."""
        self._sources.append(CacheEvents(self, model, name_of))
        return self._sources[-1]

    def drop(self, model: str) -> None:
        """It is served no more: nothing is held of it."""
        for source in [each for each in self._sources if each.model == model]:
            self._sources.remove(source)
            for worker in source.index.views if source.index is not None else ():
                source.forgotten(worker)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Blocks for a moment."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def put(self, size: int, call: Call) -> None:
        """Have the thread do it, after what it was given before."""
        waiting = self._waiting
        waiting.num_put += size + CALL_BYTES
        waiting.calls.append((size + CALL_BYTES, call))
        if waiting.num_put - waiting.num_taken > MAX_WAITING and not self._starts_over:
            self._start_over()

    def _start_over(self) -> None:
        """Drop what waits. What is known of blocks' tokens counts on."""
        self.counts["dropped"] += 1
        log.warning("KV events come faster than they are published: they start over")
        self._waiting, self._starts_over = _Waiting(), True
        self.put(0, PublishedBlocks.forget_workers)
        for source in self._sources:
            source.start_over()
        self._starts_over = False

    def _run(self) -> None:
        import zmq

        context = zmq.Context()
        try:
            pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            for sock in (pub, router):
                sock.set_hwm(self.settings.hwm)
                sock.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._bind(pub, self._endpoint)
            self._bind(router, self._replay_endpoint)
            log.info(
                "KV events at %s, replays at %s", self._endpoint, self._replay_endpoint or "none"
            )
            self._publish_all(pub, router)
        except Exception:
            log.exception("KV events are published no more")
        finally:
            context.destroy(linger=0)

    def _bind(self, sock: zmq.Socket[bytes], endpoint: str) -> None:
        """As soon as the one before this router is gone."""
        import zmq

        has_said = False
        while endpoint and not self._stop.is_set():
            try:
                sock.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if not has_said:
                    log.warning("KV events wait for %s: %s", endpoint, error)
                has_said = True
            self._take()
            self._stop.wait(BIND_S)

    def _publish_all(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> None:
        for each in range(self._most_workers):
            self._send(pub, topic_of(self._router, ""), cleared(time.time(), each))
        while not self._stop.is_set():
            router.poll(0 if self._waiting.calls else POLL_MS)
            self._take()
            for worker, number, changes in self._blocks.take_changes():
                topic = topic_of(worker, changes[0].block.origin.model)
                for batch in batches(time.time(), number, changes):
                    self._send(pub, topic, batch)
                self._most_workers = max(self._most_workers, number + 1)
            self._serve(router)

    def _take(self) -> None:
        """Do what waits, some of it where it is much."""
        waiting, until = self._waiting, time.monotonic() + TAKE_S
        while waiting.calls and time.monotonic() < until:
            size, call = waiting.calls.popleft()
            call(self._blocks)
            waiting.num_taken += size

    def _send(self, pub: zmq.Socket[bytes], topic: bytes, batch: bytes) -> None:
        """Never blocks: who does not take it loses it."""
        pub.send_multipart((topic, self._seq.to_bytes(SEQ_BYTES, "big"), batch))
        self.counts["batches"] += 1
        self._kept.append((self._seq, batch))
        self._kept_bytes += len(batch)
        self._seq += 1
        while len(self._kept) > self.settings.buffer_steps or self._kept_bytes > MAX_BUFFER:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        """Go on with replays, and begin those that are asked for."""
        import zmq

        while len(self._replays) < MAX_REPLAYS and router.poll(0):
            client, *asked = router.recv_multipart()
            if len(asked) == 2 and len(asked[1]) == SEQ_BYTES:
                self._replays = [each for each in self._replays if each.client != client]
                left = self._from(int.from_bytes(asked[1], "big"))
                self._replays.append(_Replay(client, left, time.monotonic()))
                self.counts["replays"] += 1
        for replay in list(self._replays):
            try:
                for _ in range(min(REPLAY_AT_ONCE, len(replay.left))):
                    message = (replay.client, b"", *replay.left[0])
                    router.send_multipart(message, zmq.NOBLOCK)
                    replay.left.popleft()
                    replay.took_at = time.monotonic()
            except zmq.ZMQError as error:
                is_slow = error.errno == zmq.EAGAIN
                if is_slow and time.monotonic() - replay.took_at < REPLAY_S:
                    continue
                replay.left.clear()  # it is gone
            if not replay.left:
                self._replays.remove(replay)

    def _from(self, start: int) -> deque[tuple[bytes, bytes]]:
        """The batches from this number on; or, where they are no longer kept, all that is held, as
        of the last number. And the end."""
        first = self._kept[0][0] if self._kept else self._seq
        if start >= first or first == self._first:
            kept = ((seq, batch) for seq, batch in self._kept if seq >= start)
            found = deque((seq.to_bytes(SEQ_BYTES, "big"), batch) for seq, batch in kept)
        else:
            self.counts["states"] += 1
            last, now = (self._seq - 1).to_bytes(SEQ_BYTES, "big"), time.time()
            found = deque((last, cleared(now, each)) for each in range(self._most_workers))
            for _, number, changes in self._blocks.everything():
                found += ((last, batch) for batch in batches(now, number, changes))
        found.append((END, b""))
        return found
