"""Products of the CPU kernels against torch: every kind of weight, every kind of edge."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.cpu.linear import ACTIVATIONS, CpuLinear
from kvrelay.engine.model.cpu.terms import pack_term
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.quantize import GROUP, dequantize, quantize, round_inputs, scheme
from kvrelay.engine.model.weights import ExpertsWeights
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import Driver, low_precision_kind, make_ops, tokens_of

SHAPES = ((50, 24), (96, 64), (130, 2100), (33, 77))  # outputs, depth
# The last four: bfloat16, and inputs that are rounded to that, to half floats, to that again; both
# factors as 16-bit integers.
KINDS = ("float32", "bfloat16", "int8", "int4", "bf16_pairs", "fp16", "amx", "int16")
BITS = {"int8": 8, "int4": 4}


def make_linear(
    kind: str = "float32",
    threads: int = 2,
    activation: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CpuLinear:
    library = kernels.load(default_cache_dir())
    quantization = kind if kind in BITS else "none"
    return CpuLinear(
        library,
        threads,
        dtype,
        lambda role, rows, width: torch.full((rows, width), torch.nan),
        quantization,
        low_precision=low_precision_kind(kind),
        activation=activation,
    )


def weight_of(kind: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight as the checkpoint has it, and the values that are computed with."""
    weight = torch.randn(shape)
    if kind in BITS:
        return weight, dequantize(*quantize(weight, BITS[kind]))
    weight = weight.to(torch.float32 if kind == "float32" else torch.bfloat16)
    return weight, weight.float()


def inputs_of(kind: str, x: torch.Tensor) -> torch.Tensor:
    """What is multiplied of inputs x."""
    if kind in BITS:
        return round_inputs(x, BITS[kind])
    return x.bfloat16() if kind in ("bf16_pairs", "amx") else x


def close_to(kind: str, depth: int) -> dict[str, float]:
    """What sums of `depth` products, of about 1 each, may be off by."""
    each = {"fp16": 8e-3, "int16": 2e-3}.get(kind, 3e-5)
    return {"rtol": 0, "atol": each * depth**0.5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 35, 36, 40, 200])
def test_a_product_equals_torch(rows, kind):
    torch.manual_seed(rows)
    ops = make_linear(kind)
    for outputs, depth in SHAPES:
        weight, values = weight_of(kind, outputs, depth)
        wide = torch.randn(rows, depth + 5)
        x = wide[:, :depth]  # rows may be apart
        bias, hidden = torch.randn(outputs), torch.randn(rows, outputs)
        expected = inputs_of(kind, x).double() @ values.double().t()
        close = close_to(kind, depth)
        biased = ops.linear(x, ops.matrix(weight, bias, "test")).double()
        torch.testing.assert_close(biased, expected + bias, **close)
        before = hidden.double()
        ops.add_linear(hidden, x, ops.matrix(weight, None, "test"))
        torch.testing.assert_close(hidden.double(), expected + before, **close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "depth"), [(5, 77), (40, 77), (1700, 77), (40, 1500)])
