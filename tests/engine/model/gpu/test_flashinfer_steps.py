"""Whole steps with FlashInfer's stand-in: the tokens of plain torch, whoever computes what."""

import sys
from dataclasses import replace

import pytest
import torch

from tests.engine.model.paged import DEVICE

pytest.importorskip("triton")

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import Latent
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gpu.experts import ExpertWeights, add_experts
from kvrelay.engine.model.gpu.flashinfer import attention, division
from kvrelay.engine.model.gpu.flashinfer import ops as flashinfer_ops
from kvrelay.engine.model.gpu.flashinfer.division import load
from kvrelay.engine.model.gpu.flashinfer.ops import gpu_ops
from tests.engine.model import tiny
from tests.engine.model.gpu import triton_world
from tests.engine.model.gpu.flashinfer_standin import StandIn
from tests.engine.model.gpu.triton_world import World
from tests.engine.model.talks import Talk, alone, step
from tests.engine.model.tiny import tokens_of

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a stand-in, for the CPU")
LONG, SHORT = tokens_of(37, seed=1), tokens_of(3, seed=2)  # a block is of 16 tokens
DECODE = "trtllm_batch_decode_with_kv_cache"
PROMPT = "BatchPrefillWithPagedKVCacheWrapper.run"
EXPANDED = "BatchPrefillWithRaggedKVCacheWrapper.run"


@pytest.fixture
def standin(monkeypatch):
    """FlashInfer on a GPU that has all of it, also for the sizes and the dtype of tiny models."""
    made = StandIn()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", made.decode)
    for module in (division, flashinfer_ops):
        monkeypatch.setattr(module, "DTYPES", (*division.DTYPES, torch.float32))
    monkeypatch.setattr(division, "HEAD_DIMS", (16, 32))
    monkeypatch.setattr(division, "LATENT_DIMS", ((32, 24),))
    monkeypatch.setattr(flashinfer_ops, "capability", lambda device: (9, 0))
    return made


@pytest.fixture
def world_of(checkpoint_of):
    return lambda family, kind: World(checkpoint_of(family, num_hidden_layers=2), kind)


def talk(world: World) -> list[list[int]]:
    """A prompt in chunks, one beside a decode, several decodes in a row, a whole prefix again."""
    long, short = Talk(LONG, [9, 4, 6]), Talk(SHORT, [2])
    step(world, long, counts=[20])  # a chunk
    step(world, long, short)  # the rest, behind a cached prefix, beside another prompt
    other = Talk(LONG[:9], [3])
    step(world, long, short, other)  # decodes beside a prompt
    step(world, long, short, other, repeats=3)
    return [each.output for each in (long, short, other)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "calls"),
    [
        ("llama", {DECODE, PROMPT}),  # three query heads for each KV head
        ("mistral-window", {DECODE, PROMPT}),
        ("gemma2", {PROMPT}),  # windows in every second layer, and soft caps
        ("qwen3-moe", {DECODE, PROMPT, "cutlass_fused_moe"}),
        ("deepseek3", {EXPANDED, "cutlass_fused_moe"}),
    ],
)
def test_every_kind_of_model_gives_the_tokens_of_torch(standin, world_of, family, calls):
    world = world_of(family, "flashinfer")
    experts_line = "computes the experts" if "cutlass_fused_moe" in calls else "has no experts"
    assert len(world.notices) == 2
    assert sum(each.endswith(experts_line) for each in world.notices) == 1
    standin.calls.clear()
    tokens = talk(world)
    runs = {DECODE, PROMPT, EXPANDED, "cutlass_fused_moe"}
    assert {name for name, _ in standin.calls} & runs == calls
    reference = world_of(family, "torch")
    assert tokens == [
        alone(reference, Talk(prompt, blocks), len(told))
        for prompt, blocks, told in zip(
            (LONG, SHORT, LONG[:9]), ([9, 4, 6], [2], [3]), tokens, strict=True
        )
    ]


def test_decodes_are_given_the_same_addresses_in_every_pass(standin, world_of):
    """So that a graph may hold them: only what is at the addresses changes."""
    world = world_of("llama", "flashinfer")
    one = Talk(SHORT, [2])
    step(world, one)
    standin.calls.clear()
    for _ in range(3):
        step(world, one)
    calls = standin.named(DECODE)
    assert len(calls) == 3 * 2  # passes, layers
    for name in ("block_tables", "seq_lens", "workspace_buffer"):
        assert len({call[name].data_ptr() for call in calls}) == 1
    assert len({call["max_seq_len"] for call in calls}) == 1


@pytest.mark.slow
def test_short_chunks_behind_a_long_prefix_stay_absorbed(standin, world_of):
    """Beside one that is expanded: rows of both kinds come out in their places."""
    told = []
    for kind in ("flashinfer", "torch"):
        world = world_of("deepseek3", kind)
        long, other = Talk(LONG, [9, 4, 6]), Talk(LONG[:20], [2, 3])
        step(world, long, counts=[35])
        standin.calls.clear()
        step(world, long, other)  # two tokens behind 35, and a whole prompt
        told.append((long.output, other.output))
        if kind == "flashinfer":
            run = standin.named(EXPANDED)[0]
            assert (len(run["q"]), len(run["k"]), len(run["v"])) == (20, 20, 20)
    assert told[0] == told[1]


