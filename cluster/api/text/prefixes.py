"""The last prompts, to see where one ceases to be what an earlier one was.

A prompt is served from cached KV as far as it begins as an earlier one did. Where a client changes
something in the middle of a conversation, all that follows is computed again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 2**22  # of all prompts that are kept


@dataclass(frozen=True, slots=True)
class Earlier:
    """The earlier prompt that has most in common with one."""

    call: str
    ended_at: float
    tokens: Sequence[int]
    num_common: int  # tokens, from the first


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    ended_at: float
    tokens: array[int]


class PromptHistory:
    """Owned by the calls of one process. Invariant: the prompts have MAX_TOKENS together, at most;
    in the order in which their calls ended."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_tokens = 0

    def add(self, call: str, tenant: str, ended_at: float, tokens: Sequence[int]) -> None:
        """`call` has ended."""
        self._kept[call] = _Kept(tenant, ended_at, array("I", tokens))
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)

    def tokens(self, call: str) -> Sequence[int]:
        """Of its prompt; empty, if it is kept no more."""
        kept = self._kept.get(call)
        return () if kept is None else kept.tokens

    def closest(self, call: str) -> Earlier | None:
        """Of those of the same tenant that ended before; of several the last. None: there is none
        that begins as this one does."""
        mine = self._kept.get(call)
        if mine is None:
            return None
        best: Earlier | None = None
        for name, each in self._before(call):
            count = num_common(each.tokens, mine.tokens)
            if count and (best is None or count >= best.num_common):
                best = Earlier(name, each.ended_at, each.tokens, count)
        return best

    def _before(self, call: str) -> Iterator[tuple[str, _Kept]]:
        tenant = self._kept[call].tenant
        for name, each in self._kept.items():
            if name == call:
                return
            if each.tenant == tenant:
                yield name, each


def num_common(a: array[int], b: array[int]) -> int:
    """Tokens that both begin with."""
    longest = min(len(a), len(b))
    left, right = (np.frombuffer(each, np.uint32, longest) for each in (a, b))
    differ = left != right
    return int(differ.argmax()) if differ.any() else longest
