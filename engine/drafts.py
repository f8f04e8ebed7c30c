"""Drafts: guesses of the tokens that come next, so that one pass of the model yields several.

A pass of few decodes is bound by reading weights, and a few rows more cost little. What followed
the last tokens where they stood before is fed along, a row for each (prompt lookup decoding, A.
Saxena 2023); what is drawn after each row says how far the guesses held. A draw depends on the
logits and (seed, position) alone, so the tokens are those that would have come one by one.

How many: a row more is worth it while the tokens that it is expected to add, for the time that it
is known to take, are more than what the pass yields as it is. So long contexts, large batches and
texts that do not repeat themselves get none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from engine.cost import SEQS_UNIT, fitted_s, row_features
from engine.sequence import Sequence

NGRAM = 3  # tokens that have to be the same, before what followed them is a guess
REACH = 16_384  # tokens that are searched, the last ones
LEARN = 0.15  # weight of a guess in the share of those that held
PRIOR = 0.5  # of that share, where nothing was learned
HARDLY = 0.9  # guesses are not even looked for where they would have to hold more often than that
ROW = 1 / 16  # of a pass: what a row more is believed to take until something was measured
DEAREST_ROW = 0.35  # what it is believed to take at most, or a few slow passes would end all drafts
MARGIN = 1.5  # what a row more is expected to gain, over what it takes: neither is known exactly
LONGEST = 1.5  # times a pass without drafts, which others wait for
WORD = 4  # bytes of a token in what is searched


class Lookup:
    """The guesses for one sequence. Invariant: `_words` holds its first tokens; `_source`, if not
    0, is where a token stands that is expected to come next."""

    def __init__(self, held: float) -> None:
        """held: the share of guesses that is expected to hold."""
        self.held = held
        self._words = bytearray()
        self._source = 0
        self._guess: list[int] = []

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, which begin as when last asked."""
        self._follow(tokens)
        self._guess = []
        if self._source:
            period = len(tokens) - self._source
            guess = self._guess = tokens[self._source : self._source + most]
            while len(guess) < most:  # what it is taken from goes on with the guess itself
                guess.append(guess[-period])
        return self._guess

    def learn(self, drawn: Seq[int]) -> None:
        """`drawn` is what really followed, as far as it is known."""
        for guess, token in zip(self._guess, drawn, strict=False):
            self.held += LEARN * ((guess == token) - self.held)
            if guess != token:
                break
        self._guess = []

    def _follow(self, tokens: list[int]) -> None:
        known = len(self._words) // WORD
        for token in tokens[known:] if self._source else ():
            if tokens[self._source] != token:
                self._source = 0
                break
            self._source += 1
        self._words += array("I", tokens[known:]).tobytes()
        if not self._source:
            self._source = self._search()

    def _search(self) -> int:
        """Where what follows the last tokens stands; 0: they were not there before."""
        words = self._words
        end, first = len(words), max(0, len(words) - REACH * WORD)
        if end < (NGRAM + 1) * WORD:
            return 0
        last = bytes(words[-NGRAM * WORD :])
        at = words.rfind(last, first, end - WORD)
        while at > 0 and at % WORD:
            at = words.rfind(last, first, at + len(last) - 1)
        return at // WORD + NGRAM if at >= 0 and at % WORD == 0 else 0


class Drafter:
    """What one worker guesses. Owned by its scheduler."""

    def __init__(self, most: int, max_rows: int, pool_tokens: int) -> None:
        """most: guesses for a sequence in a pass; max_rows: of a pass, sequences among them;
        pool_tokens: of the KV pool."""
        self._most, self._max_rows, self._pool_tokens = most, max_rows, pool_tokens
        self._held = PRIOR  # of late, by all sequences
        self._lookups: dict[Sequence, Lookup] = {}

    def plan(
        self, seqs: Seq[Sequence], rooms: Seq[int], weights: Seq[float]
    ) -> list[list[int]] | None:
        """The guesses that a pass over `seqs`, which are decodes, should feed along; None: of
        nobody. rooms: how many each has room for. weights: what passes cost by `row_features`;
        empty: that is not known."""
        row = self._row(seqs, weights)
        if not self._most or MARGIN * row * len(seqs) > HARDLY:
            return None
        guesses = [
            self._lookup(seq).guess(seq.tokens, min(self._most, room))
            for seq, room in zip(seqs, rooms, strict=True)
        ]
        hopes = sorted(
            (
                (self._lookups[seq].held ** count, -count, index)
                for index, (seq, guess) in enumerate(zip(seqs, guesses, strict=True))
                for count in range(1, len(guess) + 1)
            ),
            reverse=True,
        )
        counts = [0] * len(seqs)
        tokens, passes = float(len(seqs)), 1.0  # of the pass: what it yields, and what it takes
        for hope, _, index in hopes[: max(0, self._max_rows - len(seqs))]:
            if hope * passes <= MARGIN * row * tokens or (len(seqs) > 1 and passes + row > LONGEST):
                break
            counts[index] += 1
            tokens, passes = tokens + hope, passes + row
        if not any(counts):
            return None
        return [guess[:count] for guess, count in zip(guesses, counts, strict=True)]

    def learn(self, seq: Sequence, drawn: Seq[int]) -> None:
        """`drawn` followed in `seq` after its tokens of the last plan."""
        lookup = self._lookups.get(seq)
        if lookup is not None:
            lookup.learn(drawn)
            self._held += LEARN / 4 * (lookup.held - self._held)

    def forget(self, seq: Sequence) -> None:
        self._lookups.pop(seq, None)

    def _lookup(self, seq: Sequence) -> Lookup:
        return self._lookups.setdefault(seq, Lookup(self._held))

    def _row(self, seqs: Seq[Sequence], weights: Seq[float]) -> float:
        """What a row more takes of a pass over `seqs`."""
        if not weights:
            return ROW
        used = sum(len(seq.tokens) for seq in seqs) / self._pool_tokens
        pass_s = fitted_s(weights, row_features(len(seqs), used, 0.0))
        row_s = weights[1] / SEQS_UNIT + weights[3] * used / len(seqs)
        return min(max(row_s / pass_s, 0.0), DEAREST_ROW) if pass_s > 0 else ROW