def test_what_pays_is_expanded():
    deepseek = Latent(512, 1536, 128, 64, 128)
    worth = [(8192, 8192), (2, 2), (512, 4096), (64, 64)]
    assert all(attention.is_worth_it(deepseek, *each) for each in worth)
    assert not any(
        attention.is_worth_it(deepseek, *each) for each in [(1, 1), (16, 4096), (1, 900)]
    )


@pytest.mark.slow
def test_contexts_beyond_the_buffers_stay_absorbed(standin, world_of, monkeypatch):
    # Six heads with 32 and 24 numbers in float32: 24 tokens.
    monkeypatch.setattr(attention, "EXPANDED_BYTES", 24 * 6 * (32 + 24) * 4)
    world = world_of("deepseek3", "flashinfer")
    standin.calls.clear()
    long, other = Talk(LONG, [9, 4, 6]), Talk(LONG[:20], [2, 3])
    step(world, long, other)
    assert {len(run["k"]) for run in standin.named(EXPANDED)} == {20}
    reference = world_of("deepseek3", "torch")
    assert long.output == alone(reference, Talk(LONG, [9, 4, 6]), 1)
    assert other.output == alone(reference, Talk(LONG[:20], [2, 3]), 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek3"])
def test_what_fails_at_the_start_or_differs_stays_with_triton(standin, world_of, family):
    ops = world_of(family, "flashinfer").decoder._ops
    kinds = ops._division.kinds
    pool = ops._pool.data
    with torch.inference_mode():
        ops.try_out()
        assert ops._division.kinds == kinds, ops._division.lacks  # nothing is wrong
        assert ops._experts_lack == ""
        standin.wrong = 0.2
        ops.try_out()
    assert not ops._division.kinds
    assert ops._experts_lack.startswith("results differ")
    assert ops._pool.data is pool
    name = [*kinds][-1].replace("_", " ")
    differs = f"{name}: results differ from those of Triton's kernels by 0.2"
    assert differs in ops._division.notice("0.7.2")


def test_a_library_that_raises_is_quoted(standin, world_of):
    ops = world_of("llama", "flashinfer").decoder._ops

    def fail(**_):
        raise FileNotFoundError("nvcc is not here\nin any folder")

    standin.decode.trtllm_batch_decode_with_kv_cache = fail
    with torch.inference_mode():
        ops.try_out()
    assert [*ops._division.kinds] == ["prompts"]
    assert "(decodes: FileNotFoundError: nvcc is not here)" in ops._division.notice("0.7.2")


def test_fused_experts_add_what_ours_add(standin):
    torch.manual_seed(0)
    gate_ups, downs = torch.randn(4, 48, 40), torch.randn(4, 40, 24)
    x, hidden, weights = torch.randn(7, 40), torch.randn(7, 40), torch.rand(7, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    ours, theirs = hidden.clone(), hidden.clone()
    add_experts(ours, x, ExpertWeights(gate_ups, downs), chosen, weights, "silu")
    flashinfer_ops.fuse(gate_ups, downs).add(standin, theirs, x, chosen, weights)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert standin.named("cutlass_fused_moe")[0]["use_fused_finalize"] is False


@pytest.mark.slow
def test_experts_that_flashinfer_has_no_kernel_for_stay_with_triton(standin, world_of):
    world = world_of("qwen3-moe", "flashinfer-int8")
    told = "Triton's kernels compute the experts (FlashInfer's take 16-bit weights)"
    assert world.notices[1] == told
    assert world.run(Talk(SHORT, [2]).next())[0] is not None
    assert not standin.named("cutlass_fused_moe")


def test_a_package_that_cannot_be_imported_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(
        ModelError,
        match=r"engine.attention_backend is flashinfer, which cannot be imported .*: "
        r"pip install 'kvrelay\[flashinfer\]', or set it to triton",
    ):
        load("engine.attention_backend")


def test_experts_alone_can_be_asked_for(standin, checkpoint_of):
    config, notices = read_config(checkpoint_of("qwen3-moe")), []
    pool = tiny.make_pool(config, torch.float32)
    asked = EngineSection(moe_backend="flashinfer")
    made = gpu_ops(config, pool, torch.float32, 64, "none", asked, notices)
    assert notices == ["FlashInfer 0.7.2.post1 computes the experts"]
    assert not made._division.kinds


def test_auto_is_triton(standin, world_of):
    world = world_of("llama", "triton")
    assert world.notices == []
    step(world, Talk(SHORT, [2]))
    assert standin.calls == []
    runner = world_of("llama", "auto")
    assert type(runner.decoder._ops) is type(world.decoder._ops)


@pytest.mark.slow
def test_layers_with_attention_sinks_stay_with_triton(standin, world_of, monkeypatch):
    """Beside others that do not: gemma3's other layers attend to all."""
    monkeypatch.setattr(
        triton_world, "read_config", lambda path: replace(read_config(path), num_sinks=2)
    )
    world = world_of("gemma3", "flashinfer")
    assert "decodes of 1 of 2 layers and prompts of 1 of 2 layers" in world.notices[-1]
    with torch.inference_mode():
        world.decoder._ops.try_out()
    assert [*world.decoder._ops._division.kinds] == ["decodes", "prompts"]
    reference = world_of("gemma3", "torch")
    prompt, blocks = LONG[:20], [9, 4]
    expected = alone(reference, Talk(prompt, blocks), 3)
    assert alone(world, Talk(prompt, blocks), 3) == expected
