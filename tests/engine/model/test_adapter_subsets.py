"""Adapters of some of the linear layers, of some layers, and of several ranks."""

from itertools import combinations

import pytest
import torch

from tests.engine.model.tiny import Driver, tokens_of
from tests.support.adapters import PROJECTIONS, merge, write_adapter

LONG = tokens_of(40, 1)
SUBSETS = [each for n in range(1, 8) for each in combinations(PROJECTIONS, n)]
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def logits(driver):
    """Returns those after a chunk and after a decode."""
    return torch.cat([driver.feed(("x", LONG[:39])), driver.feed(("x", LONG[39:]))])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_every_subset_of_the_linear_layers_is_computed(tmp_path, llama, part):
    drivers = [Driver(llama, kind) for kind in ("cpu", "torch")]
    for number, modules in enumerate(SUBSETS[part::3]):
        folder = write_adapter(tmp_path / f"{number}", llama, modules=modules, rank=3, seed=number)
        for driver in drivers:
            driver.adapt(f"{modules}", folder)
    order = sorted(drivers[0].adapter_of.items(), key=lambda each: each[1].digest)
    found = [driver.feed(*((name, LONG[:6]) for name, _ in order)) for driver in drivers]
    assert len(found[0].unique(dim=0)) == len(order)
    torch.testing.assert_close(*found, **CLOSE)


DEFAULT = ("q_proj", "v_proj")  # where PEFT is told nothing


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        *(({"modules": each}, 1.0) for each in (DEFAULT, *combinations(PROJECTIONS, 1))),
        ({"modules": ("k_proj", "up_proj")}, 1.0),
        ({"modules": DEFAULT, "layers": (0, 2)}, 1.0),
        ({"ranks": {"q_proj": 2, "down_proj": 24}, "lora_alpha": 16}, lambda _, rank: 16 / rank),
        ({"ranks": {"v_proj": 5}, "use_rslora": True}, lambda _, rank: 8 / rank**0.5),
        (
            {"modules": DEFAULT, "alpha_pattern": {"v_proj": 24, r"^model\.layers\.0\..*": 2}},
            lambda name, _: 3.0 if "v_proj" in name else 0.25 if "layers.0." in name else 1.0,
        ),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else "merged",
)
def test_a_part_of_the_model_gives_the_logits_of_merged_weights(tmp_path, llama, given, factor):
    adapter = write_adapter(tmp_path / "adapter", llama, **given)
    driver = Driver(llama, "cpu")
    driver.adapt("x", adapter)
    merged = Driver(merge(tmp_path / "merged", llama, adapter, factor), "cpu")
    torch.testing.assert_close(logits(driver), logits(merged), **CLOSE)
