"""Worker nodes over a tiny in-memory runtime: a deterministic model, blocks that hold what was fed.

The harness delivers effects by hand, so that a test can stop the world between any two messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvrelay.cluster.roles import make_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import SLICE
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.messages import Refused, TokenDeltas
from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import Execute, Sampled, Step, StepDone
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected, StoreIndex
from kvrelay.kvtransfer.tiers.registry import TIERS, is_storage
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.worker.node import TICK, Worker
from tests.engine.configs import worker_config

BLOCK_SIZE = 4
VOCAB = 97
SLICES_PER_TICK = 4


def next_token(tokens: list[int]) -> int:
    """The tiny model: a function of all tokens so far."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return 2 + value % (VOCAB - 2)


def checksum(slots: list[int]) -> int:
    return hash(tuple(slots)) & (1 << 63) - 1


def reference(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class World:
    """One prefill worker, some decode workers, and a router that only records.

    Every worker has the lower tiers that `limits` give it; their slots are plain lists too."""

    def __init__(
        self,
        num_blocks: int = 32,
        prefill_blocks: int = 32,
        num_decode: int = 1,
        records: dict[str, list[DiskRecord]] | None = None,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.slots: dict[str, list[list[int]]] = {}  # the device's
        self.lower: dict[str, dict[Tier, list[list[int]]]] = {}
        self.indexed: dict[str, dict[int, DiskRecord]] = {}  # what the disk's index says, by slot
        self.queue: deque[tuple[str, Any]] = deque()
        self.to_router: list[Any] = []
        self.slices_due: list[str] = []  # nodes that will send a slice of a snapshot
        self.reads: list[tuple[str, CopyBlocks]] = []
        self.hold_reads = False
        self.log: list[tuple[str, CopyBlocks]] = []  # every read that was asked for
        self.lost: tuple[type, ...] = ()
        self.fault: Callable[[Step], str | None] = lambda _: None  # why a step fails
        kinds = [("prefill", Role.PREFILL, prefill_blocks)]
        for number in range(num_decode):
            name = "decode" if number == 0 else f"decode-{number}"
            kinds.append((name, Role.DECODE, num_blocks))
        for name, role, count in kinds:
            config = worker_config(
                node_id=name,
                role=role,
                epoch=1,
                num_blocks=count,
                block_size=BLOCK_SIZE,
                bytes_per_block=BLOCK_SIZE * 8,
                fingerprint=b"tiny",
                agent_metadata=b"meta",
                **{"max_model_len": 256, **limits},
            )
            found = (records or {}).get(name, [])
            self.workers[name] = make_worker(config, {Tier.DISK: found})
            self.slots[name] = [[0] * BLOCK_SIZE for _ in range(count)]
            self.lower[name] = {
                tier: [[0] * BLOCK_SIZE for _ in range(spec.num_blocks(config))]
                for tier, spec in TIERS.items()
            }
            self.indexed[name] = {record.slot: record for record in found}
            self.perform(name, self.workers[name].start(0.0))

    @property
    def prefill(self) -> Worker:
        return self.workers["prefill"]

    @property
    def decode(self) -> Worker:
        return self.workers["decode"]

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
                case CopyBlocks():
                    self.reads.append((node, effect))
                    self.log.append((node, effect))
                case StoreIndex(remove, put):
                    for slot in remove:
                        self.indexed[node].pop(slot, None)
                    self.indexed[node].update({record.slot: record for record in put})
                case Wake(_, tag) if tag == SLICE:
                    self.slices_due.append(node)

    def next_token(self, tokens: list[int]) -> int:
        return next_token(tokens)

    def run(self, node: str, step: Step) -> StepDone:
        slots = self.slots[node]
        sampled: list[Sampled | None] = []
        for seq in step.seqs:
            for position, token in enumerate(seq.input_tokens, start=seq.start):
                block = seq.block_ids[position // BLOCK_SIZE]
                slots[block][position % BLOCK_SIZE] = token
            end = seq.start + len(seq.input_tokens)
            seen = [slots[seq.block_ids[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(end)]
            first = end - len(seq.draft_tokens)
            drawn = [self.next_token(seen[:at]) for at in range(first, end + 1)]
            sampled.append(seq.verify(drawn) if seq.sample else None)
        error = self.fault(step)
        if error is not None:
            return StepDone(step.step_id, [None] * len(sampled), [], 0.01, error)
        checksums = [checksum(slots[block]) for block in step.checksum_blocks]
        return StepDone(step.step_id, sampled, checksums, 0.01)

    def memory(self, node: str, tier: Tier) -> list[list[int]]:
        return self.slots[node] if tier is Tier.DEVICE else self.lower[node][tier]

    def settle_read(self, error: str | None = None, *, corrupt: bool = False) -> None:
        node, read = self.reads.pop(0)
        source = self.memory(read.peer, read.src_tier)
        target = self.memory(node, read.dst_tier)
        for src, dst in zip(read.src, read.dst, strict=True):
            target[dst] = list(source[src])
        if corrupt:
            target[read.dst[0]][0] ^= 1
        moved = [source[i] for i in read.src] if is_storage(read.dst_tier) else None
        moved = moved or [target[i] for i in read.dst]
        sums = tuple(checksum(slots) for slots in moved)
        self.queue.append((node, CopyDone(read.transfer_id, error, sums, 0.01, 1)))

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
            self.deliver(node, Woken(TICK))
        for _ in range(SLICES_PER_TICK):
            due, self.slices_due = self.slices_due, []
            for node in due:
                self.deliver(node, Woken(SLICE))

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        remote: bool,
        attempt: int = 0,
        decode: str = "decode",
        sampling: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`options`: of the `Prefill` if it is handed over, else of the `Decode`."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, **(sampling or {}))
        work = (name, params, attempt, "router", tuple(prompt), len(prompt), 60.0)
        if remote:
            self.queue.append(("prefill", Prefill(*work, decode_to=decode, **options)))
            options = {"prefill_from": "prefill"}
        self.queue.append((decode, Decode(*work, **options)))

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

    def assert_finishes(self, name: str, prompt: list[int], count: int) -> None:
        """Come to rest; `name` has got `count` tokens by then, the model's."""
        self.drain()
        assert self.output(name, prompt) == reference(prompt, count)

    def refused(self) -> list[Refused]:
        return [m for m in self.to_router if isinstance(m, Refused)]

    def assert_idle(self) -> None:
        for worker in self.workers.values():
            assert worker.check_idle() == []
