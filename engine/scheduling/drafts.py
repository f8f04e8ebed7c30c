"""Draft tokens: speculative decoding by n-grams (prompt lookup decoding, A. Saxena 2023), and by
what the executor proposes.

A pass of few decodes is bound by reading weights, so a few rows more cost little. The draft tokens
of a sequence are those that its grammar lets follow alone, else those that its client predicts, or
that followed its last n-gram where that occurred before, or that the executor's drafter will
propose, whichever is accepted more often; each is one row more. What is sampled after each row says
how many of them are accepted. Sampling depends on the logits, the grammar and (seed, position)
alone, so the output is the same as without drafts. One more row pays while the accepted tokens that
it is expected to add, over the time that it is measured to take, exceed what the pass yields as it
is. So long contexts, large batches and texts without repetition get no drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import SEQS_UNIT, fitted_s, row_features
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Step, StepDone

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


class Drafts:
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

    @staticmethod
    def of(config: WorkerConfig) -> Drafts:
        sizes = config.max_num_seqs, config.num_blocks * config.block_size
        return Drafts(config.num_speculative_tokens, *sizes, has_drafter=bool(config.drafter))

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
