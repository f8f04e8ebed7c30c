"""Who keeps the KV of a request: what a decision says, and what workers are told."""

from __future__ import annotations

from enum import StrEnum

from engine.kv.tier import Retention

SPARE = Retention(keep_s=0.0, to_disk=False)
"""Of a copy that need not be kept: it goes first, and is copied nowhere."""


class RetainOn(StrEnum):
    """Who keeps the KV of a request. The others' copies are spare."""

    BOTH = "both"
    DECODE = "decode"
    PREFILL = "prefill"
    NOBODY = "nobody"
