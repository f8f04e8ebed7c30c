"""What the next step has: which prompts and how much of each, and how often decodes repeat.

Prompts: which are admitted, which are computed, and which wait for blocks that are computed or
loaded for another one.

Decodes alone: a repeated step samples several tokens of each sequence without the host in between.
A step that is followed has the next one waiting behind it: that one takes the tokens where they
were drawn, so the host learns and reports each at once, and prepares a step while another one runs.
What is computed for a sequence that has meanwhile ended is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import TOKENS_UNIT, FittedCost, order_of
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.scheduling.lacks import Lacks
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.step import Step

Order = tuple[int, bool, float]


def order(seq: Sequence, now: float, token_s: float) -> Order:
    """Ascending: first the highest class; of that, streams, which are silent until they are
    computed here. Then the shortest, which is best for the mean latency; but one that has waited
    counts as shorter, so that a long one does not starve. token_s: as it is measured; what a fit
    says of one token may be nothing, where all passes have equally many."""
    compute_s = max(0.0, seq.num_to_compute * token_s)
    return -seq.service_class, not seq.is_stream, order_of(compute_s, now - seq.arrived_at)


class TooLarge:
    """Those that wait and do not fit, most urgent first."""

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.num_tried = 0  # prompts
        self.least = inf  # blocks that none of them can have now
        self.are_over = False  # the passes of one of them

    def add(self, seq: Sequence, now: float) -> None:
        self.seqs.append(seq)
        self.are_over |= self._is_over(seq, now)

    def is_passed(self, now: float) -> None:
        for seq in self.seqs:
            seq.passes.add(now)
            self.are_over |= self._is_over(seq, now)

    @staticmethod
    def _is_over(seq: Sequence, now: float) -> bool:
        return seq.passes.are_over(now, seq.deadline - seq.arrived_at)


def may_be_admitted(
    waiting: Seq[Sequence],
    running: Iterable[Sequence],
    now: float,
    token_s: float,
    budget: int,
) -> Iterator[Sequence]:
    """Those that have use for blocks now, most urgent first. By class, the highest first, streams,
    unless they wait for KV to be found; then those whose KV another worker has begun to compute;
    then prompts that may be in the next step, of at most `budget` tokens. The others would keep
    others out of the memory, and stay where they are. The caller may set those that it gets
    RUNNING."""
    for service_class in sorted({seq.service_class for seq in waiting}, reverse=True):
        of_class = [seq for seq in waiting if seq.service_class is service_class]
        yield from _admissible(of_class, running, now, token_s, budget)


def _admissible(
    waiting: Iterable[Sequence],
    running: Iterable[Sequence],
    now: float,
    token_s: float,
    budget: int,
) -> Iterator[Sequence]:
    """As `may_be_admitted`, of one class."""
    prompts: list[tuple[Order, Sequence]] = []
    arriving: list[Sequence] = []
    for seq in waiting:
        if seq.awaits_producer or now < seq.not_before:
            continue
        if seq.is_stream:
            yield seq
        elif seq.is_remote:
            arriving.append(seq)
        else:
            prompts.append((order(seq, now, token_s), seq))
    yield from arriving
    if not prompts:
        return
    ahead = [(order(s, now, token_s), s.num_missing) for s in running if s.num_missing > 1]
    for key, seq in sorted(prompts, key=lambda each: each[0]):
        if sum(count for other, count in ahead if other <= key) >= budget:
            return
        yield seq
        if seq.state is SeqState.RUNNING:
            ahead.append((key, seq.num_missing))


LowClassRoom = Callable[[int, int, int, int, float], tuple[int, int]]
"""`StepTiming.low_class_room`."""


def room_for_all(*_: float) -> tuple[int, int]:
    return 1 << 30, 1 << 30


def taking_part(
    running: Seq[Sequence], room: LowClassRoom, quiet_s: float
) -> tuple[list[Sequence], int | None]:
    """Those of `running` that the next step may compute, and how many tokens of prompts if they are
    of low classes; None: of higher ones. Low classes take part beside interactive decodes as far as
    there is room for them, not beside interactive prompts, and always where there are neither.
    quiet_s: since the last interactive one."""
    low = [seq for seq in running if seq.is_low]
    if not low:
        return list(running), None
    interactive = [seq for seq in running if not seq.is_low]
    if any(not seq.is_decoding for seq in interactive):
        return interactive, None
    low.sort(key=lambda seq: -seq.service_class)
    decodes = [seq for seq in low if seq.is_decoding]
    num_tokens, low_tokens = (sum(s.num_computed for s in each) for each in (interactive, decodes))
    count, budget = room(len(interactive), num_tokens, len(decodes), low_tokens, quiet_s)
    prompts = [seq for seq in low if not seq.is_decoding] if budget else []
    return interactive + decodes[:count] + prompts, budget


def waited_s(waiting: Iterable[Sequence], running: Iterable[Sequence], now: float) -> float:
    """The longest that an interactive prompt has waited to be computed here."""
    prompts = [seq for seq in waiting if not seq.is_remote]
    prompts += [seq for seq in running if seq.num_missing > 1]
    prompts = [seq for seq in prompts if not seq.is_low]
    return max((now - seq.arrived_at for seq in prompts if not seq.is_stream), default=0.0)


def choose_prompts(
    running: Iterable[Sequence],
    now: float,
    budget: int,
    token_s: float,
    cost: FittedCost,
    decode_s: float,
    kv: KVCacheManager,
) -> list[tuple[Sequence, int]]:
    """Which prompts get how many of `budget` tokens, by `order`. Another prompt joins the pass if
    the passes that are saved, each with its decodes, are worth the delay of those in it.

    token_s: of a token, all in all; what a pass and a token more cost is in `cost`. decode_s: of a
    step of the decodes beside them. kv: holds their block tables."""
    pass_s, more_s = cost.weights[0] + decode_s, cost.weights[1] / TOKENS_UNIT
    prompts = sorted(
        (seq for seq in running if seq.num_missing > 1), key=lambda seq: order(seq, now, token_s)
    )
    chosen: list[tuple[Sequence, int]] = []
    for seq in prompts:
        count = min(seq.num_missing, budget, kv.num_covered(seq) - seq.num_computed)
        if count <= 0:
            break
        saved_s = pass_s * (len(prompts) - len(chosen))
        if chosen and more_s > 0 and saved_s < count * more_s * len(chosen):
            break
        chosen.append((seq, count))
        budget -= count
    return chosen


class Coming(NamedTuple):
    """Blocks that will be cache hits: entries `[first, end)` of a table with these names."""

    names: Seq[bytes]
    first: int
    end: int
    service_class: ServiceClass  # what is computed for a low one may come late

    @staticmethod
    def of(seq: Sequence, end: int, service_class: ServiceClass | None = None) -> Coming:
        names = seq.block_hashes
        by = seq.service_class if service_class is None else service_class
        return Coming(names, seq.num_sealed, min(end, len(names)), by)


def under_way(
    running: Iterable[Sequence], remote: Iterable[Sequence], kv: KVCacheManager
) -> list[Coming]:
    """What will be cache hits once a prompt is computed or a load is done."""
    computed = (seq for seq in running if seq.num_missing > 1 and seq.next_chain is None)
    return [
        *(Coming.of(seq, kv.num_usable(seq)) for seq in computed),
        *(Coming.of(seq, seq.num_arriving, ServiceClass.PRIORITY) for seq in remote),
    ]


def comes_by_itself(
    seq: Sequence, coming: Iterable[Coming], kv: KVCacheManager, lacks: Lacks
) -> bool:
    """Whether the next missing block of `seq` will be a cache hit, and no later than if it was
    computed for `seq`. The name of a block says what is before it: where two tables have one alike,
    they are alike up to there."""
    names = seq.block_hashes
    most = min(kv.num_usable(seq), len(names))
    shared = [
        each
        for each in coming
        if each.first < min(each.end, most)
        and each.service_class >= seq.service_class
        and each.names[each.first] == names[each.first]
    ]
    if not shared:
        return False
    at = lacks.num_cached(seq)
    return at < most and any(
        each.first <= at < each.end and each.names[at] == names[at] for each in shared
    )


def tokens_to_end(seq: Sequence, config: WorkerConfig) -> int:
    """Tokens that may be sampled for a decode before it ends, at least 1. Nothing follows the token
    that a producer samples."""
    if not seq.reserve_growth:
        return 1
    left = seq.sampling.max_tokens - seq.num_output_tokens
    return max(1, min(left, config.max_model_len - len(seq.tokens)))


def tokens_to_report(seq: Sequence, config: WorkerConfig) -> int:
    """Tokens before it ends or has to be reported: a first token is reported at once."""
    return 1 if seq.num_output_tokens == 0 else tokens_to_end(seq, config)


def repeats(decodes: Seq[Sequence], config: WorkerConfig) -> int:
    """Passes in a row that decodes can run by themselves: no block is added or sealed, and none
    ends. What follows a token that is not drawn by the kernels is not known before, nor with a mask
    what may."""
    least = size = config.block_size
    for seq in decodes:
        least = min(least, -len(seq.tokens) % size)
        if least <= 1 or not _is_drawn_on_device(seq, 0):
            return 1
    return max(1, min([least, *(tokens_to_report(seq, config) for seq in decodes)]))


def draft_rooms(decodes: Seq[Sequence], config: WorkerConfig, most: int) -> list[int]:
    """How many draft tokens each may get, up to `most`: the token sampled after them is at most the
    last one that it may have. None for those whose logits are edited or reported. With states, they
    stay in the block of its last token: a block has the state of its last token only."""
    rooms, size = [], config.block_size
    for seq in decodes:
        room = min(most, tokens_to_report(seq, config) - 1)
        if config.has_states:
            room = min(room, -len(seq.tokens) % size)
        rooms.append(room if seq.sampling.is_plain(seq.num_output_tokens) else 0)
    return rooms


def may_be_followed(decodes: Seq[Sequence]) -> bool:
    """Whether the device can draw their next tokens, and may know them before the host does."""
    return all(_is_drawn_on_device(seq, 0) for seq in decodes)


def followers(
    step: Step, in_step: Seq[Sequence], running: Seq[Sequence], config: WorkerConfig
) -> list[tuple[Sequence, int | None]] | None:
    """The decodes of the step after `step`, which is in flight over `in_step`, each with its index
    there, or None if it is not among them. None: what is to be computed next depends on the tokens
    of `step`, or is no decode."""
    if not step.may_be_followed:
        return None
    places = {seq: index for index, seq in enumerate(in_step)}
    found: list[tuple[Sequence, int | None]] = []
    for seq in running:
        index = places.get(seq)
        if index is not None and tokens_to_end(seq, config) == 1:
            continue  # it ends with the token that is under way
        if not seq.is_decoding or not _is_drawn_on_device(seq, 0 if index is None else 1):
            return None
        found.append((seq, index))
    return found[: config.max_num_batched_tokens]


def _is_drawn_on_device(seq: Sequence, num_unknown: int) -> bool:
    """`num_unknown`: tokens after those of `seq` that are under way."""
    sampling = seq.sampling
    return not sampling.is_masked and sampling.is_drawn(seq.num_output_tokens + num_unknown)


def victim(running: Seq[Sequence], windows: Windows) -> Sequence:
    """Who is preempted where others need a block: of the lowest class. Of those that stream nothing
    yet the one that has least work to lose, else the latest arrival: a stream would be silent until
    others end."""
    lowest = min(seq.service_class for seq in running)
    of_class = [seq for seq in running if seq.service_class is lowest]
    silent = [seq for seq in of_class if not seq.is_stream]
    return min(
        reversed(silent or of_class[-1:]),
        key=lambda seq: seq.num_computed - windows.tokens(seq.num_hits),
    )
