"""What a worker gets of what its machine has."""

from __future__ import annotations

import pytest

from kvrelay.cluster.control.messages import StartWorker
from kvrelay.cluster.control.specs import num_sharing_tiers
from kvrelay.cluster.control.workers import DesiredWorker
from kvrelay.engine.stats import Role
from tests.worker.test_build import spec_of

GIB = 1 << 30


def start_of(worker: DesiredWorker) -> StartWorker:
    return StartWorker(worker.node, worker.role, 1, str(worker.machine_id))


def shares(placement: dict[str, list[str]], gib: float = 12.0) -> dict[str, float]:
    """machine -> its workers, as worker -> GiB."""
    workers = [
        DesiredWorker(node, role=Role(node.split("-")[0]), machine_id=machine)
        for machine, nodes in placement.items()
        for node in nodes
    ]
    sharing = {w.node: num_sharing_tiers(start_of(w), workers) for w in workers}
    return {n: spec_of(num_sharing=many).share_of(gib) / GIB for n, many in sharing.items()}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (["decode-0"], [12]),
        (["decode-0", "decode-1", "decode-2"], [4, 4, 4]),
        (["prefill-0", "decode-0"], [0, 12]),
        (["prefill-0", "prefill-1", "decode-0", "decode-1"], [0, 0, 6, 6]),
        (["prefill-0", "prefill-1"], [6, 6]),
    ],
)
def test_decode_workers_share_a_machines_tiers(placement: list[str], expected: list[int]) -> None:
    assert list(shares({"m1": placement}).values()) == expected


def test_each_machine_has_its_own() -> None:
    found = shares({"m1": ["prefill-0", "prefill-1"], "m2": ["decode-0"], "m3": ["decode-1"]})
    assert found == {"prefill-0": 6, "prefill-1": 6, "decode-0": 12, "decode-1": 12}


def test_a_tier_that_is_off_is_nothing() -> None:
    assert shares({"m1": ["decode-0", "decode-1"]}, 0.0) == {"decode-0": 0, "decode-1": 0}
