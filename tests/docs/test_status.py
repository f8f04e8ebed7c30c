"""The page on `/status` has the fields that it has: clients are written by it."""

from __future__ import annotations

import re
from typing import get_type_hints

from kvrelay.cluster.status import (
    ClusterStatus,
    ControllerStatus,
    ModelStatus,
    RestartStatus,
    RouterProcessStatus,
    ScalingStatus,
    StoreStatus,
    WeightsStatus,
)
from kvrelay.engine.stats import Fact, GroupBlocks, Hidden, WorkerStats
from kvrelay.router.status import WorkerStatus
from tests.docs.worker_facts import with_facts
from tests.structure import ROOT

KINDS = {
    "The cluster": ClusterStatus,
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
        if "<!-- facts -->" in body:
            continue
        documented[title] = sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    assert documented == {title: _fields(kind) for title, kind in KINDS.items()}


def _fields(kind: type) -> list[str]:
    return sorted(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)


def test_the_table_of_facts_is_up_to_date() -> None:
    """If this fails: `python -m tests.docs.worker_facts`."""
    page = (ROOT / "docs/status.md").read_text(encoding="utf-8")
    assert with_facts(page) == page


def test_each_field_of_a_worker_is_shown_or_hidden_for_a_reason() -> None:
    fields = {
        kind: get_type_hints(kind, include_extras=True) for kind in (WorkerStats, WorkerStatus)
    }
    del fields[WorkerStatus]["stats"]  # whose own are among them
    silent = [
        f"{kind.__name__}.{name}"
        for kind, hints in fields.items()
        for name, hint in hints.items()
        if not isinstance(getattr(hint, "__metadata__", (None,))[0], Fact | Hidden)
    ]
    assert not silent
