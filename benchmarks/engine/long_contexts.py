"""What `benchmarks.engine.context` times: a worker and a router with contexts of a given length.

They are the classes of production in this process, a worker's node with its scheduler, KV cache and
tiers, the check of its steps, and a router's dispatcher. No model is computed: what an executor or
an agent answers is made up here. Each subject has `once`, the seconds of one operation: of this
thread's processor time, as others use the machine too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from time import thread_time
from typing import Any, Protocol

from msgspec import structs

from kvrelay.cluster.roles import make_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.block_hash import BlockChain, group_hash, unpack
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.spec import STATE_WINDOW
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.messages import Probe
from kvrelay.engine.model.batch import Guard, Limits
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role, WorkerStats
from kvrelay.engine.step import Execute, Sampled, Step, StepDone
from kvrelay.kvtransfer.agent import CopyBlocks, CopyDone
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Submit
from kvrelay.router.record import Attempt, RequestRecord

KINDS = {
    "dense": (),
    "6 groups": (0, *(512,) * 5),  # Gemma 3 270M
    "49 groups": (0, *(STATE_WINDOW,) * 48),  # Qwen3.6-27B
}
"""The windows of a model's groups of layers: 0 for all of the context, and for states 2."""

BLOCK_SIZE, VOCAB, ROUTER = 16, 256, "router-0"
MAX_TOKENS = 4096
CHUNK_TOKENS = 1 << 15  # a step computes so many while contexts are built up
PASS_S = 0.03
WAITING = 4  # sessions, in `Waiting`


class Subject(Protocol):
    def once(self) -> float:
        """Returns the seconds of one operation."""