def test_a_gated_product_is_that_of_its_halves(width, depth, kind):
    torch.manual_seed(width)
    weight = torch.randn(2 * width, depth) / depth**0.5
    for rows in (1, 7, 90):
        x, results = torch.randn(rows, depth), []
        for threads in (1, 5):
            ops = make_linear(kind, threads, ACTIVATIONS["silu"])
            results.append(ops.gated(x, ops.gated_matrix(weight, "test")))
        gate, up = (ops.linear(x, ops.matrix(half, None, "test")) for half in weight.chunk(2))
        torch.testing.assert_close(results[0], F.silu(gate) * up, rtol=1e-5, atol=1e-5)
        assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_depends_neither_on_threads_nor_on_other_outputs(kind):
    torch.manual_seed(0)
    weight, x = torch.randn(2100, 700), torch.randn(90, 700)
    for rows in (1, 2, 3, 9, 90):  # three take several panels of so many
        results = []
        for threads in (1, 2, 5):
            ops = make_linear(kind, threads)
            results.append(ops.linear(x[:rows], ops.matrix(weight, None, "test")))
        some = ops.linear(x[:rows], ops.matrix(weight[:40], None, "test"))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[0][:, :40], some)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_multiplied_alone_as_among_any_number_of_others(kind):
    torch.manual_seed(5)
    ops = make_linear(kind)
    for outputs, depth in (*SHAPES, (70, 900 if kind not in BITS else 4000)):
        weight, bias = weight_of(kind, outputs, depth)[0], torch.randn(outputs)
        matrix = ops.matrix(weight, bias if kind in BITS else None, "test")
        x, hidden = torch.randn(260, depth), torch.randn(260, outputs)
        alone = hidden.clone()
        for row in range(len(x)):
            ops.add_linear(alone[row : row + 1], x[row : row + 1], matrix)
        for rows in (2, 5, 8, 13, 32, 36, 37, 97, 260):
            found = hidden[:rows].clone()
            ops.add_linear(found, x[:rows], matrix)
            assert torch.equal(found, alone[:rows])


def test_int8_is_off_by_half_a_step_of_its_group_at_most():
    torch.manual_seed(0)
    weight = torch.randn(30, 3 * GROUP - 5) * torch.logspace(-6, 2, 30).unsqueeze(1)
    weight[3] = 0
    weight[:, 7] *= 50  # an outlier costs its own group only
    numbers, scales = quantize(weight)
    assert numbers.dtype == torch.int8
    assert scales.shape == (30, 3)
    steps = F.pad(weight, (0, 5)).view(30, 3, GROUP).abs().amax(-1) / 127
    error = F.pad(dequantize(numbers, scales) - weight, (0, 5)).view(30, 3, GROUP).abs().amax(-1)
    assert (error <= 0.76 * steps).all()  # a half, and what rounding the scale clips
    assert torch.equal(dequantize(numbers, scales)[3], torch.zeros(weight.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128])
def test_weights_that_had_4_bits_before_keep_their_values(size, dtype):
    """Whatever their groups were; of others, as many steps of a range lie between."""
    torch.manual_seed(size)
    weight = torch.randn(40, 4 * size + 32)
    weight[:, :: size - 1] *= 4  # ranges are not used alike

    def error(wide):
        return float((dequantize(*quantize(wide, 4)) - wide).norm() / wide.norm())

    assert 0.05 < error(weight) < 0.12
    groups = F.pad(weight, (0, -weight.shape[1] % size)).unflatten(-1, (-1, size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).half().float()
    zero = (-low / step).round()
    widened = (((groups / step).round() + zero).clamp(0, 15) - zero) * step
    assert error(widened.flatten(-2)[:, : weight.shape[1]].to(dtype).float()) < 0.01


def test_a_group_of_equal_weights_is_exact_in_4_bits():
    for value in (0.0, 0.75, -3.0):
        weight = torch.full((3, 70), value)
        assert torch.equal(dequantize(*quantize(weight, 4)), weight)


@pytest.mark.parametrize("kind", BITS)
def test_products_of_integers_are_of_rounded_inputs(kind):
    torch.manual_seed(3)
    for outputs, depth in SHAPES:
        weight, values = weight_of(kind, outputs, depth)
        x = torch.randn(9, depth)
        x[:, ::GROUP] = 3e3  # what such an input makes the others of its group lose shows
        x[1:, :GROUP] = 0
        ops = make_linear(kind)
        found = ops.linear(x, ops.matrix(weight, None, "test")).double()
        expected = round_inputs(x, BITS[kind]).double() @ values.double().t()
        exact = x.double() @ values.double().t()
        assert (found - expected).norm() < 1e-2 * (found - exact).norm()


@pytest.mark.parametrize(("kind", "share"), [("fp16", 0.8), ("int16", 0.3)])
def test_other_numbers_are_nearer_than_bfloat16_and_have_room_for_any_row(kind, share):
    """Rows and columns of any size, with numbers that stand out, and the largest sums there are."""
    torch.manual_seed(6)
    x, weight = torch.randn(40, 1100), torch.randn(70, 1100)
    x[3], x[4], x[5, 9], x[6] = x[3] * 1e30, x[4] * 1e-30, 1e4, 1.999
    weight[3], weight[4], weight[5, 7] = weight[3] * 1e6, weight[4] * 1e-6, 300
    weight[6], weight[7] = 1.99, 0
    narrow = weight.bfloat16()
    expected = x.double() @ narrow.double().t()
    norms = narrow.double().norm(dim=1)
    size = x.double().norm(dim=1, keepdim=True) * norms.clamp(min=1e-9)
    errors = []
    for each in ("bf16_pairs", kind):
        ops = make_linear(each)
        found = ops.linear(x, ops.matrix(narrow, None, "test")).double()
        errors.append(((found - expected) / size).abs())
    assert errors[1].max() < 2.0**-8
    assert errors[1].mean() < share * errors[0].mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_input_that_is_not_finite_is_seen_in_its_own_row_only(value, kind):
    ops = make_linear(kind)
    matrix = ops.matrix(torch.randn(20, 200), None, "test")
    x = torch.randn(8, 200)
    expected = ops.linear(x, matrix).clone()
    x[3, 130] = value
    found = ops.linear(x, matrix)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6, 7]], expected[[0, 1, 2, 4, 5, 6, 7]])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp16", "amx", "int16"])
