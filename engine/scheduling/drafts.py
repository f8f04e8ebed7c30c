"""Speculative decoding by n-grams (prompt lookup decoding, A. Saxena 2023): draft tokens without a
draft model, verified by the same pass that computes the next token.

A pass of few decodes is bound by reading weights, so a few rows more cost little. The draft tokens
of a sequence are those that its grammar lets follow alone, else those that its client predicts, or
that followed its last n-gram where that occurred before; each is one row more. What is sampled
after each row says how many of them are accepted. Sampling depends on the logits, the grammar and
(seed, position) alone, so the output is the same as without drafts.

How many: one more row pays while the accepted tokens that it is expected to add, over the time that
it is measured to take, exceed what the pass yields as it is. So long contexts, large batches and
texts without repetition get no drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from kvrelay.engine.cost import SEQS_UNIT, fitted_s, row_features
from kvrelay.engine.sequence import Sequence

NGRAM_SIZE = 3  # tokens that have to match before what followed them is proposed
SEARCHED_TOKENS = 16_384  # the last ones of a sequence
ACCEPTANCE_WEIGHT = 0.15  # of a draft token in the moving average of the acceptance rate
INITIAL_ACCEPTANCE_RATE = 0.5  # before anything was verified
MAX_NEEDED_RATE = 0.9  # no n-gram is looked up where drafts pay only above this acceptance rate
DEFAULT_ROW_COST = 1 / 16  # of a row more, as a share of a pass, before it was measured
MAX_ROW_COST = 0.35  # the most that is believed, or a few slow passes would end all drafts
MIN_GAIN = 1.5  # expected gain of a row more over its cost: neither is known exactly
MAX_SLOWDOWN = 1.5  # of a pass by its drafts, where other sequences wait for it
TOKEN_BYTES = 4  # of a token in what is searched


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


class Drafter:
    """Chooses the draft tokens of a worker's passes. Owned by its scheduler."""

    def __init__(self, max_drafts: int, max_rows: int, pool_tokens: int) -> None:
        """max_drafts: draft tokens of a sequence in a pass; max_rows: of a pass, one for each
        sequence and draft token; pool_tokens: of the KV pool."""
        self._max_drafts, self._max_rows, self._pool_tokens = max_drafts, max_rows, pool_tokens
        self._acceptance_rate = INITIAL_ACCEPTANCE_RATE  # recent, of all sequences
        self._proposers: dict[Sequence, NgramProposer] = {}

    def is_worth_it(self, seqs: Seq[Sequence], weights: Seq[float]) -> bool:
        """Whether drafts may pay in a pass over `seqs`, whatever they are."""
        return self._max_drafts > 0 and (
            MIN_GAIN * self._row_cost(seqs, weights) * len(seqs) <= MAX_NEEDED_RATE
        )

    def plan(
        self, seqs: Seq[Sequence], rooms: Seq[int], weights: Seq[float]
    ) -> list[list[int]] | None:
        """The draft tokens of each of `seqs`, which are decodes, for one pass over all of them;
        None: no sequence gets any. rooms: how many each has room for. weights: cost of passes by
        `row_features`; empty: not measured yet."""
        row = self._row_cost(seqs, weights)
        proposed = [
            self._propose(seq, min(self._max_drafts, room))
            for seq, room in zip(seqs, rooms, strict=True)
        ]
        drafts = [draft for draft, _ in proposed]
        candidates = sorted(
            (
                (rate**count, -count, index)
                for index, (draft, rate) in enumerate(proposed)
                for count in range(1, len(draft) + 1)
            ),
            reverse=True,
        )
        counts = [0] * len(seqs)
        tokens, passes = float(len(seqs)), 1.0  # expected of the pass: its yield, and its cost
        for likelihood, _, index in candidates[: max(0, self._max_rows - len(seqs))]:
            if likelihood * passes <= MIN_GAIN * row * tokens:
                break
            if len(seqs) > 1 and passes + row > MAX_SLOWDOWN:
                break
            counts[index] += 1
            tokens, passes = tokens + likelihood, passes + row
        if not any(counts):
            return None
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def on_verified(self, seq: Sequence, sampled: Seq[int]) -> None:
        """`sampled` came after the tokens that `seq` had at the last plan."""
        proposer = self._proposers.get(seq)
        if proposer is not None:
            proposer.on_verified(sampled)
            change = proposer.acceptance_rate - self._acceptance_rate
            self._acceptance_rate += ACCEPTANCE_WEIGHT / 4 * change

    def forget(self, seq: Sequence) -> None:
        self._proposers.pop(seq, None)

    def _propose(self, seq: Sequence, limit: int) -> tuple[list[int], float]:
        """Draft tokens, and how likely each is to be accepted."""
        if seq.forced:
            return list(seq.forced[:limit]), 1.0
        proposer = self._proposers.get(seq)
        if proposer is None:
            prediction = seq.sampling.prediction
            proposer = NgramProposer(self._acceptance_rate, prediction, seq.num_prompt_tokens)
            self._proposers[seq] = proposer
        return proposer.propose(seq.tokens, limit), proposer.acceptance_rate

    def _row_cost(self, seqs: Seq[Sequence], weights: Seq[float]) -> float:
        """Of one row more, as a share of a pass over `seqs`."""
        if not weights:
            return DEFAULT_ROW_COST
        used = sum(len(seq.tokens) for seq in seqs) / self._pool_tokens
        pass_s = fitted_s(weights, row_features(len(seqs), used, 0.0))
        row_s = weights[1] / SEQS_UNIT + weights[3] * used / len(seqs)
        return min(max(row_s / pass_s, 0.0), MAX_ROW_COST) if pass_s > 0 else DEFAULT_ROW_COST
