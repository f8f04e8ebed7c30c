"""Attention on a GPU: bfloat16 and real shapes, against float64 on the same device."""

import pytest
import torch

from kvrelay.engine.model import fp8
from tests.engine.model.paged import DEVICE, attention_case, expected, paged

pytest.importorskip("triton")

from kvrelay.engine.model.gpu.attention_decode import (
    decode_attention,
    decode_tiling,
    list_splits,
)
from kvrelay.engine.model.gpu.attention_prefill import prefill_attention, prefill_tiles
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.cache_write import rope_write
from kvrelay.engine.model.gpu.latent import (
    latent_decode,
    latent_prefill,
    latent_tiles,
    latent_tiling,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CONTEXTS = [1, 8192, 16, 17, 5000, 255, 4096, 4099]
CHUNKS = [(700, 700), (300, 4300), (2, 130), (129, 129), (64, 1000)]
MODELS = {  # num_heads, kv_heads, head_dim, block_size
    "llama": (32, 8, 128, 16),
    "qwen": (14, 2, 64, 32),
    "gemma": (16, 8, 256, 64),
    "phi": (32, 32, 96, 128),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 1024},
    "sinks": {"window": 1024, "num_sinks": 4},
    "softcap": {"softcap": 30.0},
}
CASES = [
    *(("llama", name, kv_fp8) for name in OPTIONS for kv_fp8 in (False, True)),
    *((model, "plain", kv_fp8) for model in ("qwen", "gemma", "phi") for kv_fp8 in (False, True)),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def check(found, answer):
    """Compares row by row the error's norm with that of the answer."""
    found, answer = found.double().flatten(0, 1), answer.to(DEVICE).flatten(0, 1)
    error = (found - answer).norm(dim=1) / answer.norm(dim=1)
    assert error.max() < 0.015  # also when it is NaN


def attention(lengths, model, variant, kv_fp8):
    """(case, queries as in qkv, out, the kernels' options, the answer)."""
    scale = MODELS[model][2] ** -0.5
    return attention_case(
        lengths, *MODELS[model], torch.bfloat16, kv_fp8, scale=scale, fill=float("nan"),
        **OPTIONS[variant],
    )  # fmt: skip


def splits_of(case, options):
    heads, pool = options["num_heads"], case.pool
    block_n = decode_tiling(pool, heads // pool.num_kv_heads).block_n
    return case.splits(heads, pool.value_dim, block_n, options["window"])


@pytest.mark.parametrize(("model", "variant", "kv_fp8"), CASES)
def test_decode_equals_float64(model, variant, kv_fp8):
    lengths = [(1, context) for context in CONTEXTS]
    case, qkv, out, options, answer = attention(lengths, model, variant, kv_fp8)
    decode_attention(
        out, qkv, case.pool, 1, *case.of_decodes, splits=splits_of(case, options), **options
    )
    check(out.view_as(answer), answer)


@pytest.mark.parametrize(("model", "variant", "kv_fp8"), CASES)
def test_prefill_equals_float64(model, variant, kv_fp8):
    case, qkv, out, options, answer = attention(CHUNKS, model, variant, kv_fp8)
    tiles = torch.from_numpy(prefill_tiles(case.spans, options["num_heads"], case.pool)).to(DEVICE)
    prefill_attention(out, qkv, case.pool, 1, tiles, *case.tensors, **options)
    check(out.view_as(answer), answer)


@pytest.mark.parametrize("kv_fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention_equals_float64(heads, kv_fp8):
    rank, rope_dim = 512, 64
    lengths = [(1, 1), (1, 3000), (1, 700), (40, 40), (33, 1000)]
    case = paged(lengths, 1, rank + rope_dim, dtype=torch.bfloat16, kv_fp8=kv_fp8, planes=1)
    queries = torch.randn(case.num_tokens, heads, rank + rope_dim, device=DEVICE).bfloat16()
    answer = expected(case, queries, heads, 0.04, value_dim=rank)
    out = torch.full((case.num_tokens, heads, rank), float("nan"), device=DEVICE).bfloat16()
    tiles = torch.from_numpy(latent_tiles(case.spans, heads, case.pool)).to(DEVICE)
    splits = case.splits(heads, rank, latent_tiling(case.pool, heads).block_n)
    options = {"rank": rank, "scale": 0.04}
    latent_prefill(out, queries, case.pool, 1, tiles, *case.tensors, **options)
    latent_decode(out, queries, case.pool, 1, *case.of_decodes, splits=splits, **options)
    check(out, answer)


def test_a_captured_decode_serves_other_contexts():
    case, qkv, out, options, answer = attention([(1, 4096), (1, 300)], "llama", "plain", False)
    context = case.context_len.clone()
    case.context_len.fill_(1)

    def work():
        splits = splits_of(case, options)
        decode_attention(out, qkv, case.pool, 1, *case.of_decodes, splits=splits, **options)

    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    case.context_len.copy_(context)
    graph.replay()
    check(out.view_as(answer), answer)


def test_a_sequence_has_the_same_numbers_in_any_batch():
    """To the bit: splits are by its own length."""
    lengths = [(1, 33), (1, 90_000), *[(1, 700 + 90 * each) for each in range(30)]]
    case, qkv, out, options, _ = attention(lengths, "llama", "plain", False)
    where, splits = (qkv, case.pool, 1), splits_of(case, options)
    decode_attention(out, *where, *case.of_decodes, splits=splits, **options)
    for chosen in ([1], [0, 5], [31, 1, 7]):
        own = torch.tensor(chosen, device=DEVICE)
        start, context, tables = (each[own] for each in case.of_decodes)
        sizes = [lengths[each][1] for each in chosen]
        shape = options["num_heads"], case.pool.value_dim, splits.block_n
        alone = torch.zeros_like(out)
        lists = list_splits(torch.ones_like(context), context, sizes, *shape)
        decode_attention(alone, *where, start, context, tables, splits=lists, **options)
        assert torch.equal(alone[own], out[own])


@pytest.mark.parametrize("kv_fp8", [False, True])
def test_what_is_written_is_what_the_reference_writes(kv_fp8):
    heads, kv_heads, head_dim, block_size, count = 32, 8, 128, 16, 333
    qkv = torch.randn(count, (heads + 2 * kv_heads) * head_dim, device=DEVICE).bfloat16()
    angles = torch.outer(torch.arange(9000.0), 1.0 / 1e4 ** (torch.arange(64) / 64)).to(DEVICE)
    tables = angles.cos(), angles.sin()
    positions = torch.randint(0, 9000, (count,), device=DEVICE)
    slots = torch.randperm(count, device=DEVICE)
    blocks = -(-count // block_size)
    if kv_fp8:
        width = block_size * (head_dim + 1)
        data = torch.zeros(blocks, 2, 2, kv_heads, width, dtype=torch.uint8, device=DEVICE)
    else:
        data = torch.zeros(blocks, 2, 2, kv_heads, block_size, head_dim, device=DEVICE).bfloat16()
    every = qkv.view(count, -1, head_dim)[:, : heads + kv_heads].float()
    a, b = every.chunk(2, -1)
    c, s = (table[positions][:, None] for table in tables)
    turned = torch.cat((a * c - b * s, b * c + a * s), -1).bfloat16()
    values = qkv.view(count, -1, head_dim)[:, heads + kv_heads :].clone()
    if kv_fp8:  # queries and keys are spread over all of their numbers before they are rounded
        turned_q = fp8.hadamard(turned[:, :heads], 64).bfloat16()
        turned_k = fp8.hadamard_inverse(turned[:, heads:], 64).bfloat16()
        turned = torch.cat((turned_q, turned_k), 1)
    rope_write(qkv, Pool(data, head_dim), 1, positions, slots, tables, num_heads=heads)
    queries = qkv.view(count, -1, head_dim)[:, :heads]
    torch.testing.assert_close(queries, turned[:, :heads], rtol=0.008, atol=1e-5)
    written = torch.stack((turned[:, heads:], values), 1)  # [count, planes, kv_heads, head_dim]
    block, offset = slots // block_size, slots % block_size
    if not kv_fp8:
        torch.testing.assert_close(data[block, 1, :, :, offset], written, rtol=0.008, atol=1e-5)
        return
    numbers, scales = fp8.parts(data, head_dim)
    found = fp8.decode(
        numbers[block, 1, :, :, offset], scales[block, 1, :, :, offset], torch.float32
    )
    torch.testing.assert_close(found, written.float(), rtol=0.07, atol=0.01)
    exact_numbers, exact_scales = fp8.encode(written[:, 1])
    assert torch.equal(numbers[block, 1, 1][torch.arange(count), :, offset], exact_numbers)
    assert torch.equal(scales[block, 1, 1][torch.arange(count), :, offset], exact_scales)
