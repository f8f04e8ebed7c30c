"""What the next step has: which prompts and how much of each, and the decodes with their drafts.

Prompts: which are admitted, which are computed, and which wait for blocks that are computed or
loaded for another one.

Decodes alone: a repeated step samples several tokens of each sequence without the host in between.
A step that is followed has the next one waiting behind it: that one takes the tokens where they
were drawn, so the host learns and reports each at once, and prepares a step while another one runs.
What is computed for a sequence that has meanwhile ended is thrown away.

Drafts: speculative decoding by n-grams (prompt lookup decoding, A. Saxena 2023). A pass of few
decodes is bound by reading weights, so a few rows more cost little. The draft tokens of a sequence
are those that its grammar lets follow alone, else those that its client predicts, or that followed
its last n-gram where that occurred before, or that the executor's drafter will propose, whichever
is accepted more often; each is one row more. What is sampled after each row
says how many of them are accepted. Sampling depends on the logits, the grammar and (seed, position)
alone, so the output is the same as without drafts. One more row pays while the accepted tokens that
it is expected to add, over the time that it is measured to take, exceed what the pass yields as it
is. So long contexts, large batches and texts without repetition get no drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import SEQS_UNIT, TOKENS_UNIT, FittedCost, fitted_s, order_of, row_features
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.window import Windows
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


def first_missing(seq: Sequence, kv: KVCacheManager) -> bytes | None:
    """Hash of the first block of a waiting sequence that is no cache hit; None: all are."""
    block_hashes, count = kv.usable_hashes(seq), kv.num_cached(seq)
    return block_hashes[count] if count < len(block_hashes) else None


def hashes_under_way(
    running: Iterable[Sequence], remote: Iterable[Sequence], kv: KVCacheManager
) -> dict[bytes, ServiceClass]:
    """Hashes of blocks that will be cache hits once a prompt is computed or a load is done, with
    the highest class of those who do: what is computed for a low one may come late."""
    block_hashes: dict[bytes, ServiceClass] = {}
    for seq in sorted(running, key=lambda seq: seq.service_class):
        if seq.num_missing > 1 and seq.next_chain is None:  # those are never hits
            coming = kv.usable_hashes(seq)[seq.num_sealed :]
            block_hashes.update(dict.fromkeys(coming, seq.service_class))
    for seq in remote:
        coming = seq.block_hashes[seq.num_sealed : seq.num_arriving]
        block_hashes.update(dict.fromkeys(coming, ServiceClass.PRIORITY))
    return block_hashes


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
    ends. With a mask, what may follow a token is not known before."""
    least = size = config.block_size
    for seq in decodes:
        least = min(least, -len(seq.tokens) % size)
        if least <= 1 or seq.sampling.is_masked:
            return 1
    return max(1, min([least, *(tokens_to_report(seq, config) for seq in decodes)]))


def draft_rooms(decodes: Seq[Sequence], config: WorkerConfig) -> list[int] | None:
    """How many draft tokens each may get: with its last token they stay in one block, and the token
    sampled after them is at most the last one that it may have. None: the logits of one sequence
    are edited or reported."""
    if not all(seq.sampling.is_plain(seq.num_output_tokens) for seq in decodes):
        return None
    size = config.block_size
    return [min(-len(seq.tokens) % size, tokens_to_report(seq, config) - 1) for seq in decodes]


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
    return not sampling.is_masked and sampling.is_plain(seq.num_output_tokens + num_unknown)


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


NGRAM_SIZE = 3  # tokens that have to match before what followed them is proposed
SEARCHED_TOKENS = 16_384  # the last ones of a sequence
ACCEPTANCE_WEIGHT = 0.15  # a draft token has it in the moving average of the acceptance rate
INITIAL_ACCEPTANCE_RATE = 0.5  # before anything was verified
MAX_NEEDED_RATE = 0.9  # no n-gram is looked up where drafts pay only above this acceptance rate
DEFAULT_ROW_COST = 1 / 16  # one row more, as a share of a pass, before it was measured
DEFAULT_DRAFT_COST = 1 / 8  # a drafter's token, as a share of a pass, before it was measured
RECOVERY = 0.005  # how fast a drafter that is not asked is thought of as at the beginning, a pass
MAX_ROW_COST = 0.35  # the most that is believed, or a few slow passes would end all drafts
MIN_GAIN = 1.5  # expected gain of a row more over its cost: neither is known exactly
MAX_SLOWDOWN = 1.5  # a pass may take so long with drafts, where other sequences wait
TOKEN_BYTES = 4  # a token has in what is searched


