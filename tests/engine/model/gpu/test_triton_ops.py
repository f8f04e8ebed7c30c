"""The GPU's operations but attention, and whole steps: interpreted where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F

from tests.engine.model.paged import DEVICE

pytest.importorskip("triton")

from kvrelay.engine.model.gpu import experts, sampling
from kvrelay.engine.model.gpu.linear import fp8, int8
from kvrelay.engine.model.gpu.norm_activation import KINDS, gated, rms_norm
from kvrelay.engine.model.quantize import dequantize, quantize
from kvrelay.engine.model.sampling import sampler
from kvrelay.engine.model.stacked import Fp8Blocks, Mxfp4
from kvrelay.engine.request import SamplingParams
from tests.engine.model.tiny import scheduled

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("width", [96, 130])
def test_rms_norm_is_that_of_the_reference_for_rows_of_any_stride(width):
    wide, weight = randn(5, 2 * width), randn(width)
    x = wide[:, :width]
    expected = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swish": lambda gate, up: (
        (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    ),
}


def test_activations_are_all_that_models_have():
    assert {*ACTIVATIONS, "squared_relu"} == {*KINDS}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_activated_and_multiplied(activation):
    gate_up = randn(3, 2 * 1100) * 5
    expected = ACTIVATIONS[activation](*gate_up.chunk(2, dim=-1))
    torch.testing.assert_close(gated(gate_up, activation), expected, rtol=1e-5, atol=1e-5)


def test_what_has_no_gate_is_activated():
    x = randn(3, 1100)
    torch.testing.assert_close(gated(x, "squared_relu"), x.relu().square())


@pytest.mark.parametrize("depth", [192, 200])
@pytest.mark.parametrize("rows", [1, 17, 65, 257])
def test_int8_products_are_those_of_the_dequantized_weights(rows, depth):
    weight, bias, x = randn(70, depth), randn(70), randn(rows, depth)
    expected = F.linear(x, dequantize(*quantize(weight)), bias)
    torch.testing.assert_close(int8.linear(x, int8.int8_matrix(weight, bias)), expected, **CLOSE)


@pytest.mark.parametrize("depth", [96, 4128])
def test_fp8_products_are_those_of_the_rounded_numbers(depth):
    """Each input rounded by its row's scale to what torch rounds it to, then summed in float32."""
    weight, bias = randn(64, depth).bfloat16(), randn(64).bfloat16()
    x = randn(5, 2 * depth).bfloat16()[:, :depth] * torch.tensor([1, 9, 0.1, 300, 0])[:, None]
    x = x.bfloat16().to(DEVICE)
    matrix = fp8.fp8_matrix(weight, bias)
    scales = (x.float().abs().amax(1, keepdim=True) / 448).clamp_(min=1e-12)
    rounded = (x.float() / scales).to(torch.float8_e4m3fn).float()
    numbers, found = fp8.quantize_rows(x)
    assert torch.equal(found, scales)
    assert torch.equal(numbers.float(), rounded)
    wide = matrix.numbers.float() * matrix.scales.view(-1, 1)
    expected = F.linear(rounded * scales, wide, bias.float())
    torch.testing.assert_close(fp8.linear(x, matrix).float(), expected, rtol=0.01, atol=0.02)
    assert fp8.linear(x[:0], matrix).shape == (0, 64)


@pytest.mark.parametrize("one_scale", [False, True])
def test_a_checkpoint_in_fp8_gets_its_numbers_back(one_scale):
    """After it was widened to bfloat16, whether its scales are of rows or of the matrix."""
    weight = randn(48, 640) * (1 + torch.arange(48, device=DEVICE)[:, None] / 16)
    largest = weight.abs().amax() if one_scale else weight.abs().amax(1, keepdim=True)
    numbers = (weight / (largest / 448)).to(torch.float8_e4m3fn)
    widened = (numbers.float() * (largest / 448)).bfloat16()
    matrix = fp8.fp8_matrix(widened, None)
    # The scale is as exact as a number of bfloat16; a row may be a power of two off in both.
    ratio = matrix.scales.view(-1, 1) / (largest / 448)
    power = ratio.log2().round().exp2()
    torch.testing.assert_close(ratio / power, torch.ones_like(ratio), rtol=2**-8, atol=0)
    assert torch.equal(matrix.numbers.float() * power, numbers.float())


def test_what_cublas_does_not_take_in_fp8_stays_as_it_is():
    assert fp8.fits(torch.empty(32, 48))
    assert not fp8.fits(torch.empty(32, 40))
    assert not fp8.fits(torch.empty(40, 32))


