"""An index that is not ours, Dynamo's standalone indexer with its own ZMQ listener, knows by our
events what our index knows: prompt by prompt, worker by worker, through whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.lab.replay.trace import preset
from tests.cluster.events.peer import (
    MODEL,
    SIZE,
    WAIT_S,
    Publishing,
    free_endpoint,
    names_of,
    spec_of,
    zmq,
)

dynamo = pytest.importorskip("dynamo._core", reason="needs Dynamo: pip install ai-dynamo-runtime")

INSTANCE = 7
WORKERS = ("decode-0", "decode-1", "decode-2")
CAPACITY = 3000  # blocks of a worker
ROUND, NUM_ROUNDS = 50, 20
Tokens = Sequence[int]


class Indexer:
    """Dynamo's, as a process of its own."""

    def __init__(self) -> None:
        self.port = free_endpoint().rpartition(":")[2]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", self.port, "--threads", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while True:
            try:
                self.call("/health")
                return
            except OSError:
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.05)

    def call(self, path: str, **body: Any) -> Any:
        url, data = f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(url, data if body else None, headers)
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def follow(self, link: Link, router: Publishing) -> None:
        self.call(
            "/register",
            instance_id=INSTANCE,
            endpoint=link.endpoint,
            replay_endpoint=router.endpoints[1],
            model_name=MODEL,
            block_size=SIZE,
        )

    def device_tokens(self, tokens: Tokens) -> dict[int, int]:
        """How much of a prompt each worker has in device memory, by number."""
        found = self.call("/query", token_ids=list(tokens), model_name=MODEL)["scores"]
        return {int(number): held for number, held in found.get(str(INSTANCE), {}).items()}


class Link:
    """Between a router and who subscribes. It loses all messages for a while."""

    def __init__(self, router: Publishing) -> None:
        self.endpoint = free_endpoint()
        self.is_down = self.is_over = False
        self.thread = threading.Thread(target=self._pass_on, args=(router.endpoints[0],))
        self.thread.start()

    def _pass_on(self, source: str) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(source)
            with context.socket(zmq.PUB) as pub:
                pub.setsockopt(zmq.LINGER, 0)
                pub.bind(self.endpoint)
                while not self.is_over:
                    if sub.poll(20):
                        message = sub.recv_multipart()
                        if not self.is_down:
                            pub.send_multipart(message)

    def close(self) -> None:
        self.is_over = True
        self.thread.join()


class Workers:
    """Each holds the blocks of its last requests, in device memory, and what has left that in host
    memory; it evicts ends of prompts first."""

    def __init__(self, router: Publishing) -> None:
        self.router = router
        self.blocks: dict[str, OrderedDict[bytes, None]] = {}
        self.epoch = 0
        self.num_marks = 0
        self.start(*WORKERS)

    def start(self, *workers: str) -> None:
        self.epoch += 1
        self.router.up(*workers, epoch=self.epoch)
        self.blocks |= {worker: OrderedDict() for worker in workers}

    def kill(self, worker: str) -> None:
        self.router.index.remove(worker)
        del self.blocks[worker]

    def serve(self, worker: str, tokens: Tokens) -> None:
        names = self.router.name(tokens)
        held = self.blocks[worker]
        stored = [name for name in names if name not in held]
        for name in reversed(names):
            held[name] = None
            held.move_to_end(name)
        evicted = [held.popitem(last=False)[0] for _ in range(len(held) - CAPACITY)]
        self.router.say(worker, stored, evicted)
        self.router.say(worker, stored, tier=Tier.HOST)

    def known(self, tokens: Tokens) -> dict[str, int]:
        """What our own index finds."""
        packed = b"".join(names_of(tokens, spec_of()))
        found = self.router.index.lookup(0.0, packed)
        return {worker: SIZE * found.held(worker).device for worker in self.blocks}

    def mark(self) -> Tokens:
        """A prompt that one of them holds from now on, and nobody held before."""
        self.num_marks += 1
        tokens = [500_000 + self.num_marks] * SIZE
        self.serve(next(iter(self.blocks)), tokens)
        return tokens


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    found = Indexer()
    yield found
    found.process.kill()
    found.process.wait()


def wait_until_known(indexer: Indexer, workers: Workers) -> None:
    """All that was said until now. The first mark is lost where it has only begun to listen."""
    until = time.monotonic() + WAIT_S
    while True:
        mark, again_at = workers.mark(), time.monotonic() + 1.0
        while time.monotonic() < again_at:
            if indexer.device_tokens(mark):
                return
            time.sleep(0.02)
        assert time.monotonic() < until, "it has not heard of the last event"


def compare(indexer: Indexer, workers: Workers, prompts: Sequence[Tokens]) -> int:
    """Returns the tokens that were found; both find the same."""
    wait_until_known(indexer, workers)
    numbers = workers.router.publisher._blocks.numbers
    total = 0
    for tokens in prompts:
        ours = {numbers[worker]: held for worker, held in workers.known(tokens).items() if held}
        assert indexer.device_tokens(tokens) == ours
        total += sum(ours.values())
    return total


def chats() -> list[tuple[str, list[int]]]:
    """Sessions and prompts of the laboratory's chat traffic."""
    trace = preset("chat", ROUND * (NUM_ROUNDS + 1), rate=5.0, seed=1)
    size, found = trace.block_tokens, []
    for each in trace.requests:
        ids = (block * size + at for block in each.block_ids for at in range(size))
        found.append((each.session or "", [1 + token % 400_000 for token in ids]))
    return found


@pytest.mark.slow
def test_an_index_of_others_finds_what_ours_finds(indexer: Indexer) -> None:
    requests = chats()
    router = Publishing(buffer_steps=20)
    workers = Workers(router)
    router.start()
    link = Link(router)
    indexer.follow(link, router)
    total = 0
    try:
        for number in range(NUM_ROUNDS):
            if number == 5:
                workers.kill("decode-1")
            if number == 8:
                workers.start("decode-1")
            link.is_down = number in (10, 14)
            for session, tokens in requests[number * ROUND : (number + 1) * ROUND]:
                alive = [*workers.blocks]
                workers.serve(alive[crc32(session.encode()) % len(alive)], tokens)
                if number == 14:  # so many batches that the first are no longer kept
                    router.settle()
            router.settle()
            time.sleep(0.2)  # what is on the way is lost too
            link.is_down = False
            coming = [tokens for _, tokens in requests[(number + 1) * ROUND :][:ROUND]]
            total += compare(indexer, workers, coming)
    finally:
        link.close()
        router.publisher.close()
    assert total > 100_000
    counts = router.publisher.counts
    assert counts["replays"] >= 3
    assert counts["states"] >= 1, "of what was no longer kept"
