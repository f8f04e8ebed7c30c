"""Draft tokens: speculative decoding by n-grams (prompt lookup decoding, A. Saxena 2023), and by
what the executor proposes.

A pass of few decodes is bound by reading weights, so a few rows more cost little. The draft tokens
of a sequence are those that its grammar lets follow alone, else those that its client predicts, or
that followed its last n-gram where that occurred before, or that the executor's drafter will
propose; each is one row more. What is sampled after each row says how many of them are accepted.
Sampling depends on the logits, the grammar and (seed, position) alone, so the output is the same as
without drafts.

What counts is the tokens that a pass is expected to yield, over the time that it is measured to
take. A row more pays while it adds more tokens for its time than the pass yields as it is. The
drafter also takes a pass of its own for each depth, which all sequences share, so one depth is
chosen for all, and then for each sequence what gains more there: its own tokens or the drafter's.
So long contexts, large batches and texts without repetition get no drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

import numpy as np

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import SEQS_UNIT, DraftCosts, fitted_s, row_features
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Step, StepDone

NGRAM_SIZE = 3  # tokens that have to match before what followed them is proposed
SEARCHED_TOKENS = 16_384  # the last ones of a sequence
ACCEPTANCE_WEIGHT = 0.15  # a draft token has it in the moving average of the acceptance rate
INITIAL_ACCEPTANCE_RATE = 0.5  # before anything was verified
MAX_NEEDED_RATE = 0.9  # no n-gram is looked up where drafts pay only above this acceptance rate
DEFAULT_ROW_COST = 1 / 16  # one row more, as a share of a pass, before it was measured
# A drafter's beginning and each of its passes, likewise; what it takes for a token more is little.
DEFAULT_DRAFTING = (1 / 16, 1 / 12, 0.0)
RECOVERY = 0.005  # how fast a drafter that is not asked is thought of as at the beginning, a pass
MAX_ROW_COST = 0.35  # the most that is believed, or a few slow passes would end all drafts
# Expected gain of a row more over its cost. The cost is not known exactly, at the beginning even
# less: to the least of them the error of what was measured is added.
LEAST_GAIN, MIN_GAIN = 1.1, 1.5
ROUNDS = 2  # in which a plan is made for the yield of the one before
MAX_SLOWDOWN = 1.5  # a pass may take so long with drafts, where other sequences wait
TOKEN_BITS = 21  # a token has in the number of an n-gram, of 63: more than any vocabulary needs
NUM_MARKS = 65_521  # a prime, and four times the tokens that are searched
MANY_TOKENS = 32  # from here on numpy is faster
_TOKEN, _NO_NGRAM = (1 << TOKEN_BITS) - 1, (1 << NGRAM_SIZE * TOKEN_BITS) - 1
# After so many passes without a request to the drafter, its slots are not written any more. Divided
# by the number of sequences, since the cost of slots grows with it.
SLOTS_FOR = 64
NOT_MEASURED = DraftCosts()


class _Ngrams:
    """The n-grams of a text that grows, each as a number, by the token that it ends with: so one is
    found by comparing numbers. Of a long text, those of its last `most` tokens at least. Most are
    new: a byte that many share says whether one may have been there before the last one."""

    def __init__(self, most: int, tokens: Seq[int] = ()) -> None:
        self.num_tokens = 0
        self.last = _NO_NGRAM
        self._most = most
        self._numbers = array("Q")  # those of the last tokens
        self._may_be_there = bytearray(NUM_MARKS)
        self.extend(tokens)

    def extend(self, tokens: Seq[int]) -> None:
        self.num_tokens += len(tokens)
        marks = self._may_be_there
        if len(tokens) > MANY_TOKENS:
            before = [self.last >> TOKEN_BITS & _TOKEN, self.last & _TOKEN]
            each = np.array([*before, *tokens[-self._most :]], np.uint64) & np.uint64(_TOKEN)
            numbers = each[:-2] << 2 * TOKEN_BITS | each[1:-1] << TOKEN_BITS | each[2:]
            self._numbers.frombytes(numbers.tobytes())
            marks[self.last % NUM_MARKS] = 1
            np.frombuffer(marks, np.uint8)[numbers[:-1] % np.uint64(NUM_MARKS)] = 1
            self.last = self._numbers[-1]
        else:
            for token in tokens:
                marks[self.last % NUM_MARKS] = 1
                self.last = (self.last << TOKEN_BITS | token & _TOKEN) & _NO_NGRAM
                self._numbers.append(self.last)
        if len(self._numbers) >= 2 * self._most:
            del self._numbers[: -self._most]

    def find(self, ngram: int) -> int | None:
        """Index of the token that its last occurrence ends with, before the end of the text."""
        if not self._may_be_there[ngram % NUM_MARKS]:
            return None
        first = max(0, len(self._numbers) - self._most + NGRAM_SIZE - 1)
        (places,) = (np.frombuffer(self._numbers, np.uint64)[first:-1] == ngram).nonzero()
        if not len(places):
            return None
        return self.num_tokens - len(self._numbers) + first + int(places[-1])


class NgramProposer:
    """Proposes the draft tokens of one sequence. Invariant: `_known` has the n-grams of its first
    tokens; `_source`, if there is one, is the index of the token that is expected to come next.
    Indices count `_prediction`, what a client expects of the output, before the sequence's
    tokens."""

    def __init__(
        self, acceptance_rate: float, prediction: Seq[int] = (), num_prompt: int = 0
    ) -> None:
        """acceptance_rate: the share of draft tokens that is expected to be accepted. prediction:
        of what follows the first `num_prompt` tokens."""
        self.acceptance_rate = acceptance_rate
        self._prediction, self._num_prompt = list(prediction), num_prompt
        self._known = _Ngrams(SEARCHED_TOKENS)
        self._predicted = _Ngrams(len(prediction), prediction) if prediction else None
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
        num_predicted, known = len(self._prediction), self._known.num_tokens
        if self._source is not None:
            for token in tokens[max(known, self._num_prompt) :]:
                source = self._source
                expected = (
                    self._prediction[source]
                    if source < num_predicted
                    else tokens[source - num_predicted]
                )
                self._source = source + 1 if expected == token else None
                if self._source == num_predicted:  # the prediction has ended
                    self._source = None
                if self._source is None:
                    break
        self._known.extend(tokens[known:])
        if self._source is None:
            self._source = self._search()

    def _search(self) -> int | None:
        """Index of the token after the latest earlier occurrence of the last n-gram, at last in the
        prediction; None: there is none."""
        ngram = self._known.last
        found = self._known.find(ngram)
        if found is not None:
            return len(self._prediction) + found + 1
        found = self._predicted.find(ngram) if self._predicted else None
        return None if found is None else found + 1


class Draft(NamedTuple):
    """What a sequence gets in a pass: tokens, or how many the executor's drafter is to propose."""

    tokens: list[int]
    num_asked: int = 0