def test_inputs_of_zero_and_of_next_to_nothing_leave_the_bias(kind):
    ops = make_linear(kind)
    bias = torch.randn(20)
    matrix = ops.matrix(torch.randn(20, 100), bias, "test")
    x = torch.stack([torch.zeros(100), torch.full((100,), 1e-35)])
    assert round_inputs(x).count_nonzero() == 0
    assert torch.equal(ops.linear(x, matrix), bias.expand(2, 20))


def expert_layer(ops, router, bias, gate_ups, downs):
    prepared = ops.router(router), bias, ops.experts(gate_ups, downs)
    return ExpertsWeights(*prepared)


@pytest.mark.parametrize(
    "choice",
    [
        {"normalize": True},
        {"normalize": False, "scale": 2.5},
        {"normalize": False, "num_groups": 3, "num_chosen_groups": 2},
        {"normalize": True, "scoring": "sigmoid", "scale": 1.5, "has_bias": True},
        {
            "normalize": True,
            "scoring": "sigmoid",
            "has_bias": True,
            "num_groups": 3,
            "num_chosen_groups": 2,
        },
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_torch_with_any_number_of_tokens_each(kind, choice):
    torch.manual_seed(1)
    num_experts, width, hidden_size = 6, 40, 72
    experts = Experts(num_experts, 3, width, **choice)
    config = replace(config_of(hidden=hidden_size), experts=experts)
    quantization = kind if kind in BITS else "none"
    ours = make_ops("cpu", config, quantization=quantization)
    theirs = make_ops("torch", config, quantization=quantization)
    gate_ups, _ = weight_of(kind, num_experts, 2 * width, hidden_size)
    downs, _ = weight_of(kind, num_experts, hidden_size, width)
    # The first number of a token is large: expert 0 gets every token, and expert 5 hardly any.
    router = torch.randn(num_experts, hidden_size)
    router[0, 0], router[5, 0] = 30.0, -30.0
    bias = torch.randn(num_experts) * 0.2 if choice.get("has_bias") else None
    layers = [expert_layer(ops, router, bias, gate_ups, downs) for ops in (ours, theirs)]
    for num_tokens in (1, 5, 120):
        x = torch.randn(num_tokens, hidden_size) / hidden_size**0.5
        x[:, 0] = 0.3
        hidden = torch.randn(num_tokens, hidden_size)
        expected = hidden.clone()
        ours.add_experts(hidden, x, layers[0])
        theirs.add_experts(expected, x, layers[1])
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=2e-3)


def test_a_token_passes_its_experts_the_same_way_whatever_the_batch():
    torch.manual_seed(2)
    config = replace(config_of(hidden=64), experts=Experts(4, 2, 32, normalize=True))
    ops = make_ops("cpu", config)
    weights = torch.randn(4, 64), None, torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    layer = expert_layer(ops, *weights)
    x, hidden = torch.randn(600, 64), torch.zeros(600, 64)
    ops.add_experts(hidden, x, layer)
    for at in (0, 3, 599):
        alone = torch.zeros(1, 64)
        ops.add_experts(alone, x[at : at + 1], layer)
        assert torch.equal(alone[0], hidden[at])


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.1), ("int4", 0.8)])
def test_a_quantized_model_is_close_to_the_model_and_the_same_on_either_set_of_ops(
    llama, kind, share
):
    tokens = tokens_of(40, seed=1)
    exact = Driver(llama, "cpu").feed(("a", tokens))
    ours = Driver(llama, "cpu", quantization=kind).feed(("a", tokens))
    theirs = Driver(llama, "torch", quantization=kind).feed(("a", tokens))
    error = (ours - exact).norm()
    assert 0 < error < share * exact.norm()
    assert (ours - theirs).norm() < 0.2 * error  # a last bit decides which way an input is rounded