class NgramProposer:
    """Proposes the draft tokens of one sequence. Invariant: `_searched` holds its first tokens;
    `_source`, if there is one, is the index of the token that is expected to come next. Indices
    count `_prediction`, what a client expects of the output, before the sequence's tokens."""

    def __init__(
        self, acceptance_rate: float, prediction: Seq[int] = (), num_prompt: int = 0
    ) -> None:
        """acceptance_rate: the share of draft tokens that is expected to be accepted. prediction:
        of what follows the first `num_prompt` tokens."""
        self.acceptance_rate = acceptance_rate
        self._prediction, self._num_prompt = list(prediction), num_prompt
        self._searched = bytearray(array("I", prediction).tobytes())
        self._source: int | None = 0 if prediction else None
        self._proposed: list[int] = []

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """Up to `limit` draft tokens after `tokens`, which extend those of the last call."""
        self._follow(tokens)
        self._proposed = []
        if self._source is None:
            return self._proposed
        if self._source < len(self._prediction):
            self._proposed = self._prediction[self._source : self._source + limit]
            return self._proposed
        source = self._source - len(self._prediction)
        period = len(tokens) - source
        proposed = self._proposed = tokens[source : source + limit]
        while len(proposed) < limit:  # past the end of `tokens` the source is the draft itself
            proposed.append(proposed[-period])
        return self._proposed

    def on_verified(self, sampled: Seq[int]) -> None:
        """`sampled` came after the tokens of the last call: all that is known of them."""
        for proposed, token in zip(self._proposed, sampled, strict=False):
            accepted = proposed == token
            self.acceptance_rate += ACCEPTANCE_WEIGHT * (accepted - self.acceptance_rate)
            if not accepted:
                break
        self._proposed = []

    def _follow(self, tokens: list[int]) -> None:
        num_predicted = len(self._prediction)
        known = len(self._searched) // TOKEN_BYTES - num_predicted
        for token in tokens[max(known, self._num_prompt) :]:
            if self._source is None:
                break
            source = self._source
            expected = (
                self._prediction[source]
                if source < num_predicted
                else tokens[source - num_predicted]
            )
            self._source = source + 1 if expected == token else None
            if self._source == num_predicted:  # the prediction has ended
                self._source = None
        self._searched += array("I", tokens[known:]).tobytes()
        if self._source is None:
            self._source = self._search()

    def _search(self) -> int | None:
        """Index of the token after the latest earlier occurrence of the last n-gram, at last in the
        prediction; None: there is none."""
        searched = self._searched
        end, first = len(searched), max(0, len(searched) - SEARCHED_TOKENS * TOKEN_BYTES)
        if end < (NGRAM_SIZE + 1) * TOKEN_BYTES:
            return None
        ngram = bytes(searched[-NGRAM_SIZE * TOKEN_BYTES :])
        found = _rfind(searched, ngram, first, end - TOKEN_BYTES)
        num_predicted = len(self._prediction)
        if num_predicted and (found is None or found + NGRAM_SIZE == num_predicted):
            found = _rfind(searched, ngram, 0, (num_predicted - 1) * TOKEN_BYTES)
        return None if found is None else found + NGRAM_SIZE


def _rfind(searched: bytearray, ngram: bytes, first: int, end: int) -> int | None:
    """Index of the token where the last occurrence within these bytes begins."""
    at = searched.rfind(ngram, first, end)
    while at > 0 and at % TOKEN_BYTES:  # not where a token begins
        at = searched.rfind(ngram, first, at + len(ngram) - 1)
    return at // TOKEN_BYTES if at >= 0 and at % TOKEN_BYTES == 0 else None


class Draft(NamedTuple):
    """What a sequence gets in a pass: tokens, or how many the executor's drafter is to propose."""

    tokens: list[int]
    num_asked: int = 0


class _Source(NamedTuple):
    tokens: list[int]
    most: int
    rate: float  # how likely each is to be accepted after the one before
    cost: float  # what each takes, as a share of a pass
    is_asked: bool = False  # it is the executor's drafter


