"""What of our sampling vLLM has no parameter for, as a logits processor of its interface.

A process that computes a model makes one `LogitEdits`. It keeps a `RowEdits` for each request that
asks for some, by `extra_args`, and applies it to that one's row, after the grammar's mask.
"""

from __future__ import annotations

from math import inf
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from kvrelay.decode_worker.vllm.parameters import EDITS
from kvrelay.engine.request import ReasoningBudget


class RowEdits:
    """`known`: tokens that the output begins with. `budget`: of reasoning, where the output goes
    on after the tokens `before`. `stops`: may not come before `min_tokens`, but where a grammar
    has left nothing else."""

    def __init__(
        self,
        known: list[int] | None = None,
        budget: tuple[int, int, int | None] | None = None,
        before: list[int] | None = None,
        min_tokens: int = 0,
        stops: list[int] | None = None,
    ) -> None:
        self._known, self._before, self._stops = known or [], before or [], stops or []
        self._budget = ReasoningBudget(*budget) if budget else None
        self._min_tokens = min_tokens

    def __call__(self, output: list[int], row: Any) -> Any:
        """row: tensor, float32 [vocab_size], edited in place."""
        if len(output) < len(self._known):
            return _leave(row, self._known[len(output)])
        if self._budget is not None and self._budget.is_used_up([*self._before, *output]):
            return _leave(row, self._budget.end)
        if len(output) < self._min_tokens:
            stops = [token for token in self._stops if token < len(row)]
            taken = row[stops]
            row[stops] = -inf
            if row.amax() == -inf:
                row[stops] = taken
        return row


def _leave(row: Any, token: int) -> Any:
    """No other token may come, unless this one may not."""
    if row[token] != -inf:
        row.fill_(-inf)
        row[token] = 0.0
    return row


class LogitEdits(AdapterLogitsProcessor):  # type: ignore[misc]
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> RowEdits | None:
        asked = (params.extra_args or {}).get(EDITS)
        return RowEdits(**asked) if asked else None
