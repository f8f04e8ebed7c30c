"""A tier more, an archive, as one would be added: a member of the enum and an entry in the
registry. For tests of what else has to know of it: nothing."""

from __future__ import annotations

import pytest

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.tiers.registry import TIERS, TierSpec

WRITE_AFTER_S = 10.0


def add_object_tier(monkeypatch: pytest.MonkeyPatch, num_blocks: int = 80) -> Tier:
    """Until the test ends, every worker has an archive of `num_blocks`."""
    tier = str.__new__(Tier, "archive")
    tier._name_, tier._value_ = "ARCHIVE", "archive"
    monkeypatch.setattr(Tier, "_member_names_", [*Tier._member_names_, "ARCHIVE"])
    monkeypatch.setitem(Tier._member_map_, "ARCHIVE", tier)
    monkeypatch.setitem(Tier._value2member_map_, "archive", tier)

    class Archive(TierSpec):
        def num_blocks(self, config: WorkerConfig) -> int:
            return num_blocks

    spec = Archive("", 1e9, "archive", write_after_s=lambda config: WRITE_AFTER_S)
    monkeypatch.setitem(TIERS, tier, spec)
    return tier
