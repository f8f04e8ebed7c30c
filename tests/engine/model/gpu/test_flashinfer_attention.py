"""FlashInfer's calls as a stand-in records them: views of the pool, strides, page lists, and what
the stand-in computes from them beside the answer in float64."""

import inspect
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.model.paged import DEVICE, expected, paged

pytest.importorskip("triton")

from kvrelay.engine.model.config import Latent
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.flashinfer import division
from kvrelay.engine.model.gpu.flashinfer.attention import PagedAttention, page_lists
from kvrelay.engine.model.gpu.flashinfer.division import Division, divide
from kvrelay.engine.model.gpu.flashinfer.ops import trial_batch
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.gpu.flashinfer_parameters import PARAMETERS, VERSION
from tests.engine.model.gpu.flashinfer_standin import StandIn

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a stand-in, for the CPU")
HOPPER, ADA = (9, 0), (8, 9)
CONFIG = config_of(4, 2, 64, hidden=256)
LATENT = replace(
    CONFIG, num_kv_heads=1, head_dim=576, latent=Latent(512, None, 128, 64, 128), ropes=()
)
WINDOW = 24
DECODES = [(1, 1), (1, 16), (1, 17), (1, 90)]
PROMPTS = [(5, 5), (33, 33), (16, 16)]
MIXED = [(1, 20), (7, 30), (16, 48), (1, 64), (40, 90)]  # decodes, chunks behind a prefix


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pool_of(dtype=torch.bfloat16, block_size=16, config=CONFIG, num_blocks=3):
    planes = 2 if config.latent is None else 1
    shape = (num_blocks, config.num_layers, planes, config.num_kv_heads)
    if dtype == torch.uint8:
        size = block_size * (config.head_dim + 1)
        return Pool(torch.zeros((*shape, size), dtype=dtype), config.head_dim)
    data = torch.zeros((*shape, block_size, config.head_dim), dtype=dtype)
    return Pool(data, config.head_dim)


def batch_of(case, config=CONFIG):
    """The batch that a step over `case` would have."""
    batch, _ = trial_batch([(count, context) for _, count, context in case.spans], 16, DEVICE)
    starts, counts, contexts, tables = case.tensors
    return replace(
        batch,
        query_start=starts,
        query_len=counts,
        context_len=contexts,
        block_tables=tables.contiguous(),
    )


@pytest.mark.parametrize(
    ("lengths", "softcap"),
    [(DECODES, 0.0), (PROMPTS, 0.0), (PROMPTS, 5.0), (MIXED, 0.0), (MIXED, 5.0)],
    ids=["decodes", "prompts", "prompts-softcap", "mixed", "mixed-softcap"],
)
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_calls_give_the_attention_of_every_row(dtype, window, lengths, softcap):
    decodes = lengths is DECODES
    config = replace(CONFIG, windows=(window, window), attention_softcap=softcap)
    case = paged(lengths, 2, 64, dtype=dtype, layer=1, given_back=window)
    if not window:
        case.block_tables.clamp_(min=0)  # past a context: 0, as a batch has it
    standin, both = StandIn(), Division((True, True), (True, True))
    paged_attention = PagedAttention(standin, config, both, dtype, DEVICE)
    paged_attention.use_pool(case.pool)
    batch = batch_of(case)
    qkv = torch.randn(case.num_tokens, 8 * 64).to(dtype)
    if decodes:
        paged_attention.begin_decodes(batch)
        out = paged_attention.decodes(qkv, 1)
    else:
        paged_attention.begin_prompts(batch)
        out = paged_attention.prompts(qkv, 1)
    queries = qkv[:, : 4 * 64].view(-1, 4, 64)
    scale = config.score_scale
    answer = expected(case, queries, 4, scale, window=window, softcap=softcap)
    torch.testing.assert_close(out.view(-1, 4, 64).double(), answer, rtol=1e-2, atol=1e-2)
    name = "trtllm_batch_decode_with_kv_cache" if decodes else "BatchPrefillWithPagedKVCacheWrapper"
    assert standin.calls[-1][0].startswith(name)


def test_pages_are_views_of_the_pool_and_queries_of_qkv():
    standin, both = StandIn(), Division((True, True), (True, True))
    case = paged(MIXED, 2, 64, dtype=torch.bfloat16, layers=2)
    case.block_tables.clamp_(min=0)
    attention = PagedAttention(standin, CONFIG, both, torch.bfloat16, DEVICE)
    attention.use_pool(case.pool)
    attention.begin_prompts(batch_of(case))
    qkv = torch.randn(case.num_tokens, 8 * 64, dtype=torch.bfloat16)
    data = case.pool.data
    for layer in (0, 1):
        data[:, layer].nan_to_num_()
        attention.prompts(qkv, layer)
        run = standin.named("BatchPrefillWithPagedKVCacheWrapper.run")[-1]
        for plane, pages in enumerate(run["paged_kv_cache"]):
            assert pages.data_ptr() == data[0, layer, plane].data_ptr()
            assert pages.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            assert pages.shape == (len(data), 2, 16, 64)
            # From page to page all layers and both planes, then heads, tokens, numbers.
            assert pages.stride() == (2 * 2 * 2 * 16 * 64, 16 * 64, 64, 1)
        assert run["q"].data_ptr() == qkv.data_ptr()
        assert run["q"].stride() == (8 * 64, 64, 1)


