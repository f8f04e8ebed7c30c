"""How often tokens have come in a context, for penalties: counted once, and then token by token.

Life: made of the whole context when a token is first sampled after it, milliseconds for a long one.
Later steps count what was added since; passes that the kernels repeat count their own tokens. It
is in `ScheduledSeq.kept`, so it ends with its sequence. Where the context is another one, or
shorter than what was counted, it is made anew.
"""

from __future__ import annotations

import numpy as np

from kvrelay.engine.step import ScheduledSeq

IN_PROMPT = 1 << 32  # a token's count has one of these for each time in the prompt, 1 in the output
KEY = "counts"
SPARE = 256  # tokens that there is room for, beyond those that are there

COUNTS = np.dtype(
    [
        ("tokens", np.uint64),  # address of the context's, int32
        ("ids", np.uint64),  # address of the different ones among them, int32
        ("times", np.uint64),  # address of their counts, int64
        ("length", np.int64),  # tokens that are counted
        ("num_ids", np.int64),
        ("num_prompt", np.int64),
        ("window", np.int64),  # so many of the last ones count; 0: all
    ]
)
"""What the kernels get, and bring up to date."""


class Counts:
    """Counts the tokens of one context. Invariant: `record` says where the arrays are and how much
    of them is used; of a token that has left the window nothing is left but its id."""

    def __init__(self, context: list[int], num_prompt: int, window: int) -> None:
        tokens, size = np.array(context, np.int32), len(context)
        first = max(0, size - window) if window else 0
        ids, places = np.unique(tokens[first:], return_inverse=True)
        in_prompt = max(0, num_prompt - first)
        times = np.bincount(places[:in_prompt], minlength=len(ids)) * IN_PROMPT
        times += np.bincount(places[in_prompt:], minlength=len(ids))
        self.context, self.record = context, np.zeros((), COUNTS)
        self.record["length"], self.record["num_ids"] = size, len(ids)
        self.record["num_prompt"], self.record["window"] = num_prompt, window
        self._tokens, self._ids, self._times = tokens, ids, times
        self._make_room(size)

    @property
    def address(self) -> int:
        return self.record.ctypes.data

    def is_of(self, context: list[int], window: int) -> bool:
        record = self.record
        return (
            self.context is context
            and int(record["length"]) <= len(context)
            and int(record["window"]) == window
        )

    def update(self, room: int) -> None:
        """Counts what the context has more, and has room for so many tokens after it."""
        record, size = self.record, len(self.context)
        if size + room > len(self._tokens):
            self._make_room(size + room)
        window = int(record["window"])
        for at in range(int(record["length"]), size):
            self._tokens[at] = self.context[at]
            self._add(at, 1)
            if window and at >= window:
                self._add(at - window, -1)
        record["length"] = size

    def known(self, vocab: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a vocabulary that count, and how often each has come in the output."""
        count = int(self.record["num_ids"])
        ids, times = self._ids[:count], self._times[:count]
        which = (times > 0) & (ids >= 0) & (ids < vocab)
        return ids[which].astype(np.int64), times[which] % IN_PROMPT

    def _add(self, at: int, sign: int) -> None:
        """The token at a position of the context comes, or goes."""
        token, count = self._tokens[at], int(self.record["num_ids"])
        found = np.flatnonzero(self._ids[:count] == token)
        if not len(found):
            self._ids[count], self._times[count] = token, 0
            self.record["num_ids"] = count + 1
        place = found[0] if len(found) else count
        self._times[place] += sign * (IN_PROMPT if at < self.record["num_prompt"] else 1)

    def _make_room(self, size: int) -> None:
        """For a context of so many tokens, which may all differ."""
        for name in ("tokens", "ids", "times"):
            old = getattr(self, f"_{name}")
            new = np.zeros(size + SPARE, old.dtype)
            new[: len(old)] = old
            setattr(self, f"_{name}", new)
            self.record[name] = new.ctypes.data


def counts_of(seq: ScheduledSeq, window: int, room: int = 0) -> Counts:
    """Counts its whole context, with room for so many tokens after it."""
    found: Counts | None = seq.kept.get(KEY)
    if found is None or not found.is_of(seq.context, window):
        found = seq.kept[KEY] = Counts(seq.context, seq.num_prompt_tokens, window)
    found.update(room)
    return found
