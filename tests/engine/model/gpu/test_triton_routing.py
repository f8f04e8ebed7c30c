"""Experts are chosen and sorted as torch's operations do it: interpreted where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.engine.model.paged import DEVICE

pytest.importorskip("triton")

from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.gpu.routing import route, sort_pairs
from kvrelay.engine.model.ops import choose_experts

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

KINDS = {  # as families have them: experts, choices, further settings, and what a layer has
    "mixtral": ((8, 2, True), {}, ()),
    "qwen3": ((128, 8, True), {}, ()),
    "deepseek2": ((160, 6, False), {"num_groups": 8, "num_chosen_groups": 3, "scale": 16.0}, ()),
    "deepseek3": (
        (256, 8, True),
        {"scoring": "sigmoid", "num_groups": 8, "num_chosen_groups": 4, "scale": 2.5},
        ("bias",),
    ),
    "minimax": ((48, 6, True), {"scoring": "sigmoid"}, ("bias",)),
    "gemma4": ((24, 3, True), {}, ("scales",)),
    "llama4": ((16, 1, False), {"scoring": "sigmoid", "scales_inputs": True}, ()),
    "one": ((1, 1, True), {}, ()),
}


def routed(kind, num_tokens, logits=None):
    """What torch and the kernel say of random logits."""
    (num_experts, each, normalize), more, parts = KINDS[kind]
    config = SimpleNamespace(experts=Experts(num_experts, each, 8, normalize, **more))
    vectors = {name: torch.rand(num_experts, device=DEVICE) for name in parts}
    layer = SimpleNamespace(**{"bias": None, "scales": None} | vectors)
    x = torch.randn(num_tokens, 8, device=DEVICE)
    if logits is None:
        logits = 3 * torch.randn(num_tokens, num_experts, device=DEVICE)
    return [choose(x, logits, layer, config) for choose in (choose_experts, route)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_experts_and_weights_are_those_of_torch(kind, num_tokens):
    torch.manual_seed(num_tokens)
    expected, found = routed(kind, num_tokens)
    assert found[1].tolist() == expected[1].tolist(), "in the order of their scores"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_of_equal_scores_the_first_experts_are_chosen():
    chosen = routed("qwen3", 2, torch.zeros(2, 128, device=DEVICE))[1][1]
    assert chosen.tolist() == [[*range(8)]] * 2


def test_logits_that_are_no_numbers_choose_experts_that_exist():
    """What is computed of them is nothing; an address beyond the matrices would end the worker."""
    chosen = routed("deepseek3", 1, torch.full((1, 256), torch.nan, device=DEVICE))[1][1][0]
    assert len({*chosen.tolist()} & {*range(256)}) == 8


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "each", "block"),
    [(1, 256, 8, 16), (1, 1, 1, 16), (7, 5, 3, 16), (700, 3, 2, 16), (130, 40, 8, 64)],
)
@pytest.mark.parametrize("skewed", [False, True])
def test_every_pair_is_in_one_tile_of_its_expert(num_tokens, num_experts, each, block, skewed):
    torch.manual_seed(0)
    liking = torch.rand(num_tokens, num_experts)
    if skewed:  # all like the last ones
        liking += torch.arange(num_experts)
    chosen = liking.topk(each, dim=-1).indices
    tiles = sort_pairs(chosen.to(DEVICE), num_experts, block)
    assert tiles.pairs.tolist() == chosen.flatten().sort(stable=True).indices.tolist()
    covered, experts = [], tiles.expert.tolist()
    for expert, first, end in zip(experts, tiles.first.tolist(), tiles.end.tolist(), strict=True):
        if expert == num_experts:
            continue
        own = range(first, min(first + block, end))
        assert len(own) > 0
        assert {chosen.flatten()[tiles.pairs[place]].item() for place in own} == {expert}
        covered += own
    assert covered == [*range(chosen.numel())]
    used = sum(expert < num_experts for expert in experts)
    assert {*experts[used:]} <= {num_experts}, "the rest end at once"
