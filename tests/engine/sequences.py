"""Sequences for the tests of what schedules and stores them."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import DEFAULT_RETENTION
from kvrelay.engine.request import RequestSpec, SamplingParams
from kvrelay.engine.sequence import Sequence


def sequence(tokens: list[int], *, block_size: int = 4, **changes: Any) -> Sequence:
    """changes: of the sequence, or of its request."""
    asked = {
        name: changes.pop(name)
        for name in ("request_id", "sampling", "need", "priority")
        if name in changes
    }
    fields: dict[str, Any] = {
        "spec": RequestSpec(**{"request_id": "r", "sampling": SamplingParams()} | asked),
        "attempt": 1,
        "router": "router",
        "tokens": tokens,
        "num_prompt_tokens": len(tokens),
        "deadline": 1e9,
        "arrived_at": 0.0,
        "chain": BlockChain(b"f", UNSALTED, block_size),
        "retention": DEFAULT_RETENTION,
    }
    return Sequence(**(fields | changes))