def config_for(kind: str, context: int, num_seqs: int, **more: Any) -> WorkerConfig:
    """With blocks for `num_seqs` sequences of `context` and more tokens."""
    windows, longest = KINDS[kind], context + MAX_TOKENS + 2 * BLOCK_SIZE
    num_sized = sum(map(bool, windows))
    ends = sum(-(-window // BLOCK_SIZE) + 2 for window in windows if window)
    spare = 4 * num_sized * (CHUNK_TOKENS // BLOCK_SIZE)
    return WorkerConfig(
        node_id="decode-0",
        role=Role.DECODE,
        epoch=1,
        num_blocks=num_seqs * (-(-longest // BLOCK_SIZE) + ends) + spare,
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        max_model_len=longest,
        fingerprint=b"context",
        group_windows=windows,
        has_states=STATE_WINDOW in windows,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=num_seqs + WAITING,
        steps_ahead=1,
        **more,
    )


class Engine:
    """Drives a worker's node. Invariant: the steps that it has not been answered are in `steps`."""

    def __init__(self, config: WorkerConfig, seed: int) -> None:
        self.config = config
        self.node = make_worker(config)
        self.node.start(0.0)
        self.steps: deque[Step] = deque()
        self.random = random.Random(seed)
        self._copies: deque[CopyBlocks] = deque()
        self._now = 0.0
        self._number = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randbytes(count))

    def tell(self, message: Any) -> float:
        """Returns the seconds that the node took."""
        self._now += PASS_S / 10
        began = thread_time()
        effects = self.node.receive(self._now, message)
        seconds = thread_time() - began
        self.steps += [each.step for each in effects if isinstance(each, Execute)]
        self._copies += [each for each in effects if isinstance(each, CopyBlocks)]
        return seconds

    def decode(
        self, tokens: tuple[int, ...], max_tokens: int = MAX_TOKENS, block_hashes: bytes = b""
    ) -> Decode:
        """A request; without hashes, they are computed when they are asked for."""
        self._number += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(VOCAB,))
        about = f"r-{self._number}", sampling, 1, ROUTER, tokens, len(tokens), 1e6
        return Decode(*about, block_hashes=block_hashes)

    def answer(self) -> float:
        """The first of the steps is done."""
        step = self.steps.popleft()
        sampled = [Sampled(self.random.randrange(VOCAB)) if s.sample else None for s in step.seqs]
        checksums = [0] * len(step.checksum_blocks)
        return self.tell(StepDone(step.step_id, sampled, checksums, PASS_S))

    def settle_copies(self) -> None:
        """Whatever is to be copied between the tiers has been."""
        while self._copies:
            copy = self._copies.popleft()
            count = len(copy.src)
            self.tell(CopyDone(copy.transfer_id, None, (0,) * count, 0.001, count))

    def compute_prompts(self, requests: Sequence[Decode]) -> None:
        """Until all decode. Block tables are not compared meanwhile, which would take minutes."""
        scheduler = self.node.core.scheduler
        scheduler.config = structs.replace(self.config, guard=False)
        for request in requests:
            self.tell(request)
        while any(s.num_missing > 1 for s in scheduler.running) or scheduler.waiting:
            self.answer()
        scheduler.config = self.config

    def take_rest_of_pool(self, but: int) -> None:
        """As others that run might have it."""
        kv = self.node.core.kv
        kv.allocate(max(0, kv.pool.num_free - but))


class Steps:
    """Decode steps of a batch, in the node and in the check before each pass."""

    def __init__(self, kind: str, context: int, num_seqs: int) -> None:
        config = config_for(kind, context, num_seqs)
        self.engine = engine = Engine(config, seed=num_seqs)
        lengths = [context + engine.random.randrange(BLOCK_SIZE) for _ in range(num_seqs)]
        engine.compute_prompts([engine.decode(engine.tokens(length)) for length in lengths])
        while engine.steps[0].num_tokens > num_seqs:
            engine.answer()
        num_states = KINDS[kind].count(STATE_WINDOW)
        sizes = config.num_blocks, BLOCK_SIZE, config.max_model_len, VOCAB
        groups = {"group_windows": config.group_windows, "num_state_groups": num_states}
        self.guard = Guard(Limits(*sizes, **groups))  # type: ignore[arg-type]
        self._check()

    def once(self) -> float:
        seconds = self.engine.answer()
        return seconds + self._check()

    def _check(self) -> float:
        """The step that was handed out last."""
        began = thread_time()
        failed, invalid, _ = self.guard.check(self.engine.steps[-1])
        seconds = thread_time() - began
        assert not failed, failed
        assert not invalid, invalid
        return seconds


class Waiting:
    """A message that has nothing to do with it, while sessions wait for memory: each has half of
    its context in the cache, as agents that part from each other do."""

    def __init__(self, kind: str, context: int, num_seqs: int) -> None:
        self.engine = engine = Engine(config_for(kind, context, 2), seed=num_seqs)
        prompt = engine.tokens(context)
        engine.compute_prompts([engine.decode(prompt)])
        engine.take_rest_of_pool(but=8 * engine.node.core.kv.windows.count)
        for _ in range(num_seqs):
            engine.tell(engine.decode(prompt[: context // 2] + engine.tokens(context // 2)))
        assert len(engine.node.core.scheduler.waiting) == num_seqs

    def once(self) -> float:
        return self.engine.tell(Probe("unknown", 1, ROUTER, 0))


class Computing:
    """Such a message, while a long prompt is computed and short ones wait for memory."""

    def __init__(self, kind: str, context: int, num_seqs: int) -> None:
        self.engine = engine = Engine(config_for(kind, context, 2), seed=num_seqs)
        engine.tell(engine.decode(engine.tokens(context)))
        engine.take_rest_of_pool(but=8 * engine.node.core.kv.windows.count)
        for _ in range(num_seqs):
            engine.tell(engine.decode(engine.tokens(1024)))
        assert len(engine.node.core.scheduler.waiting) == num_seqs

    def once(self) -> float:
        return self.engine.tell(Probe("unknown", 1, ROUTER, 0))


class Turns:
    """A turn of a session whose context is all cached, here and in host memory: it is admitted,
    its last token is computed, and it ends."""

    def __init__(self, kind: str, context: int, num_seqs: int) -> None:
        rows = context // BLOCK_SIZE
        config = config_for(kind, context, 1, num_host_blocks=2 * rows + 4096)
        self.engine = engine = Engine(config, seed=num_seqs)
        self.tokens = engine.tokens(context)
        groups = engine.node.core.kv.windows.count
        chain = BlockChain(engine.node.core.fingerprint, UNSALTED, BLOCK_SIZE, groups)
        self.hashes = b"".join(chain.extend(self.tokens))
        for _ in range(2):  # computed, then found
            self.once()

    def once(self) -> float:
        engine = self.engine
        prompt = (*self.tokens, engine.random.randrange(VOCAB))
        seconds = engine.tell(engine.decode(prompt, 1, self.hashes))
        while engine.steps:
            seconds += engine.answer()
        assert not engine.node.core.seqs
        engine.settle_copies()
        return seconds


MARKS = {"no marks": None, "marks at the end": 1.0, "marks half way": 0.5}
"""Up to where, in parts of what they hold, workers have the windows or states to go on with."""


class Decisions:
    """Routing decisions about a prompt that every worker holds. The names of its blocks are known:
    to hash a prompt takes as long as it is, in any router."""

    def __init__(self, kind: str, context: int, num_workers: int) -> None:
        share = MARKS[kind]
        self.dispatcher = Dispatcher(RouterConfig())
        config = config_for("dense" if share is None else "6 groups", context, 64)
        tokens = tuple(random.Random(1).randbytes(context + 1))
        submit = Submit("r-1", SamplingParams(), "api", tokens, 60.0)
        self.record = RequestRecord(submit, submit.sampling, 1, 0.0, 60.0, 0.0)
        info = config.info()
        names, mark_group = bytes(self.record.packed_hashes(info)), info.mark_group
        if share is not None:
            rows = unpack(names)
            names += group_hash(rows[int(share * len(rows)) - 1], mark_group)
        for number in range(num_workers):
            self._add(config, f"decode-{number}", names)
        self.once()

    def _add(self, config: WorkerConfig, worker: str, names: bytes) -> None:
        info = structs.replace(config, node_id=worker).info()
        stats = WorkerStats(
            worker=worker, epoch=1, num_free_blocks=info.num_blocks, num_cached_blocks=0,
            num_waiting=0, num_running=0, num_handoffs=0, pending_prefill_tokens=0,
            prefill_tokens_per_s=20_000.0, decode_step_s=0.02, read_bytes_per_s=20e9,
        )  # fmt: skip
        self.dispatcher.on_worker_up(0.0, info)
        self.dispatcher.index.restore(0.0, worker, 1, 0, {Tier.DEVICE: names})
        self.dispatcher.on_stats(0.0, stats)

    def once(self) -> float:
        record = self.record
        began = thread_time()
        attempt = self.dispatcher.place(0.0, record)
        seconds = thread_time() - began
        assert isinstance(attempt, Attempt)
        self.dispatcher.release(attempt, record.request_id)
        record.current = None  # placed again: another request would push all out of caches
        return seconds
