"""Worker nodes over a tiny in-memory runtime: a deterministic model, blocks that hold what was fed.

The harness delivers effects by hand, so that a test can stop the world between any two messages.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from decode_worker.messages import Decode
from decode_worker.worker import DecodeWorker
from engine.config import WorkerConfig
from engine.node import Send, Wake, Woken
from engine.outbox import Refused, TokenDeltas
from engine.request import SamplingParams
from engine.stats import Role
from engine.step import Execute, Sampled, Step, StepDone
from kvtransfer.agent import ConnectPeer, PeerConnected, ReadBlocks, ReadDone
from prefill_worker.messages import Prefill
from prefill_worker.worker import PrefillWorker

BLOCK_SIZE = 4
VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """The tiny model: a function of all tokens so far."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return 2 + value % (VOCAB - 2)


def reference(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class World:
    """One prefill and one decode worker, and a router that only records."""

    def __init__(self, num_blocks: int = 32, prefill_blocks: int = 32, **limits: Any) -> None:
        self.now = 0.0
        self.workers: dict[str, PrefillWorker | DecodeWorker] = {}
        self.slots: dict[str, list[list[int]]] = {}
        self.queue: deque[tuple[str, Any]] = deque()
        self.to_router: list[Any] = []
        self.reads: list[tuple[str, ReadBlocks]] = []
        self.hold_reads = False
        self.lost: tuple[type, ...] = ()
        for role, kind, count in (
            (Role.PREFILL, PrefillWorker, prefill_blocks),
            (Role.DECODE, DecodeWorker, num_blocks),
        ):
            config = WorkerConfig(
                node_id=str(role),
                role=role,
                epoch=1,
                num_blocks=count,
                block_size=BLOCK_SIZE,
                bytes_per_block=BLOCK_SIZE * 8,
                max_model_len=256,
                fingerprint=b"tiny",
                agent_metadata=b"meta",
                **limits,
            )
            self.workers[str(role)] = kind(config)
            self.slots[str(role)] = [[0] * BLOCK_SIZE for _ in range(count)]
            self.perform(str(role), self.workers[str(role)].start(0.0))

    @property
    def prefill(self) -> PrefillWorker:
        worker = self.workers["prefill"]
        assert isinstance(worker, PrefillWorker)
        return worker

    @property
    def decode(self) -> DecodeWorker:
        worker = self.workers["decode"]
        assert isinstance(worker, DecodeWorker)
        return worker

    def perform(self, node: str, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send("router", message):
                    self.to_router.append(message)
                case Send(to, message):
                    if not isinstance(message, self.lost):
                        self.queue.append((to, message))
                case Execute(step):
                    self.queue.append((node, self.run(node, step)))
                case ConnectPeer(peer, epoch, _, _):
                    self.queue.append((node, PeerConnected(peer, epoch)))
                case ReadBlocks():
                    self.reads.append((node, effect))
                case Wake():
                    pass

    def run(self, node: str, step: Step) -> StepDone:
        slots = self.slots[node]
        sampled: list[Sampled | None] = []
        for seq in step.seqs:
            for position, token in enumerate(seq.tokens, start=seq.start):
                block = seq.block_ids[position // BLOCK_SIZE]
                slots[block][position % BLOCK_SIZE] = token
            end = seq.start + len(seq.tokens)
            seen = [slots[seq.block_ids[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(end)]
            sampled.append(Sampled(next_token(seen)) if seq.sample else None)
        checksums = [hash(tuple(slots[block])) for block in step.checksum_blocks]
        return StepDone(step.step_id, sampled, checksums, 0.01)

    def settle_read(self, error: str | None = None, *, corrupt: bool = False) -> None:
        node, read = self.reads.pop(0)
        for src, dst in zip(read.src, read.dst, strict=True):
            self.slots[node][dst] = list(self.slots[read.peer][src])
        if corrupt:
            self.slots[node][read.dst[0]][0] ^= 1
        sums = tuple(hash(tuple(self.slots[node][dst])) for dst in read.dst)
        self.queue.append((node, ReadDone(read.transfer_id, error, sums, 0.01, 1)))

    def deliver(self, node: str, message: Any) -> None:
        self.perform(node, self.workers[node].receive(self.now, message))

    def step(self) -> bool:
        """Deliver one message; False if there is none."""
        if not self.queue and self.reads and not self.hold_reads:
            self.settle_read()
        if not self.queue:
            return False
        self.deliver(*self.queue.popleft())
        return True

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the workers never come to rest")

    def tick(self, after_s: float) -> None:
        self.now += after_s
        for node in self.workers:
            self.deliver(node, Woken("tick"))

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, *, remote: bool, attempt: int = 0
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        tokens = tuple(prompt)
        common = (name, attempt, "router")
        rest = (tokens, len(prompt), sampling, 60.0)
        if remote:
            self.queue.append(("prefill", Prefill(*common, "decode", *rest)))
        self.queue.append(("decode", Decode(*common, "prefill" if remote else None, *rest)))

    def output(self, name: str, prompt: list[int]) -> list[int]:
        """What the router knows: gapless, and the same token wherever one came twice."""
        tokens: dict[int, int] = {}
        for frame in self.to_router:
            if isinstance(frame, TokenDeltas):
                for delta in frame.deltas:
                    if delta.request_id == name:
                        for position, token in enumerate(delta.tokens, start=delta.position):
                            assert tokens.setdefault(position, token) == token
        assert sorted(tokens) == list(range(len(prompt), len(prompt) + len(tokens)))
        return [tokens[position] for position in sorted(tokens)]

    def refused(self) -> list[Refused]:
        return [m for m in self.to_router if isinstance(m, Refused)]

    def assert_idle(self) -> None:
        for worker in self.workers.values():
            assert worker.check_idle() == []