@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.integers(0, 200)).map(lambda n: (n[0], n[0] + n[1])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([16, 32, 128]),
)
def test_page_lists_are_those_of_a_loop(lengths, block_size):
    spans, first, starts, pages, entries = [], 0, [0], [0], []
    width = max(-(-context // block_size) for _, context in lengths) + 1
    for seq, (count, context) in enumerate(lengths):
        spans.append((first, count, context))
        first += count
        starts.append(first)
        entries += [seq * width + page for page in range(-(-context // block_size))]
        pages.append(len(entries))
    found = page_lists(spans, block_size, width)
    assert found.query_starts.tolist() == starts
    assert found.page_starts.tolist() == pages
    assert found.entries.tolist() == entries
    for last, (_, context) in zip(found.last_page_len.tolist(), lengths, strict=True):
        assert 1 <= last <= block_size
        assert (context - last) % block_size == 0


def test_a_plan_is_made_once_a_step_for_each_window():
    config = replace(CONFIG, num_layers=4, windows=(WINDOW, 0, WINDOW, 0))
    standin, both = StandIn(), Division((True,) * 4, (True,) * 4)
    attention = PagedAttention(standin, config, both, torch.bfloat16, DEVICE)
    case = paged(PROMPTS, 2, 64, dtype=torch.bfloat16, layers=2)
    case.block_tables.clamp_(min=0)
    case.pool.data.nan_to_num_()
    attention.use_pool(case.pool)
    tables = case.block_tables.contiguous()
    attention.begin_prompts(replace(batch_of(case), more_tables=tables.unsqueeze(0)))
    qkv = torch.randn(case.num_tokens, 8 * 64, dtype=torch.bfloat16)
    for layer in range(4):
        attention.prompts(qkv, layer)
    plans = standin.named("BatchPrefillWithPagedKVCacheWrapper.plan")
    assert sorted(plan["window_left"] for plan in plans) == [-1, WINDOW - 1]
    assert all(plan["sm_scale"] == 64**-0.5 for plan in plans)
    assert len(standin.named("BatchPrefillWithPagedKVCacheWrapper")) == 2


@pytest.mark.parametrize(
    ("changes", "pool", "capability", "decodes", "prompts", "said"),
    [
        ({}, {}, HOPPER, 2, 2, "attention: decodes of all layers and prompts of all layers"),
        ({}, {}, ADA, 0, 2, "prompts of all layers; Triton's kernels the rest (decodes: compute"),
        ({}, {"block_size": 8}, HOPPER, 0, 2, "decodes: blocks of 8 tokens"),
        ({"attention_softcap": 5.0}, {}, HOPPER, 0, 2, "decodes: soft-capped scores"),
        ({"windows": (WINDOW, 0)}, {}, HOPPER, 2, 2, "decodes of all layers"),
        ({"windows": (WINDOW, 0), "num_sinks": 4}, {}, HOPPER, 1, 1, "1 of 2 layers; .*sinks"),
        ({"head_dim": 96}, {}, HOPPER, 0, 0, "no attention of this model.*heads of 96 dim"),
        ({}, {"dtype": torch.float32}, HOPPER, 0, 0, "float32 is not a 16-bit type"),
        ({}, {"dtype": torch.uint8}, HOPPER, 0, 0, "KV in FP8 has a scale per token"),
    ],
)
def test_what_flashinfer_lacks_stays_with_triton_in_words(
    changes, pool, capability, decodes, prompts, said
):
    config = replace(CONFIG, **changes)
    made = pool_of(**pool, config=config)
    dtype = torch.bfloat16 if made.is_fp8 else made.data.dtype
    found = divide(config, made, dtype, capability)
    assert (sum(found.decodes), sum(found.prompts)) == (decodes, prompts)
    assert not found.latent_prompts
    assert re.search(said.replace("(", "\\("), found.notice("0.7.2"))


def test_latents_are_expanded_for_prompts_only():
    found = divide(LATENT, pool_of(config=LATENT), torch.bfloat16, ADA)
    assert (any(found.decodes), any(found.prompts), found.latent_prompts) == (False, False, True)
    assert "prompts with expanded latents; Triton's kernels the rest" in found.notice("0.7.2")
    assert LATENT.latent is not None
    other = replace(LATENT, latent=replace(LATENT.latent, value_dim=96))
    assert not divide(other, pool_of(config=other), torch.bfloat16, HOPPER).latent_prompts
    in_fp8 = pool_of(torch.uint8, config=LATENT)
    assert not divide(LATENT, in_fp8, torch.bfloat16, HOPPER).latent_prompts
    assert (192, 128) in division.LATENT_DIMS


def test_recorded_parameters_are_those_of_the_package():
    """Where it is installed; it needs no GPU for that."""
    flashinfer = pytest.importorskip("flashinfer")
    if flashinfer.__version__ != VERSION:
        pytest.skip(f"recorded from {VERSION}")
    for name, (required, others) in PARAMETERS.items():
        owner, _, method = name.partition(".")
        found = getattr(flashinfer, owner, None) or getattr(flashinfer.decode, owner)
        found = getattr(found, method) if method else found
        parameters = inspect.signature(found).parameters.values()
        names = {each.name for each in parameters if each.kind is not each.VAR_POSITIONAL}
        assert names - {"self"} == {*required.split(), *others.split()}, name