class Drafter:
    """Chooses the draft tokens of a worker's passes. Owned by its scheduler."""

    def __init__(
        self, max_drafts: int, max_rows: int, pool_tokens: int, *, has_drafter: bool = False
    ) -> None:
        """max_drafts: draft tokens of a sequence in a pass; max_rows: of a pass, one for each
        sequence and draft token; pool_tokens: of the KV pool; has_drafter: whether the executor
        proposes tokens when it is asked."""
        self._max_drafts, self._max_rows, self._pool_tokens = max_drafts, max_rows, pool_tokens
        self._acceptance_rate = INITIAL_ACCEPTANCE_RATE  # recent, of all sequences
        self._proposers: dict[Sequence, NgramProposer] = {}
        self._has_drafter = has_drafter
        self._asked_rate = INITIAL_ACCEPTANCE_RATE  # that of the executor's drafter
        self._asked_rates: dict[Sequence, float] = {}
        self._unasked = 0.0  # passes since the executor's drafter was asked
        self._num_seqs = 1  # the last plan was for so many

    def is_worth_it(self, seqs: Seq[Sequence], weights: Seq[float]) -> bool:
        """Whether drafts may pay in a pass over `seqs`, whatever they are."""
        return self._max_drafts > 0 and (
            MIN_GAIN * self._row_cost(seqs, weights) * len(seqs) <= MAX_NEEDED_RATE
        )

    def plan(
        self, seqs: Seq[Sequence], rooms: Seq[int], weights: Seq[float], draft_token_s: float = 0.0
    ) -> list[Draft] | None:
        """The draft tokens of each of `seqs`, which are decodes, for one pass over all of them;
        None: no sequence gets any. rooms: how many each has room for. weights: cost of passes by
        `row_features`; empty: not measured yet. draft_token_s: of the executor's drafter; 0: not
        measured yet."""
        row = self._row_cost(seqs, weights)
        asked = row + self._asked_cost(seqs, weights, draft_token_s)
        sources = [
            self._propose(seq, min(self._max_drafts, room), row, asked)
            for seq, room in zip(seqs, rooms, strict=True)
        ]
        candidates = sorted(
            (
                (source.rate**count, -count, index)
                for index, source in enumerate(sources)
                for count in range(1, source.most + 1)
            ),
            reverse=True,
        )
        counts = [0] * len(seqs)
        tokens, passes = float(len(seqs)), 1.0  # expected of the pass: its yield, and its cost
        for likelihood, _, index in candidates[: max(0, self._max_rows - len(seqs))]:
            cost = sources[index].cost
            if likelihood * passes <= MIN_GAIN * cost * tokens:
                continue
            if len(seqs) > 1 and passes + cost > MAX_SLOWDOWN:
                continue
            counts[index] += 1
            tokens, passes = tokens + likelihood, passes + cost
        self._num_seqs = len(seqs)
        if not any(counts):
            return None
        return [
            Draft([], count) if source.is_asked else Draft(source.tokens[:count])
            for source, count in zip(sources, counts, strict=True)
        ]

    def on_verified(self, seq: Sequence, sampled: Seq[int], num_asked: int = 0) -> None:
        """`sampled` came after the tokens that `seq` had at the last plan. num_asked: draft tokens
        that were the drafter's."""
        rate = self._asked_rates.get(seq, self._asked_rate)
        for number in range(min(num_asked, len(sampled))):
            accepted = number < len(sampled) - 1
            rate += ACCEPTANCE_WEIGHT * (accepted - rate)
        if num_asked:
            self._unasked = 0.0
            self._asked_rate += ACCEPTANCE_WEIGHT / 4 * (rate - self._asked_rate)
        else:  # it shows no more whether it would be right by now, or what it takes
            self._unasked += len(sampled) / self._num_seqs
            weight = 1.0 - (1.0 - RECOVERY) ** len(sampled)
            rate += weight * (INITIAL_ACCEPTANCE_RATE - rate)
            passed = weight / self._num_seqs
            self._asked_rate += passed * (INITIAL_ACCEPTANCE_RATE - self._asked_rate)
        if self._has_drafter:
            self._asked_rates[seq] = rate
        proposer = self._proposers.get(seq)
        if proposer is not None:
            proposer.on_verified(sampled)
            change = proposer.acceptance_rate - self._acceptance_rate
            self._acceptance_rate += ACCEPTANCE_WEIGHT / 4 * change

    def forget(self, seq: Sequence) -> None:
        self._proposers.pop(seq, None)
        self._asked_rates.pop(seq, None)

    def _propose(self, seq: Sequence, limit: int, row: float, asked: float) -> _Source:
        """Where draft tokens come from, up to `limit`; row, asked: what each costs, of n-grams and
        of the drafter."""
        if seq.forced:
            return _Source(list(seq.forced[:limit]), min(limit, len(seq.forced)), 1.0, row)
        proposer = self._proposers.get(seq)
        if proposer is None:
            prediction = seq.sampling.prediction
            proposer = NgramProposer(self._acceptance_rate, prediction, seq.num_prompt_tokens)
            self._proposers[seq] = proposer
        tokens, rate = proposer.propose(seq.tokens, limit), proposer.acceptance_rate
        own = self._asked_rates.get(seq, self._asked_rate)
        if self._has_drafter and (not tokens or own > rate):
            return _Source([], max(0, limit), own, asked, is_asked=True)
        return _Source(tokens, len(tokens), rate, row)

    def _asked_cost(self, seqs: Seq[Sequence], weights: Seq[float], draft_token_s: float) -> float:
        """What one more of the drafter's tokens costs before it is verified, likewise."""
        pass_s = self._pass_s(seqs, weights)
        if pass_s <= 0 or draft_token_s <= 0:
            return DEFAULT_DRAFT_COST
        trust: float = (1.0 - RECOVERY) ** self._unasked
        return DEFAULT_DRAFT_COST + trust * (draft_token_s / pass_s - DEFAULT_DRAFT_COST)

    def _pass_s(self, seqs: Seq[Sequence], weights: Seq[float]) -> float:
        if not weights:
            return 0.0
        used = sum(len(seq.tokens) for seq in seqs) / self._pool_tokens
        return fitted_s(weights, row_features(len(seqs), used, 0.0))

    def _row_cost(self, seqs: Seq[Sequence], weights: Seq[float]) -> float:
        """What one row more costs, as a share of a pass over `seqs`."""
        if not weights:
            return DEFAULT_ROW_COST
        used = sum(len(seq.tokens) for seq in seqs) / self._pool_tokens
        pass_s = self._pass_s(seqs, weights)
        row_s = weights[1] / SEQS_UNIT + weights[3] * used / len(seqs)
        return min(max(row_s / pass_s, 0.0), MAX_ROW_COST) if pass_s > 0 else DEFAULT_ROW_COST
