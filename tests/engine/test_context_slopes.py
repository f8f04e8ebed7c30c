"""What a worker's node or a router does once in a step, message, turn or decision grows with the
context no more than `benchmarks.engine.context` says."""

from __future__ import annotations

import pytest

from benchmarks.engine.context import BOUNDS, CONTEXTS, MEASURES, contexts_of, measure

AT_1M = {"decision", "turn"}  # where that takes no minutes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), BOUNDS)
def test_slopes(name: str, kind: str) -> None:
    size = MEASURES[name].sizes[0]
    wanted = {"8k", "128k", "1M"} if name in AT_1M else {"8k", "128k"}
    known = contexts_of(name, kind, size, full=False)
    contexts = {text: CONTEXTS[text] for text in sorted(wanted & known.keys())}
    if len(contexts) < 2:
        pytest.skip("takes minutes")
    row = measure(name, kind, size, contexts, rounds=4)
    for text, bound in zip(("128k", "1M"), BOUNDS[name, kind], strict=True):
        slope = row.slope(long=text)
        assert slope is None or slope <= bound, row


def test_every_measure_has_its_bounds() -> None:
    assert set(BOUNDS) == {(name, kind) for name, each in MEASURES.items() for kind in each.kinds}
