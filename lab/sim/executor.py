"""The executor of a simulated worker: its KV pool, and steps that run in virtual time.

A step is checked when it starts: every slot that it relies on must hold what the oracle says. It
reads and writes the pool when it ends, so a block that is given away while a step is in flight is
overwritten by that step, as it would be by a kernel. A failed step leaves rubbish behind, and fails
the one that follows it.

Its transfer agent makes reads that really tear. A read copies each block at its own moment between
its start and its end, so a source block that is overwritten meanwhile arrives torn or stale. A read
that fails or stalls may have copied some blocks and not others. Up to the moment of its `CopyDone`
it can write to its destination, never after it.

A worker may have several ranks: each reads its part of every block, slots in place of heads, with a
fate of its own, and the answers are joined by what joins those of real ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import PromptOutputs
from kvrelay.engine.step import Sampled, ScheduledSeq, Step, StepDone
from kvrelay.engine.weights import NO_VERSION
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected, TransferId
from kvrelay.kvtransfer.ranks import RankAnswers
from kvrelay.lab.sim.model import (
    FULL,
    UNWRITTEN,
    Attention,
    checksum,
    embedding,
    extend_slots,
    forced_after,
    logprobs_of,
    next_token,
    packed_sum,
    slot_value,
)

OnViolation = Callable[[str, str], None]
"""Called with the kind of a violation and a text that says what happened."""


POISON = "poison"  # why a row has no token, or a step fails, that has such a request

LAYER_S = 0.05  # virtual time that a step takes for a layer


@dataclass(slots=True)
class _Chain:
    """What the oracle says of one request: tokens seen so far and their slots."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class SimPool:
    """`[num_blocks, block_size]` slots of 64 bits. Owned by one life of one worker. What a group of
    layers holds is marked with its number, and comes out without: a slot of another group's block
    is none that anybody has written; likewise what other weights have computed. A block of states
    has the last one in all of its slots."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        with_checksums: bool,
        attention: Attention = FULL,
    ) -> None:
        self.block_size = block_size
        self.num_groups = len(attention.windows)
        self._num_attending = attention.num_attending
        self.with_checksums = with_checksums
        self.mark = 0  # in all that is written: which weights have computed it
        self.blocks = [[UNWRITTEN] * block_size for _ in range(num_blocks)]

    def checksum(self, block: int, rank: int = 0, num_ranks: int = 1) -> int:
        """0 where the deployment runs without checksums: the handoff alone has to be enough."""
        return checksum(self.blocks[block], rank, num_ranks) if self.with_checksums else 0

    def gather(self, block_ids: list[int], end: int, group: int = 0) -> list[int]:
        """Slots of positions `[0, end)` of a block table; unwritten ones outside its windows."""
        slots: list[int] = []
        for block in block_ids[group : self.entries(end) : self.num_groups]:
            slots += self.blocks[block] if block >= 0 else [UNWRITTEN] * self.block_size
        del slots[end:]
        mark = group ^ self.mark
        return [slot ^ mark for slot in slots] if mark else slots

    def gather_groups(self, block_ids: list[int], end: int) -> list[list[int]]:
        return [self.gather(block_ids, end, group) for group in range(self.num_groups)]

    def write(self, block_ids: list[int], position: int, value: int) -> None:
        first = position // self.block_size * self.num_groups
        row = block_ids[first : first + self.num_groups]
        for group, block in enumerate(row[: self._num_attending]):
            assert block >= 0, "KV is written outside the windows"
            self.blocks[block][position % self.block_size] = value ^ group ^ self.mark
        self.write_states(block_ids, position, value)

    def write_states(self, block_ids: list[int], position: int, value: int) -> None:
        first = position // self.block_size * self.num_groups
        for group in range(self._num_attending, self.num_groups):
            block = block_ids[first + group]
            assert block >= 0, "a state is written outside the windows"
            self.blocks[block][:] = [value ^ group ^ self.mark] * self.block_size

    def entries(self, end: int) -> int:
        return -(-end // self.block_size) * self.num_groups


@dataclass(slots=True)
class _InFlight:
    step: Step
    tables: list[list[int]]  # as they were when it was handed out
    error: str | None = None  # that it will end with
    failed: dict[int, str] = field(default_factory=dict)  # rows that are left out, and why
    is_abandoned: bool = False


class SimExecutor:
    """Runs the steps of one life of one worker. Invariant: at most two are in flight, of which the
    first runs."""

    def __init__(
        self,
        pools: dict[Tier, SimPool],
        on_violation: OnViolation,
        attention: Attention = FULL,
        row_fault: Callable[[str], str | None] = lambda _attempt: None,
        step_fault: Callable[[str], str | None] = lambda _attempt: None,
    ) -> None:
        """`pools`: the device's, host memory's, and the disk's, which outlives this life.
        `row_fault`, `step_fault`: why the attempt ("request#number") that is about to be sampled is
        left out of its step, or fails all of it; asked once a row."""
        self._attention = attention
        self._row_fault, self._step_fault = row_fault, step_fault
        self.pools = pools
        self.pool = pools[Tier.DEVICE]
        # Blocks that a transfer in flight may write to.
        self.writable: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._on_violation = on_violation
        self._chains: dict[str, _Chain] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._sampled: list[Sampled | None] = []  # by the last step that has ended
        self._left_out = False  # some of that step were
        self.failed_in_a_row = 0  # steps
        self.runs_since: float | None = None  # the step that runs; None: it hangs, or none does
        self.loaded = NO_VERSION  # beside what is in use

    def num_passed(self, now: float) -> int:
        """Layers: two steps of the same length are not told apart, as on a GPU."""
        return 0 if self.runs_since is None else round((now - self.runs_since) / LAYER_S)

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step that runs computes."""
        return self._in_flight[0].step.num_tokens

    def begin(self, step: Step) -> bool:
        """True: it runs now. False: once the one before it has ended."""
        assert len(self._in_flight) < 2, "three steps in flight"
        assert step.seqs, "an empty step"
        self._in_flight.append(_InFlight(step, [list(seq.block_ids) for seq in step.seqs]))
        if len(self._in_flight) > 1:
            assert self._in_flight[0].step.may_be_followed
            return False
        self._start()
        return True

    def abandon(self, step_id: int) -> None:
        """What this step writes from now on is rubbish, if it still runs."""
        if self._in_flight and self._in_flight[0].step.step_id == step_id:
            self._in_flight[0].is_abandoned = True

    def _start(self) -> None:
        """Check the step that runs from now on; its tokens are known."""
        runs = self._in_flight[0]
        seqs = [self._with_token(seq) for seq in runs.step.seqs]
        if any(seq is None for seq in seqs) and not self._left_out:
            runs.error = "the step before it failed"
            return
        for index, seq in enumerate(seqs):
            why = "it was left out of the step before" if seq is None else None
            if seq is not None and seq.sample:
                runs.error = runs.error or self._step_fault(seq.request_id)
                why = self._row_fault(seq.request_id)
            if why is not None:
                runs.failed[index] = why
        both = zip(seqs, runs.step.seqs, strict=True)
        runs.step = replace(runs.step, seqs=[seq or old for seq, old in both])
        for index, (seq, table) in enumerate(zip(runs.step.seqs, runs.tables, strict=True)):
            if index not in runs.failed:
                self._check(seq, table)

    def _with_token(self, seq: ScheduledSeq) -> ScheduledSeq | None:
        """None: it follows a sequence that has none."""
        if seq.follows is None:
            return seq
        before = self._sampled[seq.follows]
        if before is None:
            return None
        context = [*seq.context[: seq.start], before.token]
        return replace(seq, tokens=[before.token], context=context)

    def written(self) -> set[int]:
        """Blocks that the step that runs writes to first."""
        runs, size, groups = self._in_flight[0], self.pool.block_size, self.pool.num_groups
        found: set[int] = set()
        for index, (seq, table) in enumerate(zip(runs.step.seqs, runs.tables, strict=True)):
            if index not in runs.failed:
                first = seq.start // size * groups
                found.update(block for block in table[first : first + groups] if block >= 0)
        return found

    def finish(self, elapsed_s: float, error: str | None) -> StepDone:
        """End the step that runs; the one behind it runs then. With `error`, what it wrote is
        rubbish."""
        done = self._finish(self._in_flight.popleft(), elapsed_s, error)
        self._sampled, self._left_out = done.sampled, bool(done.failed or done.unsampled)
        if self._in_flight:
            self._start()
        return done

    def _finish(self, ended: _InFlight, elapsed_s: float, error: str | None) -> StepDone:
        step, tables, error = ended.step, ended.tables, error or ended.error
        is_void = error is not None or ended.is_abandoned
        sampled = [
            None if index in ended.failed else self._run(seq, table, failed=is_void)
            for index, (seq, table) in enumerate(zip(step.seqs, tables, strict=True))
        ]
        self.failed_in_a_row = 0 if error is None else self.failed_in_a_row + 1
        if error is not None:
            return StepDone(step.step_id, [None] * len(sampled), [], elapsed_s, error)
        if ended.is_abandoned:
            again = frozenset(range(len(sampled)))
            return StepDone(step.step_id, [None] * len(sampled), [], elapsed_s, waiting=again)
        prompts = {
            index: self._prompt_outputs(seq, table)
            for index, (seq, table) in enumerate(zip(step.seqs, tables, strict=True))
            if seq.outputs_from is not None and index not in ended.failed
        }
        checksums = [self.pool.checksum(block) for block in step.checksum_blocks]
        tokens = sampled if ended.failed else self._repeat(step, tables, sampled)
        own = {index: why for index, why in ended.failed.items() if why == POISON}
        return StepDone(
            step.step_id,
            tokens,
            checksums,
            elapsed_s,
            failed={index: why for index, why in ended.failed.items() if why != POISON},
            unsampled=own,
            prompts=prompts,
        )

    def _repeat(
        self, step: Step, tables: list[list[int]], sampled: list[Sampled | None]
    ) -> list[Sampled | None]:
        """Run the step again as often as it allows, or less often; until a stop token comes."""
        if step.repeats == 1 or any(seq.sampling.logprobs is not None for seq in step.seqs):
            return sampled
        tokens, pool = [[first.token] for first in sampled if first is not None], self.pool
        for repeat in range(step.step_id % step.repeats):
            ended = zip(step.seqs, tokens, strict=True)
            if any(new[-1] in seq.sampling.stop_token_ids for seq, new in ended):
                break
            for seq, table, new in zip(step.seqs, tables, tokens, strict=True):
                position = seq.start + 1 + repeat
                before = pool.gather(table, position)[-1]
                pool.write(table, position, slot_value(before, new[-1], position))
                attended = self._attended(table, position + 1)
                new.append(next_token(attended, seq.sampling, position + 1))
        return [Sampled(new[0], None, tuple(new[1:])) for new in tokens]

    def _run(self, seq: ScheduledSeq, table: list[int], *, failed: bool) -> Sampled | None:
        pool, end = self.pool, seq.start + len(seq.tokens)
        previous = pool.gather(table, seq.start)[-1] if seq.start else 0
        for position, token in enumerate(seq.tokens, start=seq.start):
            previous = slot_value(previous, token, position)
            pool.write(table, position, UNWRITTEN if failed else previous)
        if failed or not seq.sample:
            return None
        attended = self._attended(table, end)
        drawn, left = [next_token(attended, seq.sampling, end)], [previous]
        logprobs = seq.sampling.logprobs
        if logprobs is not None:
            assert not seq.most_drafts, "draft tokens where log-probabilities are reported"
            return Sampled(drawn[0], logprobs_of(attended, drawn[0], end, logprobs))
        draft = list(seq.draft_tokens)
        for position in range(end, seq.end):
            if seq.num_drafts:  # a drafter that is right two times of three
                draft.append(drawn[-1] if position % 3 else drawn[-1] + 1)
            previous = slot_value(previous, draft[position - end], position)
            pool.write(table, position, previous)
            left.append(previous)
            attended = self._attended(table, position + 1)
            drawn.append(next_token(attended, seq.sampling, position + 1))
        found = replace(seq, draft_tokens=draft).verify(drawn)
        last = end + len(found.more)
        pool.write_states(table, last - 1, left[len(found.more)])
        forced = forced_after(seq.sampling.grammar, last)
        return replace(found, forced=forced, num_drafts=seq.num_drafts)

    def _attended(self, table: list[int], end: int) -> int:
        slots, *others = self.pool.gather_groups(table, end)
        return self._attention.attended(slots, end, *others)

    def _prompt_outputs(self, seq: ScheduledSeq, table: list[int]) -> PromptOutputs:
        """What the tokens of this step give; the embedding is a sum until the prompt ends."""
        positions, sampling = seq.output_positions, seq.sampling
        if not positions:
            return PromptOutputs(embedding=seq.pooled)
        slots, *others = self.pool.gather_groups(table, positions.stop)
        del others[self._attention.num_attending - 1 :]  # states of these positions are gone
        logprobs = []
        if sampling.prompt_logprobs is not None:
            for at in positions:
                attended = self._attention.attended(slots, at + 1, *others)
                if at + 1 < seq.num_prompt_tokens:
                    token = seq.context[at + 1]
                    logprobs.append(logprobs_of(attended, token, at + 1, sampling.prompt_logprobs))
        pooled = (
            b"" if sampling.pooling is None else packed_sum(slots[positions.start :], seq.pooled)
        )
        if sampling.pooling is not None and positions.stop == seq.num_prompt_tokens:
            pooled = embedding(sampling.pooling, pooled, slots[-1], len(slots))
        return PromptOutputs(tuple(logprobs), pooled)

    def _check(self, seq: ScheduledSeq, table: list[int]) -> None:
        """Assert the contract of a scheduled sequence; report KV that is not what it should be."""
        size, start, end = self.pool.block_size, seq.start, seq.start + len(seq.tokens)
        assert seq.tokens
        assert seq.context[start:end] == seq.tokens
        assert len(table) >= self.pool.entries(end)
        if seq.most_drafts:
            assert len(table) >= self.pool.entries(seq.end), "a draft leaves its blocks"
            if self._attention.num_attending < self.pool.num_groups:
                assert start // size == (seq.end - 1) // size, "a draft leaves its state's block"
        used = [block for block in table[: self.pool.entries(end)] if block >= 0]
        assert len(set(used)) == len(used), "a block twice in one table"
        writable = self.writable[Tier.DEVICE]
        if not writable.isdisjoint(used):
            shared = sorted(writable.intersection(used))
            self._on_violation(
                "block in use while a transfer can write to it", f"{seq.request_id} {shared}"
            )
        want = self._oracle(seq)
        for group, have in enumerate(self.pool.gather_groups(table, start)):
            # What the first query reads beside its own slot, and those after it no more than that.
            read = [p for p in self._attention.read_positions(start + 1, group) if p < start]
            position = next((p for p in read if have[p] != want[p]), None)
            if position is not None:
                block = table[position // size * self.pool.num_groups + group]
                self._on_violation(
                    "block used with wrong content",
                    f"{seq.request_id} block {block} position {position} of [0, {start})",
                )

    def _oracle(self, seq: ScheduledSeq) -> list[int]:
        chain = self._chains.setdefault(seq.request_id, _Chain())
        if seq.context[: len(chain.tokens)] != chain.tokens:
            chain.tokens, chain.slots = [], []
        fresh = seq.context[len(chain.tokens) :]
        if fresh:
            chain.tokens += fresh
            extend_slots(chain.slots, fresh)
        return chain.slots


@dataclass(frozen=True, slots=True)
class ReadFate:
    """What becomes of one rank's read, decided when it is posted."""

    duration_s: float
    error: str | None = None
    moments: tuple[float | None, ...] = ()  # when block i is copied, after the start; None: never
    flip: tuple[int, int] | None = None  # (index of the block, index of the slot) damaged


class SimPeer(Protocol):
    """One life of a worker, as its peers see it."""

    node_id: NodeId
    epoch: int
    alive: bool
    executor: SimExecutor


class SimAgent:
    """Moves blocks into the pool of one life of one worker.

    Invariant: `executor.writable` are the destination blocks of the live transfers, by tier, and no
    block belongs to two of them.
    """

    def __init__(
        self,
        own: NodeId,
        executor: SimExecutor,
        find_peer: Callable[[NodeId], SimPeer | None],
        after: Callable[[float, Callable[[], None]], None],
        on_violation: OnViolation,
        num_ranks: int = 1,
        join: type[RankAnswers] = RankAnswers,
    ) -> None:
        self.num_ranks = num_ranks
        self._join = join
        self._own = own
        self._executor = executor
        self._find_peer = find_peer
        self._after = after  # calls back after that many seconds, unless this worker died
        self._on_violation = on_violation
        self._peers: dict[NodeId, SimPeer] = {}
        self._live: dict[TransferId, int] = {}  # ranks that can still write

    @property
    def num_live(self) -> int:
        return len(self._live)

    def connect(self, effect: ConnectPeer, error: str | None) -> PeerConnected:
        """Make the peer readable if it is still the process that `effect` means."""
        peer = self._find_peer(effect.peer)
        if error is None and (peer is None or not peer.alive or peer.epoch != effect.epoch):
            error = f"{effect.peer} epoch {effect.epoch} is not there"
        if error is None:
            assert peer is not None
            assert effect.num_blocks == len(peer.executor.pool.blocks)
            self._peers[effect.peer] = peer
        return PeerConnected(effect.peer, effect.epoch, error)

    def source(self, effect: CopyBlocks) -> SimPeer | None:
        """The process to read from, dead or alive; None if it was never connected. Its own blocks
        a worker can always move."""
        peer = self._peers.get(effect.peer)
        if effect.peer == self._own:
            peer = self._find_peer(effect.peer)
        return peer if peer is not None and peer.epoch == effect.epoch else None

    def read(
        self, effect: CopyBlocks, fates: Sequence[ReadFate], done: Callable[[Any], None]
    ) -> None:
        """Post the read: copies and the ends are events from now on. `fates`: of each rank. `done`
        gets its `CopyDone`."""
        assert effect.transfer_id not in self._live
        assert len(effect.src) == len(effect.dst) > 0
        assert len(set(effect.dst)) == len(effect.dst)
        executor, source = self._executor, self.source(effect)
        writable = executor.writable[effect.dst_tier]
        if not writable.isdisjoint(effect.dst):
            self._on_violation("two transfers write to one block", f"transfer {effect.transfer_id}")
        if effect.peer == self._own:
            self._check_own(effect)
        else:
            assert Tier.DISK not in (effect.src_tier, effect.dst_tier), "a peer's disk"
        self._live[effect.transfer_id] = self.num_ranks
        writable.update(effect.dst)
        answers = self._join([True] * self.num_ranks, lambda _request: None, done)
        answers.begin(effect)
        for rank, fate in enumerate(fates):
            self._post(effect, source, rank, fate, answers)

    def _post(
        self,
        effect: CopyBlocks,
        source: SimPeer | None,
        rank: int,
        fate: ReadFate,
        answers: RankAnswers,
    ) -> None:
        # What is written to disk has its checksum taken before.
        before = None
        if effect.dst_tier is Tier.DISK:
            before = self._checksums(effect.src_tier, effect.src, rank)
        if source is not None:
            for index, moment in enumerate(fate.moments):
                if moment is not None:
                    self._after(moment, self._copy(effect, source, rank, index, fate.flip))

        def settle() -> None:
            answers.add(rank, self._settle(effect, source, rank, fate, before))

        self._after(fate.duration_s, settle)

    def _check_own(self, effect: CopyBlocks) -> None:
        """A worker knows what happens to its own blocks: it must not read one that is written."""
        overlap = self._executor.writable[effect.src_tier].intersection(effect.src)
        if overlap:
            text = f"transfer {effect.transfer_id}, {effect.src_tier} {sorted(overlap)}"
            self._on_violation("a move reads a block that is being written", text)

    def _checksums(self, tier: Tier, blocks: tuple[int, ...], rank: int) -> tuple[int, ...]:
        pool = self._executor.pools[tier]
        return tuple(pool.checksum(block, rank, self.num_ranks) for block in blocks)

    def _copy(
        self,
        effect: CopyBlocks,
        source: SimPeer,
        rank: int,
        index: int,
        flip: tuple[int, int] | None,
    ) -> Callable[[], None]:
        def copy() -> None:
            if not source.alive:
                return
            block = list(source.executor.pools[effect.src_tier].blocks[effect.src[index]])
            if flip is not None and flip[0] == index:
                own = range(rank, len(block), self.num_ranks)
                block[own[flip[1] % len(own)]] ^= 1 << 17
            blocks, number = self._executor.pools[effect.dst_tier].blocks, effect.dst[index]
            there = list(blocks[number])
            there[rank :: self.num_ranks] = block[rank :: self.num_ranks]
            blocks[number] = there

        return copy

    def _settle(
        self,
        effect: CopyBlocks,
        source: SimPeer | None,
        rank: int,
        fate: ReadFate,
        before: tuple[int, ...] | None,
    ) -> CopyDone:
        self._live[effect.transfer_id] -= 1
        if not self._live[effect.transfer_id]:
            del self._live[effect.transfer_id]
            self._executor.writable[effect.dst_tier].difference_update(effect.dst)
        error = fate.error
        if error is None and (source is None or not source.alive):
            error = f"{effect.peer} epoch {effect.epoch} is gone"
        if error is not None:
            return CopyDone(effect.transfer_id, error, elapsed_s=fate.duration_s)
        return CopyDone(
            effect.transfer_id,
            None,
            self._checksums(effect.dst_tier, effect.dst, rank) if before is None else before,
            fate.duration_s,
            len(effect.dst) * self._executor.pool.block_size * 8 // self.num_ranks,
        )
