"""The page on `/status` has the fields that it has: clients are written by it."""

from __future__ import annotations

import re

from kvrelay.cluster.status import (
    ClusterStatus,
    ControllerStatus,
    ModelStatus,
    RestartStatus,
    RouterProcessStatus,
    ScalingStatus,
    StoreStatus,
    WeightsStatus,
    WorkerStatus,
)
from kvrelay.engine.stats import GroupBlocks
from tests.structure import ROOT

KINDS = {
    "The cluster": ClusterStatus,
    "A worker": WorkerStatus,
    "Groups of a worker": GroupBlocks,
    "A model": ModelStatus,
    "A router": RouterProcessStatus,
    "The controller": ControllerStatus,
    "The autoscaler": ScalingStatus,
    "The store": StoreStatus,
    "A restart": RestartStatus,
    "Weights": WeightsStatus,
}


def test_every_field_of_the_status_is_on_its_page_and_no_other() -> None:
    text = (ROOT / "docs/status.md").read_text(encoding="utf-8")
    documented = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        cells = re.findall(r"^\| (`[^|]+`) \|", body, re.MULTILINE)
        documented[title] = sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    assert documented == {title: _fields(kind) for title, kind in KINDS.items()}


def _fields(kind: type) -> list[str]:
    return sorted(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)