def test_the_kv_of_quantized_weights_has_another_name_on_each_kind_of_device(llama):
    config = read_config(llama)
    schemes = [scheme("none", "cpu"), scheme("none", "cuda")]
    schemes += [scheme("int8", "cpu"), scheme("int8", "cuda"), scheme("int4", "cpu")]
    digests = [config.digest(llama, quantization=each) for each in schemes]
    assert digests[0] == digests[1] == config.digest(llama)
    assert len(set(digests)) == 4


def test_the_number_of_ranks_is_in_that_name_only_where_inputs_are_rounded(llama):
    assert scheme("int8", "cpu", 1) == scheme("int8", "cpu")
    assert (
        len({scheme(kind, "cpu", ranks) for kind in ("int8", "int4") for ranks in (1, 2, 4)}) == 6
    )
    assert scheme("none", "cpu", 2) == scheme("none", "cpu")
    assert scheme("int8", "cuda", 2) == scheme("int8", "cuda")


def test_an_unknown_quantization_is_refused(llama):
    with pytest.raises(ModelError, match="quantization int3 is not supported; supported: none, in"):
        model_runner(llama, num_blocks=4, quantization="int3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [((64, 4), (32, 16), (32, 6)), ((33, 3), (50, 21)), ((7, 1),)])
def test_an_adapters_part_equals_torch_and_stores_no_zeros(dtype, parts):
    """parts: outputs and ranks of each matrix of a stack."""
    torch.manual_seed(1)
    library, depth = kernels.load(default_cache_dir()), 77
    ups = [torch.randn(shape).to(dtype).float() for shape in parts]
    up = torch.block_diag(*ups)
    down = torch.randn(up.shape[1], depth).to(dtype).float()
    term = pack_term(
        library, 2, down, up, HugePages(), bf16=dtype == torch.bfloat16, in_panels=False
    )
    x = torch.randn(40, depth + 5)[:, :depth].to(dtype).float()  # rows are apart
    low = (x.double() @ down.double().t()).to(dtype)
    base = torch.randn(40, len(up))
    expected = base + low.double() @ up.double().t()
    alone = [base[row : row + 1].clone() for row in range(40)]
    for row, out in enumerate(alone):
        term.add(out, x[row : row + 1])
    atol = 1e-4 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(torch.cat(alone).double(), expected, rtol=0, atol=atol)
    for rows in (2, 3, 5, 6, 7, 13, 40):
        out = torch.full((rows, len(up) + 3), 9.0)
        out[:, : len(up)] = base[:rows]
        term.add(out[:, : len(up)], x[:rows])
        assert torch.equal(out[:, : len(up)], torch.cat(alone[:rows])), "depends on other rows"
        assert bool((out[:, len(up) :] == 9.0).all())
    if len(up) == 128:  # each part has whole vectors
        stored = term.spans[:, 1].sum() * (2 if dtype == torch.bfloat16 else 1)
        vector = len(up) // len(term.spans)
        assert stored * vector == sum(each.numel() for each in ups)