def test_int8_experts_are_those_of_the_dequantized_weights():
    gate_ups, downs, x, weights = randn(3, 48, 70), randn(3, 70, 24), randn(5, 70), randn(5, 2)
    chosen = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0], [2, 1]], device=DEVICE)
    both = [quantize(each) for each in (gate_ups, downs)]
    wide = experts.ExpertWeights(*(dequantize(*each) for each in both))
    narrow = experts.ExpertWeights(*(each[0] for each in both), *(each[1] for each in both))
    found = [torch.zeros(5, 70, device=DEVICE) for _ in range(2)]
    for hidden, stacked in zip(found, (wide, narrow), strict=True):
        experts.add_experts(hidden, x, stacked, chosen, weights, "silu")
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "each"), [(1, 8, 3), (11, 8, 3), (140, 2, 1)]
)
def test_experts_add_what_each_token_chose(num_tokens, num_experts, each):
    gate_ups, downs = randn(num_experts, 48, 40), randn(num_experts, 40, 24)
    x, hidden, weights = randn(num_tokens, 40), randn(num_tokens, 40), randn(num_tokens, each)
    chosen = torch.stack([torch.randperm(num_experts)[:each] for _ in range(num_tokens)]).to(DEVICE)
    expected = hidden.clone()
    for k in range(each):
        gate, up = torch.einsum("nh,nwh->nw", x, gate_ups[chosen[:, k]]).chunk(2, dim=1)
        product = torch.einsum("nw,nhw->nh", F.silu(gate) * up, downs[chosen[:, k]])
        expected += weights[:, k, None] * product
    stacked = experts.ExpertWeights(gate_ups, downs)
    experts.add_experts(hidden, x, stacked, chosen, weights, "silu")
    torch.testing.assert_close(hidden, expected, **CLOSE)


def mxfp4(rows, columns):
    pairs = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8)
    return Mxfp4(pairs, torch.randint(118, 125, (2, rows, columns // 32), dtype=torch.uint8))


def fp8_blocks(rows, columns):
    """Blocks of 32 rows and 64 columns; rows end within none."""
    scales = torch.rand(2, rows // 32, -(-columns // 64)) + 0.1
    return Fp8Blocks(torch.randn(2, rows, columns).to(torch.float8_e4m3fn), scales, (32, 64))


@pytest.mark.parametrize("num_tokens", [3, 130])
@pytest.mark.parametrize(
    ("packed", "names", "block", "activation"),
    [
        (mxfp4, ("pairs", "scales"), (), "clamped_swish"),
        (fp8_blocks, ("numbers", "scales"), ((32, 64),), "silu"),
    ],
)
def test_packed_experts_are_those_of_the_widened_numbers(
    packed, names, block, activation, num_tokens
):
    both = [packed(rows, columns) for rows, columns in ((2 * 64, 96), (96, 64))]
    x, weights = randn(num_tokens, 96), randn(num_tokens, 1)
    chosen = torch.randint(0, 2, (num_tokens, 1)).to(DEVICE)
    wide = experts.ExpertWeights(*(each.widened().to(DEVICE) for each in both))
    narrow = [getattr(each, name).to(DEVICE) for name in names for each in both]
    found = [torch.zeros(num_tokens, 96, device=DEVICE) for _ in range(2)]
    for hidden, stacked in zip(found, (wide, experts.ExpertWeights(*narrow, *block)), strict=True):
        experts.add_experts(hidden, x, stacked, chosen, weights, activation)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


def test_experts_have_biases_or_no_gate():
    gate_ups, downs, chosen = randn(4, 24, 40), randn(4, 40, 24), torch.tensor([[2, 0], [3, 2]])
    x, weights, chosen = randn(2, 40), randn(2, 2), chosen.to(DEVICE)
    biases, hidden, expected = (randn(4, 24), randn(4, 40)), randn(2, 40), []
    for row in range(2):
        parts = [
            weights[row, k]
            * F.linear(
                F.linear(x[row], gate_ups[each], biases[0][each]).relu().square(),
                downs[each],
                biases[1][each],
            )
            for k, each in enumerate(chosen[row].tolist())
        ]
        expected.append(hidden[row] + sum(parts))
    stacked = experts.ExpertWeights(gate_ups, downs)
    experts.add_experts(hidden, x, stacked, chosen, weights, "squared_relu", biases)
    torch.testing.assert_close(hidden, torch.stack(expected), **CLOSE)


FILTERS = (  # top_k, top_p, min_p
    *((0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (40, 0.9, 0.02)),
    *((1, 1.0, 0.0), (5000, 0.5, 0.0), (0, 0.0, 0.0), (3, 0.3, 0.9)),
)
SEEDS = (1, -(2**63) + 5, 2**64 + 12)
TEMPERATURES = (0.0, 0.7, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("max_few", [sampling.MAX_FEW, 4])
def test_draws_are_the_hosts(max_few, monkeypatch):
    """Every filter alone and with others; rows of one launch do not disturb one another. Also where
    more tokens may be kept than are collected."""
    monkeypatch.setattr(sampling, "MAX_FEW", max_few)
    params = [
        SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=min_p, seed=seed)
        for temperature in TEMPERATURES
        for k, p, min_p in FILTERS
        for seed in SEEDS
    ]
    if DEVICE.type == "cpu":  # interpreted: every filter once
        params = [*params[27:54:3], params[1], params[-2]]
        params = params if max_few == sampling.BLOCK else params[1:5]
    logits = torch.randn(len(params), 700) * 2.0
    logits[:, 13] = -torch.inf
    logits[::2] = logits[::2].round()  # ties at the cuts
    seqs = [
        scheduled([1], row, [0], context=list(range(row + 1)), sampling=each)
        for row, each in enumerate(params)
    ]
    expected = [each.token for each in sampler.sample(logits.clone(), seqs)]
    values = sampling.draws_of(seqs).items()
    draws = {name: torch.from_numpy(each).to(DEVICE) for name, each in values}
    out = torch.full((len(params),), -1, device=DEVICE)
    sampling.draw(logits.to(DEVICE), draws, out)
    assert out.tolist() == expected
    assert len(set(expected)) > len(params) // 2