class _Source(NamedTuple):
    tokens: list[int]
    most: int
    rate: float  # how likely each is to be accepted after the one before
    is_asked: bool = False  # it is the executor's drafter

    def gains(self, price: float) -> list[float]:
        """By how many of its tokens are taken, as far as each is worth `price`: the accepted tokens
        that are expected, less what they cost."""
        found, likelihood = [0.0], 1.0
        for _ in range(self.most):
            likelihood *= self.rate
            if likelihood <= price:
                break
            found.append(found[-1] + likelihood - price)
        return found


class _Prices(NamedTuple):
    """What drafts take, as shares of the pass without any."""

    row: float
    begin: float = 0.0  # the executor's drafter takes so long: to be asked at all,
    depth: float = 0.0  # each of its passes,
    token: float = 0.0  # and each of its tokens, beside its row


class _Plan:
    """How many tokens of which source each sequence gets."""

    def __init__(self, sources: Seq[_Source], counts: Seq[int], prices: _Prices) -> None:
        self.sources, self.counts, self._prices = sources, [*counts], prices

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def tokens(self) -> float:
        """What is expected from the pass."""
        accepted = (
            sum(source.rate**at for at in range(1, count + 1))
            for source, count in zip(self.sources, self.counts, strict=True)
        )
        return len(self.sources) + sum(accepted)

    @property
    def cost(self) -> float:
        """What the pass takes, in passes without drafts."""
        begin, depth, token = self._prices[1:]
        both = zip(self.sources, self.counts, strict=True)
        asked = [count for source, count in both if count and source.is_asked]
        drafting = begin + depth * max(asked) + token * sum(asked) if asked else 0.0
        return 1.0 + self._prices.row * self.num_rows + drafting

    def cut(self, max_rows: int, max_cost: float) -> None:
        """Leaves away those that are least likely to be accepted, as long as it exceeds these."""
        both = enumerate(zip(self.sources, self.counts, strict=True))
        rows = sorted(
            (source.rate**count, -count, index)
            for index, (source, most) in both
            for count in range(1, most + 1)
        )
        num_rows, cost = self.num_rows, self.cost
        for _, _, index in rows:
            if num_rows <= max_rows and cost <= max_cost:
                return
            self.counts[index] -= 1
            num_rows -= 1
            cost = self.cost if self.sources[index].is_asked else cost - self._prices.row


