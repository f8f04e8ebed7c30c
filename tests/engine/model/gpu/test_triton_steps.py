"""Whole steps by the GPU's kernels: the tokens of plain torch, however the work is cut. Interpreted
where there is no GPU, and then without graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.request import Pooling, SamplingParams
from tests.engine.model.checkpoint.test_quantized import fp8_config, in_fp8_blocks, in_mxfp4, write
from tests.engine.model.gpu.triton_world import DEVICE, World
from tests.engine.model.talks import DRAWN, GREEDY, Talk, alone, drafting, step
from tests.engine.model.tiny import tokens_of

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
LONG, SHORT = tokens_of(18, seed=1), tokens_of(3, seed=2)  # a block is of 16 tokens
INTERPRETED = DEVICE.type == "cpu"  # and slow
ON_GPU = pytest.mark.skipif(INTERPRETED, reason="takes a minute without a GPU")
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def triton(path):
    return World(path, "triton")


@pytest.fixture(scope="module")
def expected(path):
    """What follows each prompt, by plain torch."""
    world = World(path, "torch")
    return {
        "long": alone(world, Talk(LONG, [9, 4]), NUM_TOKENS),
        "short": alone(world, Talk(SHORT, [2], DRAWN), NUM_TOKENS),
        "greedy": alone(world, Talk(SHORT, [3]), NUM_TOKENS),
    }


def test_chunks_and_mixed_steps_give_the_tokens_of_torch(triton, expected):
    triton.pool.zero_()
    long, short, greedy = Talk(LONG, [9, 4]), Talk(SHORT, [2], DRAWN), Talk(SHORT, [3])
    step(triton, long, counts=[4])  # a chunk
    step(triton, long, short)  # the rest of one prompt beside a whole other
    step(triton, long, short, greedy)  # a prompt beside decodes
    while len(greedy.output) < NUM_TOKENS:
        step(triton, long, short, greedy)
    assert long.output[:NUM_TOKENS] == expected["long"]
    assert short.output[:NUM_TOKENS] == expected["short"]
    assert greedy.output == expected["greedy"]
    # Rows that fill a pass up to four have written nothing.
    written = triton.pool.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert written == [2, 3, 4, 9]


@pytest.mark.slow
def test_drafts_give_the_tokens_of_torch(triton, expected):
    """And are left out where a pass has no rows for them: it has four."""
    several = [Talk(LONG, [9, 4]), Talk(SHORT, [2], DRAWN), Talk(SHORT, [3])]
    tokens = [expected[name] for name in ("long", "short", "greedy")]
    step(triton, *several)
    assert drafting(triton, several[:1], tokens[:1]) + drafting(triton, several[1:], tokens[1:]) > 1
    assert [talk.output for talk in several] == tokens
    again = Talk(SHORT, [3])
    step(triton, again)
    got = triton.run(again.next(draft=[*tokens[2][1:], 1]))[0]  # five rows
    assert (got.token, got.more) == (tokens[2][1], ())


def test_rows_whose_logits_are_edited_or_told_are_sampled_as_by_the_host(triton, path, expected):
    banned = expected["greedy"][0]
    asked = SamplingParams(
        temperature=0.0, logit_bias={banned: -1000.0}, repetition_penalty=1.3, logprobs=2
    )
    reference, edited = Talk(SHORT, [3], asked), Talk(SHORT, [3], asked)
    told = World(path, "torch").run(reference.next())[0]
    got = triton.run(edited.next(), Talk(SHORT, [2], DRAWN).next())
    assert got[0].token == told.token != banned
    assert got[0].logprobs.logprob == pytest.approx(told.logprobs.logprob, abs=1e-4)
    assert [token for token, _ in got[0].logprobs.top] == [token for token, _ in told.logprobs.top]
    assert got[1].token == expected["short"][0]
    edited.take(edited.next(), got[0])
    assert triton.run(edited.next())[0].logprobs is not None


def test_penalized_rows_are_drawn_in_mixed_steps_and_in_passes(triton, path):
    """Beside a plain one, one that is also told its log-probabilities, and a prompt."""
    penalties = {"repetition_penalty": 0.3, "presence_penalty": -0.5, "frequency_penalty": -0.4}
    ways = replace(GREEDY, **penalties), DRAWN, replace(DRAWN, **penalties, logprobs=0)
    prompts, tables = (LONG, SHORT, SHORT), ([9, 4], [2], [3])
    world = World(path, "torch")
    expected = [alone(world, Talk(*each), 4) for each in zip(prompts, tables, ways, strict=True)]
    first, plain, told = (Talk(*each) for each in zip(prompts, tables, ways, strict=True))
    step(triton, plain)
    step(triton, first, plain)
    step(triton, first, plain, told)
    while len(told.output) < 4:
        step(triton, told, plain, first)
    assert [each.output[:4] for each in (first, plain, told)] == expected
    assert triton.steps._passes.counts._used, "they are counted on the device"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"block_ids": [12]}, "block ids 12 to 12 are outside the pool of 12 blocks"),
        ({"start": 16}, "1 blocks for 17 positions, 2 are needed"),
        ({"tokens": [131]}, "token ids 131 to 131 are outside the vocabulary"),
        ({"draft_tokens": [2, 131]}, "token ids 1 to 131 are outside the vocabulary"),
        ({"start": 14, "draft_tokens": [2, 2]}, "1 blocks for 17 positions, 2 are needed"),
        ({"start": 600}, "exceed the model's length"),
    ],
)
def test_a_faulty_decode_is_refused_by_name_before_anything_is_written(triton, changes, told):
    triton.pool.zero_()
    good = Talk([1], [5]).next()
    with pytest.raises(ValueError, match=f"request r: .*{told}"):
        triton.run(good, replace(Talk([1], [3]).next(), **changes))
    assert triton.pool.abs().max() == 0
    assert triton.run(good)[0] is not None


def test_blocks_that_moved_are_looked_up_anew(triton, expected):
    """A sequence that was preempted comes back with the same positions in other blocks."""
    talk = Talk(SHORT, [3])
    step(triton, talk)
    step(triton, talk)
    again = Talk(talk.tokens, [8])
    step(triton, again, counts=[len(talk.tokens) - 1])
    again.prompt = talk.prompt
    assert alone(triton, again, 4) == expected["greedy"][:4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "kv_dtype"),
    [
        ("qwen3-moe", "int8", "float8_e4m3"),
        pytest.param("qwen2", "fp8", "bfloat16", marks=ON_GPU),  # not what the interpreter has
        pytest.param("llama", "int8", "float32", marks=ON_GPU),
        pytest.param("llama", "", "float8_e4m3", marks=ON_GPU),
        pytest.param("gemma2", "", "float32", marks=ON_GPU),
        pytest.param("gemma3", "", "float32", marks=ON_GPU),
        pytest.param("mixtral", "", "float32", marks=ON_GPU),
        pytest.param("deepseek3", "", "float32", marks=ON_GPU),
        pytest.param("deepseek3", "", "float8_e4m3", marks=ON_GPU),
        pytest.param("minimax-m2", "", "float32"),
        pytest.param("mistral4", "", "float32"),
        pytest.param("llama4", "", "float32"),
        pytest.param("gpt-oss", "", "float32"),
        pytest.param("gpt-oss", "int8", "float8_e4m3"),
        pytest.param("mimo-v2", "", "float32"),
        pytest.param("mimo-v2", "", "float8_e4m3"),
    ],
)
def test_every_kind_of_model_gives_the_tokens_of_torch(family, kind, kv_dtype, checkpoint_of):
    layers = 3 if family == "mimo-v2" else 2 if INTERPRETED else 4  # MiMo names each
    model = checkpoint_of(family, num_hidden_layers=layers)
    tokens = []
    for name in ("torch", "triton"):
        dtype = "bfloat16" if kind == "fp8" else "float32"
        world = World(model, f"{name}-{kind}" if kind else name, kv_dtype, dtype=dtype)
        tokens.append(alone(world, Talk(LONG[:4] if INTERPRETED else LONG, [9, 4]), 3))
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_experts_stay_as_they_are_stored(family, checkpoint_of, tmp_path):
    source = checkpoint_of(family, num_hidden_layers=2)
    if family == "gpt-oss":
        kind, stored, config = torch.uint8, in_mxfp4(source)[0], {"quant_method": "mxfp4"}
    else:
        kind, block = torch.float8_e4m3fn, (32, 64)
        stored, config = in_fp8_blocks(source, block)[0], fp8_config(block)
    write(source, tmp_path / "model", stored, config)
    worlds = [World(tmp_path / "model", name) for name in ("torch", "triton")]
    assert worlds[1].decoder._weights.layers[-1].experts.experts.gate_ups.dtype == kind
    tokens = [alone(world, Talk(LONG[:9], [9, 4]), 3) for world in worlds]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("family", ["deepseek32", "glm5-shared"])
def test_sparse_attention_gives_the_tokens_of_torch(family, checkpoint_of):
    """A prompt in chunks, the first within `index_topk`, beside a decode, then both decode."""
    model, tokens = checkpoint_of(family, index_topk=4), []
    for kind in ("torch", "triton"):
        world, long, short = World(model, kind), Talk(LONG[:11], [9, 4]), Talk(SHORT, [3])
        step(world, long, counts=[3])
        step(world, long, short, counts=[5, None])
        step(world, long, short)
        for _ in range(3):
            step(world, long, short)
        tokens.append((long.output, short.output))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("counts", [[18], [7, 11]])
def test_what_a_prompt_gives_is_that_of_torch(triton, path, counts):
    """Beside a decode: its log-probabilities, and its embedding."""
    world, found = World(path, "torch"), []
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, pooling=Pooling.MEAN)
    for run in (triton.outputs, world.outputs):
        long, other = Talk(LONG, [9, 4], params), Talk(SHORT, [3])
        step(triton if run == triton.outputs else world, other)
        logprobs, pooled = [], b""
        for count in counts:
            share = replace(long.next(count), context=LONG, pooled=pooled)
            share.outputs_from = share.start
            given = run(other.next(), share)[1]
            long.num_computed = share.end
            logprobs += given.logprobs
            pooled = given.embedding
        found.append((logprobs, np.frombuffer(pooled, np.float32)))
    (mine, my_vector), (theirs, their_vector) = found
    assert len(mine) == len(LONG) - 1
    assert [each.logprob for each in mine] == pytest.approx([o.logprob for o in theirs], abs=1e-4)
    np.testing.assert_allclose(my_vector, their_vector, atol=1e-4)
