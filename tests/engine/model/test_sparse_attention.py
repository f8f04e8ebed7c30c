"""Sparse attention: with room for the whole context it is dense attention to the bit, and what a
token attends to depends on nothing but its context."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from kvrelay.engine.model.checkpoint.families import parse, read_config
from kvrelay.engine.model.config import ModelConfig, with_window
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import highest
from tests.engine.model import tiny
from tests.engine.model.tiny import Driver, low_precision_kind, make_checkpoint, tokens_of

LONG, OTHER = tokens_of(150, seed=1), tokens_of(90, seed=2)
SPARSE = ("deepseek32", "glm5", "glm5-shared")
TOPK = 24


@pytest.fixture(scope="module", params=SPARSE)
def path(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    return path


def with_topk(config: ModelConfig, topk: int) -> ModelConfig:
    latent = config.latent
    assert latent is not None
    assert latent.indexer is not None
    return replace(config, latent=replace(latent, indexer=replace(latent.indexer, topk=topk)))


def dense(config: ModelConfig) -> ModelConfig:
    assert config.latent is not None
    return replace(config, latent=replace(config.latent, indexer=None), layer_heads=())


def in_chunks(driver: Driver, name: str, tokens: list[int], size: int) -> torch.Tensor:
    """Returns the logits after each chunk."""
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    return torch.cat([driver.feed((name, part)) for part in parts])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "torch"},
        {"kind": "cpu"},
        {"kind": "cpu", "fp8": True},
        {"kind": "cpu", "dtype": torch.bfloat16},
        {"kind": "cpu", "quantization": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_with_room_for_the_context_it_is_dense_attention_to_the_bit(path, options):
    config = read_config(path)
    narrow, wide, all_of_it = (
        Driver(path, config=each, **options)
        for each in (config, with_topk(config, len(LONG)), dense(config))
    )
    for size in (64, 1):
        name, tokens = f"by {size}", LONG if size > 1 else LONG[:40]
        expected = in_chunks(all_of_it, name, tokens, size)
        assert torch.equal(in_chunks(wide, name, tokens, size), expected)
        got = in_chunks(narrow, name, tokens, size)
        assert (got[-1] - expected[-1]).abs().max() > 0.01, "the selection would not matter"


def test_tokens_before_topk_are_dense_to_the_bit_beside_those_that_are_not(path):
    """Prompts' outputs of all rows: the first `topk` of one step see all that is before them."""
    config = read_config(path)
    got, expected = (
        Driver(path, "cpu", each).feed(("a", LONG[: TOPK + 30]), ("b", OTHER[:TOPK]))
        for each in (config, dense(config))
    )
    assert torch.equal(got[1], expected[1])
    assert not torch.equal(got[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_decodes_and_batches_give_the_bits_of_the_whole(path, dtype):
    drivers = [Driver(path, "cpu", dtype=dtype, threads=threads) for threads in (1, 2, 4)]
    whole = Driver(path, "cpu", dtype=dtype).feed(("whole", LONG), ("other", OTHER))
    for driver, size in zip(drivers, (1, 7, 64), strict=True):
        assert torch.equal(in_chunks(driver, "a", LONG, size)[-1], whole[0])
        assert torch.equal(in_chunks(driver, "b", OTHER, size)[-1], whole[1])
    driver = Driver(path, "cpu", dtype=dtype)
    driver.feed(("a", LONG[:100]), ("b", OTHER[:30]), mute=("a", "b"))
    got = driver.feed(("a", LONG[100:]), ("c", LONG[:1]), ("b", OTHER[30:]))
    assert torch.equal(got[[0, 2]], whole)


@pytest.mark.parametrize("low_precision", ["bf16_pairs", "fp16", "amx", "int16"])
def test_rounded_products_leave_chunks_alike(path, low_precision):
    kind = low_precision_kind(low_precision)
    drivers = [Driver(path, "cpu", dtype=torch.bfloat16, low_precision=kind) for _ in range(3)]
    each = [
        in_chunks(driver, "a", LONG, size)[-1]
        for driver, size in zip(drivers, (len(LONG), 7, 1), strict=True)
    ]
    assert torch.equal(each[1], each[0])
    assert torch.equal(each[2], each[0])


@pytest.mark.parametrize("size", [150, 7])
def test_kv_in_8_bits_gives_the_logits_of_torch(path, size):
    """Latents and index keys are widened by their scales where they are gathered and scored. A
    number between two of FP8 may be written as the other one: tokens that see it differ more, and
    one or two of them choose another key by it."""
    cpu, torch_ = (Driver(path, kind, fp8=True) for kind in ("cpu", "torch"))
    got, expected = (in_chunks(driver, "a", LONG, size) for driver in (cpu, torch_))
    apart = (got - expected).abs().amax(1)
    assert apart.median() <= 2e-3
    assert (apart > 0.05).sum() <= 2


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_one_position_more_or_less_shows(path, kind):
    """The tolerance of comparisons with transformers would not hide a selection that is off."""
    config = read_config(path)
    each = [
        Driver(path, kind, with_topk(config, topk)).feed(("a", LONG))[0]
        for topk in (TOPK - 1, TOPK, TOPK + 1)
    ]
    assert min((each[1] - each[0]).abs().max(), (each[1] - each[2]).abs().max()) > 1e-3


def test_kernels_choose_what_torch_does(path):
    """Small whole numbers, of which many scores are equal: those of earlier positions count as
    higher."""
    config = read_config(path)
    indexer = config.indexer
    assert indexer is not None
    chosen, context = {}, 130
    order = torch.Generator().manual_seed(5)
    shape = (context, indexer.num_heads * indexer.head_dim)
    queries = torch.randint(-1, 2, shape, generator=order).float()
    keys = torch.randint(-1, 2, (context, indexer.head_dim), generator=order).float()
    keys[::3] = keys[0]
    weights = torch.randint(-2, 3, (context, indexer.num_heads), generator=order).float()
    for kind in ("cpu", "torch"):
        config = replace(config, layer_ropes=(-1,) * config.num_layers)
        driver = Driver(path, kind, config)
        driver.feed(("a", LONG[:context]))
        ops = driver.ops
        ops.begin(driver.batch)
        ops.index_write(queries.clone(), keys.clone(), 0)
        found = ops.select(queries, weights, 0)
        if isinstance(ops, CpuOps):
            found = ops.selected(context)
        chosen[kind] = found[indexer.topk :].long()
    assert torch.equal(chosen["cpu"], chosen["torch"])
    scores = torch.einsum("nhd,kd->nhk", queries.unflatten(1, (-1, indexer.head_dim)), keys)
    scores = torch.einsum("nhk,nh->nk", scores.relu(), weights)
    for row in range(indexer.topk, context):
        pairs = sorted((-float(score), at) for at, score in enumerate(scores[row, : row + 1]))
        assert len({score for score, _ in pairs}) < len(pairs)
        expected = sorted(at for _, at in pairs[: indexer.topk])
        assert chosen["torch"][row - indexer.topk].tolist() == expected


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FSSFFS"},
        {"indexer_types": ["full", "full", "shared", "shared", "shared", "full"]},
    ],
)
def test_layers_share_selections_by_the_schedule_of_transformers(schedule):
    fields = {**tiny.SHAPE, **tiny.LATENT, **tiny.INDEXER, "q_lora_rank": 48}
    fields["num_hidden_layers"] = 6
    expected = transformers.GlmMoeDsaConfig(**fields, **schedule).indexer_types
    raw = {**fields, **schedule, "architectures": ["GlmMoeDsaForCausalLM"]}
    indexer = parse(raw, {}).indexer
    assert indexer is not None
    assert [indexer.scores_in(layer) for layer in range(6)] == [e == "full" for e in expected]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "the first one full"),
        ({"indexer_types": ["full"]}, "one of full and shared is needed for each of 3 layers"),
        ({"index_topk_pattern": "FXF"}, "indexer_types 'FXF' is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank None with index_head_dim 32"),
        ({"index_head_dim": 8}, r"at least qk_rope_head_dim \(16\)"),
        ({"index_topk": 0}, "index_topk is 0, a positive integer is needed"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "the first ones may be dense"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, told):
    raw = {**tiny.SHAPE, **tiny.LATENT, **tiny.INDEXER, "q_lora_rank": 48, **changes}
    with pytest.raises(ModelError, match=told):
        parse({**raw, "architectures": ["GlmMoeDsaForCausalLM"]}, {})


def test_a_window_on_top_is_refused(path):
    with pytest.raises(ModelError, match="a window of 40 positions is not possible with sparse"):
        with_window(read_config(path), 40, 0)


def test_the_highest_of_any_floats():
    order = torch.Generator().manual_seed(1)
    for count in (1, 7, 60, 64):
        scores = torch.randn(5, 64, generator=order)
        scores[:, ::4] = 0.0
        scores[:, ::8] = -0.0
        scores[1] = -torch.inf
        scores[2, 5:9] = torch.inf
        for row, got in zip(scores.tolist(), highest(scores, count).tolist(), strict=True):
            pairs = sorted((-score, at) for at, score in enumerate(row))
            assert got == sorted(at for _, at in pairs[:count])