class Drafts:
    """Chooses the draft tokens of a worker's passes. Owned by its scheduler."""

    def __init__(
        self, max_drafts: int, max_rows: int, pool_tokens: int, *, has_drafter: bool = False
    ) -> None:
        """max_drafts: draft tokens of a sequence in a pass; max_rows: of a pass, one for each
        sequence and draft token; pool_tokens: of the KV pool; has_drafter: whether the executor
        proposes tokens when it is asked."""
        self.max_drafts, self._max_rows, self._pool_tokens = max_drafts, max_rows, pool_tokens
        self._acceptance_rate = INITIAL_ACCEPTANCE_RATE  # recent, of all sequences
        self._proposers: dict[Sequence, NgramProposer] = {}
        self._has_drafter = has_drafter
        self._asked_rate = INITIAL_ACCEPTANCE_RATE  # that of the executor's drafter
        self._asked_rates: dict[Sequence, float] = {}
        self._unasked = 0.0  # passes since the executor's drafter was asked
        self._num_seqs = 1  # the last plan was for so many

    @staticmethod
    def of(config: WorkerConfig) -> Drafts:
        sizes = config.max_num_seqs, config.num_blocks * config.block_size
        return Drafts(config.num_speculative_tokens, *sizes, has_drafter=bool(config.drafter))

    def is_worth_it(self, seqs: Seq[Sequence], costs: DraftCosts = NOT_MEASURED) -> bool:
        """Whether drafts may pay in a pass over `seqs`, whatever they are."""
        return self.max_drafts > 0 and (
            _least_gain(costs) * self._row_cost(seqs, costs.rows) * len(seqs) <= MAX_NEEDED_RATE
        )

    def makes_slots(self, num_seqs: int) -> bool:
        """Whether the executor's drafter is to have all that it goes on from: it was asked of late,
        and may be again."""
        return self._unasked * num_seqs <= SLOTS_FOR

    def plan(
        self, seqs: Seq[Sequence], rooms: Seq[int], costs: DraftCosts = NOT_MEASURED
    ) -> list[Draft] | None:
        """The draft tokens of each of `seqs`, which are decodes, for one pass over all of them;
        None: no sequence gets any. rooms: how many each has room for."""
        limits = [max(0, min(self.max_drafts, room)) for room in rooms]
        own = [self._own(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        asked = list[_Source]()
        if self._has_drafter:
            asked = [self._asked(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        self._num_seqs = len(seqs)
        if not any(source.most for source in (*own, *asked)):  # as in most passes of n-grams
            return None
        prices, gain = self._prices(seqs, costs), _least_gain(costs)
        yielded = float(len(seqs))
        best = _chosen(own, asked, prices, gain * yielded)
        for _ in range(ROUNDS - 1):
            if not best.num_rows:
                return None
            yielded = max(yielded, best.tokens / best.cost)
            best = _chosen(own, asked, prices, gain * yielded)
        best.cut(self._max_rows - len(seqs), MAX_SLOWDOWN if len(seqs) > 1 else inf)
        gained, cost = best.tokens - len(seqs), (best.cost - 1.0) * len(seqs)
        if not best.num_rows or gained <= min(gain, 1.0) * cost:  # what is left may lose
            return None
        return [
            Draft([], count) if source.is_asked else Draft(source.tokens[:count])
            for source, count in zip(best.sources, best.counts, strict=True)
        ]

    def on_verified(self, seq: Sequence, sampled: Seq[int], num_asked: int = 0) -> None:
        """`sampled` came after the tokens that `seq` had at the last plan. num_asked: draft tokens
        that were the drafter's."""
        if self._has_drafter:
            self._on_asked(seq, sampled, num_asked)
        proposer = self._proposers.get(seq)
        if proposer is not None:
            proposer.on_verified(sampled)
            change = proposer.acceptance_rate - self._acceptance_rate
            self._acceptance_rate += ACCEPTANCE_WEIGHT / 4 * change

    def _on_asked(self, seq: Sequence, sampled: Seq[int], num_asked: int) -> None:
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
        self._asked_rates[seq] = rate

    def forget(self, seq: Sequence) -> None:
        self._proposers.pop(seq, None)
        self._asked_rates.pop(seq, None)

    def _own(self, seq: Sequence, limit: int) -> _Source:
        """What the scheduler itself proposes for it, up to `limit`."""
        if seq.forced:
            return _Source(list(seq.forced[:limit]), min(limit, len(seq.forced)), 1.0)
        proposer = self._proposers.get(seq)
        if proposer is None:
            prediction = seq.sampling.prediction
            proposer = NgramProposer(self._acceptance_rate, prediction, seq.num_prompt_tokens)
            self._proposers[seq] = proposer
        tokens = proposer.propose(seq.tokens, limit)
        return _Source(tokens, len(tokens), proposer.acceptance_rate)

    def _asked(self, seq: Sequence, limit: int) -> _Source:
        """What the executor's drafter would propose; nothing where a grammar leaves no choice."""
        most = 0 if seq.forced else limit
        rate = self._asked_rates.get(seq, self._asked_rate)
        return _Source([], most, rate, is_asked=True)

    def _prices(self, seqs: Seq[Sequence], costs: DraftCosts) -> _Prices:
        row, pass_s = self._row_cost(seqs, costs.rows), self._pass_s(seqs, costs.rows)
        begin, depth, token = DEFAULT_DRAFTING
        if pass_s > 0 and costs.drafting:
            trust: float = (1.0 - RECOVERY) ** self._unasked
            units = zip(DEFAULT_DRAFTING, costs.drafting, (1.0, 1.0, SEQS_UNIT), strict=True)
            begin, depth, token = (
                default + trust * (seconds / unit / pass_s - default)
                for default, seconds, unit in units
            )
        return _Prices(row, begin, depth, token)

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


def _least_gain(costs: DraftCosts) -> float:
    return min(MIN_GAIN, LEAST_GAIN + costs.error)


def _chosen(own: Seq[_Source], asked: Seq[_Source], prices: _Prices, worth: float) -> _Plan:
    """What gains most, where the time of a pass is worth so many tokens: the drafter's depth, and
    for each sequence one of its two sources."""
    alone = [source.gains(prices.row * worth) for source in own]
    if not asked:
        return _Plan(own, [len(gains) - 1 for gains in alone], prices)
    drafting = [source.gains((prices.row + prices.token) * worth) for source in asked]
    depth, most = 0, 0.0
    for passes in range(1, max(map(len, drafting))):
        more = (
            max(0.0, gains[min(passes, len(gains) - 1)] - others[-1])
            for gains, others in zip(drafting, alone, strict=True)
        )
        gained = sum(more) - worth * (prices.begin + passes * prices.depth)
        if gained > most:
            depth, most = passes, gained
    sources, counts = [], []
    for index, (gains, others) in enumerate(zip(drafting, alone, strict=True)):
        count = min(depth, len(gains) - 1)
        is_asked = gains[count] > others[-1]
        sources.append(asked[index] if is_asked else own[index])
        counts.append(count if is_asked else len(others) - 1)
    return _Plan(sources, counts, prices)


def drafted(step: Step, done: StepDone) -> dict[str, tuple[int, int]]:
    """Draft tokens of a step that has ended, and how many were accepted: all of them, and those of
    the executor's drafter."""
    drafts = {"draft": (0, 0), "drafter": (0, 0)}
    for share, each in zip(step.seqs, done.sampled, strict=True):
        if each is None or not share.most_drafts:
            continue
        proposed = len(share.draft_tokens) or each.num_drafts
        for source in ("draft", "drafter") if share.num_drafts else ("draft",):
            before, accepted = drafts[source]
            drafts[source] = before + proposed, accepted + len(each.more)
    return drafts
