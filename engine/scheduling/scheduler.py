"""The scheduler: which tokens of which sequences go into the next step.

There are no phases. Each running sequence has `num_computed` chasing `len(tokens)`; a step computes
the difference, up to a budget of tokens. A decode is a difference of one, a long prompt is computed
in chunks, and a prefix cache hit or KV from another worker makes the difference smaller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import LATELY_S, LOW_CLASS_STEP_S, DraftCosts, FittedCost
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.scheduling.drafts import NOT_MEASURED, Draft, Drafts
from kvrelay.engine.scheduling.isolation import Isolation
from kvrelay.engine.scheduling.lacks import Lacks
from kvrelay.engine.scheduling.selection import (
    Coming,
    LowClassRoom,
    TooLarge,
    choose_prompts,
    comes_by_itself,
    draft_rooms,
    followers,
    may_be_admitted,
    may_be_followed,
    repeats,
    room_for_all,
    taking_part,
    under_way,
    victim,
    waited_s,
)
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.step import HEALTH_CHECK, UNKNOWN, ScheduledSeq, Step, StepDone

MAX_TRIED = 8  # prompts that do not fit, each needing less: each costs a lookup

MAX_PAUSE_S = 0.5
"""Decodes are left out of steps with prompts for so long, where no time between tokens is aimed at;
else of one step in a row, which has the size of one with them."""


def _makes_room(one: Sequence, other: Sequence) -> bool:
    """Whether `one`, which runs, is preempted for `other`."""
    if one.service_class is other.service_class:
        return other.is_stream and not one.is_stream
    return one.service_class < other.service_class


def _num_blocks(seqs: list[Sequence]) -> int:
    return sum(each.block_ids.num_held for each in seqs)


class InFlight(NamedTuple):
    step: Step
    seqs: list[Sequence]  # those of its shares; none has that of a health check


class Scheduler:
    """Owns the waiting queue and the running list. At most one step is in flight, and one more
    behind it if the executor takes one ahead.

    Invariant: a sequence is in `waiting` iff WAITING, in `running` iff RUNNING, in `remote` iff
    REMOTE; blocks of a sequence that is in a step in flight are not freed before the step is done.
    """

    def __init__(self, config: WorkerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.remote: list[Sequence] = []  # admitted, KV is being transferred or loaded
        self.held: list[Sequence] = []  # computed, for consumers that have not read all of it
        self.wanted: list[Sequence] = []  # those of them whose blocks one of a higher class needs
        self.in_flight: deque[InFlight] = deque()
        self._next_step_id = 0
        self._awaited = -1  # the step whose tokens draft tokens will follow
        self._isolation = Isolation()
        self._lacks = Lacks(kv)  # what those that wait lack
        self._paused_at: float | None = None  # when a step began without the decodes that waited
        self._interactive_at = -inf  # when there was an interactive sequence to compute
        self.faults: list[tuple[Sequence, Refusal, str]] = []  # for the worker to end, and why
        self.num_preemptions = 0
        self.lacks_room = False  # one that may go on waits for blocks
        self._is_to_preempt = False  # once no step is in flight
        self._abandoned = -1  # the last step that was
        self.is_paused = False  # no step begins
        self.may_preempt = True  # False: what computes them has to have ended them before
        self.gives_way: Sequence | None = None  # whom it has to end then, for one that waits
        self.admits_until = inf  # those that have come later wait
        self._preempted: list[Sequence] = []
        self._drafting = Drafts.of(config)
        self._mark = config.quest_mark  # salts that begin so are Quest's

    def add(self, seq: Sequence) -> None:
        seq.state = SeqState.WAITING
        self.waiting.append(seq)

    def admit(self, seq: Sequence, now: float) -> bool:
        """Allocate a waiting sequence's blocks, if there is room. The caller sets its state."""
        if self.num_admitted >= self.config.max_num_seqs:
            return False
        headroom = self._headroom(seq)
        if self.kv.pool.num_free <= headroom or self._lacks.is_in_vain(seq, headroom):
            return False
        if not self.kv.admit(seq, headroom):
            self._lacks.note(seq, headroom)
            return False
        self._lacks.forget(seq)
        if seq.admitted_at is None:
            seq.admitted_at = now
        if not seq.has_own_kv:
            seq.cached_by_source = {"device": seq.num_computed} if seq.num_computed else {}
        seq.end_phase("worker_queue", now)
        return True

    def _headroom(self, seq: Sequence) -> int:
        """Blocks of a busy sequence's next tokens stay free, or the next steps would preempt."""
        return self.num_admitted * self.kv.windows.count if seq.reserve_growth else 0

    def admit_waiting(
        self, now: float, comes_from_elsewhere: Callable[[Sequence], bool], token_s: float
    ) -> list[Sequence]:
        """Admit those that may go on now; returns them: they are REMOTE now if their KV
        `comes_from_elsewhere` (asked once they have their blocks), and else RUNNING. `token_s`: as
        of `schedule`.

        A sequence whose next missing block is being computed or loaded for another one is skipped
        until that block is a cache hit. Those behind one that does not fit may pass it, a number of
        times; but nothing passes a stream except other streams."""
        admitted: list[Sequence] = []
        too_large = TooLarge()
        lost = ServiceClass.BATCH  # the highest class of those that are preempted here
        self.lacks_room, self._is_to_preempt, self.gives_way = False, False, None
        self.wanted.clear()
        if not self.waiting or self.is_paused:  # as after most messages
            return admitted
        coming = under_way(self.running, self.remote, self.kv)
        budget = self.config.max_num_batched_tokens
        waiting = tuple(seq for seq in self.waiting if seq.arrived_at <= self.admits_until)
        for seq in may_be_admitted(waiting, self.running, now, token_s, budget):
            is_first = not too_large.seqs
            if seq.service_class < lost or not (is_first or self._may_pass(seq, too_large)):
                break
            if comes_by_itself(seq, coming, self.kv, self._lacks):
                continue
            headroom = self._headroom(seq)
            if not seq.is_stream and self.kv.lacks(seq, too_large.least - headroom):
                too_large.add(seq, now)  # without a try: another one needs no more
                continue
            while not (is_admitted := self.admit(seq, now)) and (gone := self._give_way(seq)):
                lost = max(lost, gone.service_class)
            if not is_admitted:
                self.lacks_room = True
                self.wanted = self.wanted or self._held_before(seq)
                too_large.add(seq, now)
                if not seq.is_stream:
                    too_large.num_tried += 1
                    most = self.kv.windows.max_blocks(len(seq.tokens)) + headroom
                    too_large.least = min(too_large.least, most)
                continue
            too_large.is_passed(now)
            self.waiting.remove(seq)
            admitted.append(seq)
            if comes_from_elsewhere(seq):
                seq.state = SeqState.REMOTE
                self.remote.append(seq)
            else:
                seq.state = SeqState.RUNNING
                self.running.append(seq)
                coming.append(Coming.of(seq, self.kv.num_usable(seq)))
        return admitted

    def _may_pass(self, seq: Sequence, too_large: TooLarge) -> bool:
        """Whether `seq` may have memory that `too_large`, which are more urgent, cannot use yet."""
        if self.num_admitted >= self.config.max_num_seqs or too_large.are_over:
            return False
        first = too_large.seqs[0]
        if first.service_class > seq.service_class:
            return False
        return seq.is_stream or not (first.is_stream or too_large.num_tried >= MAX_TRIED)

    def compute_here(self, seq: Sequence) -> None:
        """Compute the rest of `seq` here: its remote KV has arrived, or will not arrive."""
        assert seq.state is SeqState.REMOTE
        assert seq.num_reads == 0
        self.remote.remove(seq)
        seq.state = SeqState.RUNNING
        self.running.append(seq)

    def readmit(self, seq: Sequence) -> None:
        """The remote KV of `seq` that arrived cannot be continued: it waits for new blocks, and is
        computed from its first token."""
        assert seq.state is SeqState.REMOTE
        assert seq.num_reads == 0
        self.remote.remove(seq)
        self._wait_again(seq)

    def schedule(
        self,
        now: float,
        prompt_budget: Callable[[float], int],
        cost: FittedCost,
        decode_s: float = 0.0,
        draft_costs: DraftCosts = NOT_MEASURED,
        token_s: float = 0.0,
        computes_apart: Callable[[int, int], bool] = lambda _prompts, _decodes: False,
        low_class_room: LowClassRoom = room_for_all,
    ) -> Step | None:
        """The next step; None: there is nothing to do, or a step is in flight that none follows.
        Decodes go first, then prompts: at most `prompt_budget` tokens where they would delay
        decodes, by how long a prompt has waited. `cost` is the measured cost of prompts; beside
        decodes, what they add to `decode_s`, the time of a step of decodes alone. token_s: of a
        prompt, all in all; 0: not measured yet. draft_costs, `computes_apart`, `low_class_room`: as
        of `StepTiming`."""
        if len(self.in_flight) > self.config.steps_ahead or not self.running:
            return None  # as after most messages
        under_way = self._isolation.is_under_way
        if self.in_flight if under_way else self.is_paused:
            return None
        if self.in_flight:
            return self._follow(*self.in_flight[0], draft_costs, low_class_room, now)
        self._make_room_for_growth()
        if self._isolation.is_under_way and (apart := self._step_apart()) is not None:
            return apart
        budget = self.config.max_num_batched_tokens
        running, low_budget = self._taking_part(low_class_room, now)
        decodes = [seq for seq in running if seq.is_decoding][:budget]
        num_prompts = len(running) - len(decodes)
        has_both = 0 < len(decodes) < len(running)
        is_apart = has_both and self._may_pause(now) and computes_apart(num_prompts, len(decodes))
        chosen = [(seq, 1) for seq in decodes if not (is_apart and seq.is_stream)]
        if num_prompts:
            # Who waits for memory is helped by streams that end soon.
            others = () if self.lacks_room else self.waiting
            most = budget if low_budget is None else low_budget
            if decodes and low_budget is None:
                most = prompt_budget(waited_s(others, running, now))
            budget = min(budget - len(chosen), most)
            beside_s = decode_s if chosen else 0.0
            common = now, budget, token_s, cost, beside_s, self.kv
            chosen += choose_prompts(running, *common)
        if is_apart and not chosen:  # there is no block for a token of them
            is_apart, chosen = False, [(seq, 1) for seq in decodes]
        if not chosen:  # likewise, and lower classes may have one
            of_low = [seq for seq in self.running if seq.is_decoding]
            chosen = [(seq, 1) for seq in of_low[: self.config.max_num_batched_tokens]]
        chosen = [each for each in chosen if self._is_sound(*each)]
        if not chosen:
            return None
        step = Step(self._next_step_id, [self._share(seq, count) for seq, count in chosen])
        if len(chosen) == len(decodes) == len(running):
            drafts = self._drafts(decodes, draft_costs)
            is_short = decodes[0].is_low and now - self._interactive_at <= LATELY_S
            step.makes_slots = self._drafting.makes_slots(len(decodes))
            if drafts is not None:
                for seq, share, draft in zip(decodes, step.seqs, drafts, strict=True):
                    share.draft_tokens, share.num_drafts = self._fitting(seq, draft)
            elif self.config.steps_ahead:
                step.may_be_followed = not is_short and may_be_followed(decodes)
            elif not is_short:
                step.repeats = repeats(decodes, self.config)
                if low_budget is not None and decode_s > 0:
                    step.repeats = max(1, min(step.repeats, int(LOW_CLASS_STEP_S / decode_s)))
        step.low_priority = not decodes and not any(seq.reserve_growth for seq, _ in chosen)
        self._note_pause(now, is_apart)
        return self._begin(step, [seq for seq, _ in chosen])

    def _taking_part(self, room: LowClassRoom, now: float) -> tuple[list[Sequence], int | None]:
        running, low_budget = taking_part(self.running, room, now - self._interactive_at)
        if running and not running[0].is_low:
            self._interactive_at = now
        return running, low_budget

    def _note_pause(self, now: float, is_apart: bool) -> None:
        if not is_apart:
            self._paused_at = None
        elif self._paused_at is None:
            self._paused_at = now

    def step_in_the_way(self) -> int | None:
        """The step that runs, if it is of low classes alone and an interactive sequence waits for
        its end; once for each step. States could not go back to where they were."""
        config, under_way = self.config, self._isolation.is_under_way
        if len(self.in_flight) != 1 or config.steps_ahead or config.has_states or under_way:
            return None
        step, seqs = self.in_flight[0]
        if not seqs or step.step_id == self._abandoned or not all(seq.is_low for seq in seqs):
            return None
        if all(seq.is_low for seq in self.running):
            return None
        self._abandoned = step.step_id
        return step.step_id

    def _step_apart(self) -> Step | None:
        """The next step after one that failed, of some of its sequences; None: all were tried."""
        isolation = self._isolation
        if isolation.culprit is not None:
            check = self._health_check(isolation.culprit[0])
            if check is not None:
                isolation.is_checking = True
                return self._begin(check, [])
            self._judge(None)
        while group := isolation.next_group():
            budget, chosen = self.config.max_num_batched_tokens, []
            for seq in group[:budget]:
                room = self.kv.num_covered(seq) - seq.num_computed
                count = min(seq.num_missing, budget, room)
                if count > 0 and self._is_sound(seq, count):
                    chosen.append((seq, count))
                budget -= max(count, 0)
            if chosen:
                step = Step(self._next_step_id, [self._share(*each) for each in chosen])
                last = group.index(chosen[-1][0])
                isolation.begin(step.step_id, group[last + 1 :] if not budget else [])
                return self._begin(step, [seq for seq, _ in chosen])
        return None

    def _health_check(self, culprit: Sequence) -> Step | None:
        """A step that fails only where any would: one token, in a block that nothing else uses.
        None: there is no such block, or nobody to judge any more."""
        if culprit.state is SeqState.DEAD:
            return None
        num_groups = self.kv.windows.count
        if self.kv.pool.num_free < num_groups and culprit.state is SeqState.RUNNING:
            self.preempt(culprit)
        blocks = self.kv.allocate(num_groups)
        if blocks is None:
            return None
        share = ScheduledSeq(
            request_id=HEALTH_CHECK,
            tokens=[0],
            start=0,
            block_ids=blocks,
            sample=True,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            context=[0],
            num_prompt_tokens=1,
        )
        return Step(self._next_step_id, [share], is_health_check=True)

    def _judge(self, error: str | None) -> None:
        """After a health check, which failed with `error`."""
        culprit = self._isolation.on_health_check(error)
        if culprit is not None:
            self.faults.append((culprit[0], Refusal.EXECUTION, culprit[1]))

    def _may_pause(self, now: float) -> bool:
        """Whether prompts may be computed in a step without the decodes."""
        if self._paused_at is None:
            return True
        return self.config.itl_target_s == 0 and now - self._paused_at < MAX_PAUSE_S

    def _follow(
        self,
        step: Step,
        in_step: list[Sequence],
        draft_costs: DraftCosts,
        low_class_room: LowClassRoom,
        now: float,
    ) -> Step | None:
        """The step after `step`, which is in flight, before its tokens are known. None if they have
        to be, if there is no block to be had without preempting, and if one is to be preempted."""
        if step.step_id == self._awaited or self._is_to_preempt:
            return None
        running, _ = self._taking_part(low_class_room, now)
        found = followers(step, in_step, running, self.config)
        if not found:
            return None
        if self._drafts([seq for seq, _ in found], draft_costs) is not None:
            self._awaited = step.step_id
            return None
        if not all(self.kv.grow(seq, index is not None) for seq, index in found):
            return None
        found = [(seq, index) for seq, index in found if self._is_sound(seq, 1, index)]
        if not found:
            return None
        next_step = Step(self._next_step_id, [self._share(seq, 1, index) for seq, index in found])
        next_step.may_be_followed = True
        return self._begin(next_step, [seq for seq, _ in found])

    def _begin(self, step: Step, seqs: list[Sequence]) -> Step:
        self._next_step_id += 1
        self.in_flight.append(InFlight(step, seqs))
        for seq in seqs:
            seq.num_steps += 1
        return step

    def finish_step(self, done: StepDone) -> list[tuple[Sequence, int]]:
        """Apply a step that is done: KV computed, blocks sealed, sampled tokens appended.

        Returns (sequence, tokens computed) of those that live, are not in `faults`, and do not wait
        for their grammars. Blocks of those that were ended meanwhile are freed. After a failed step
        nothing is computed: its sequences run again apart."""
        step, seqs = self.in_flight.popleft()
        assert step.step_id == done.step_id
        if step.is_health_check:
            self.kv.pool.release(step.seqs[0].block_ids, evict_first=True)
            self._judge(done.error)
            return []
        survivors: list[tuple[Sequence, int]] = []
        if done.error is None and len(done.waiting) < len(seqs):
            self.kv.checksums.update(zip(step.checksum_blocks, done.checksums, strict=True))
        windows, has_faults = self.kv.windows, done.has_faults
        size, count = windows.block_size, windows.count
        for index, (seq, share) in enumerate(zip(seqs, step.seqs, strict=True)):
            seq.num_steps -= 1
            if seq.state is SeqState.DEAD:
                self.release_if_settled(seq)
                continue
            if has_faults and (fault := done.fault(index)) is not None:
                self.faults.append((seq, *fault))
                continue
            if self.config.has_states and (done.error is not None or index in done.waiting):
                # What the step has left of the state of its last token is unknown.
                seq.num_computed = windows.tokens(seq.num_sealed)
            if index in done.waiting:
                continue
            if done.error is None:
                sampled = done.sampled[index]
                seq.num_computed = share.start + len(share.tokens)
                seq.has_own_kv = True
                if share.outputs_from is not None:
                    seq.take_outputs(done.prompts[index], seq.num_computed)
                if share.sample:
                    assert sampled is not None
                    seq.append(sampled.token, sampled.logprobs)
                    if sampled.more:
                        seq.tokens.extend(sampled.more)
                        seq.num_computed += len(sampled.more)
                    new = sampled.token, *sampled.more
                    self._drafting.on_verified(seq, new, sampled.num_drafts)
                    if most := share.most_drafts:
                        computed = len(share.draft_tokens) or sampled.num_drafts
                        before, accepted = seq.drafts, len(sampled.more)
                        seq.drafts = before[0] + accepted, before[1] + computed - accepted
                    seq.forced = sampled.forced
                    if len(sampled.more) < most:  # it did not fill all its blocks
                        first, end = windows.full(seq.num_computed), windows.full(share.end)
                        for block in share.block_ids[first:end]:
                            self.kv.checksums.pop(block, None)
                if seq.num_sealed < seq.num_computed // size * count:
                    self.kv.seal_computed(seq)
                self.kv.slide(seq)
            survivors.append((seq, len(share.tokens)))
        if done.error is not None:
            self._isolation.on_failed(done.step_id, [seq for seq, _ in survivors], done.error)
            return []
        return survivors

    def remove(self, seq: Sequence) -> None:
        """End `seq` in whatever state it is. Its blocks are freed now, or, if a step or a transfer
        still writes to them, when that has settled (`release_if_settled`)."""
        if seq.state is SeqState.WAITING:
            self.waiting.remove(seq)
            self._lacks.forget(seq)
        elif seq.state is SeqState.RUNNING:
            self.running.remove(seq)
        elif seq.state is SeqState.REMOTE:
            self.remote.remove(seq)
        elif seq.state is SeqState.HELD:
            self.held.remove(seq)
        seq.state = SeqState.DEAD
        self._drafting.forget(seq)
        self.release_if_settled(seq)

    def release_if_settled(self, seq: Sequence) -> None:
        """Free a dead sequence's blocks, unless something still writes to them."""
        assert seq.state is SeqState.DEAD
        if seq.num_steps == 0 and seq.num_reads == 0:
            self.kv.release(seq)

    def hold(self, seq: Sequence) -> None:
        """`seq` is computed; it keeps its blocks for a consumer and is scheduled no more."""
        self.running.remove(seq)
        self.held.append(seq)
        seq.state = SeqState.HELD

    @property
    def num_admitted(self) -> int:
        return len(self.running) + len(self.remote)

    @property
    def pending_tokens(self) -> int:
        """Known tokens without KV, of sequences that are computed here."""
        return sum(len(s.tokens) - s.num_computed for s in self.running) + sum(
            s.num_to_compute for s in self.waiting if not s.is_remote
        )

    def _drafts(self, decodes: list[Sequence], costs: DraftCosts) -> list[Draft] | None:
        """Plans as `Drafts.plan` does. None if it is not worth it, or may not be."""
        if not self._drafting.is_worth_it(decodes, costs):
            return None
        rooms = draft_rooms(decodes, self.config, self._drafting.max_drafts)
        return self._drafting.plan(decodes, rooms, costs) if any(rooms) else None

    def _fitting(self, seq: Sequence, draft: Draft) -> Draft:
        """`draft` in the blocks of `seq`; it gets more for that where others do not wait for them,
        and the next tokens of all will find some."""
        count = draft.num_asked or len(draft.tokens)
        if len(seq.tokens) + count > self.kv.num_covered(seq):
            spare = self.kv.pool.num_free - self.num_admitted * self.kv.windows.count
            if not self.lacks_room and spare > self.kv.windows.entries(count):
                self.kv.grow(seq, count)
            count = min(count, self.kv.num_covered(seq) - len(seq.tokens))
        return Draft(draft.tokens[:count], min(count, draft.num_asked))

    def _make_room_for_growth(self) -> None:
        """A block for the newest token of every running sequence; preempts others for it."""
        for seq in list(self.running):
            while seq.state is SeqState.RUNNING and not self.kv.grow(seq):
                self.preempt(victim(self.running, self.kv.windows))

    def _give_way(self, seq: Sequence) -> Sequence | None:
        """Preempts and returns one of a lower class, or for a stream one of its class that streams
        nothing yet, if with them all gone `seq` could be admitted: a stream would be silent until
        others end."""
        others = self._running_before(seq)
        num_free = self.kv.pool.num_free + _num_blocks(others)
        if not others or num_free < self.kv.windows.max_blocks(len(seq.tokens)):
            return None
        if self.in_flight:
            self._is_to_preempt = True
            return None
        gone = victim(others, self.kv.windows)
        if not self.may_preempt:
            self.gives_way = self.gives_way or gone
            return None
        self.preempt(gone)
        return gone

    def _running_before(self, seq: Sequence) -> list[Sequence]:
        """Those that are preempted for `seq` where that makes enough room."""
        return [each for each in self.running if _makes_room(each, seq)]

    def _held_before(self, seq: Sequence) -> list[Sequence]:
        """Those of lower classes, the lowest first, whose blocks `seq` needs beside those of
        running ones, and consumers have not read; none if all would not be enough."""
        lower = [each for each in self.held if each.service_class < seq.service_class]
        lower.sort(key=lambda each: each.service_class)
        lacking = self.kv.windows.max_blocks(len(seq.tokens)) + self._headroom(seq)
        lacking -= self.kv.pool.num_free + _num_blocks(self._running_before(seq))
        found: list[Sequence] = []
        for each in lower:
            if lacking <= 0:
                break
            found.append(each)
            lacking -= _num_blocks([each])
        return found if lacking <= 0 else []

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        self.kv.release(seq)
        seq.state = SeqState.WAITING
        self.waiting.appendleft(seq)

    @property
    def is_settled(self) -> bool:
        """No step is under way, and none that failed is tried again."""
        return not self.in_flight and not self._isolation.is_under_way

    def recompute(self, seq: Sequence) -> None:
        """It loses its KV, and is computed again as soon as it has blocks."""
        self.running.remove(seq)
        self._wait_again(seq)

    def take_row(self) -> list[int]:
        """A row of blocks for a probe, whatever has to be preempted for it; at most that."""
        while (blocks := self.kv.allocate(self.kv.windows.count)) is None and self.running:
            self.preempt(victim(self.running, self.kv.windows))
        return blocks or []

    def take_preempted(self) -> list[Sequence]:
        """Those that have lost their blocks since the last call, in whatever state they are."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_faults(self) -> list[tuple[Sequence, Refusal, str]]:
        """Live sequences that were left out of a step since the last call. The caller ends them."""
        faults, self.faults = self.faults, []
        return [fault for fault in faults if fault[0].state is not SeqState.DEAD]

    def _is_sound(self, seq: Sequence, count: int, follows: int | None = None) -> bool:
        """Whether the blocks of its next `count` tokens are its own. It is in `faults` if not."""
        start = seq.num_computed + (follows is not None)
        why = self.kv.fault(seq, start, count, thorough=self.config.guard)
        if why is not None:
            self.faults.append((seq, Refusal.BLOCK_TABLE, why))
        return why is None

    def _share(self, seq: Sequence, count: int, follows: int | None = None) -> ScheduledSeq:
        """`follows`: the index that ScheduledSeq has of the token before."""
        start = seq.num_computed + (follows is not None)
        end = start + count
        return ScheduledSeq(
            request_id=f"{seq.request_id}#{seq.attempt}",
            tokens=seq.tokens[start:end] if follows is None else [UNKNOWN],
            start=start,
            block_ids=seq.block_ids,
            sample=end >= len(seq.tokens),
            sampling=seq.sampling,
            context=seq.tokens,
            num_prompt_tokens=seq.num_prompt_tokens,
            outputs_from=seq.outputs_from,
            pooled=seq.pooled,
            follows=follows,
            need=seq.need,
            images=seq.spec.images,
            reads_pages=bool(self._mark) and seq.spec.scope.salt.startswith(self._mark),
            kept=seq.kept,
        )
