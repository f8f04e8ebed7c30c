"""Sequences for the tests of what schedules and stores them."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.kv.block_hash import UNSALTED, BlockChain
from kvrelay.engine.kv.tier import DEFAULT_RETENTION
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sequence import Sequence


def sequence(tokens: list[int], *, block_size: int = 4, **changes: Any) -> Sequence:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "router": "router",
        "tokens": tokens,
        "num_prompt_tokens": len(tokens),
        "sampling": SamplingParams(),
        "deadline": 1e9,
        "arrived_at": 0.0,
        "chain": BlockChain(b"f", UNSALTED, block_size),
        "retention": DEFAULT_RETENTION,
    }
    return Sequence(**(fields | changes))
