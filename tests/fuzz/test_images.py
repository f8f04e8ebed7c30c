"""A few configurations of each model that reads images, and those in which the fuzz has found a
difference; `python -m tests.fuzz.images` compares more."""

from __future__ import annotations

import pytest

from tests.engine.model import tiny
from tests.fuzz.families import Draw, Fields, Outcome, fuzz
from tests.fuzz.images import FAMILIES, compare, compare_fields

COUNT, SEED = 4, 1000
TOWER = {
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 96,
    "initializer_range": 0.2,
}
SPEC = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
TEXT = {**tiny.SHAPE, "head_dim": 32, "rope_parameters": {**SPEC, "mrope_section": [6, 5, 5]}}
FOUND: dict[str, tuple[str, Fields]] = {
    "taps-not-stated": ("qwen3-vl", {**TOWER, "depth": 9}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configurations_give_the_log_probabilities_of_transformers(family: str) -> None:
    outcome = fuzz(family, COUNT, SEED, compare)
    assert not outcome.different, "\n".join(outcome.different)
    assert outcome.compared >= COUNT // 2, (outcome.refused, outcome.impossible)


@pytest.mark.parametrize("as_given", [True, False], ids=["as-given", "as-saved"])
@pytest.mark.parametrize("case", FOUND)
def test_what_the_fuzz_has_found(case: str, as_given: bool) -> None:
    family, vision = FOUND[case]
    outcome = Outcome()
    compare_fields(family, TEXT, vision, Draw(case), outcome, as_given, case)
    assert outcome.compared == 1, (outcome.refused, outcome.impossible)
    assert not outcome.different, "\n".join(outcome.different)
