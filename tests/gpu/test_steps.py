"""Whole steps on a GPU: captured or not, in every dtype, the same tokens.

`pytest -m gpu tests/gpu tests/engine/model` on a machine with one; Ray is not needed.
"""

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.gpu.triton_world import World
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import GREEDY, Talk, alone, step
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import HYBRID, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DRAWN = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=5)
PROMPTS = [tokens_of(count, seed=count) for count in (37, 20, 5)]
BLOCKS = ([9, 4, 7, 1], [2, 11, 8], [3, 6])


def talk_all(world: World) -> list[list[int]]:
    """Three sequences together, two greedy and one drawn, as many passes in a row as may be."""
    samplings = (GREEDY, DRAWN, GREEDY)
    talks = [Talk(*each) for each in zip(PROMPTS, BLOCKS, samplings, strict=True)]
    step(world, *talks)
    while len(talks[0].output) < 24:
        room = min(-len(talk.tokens) % 16 for talk in talks)
        step(world, *talks, repeats=max(1, min(room, 24 - len(talks[0].output))))
    return [talk.output for talk in talks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3"])
@pytest.mark.parametrize("kind", ["triton", "triton-int8"])
def test_captured_steps_give_the_tokens_of_steps_that_are_not(llama, dtype, kv_dtype, kind):
    kv = dtype if kv_dtype == "auto" else kv_dtype
    captured, plain = (World(llama, kind, kv, graphs, dtype) for graphs in (True, False))
    assert talk_all(captured) == talk_all(plain)
    assert torch.equal(captured.pool.view(torch.uint8), plain.pool.view(torch.uint8))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma3", "deepseek3", "deepseek32"])
def test_steps_of_other_families_can_be_captured(family, checkpoint_of):
    path = checkpoint_of(family)
    captured, plain = (World(path, "triton", graphs=graphs) for graphs in (True, False))
    assert talk_all(captured) == talk_all(plain)


@pytest.mark.parametrize("family", ["gpt-oss", "mimo-v2", *HYBRID])
def test_a_sized_pool_gives_the_tokens_of_a_cpu(family, checkpoint_of):
    """What is bound to the pool is bound to the one that is made of measured memory."""
    path, options = checkpoint_of(family), {"dtype": "float32", "max_num_seqs": 2}
    small = {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.05}
    ours = model_runner(path, device="cuda", num_blocks=0, **options, **small)
    theirs = model_runner(path, device="cpu", num_blocks=60, **options)
    blocks = [59 - index for index in range(3 * theirs.kv_spec.num_groups)]
    expected = generate(theirs, PROMPTS[0], blocks, 12, temperature=0.0)
    assert generate(ours, PROMPTS[0], blocks, 12, temperature=0.0) == expected


def test_tokens_are_those_of_torch_in_float32(llama):
    captured, reference = World(llama, "triton", graphs=True), World(llama, "torch")
    expected = [
        alone(reference, Talk(prompt, blocks), 24)
        for prompt, blocks in zip(PROMPTS, BLOCKS, strict=True)
    ]
    together = talk_all(captured)
    assert (together[0][:24], together[2][:24]) == (expected[0], expected[2])
    assert alone(captured, Talk(PROMPTS[1], BLOCKS[1]), 24) == expected[1]


def test_logits_in_bfloat16_stay_near_those_in_float32(llama):
    """Within what torch in bfloat16 loses, by a fifth."""
    told = SamplingParams(temperature=0.0, logprobs=131)
    lines = []
    for kind, dtype in (("triton", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")):
        world = World(llama, kind, dtype, dtype=dtype)
        sampled = world.run(Talk(PROMPTS[0], BLOCKS[0], told).next())[0]
        lines.append(torch.tensor([logprob for _, logprob in sorted(sampled.logprobs.top)]))
    kernels, plain = ((each - lines[2]).abs().mean() for each in lines[:2])
    assert 0 < kernels < 1.2 * plain


@pytest.mark.parametrize("graphs", [True, False])
def test_a_runner_uses_the_kernels_and_says_nothing(llama, graphs):
    told = []
    runner = model_runner(
        llama,
        device="cuda",
        dtype="float32",
        num_blocks=12,
        max_num_seqs=4,
        cuda_graphs=graphs,
        progress=told.append,
    )
    assert runner.notices == []
    assert ("capturing decode steps: 3 of 3" in told) == graphs
    talk, reference = Talk(PROMPTS[1], BLOCKS[1]), World(llama, "torch")
    while len(talk.output) < 12:
        share = talk.next()
        done = runner.execute(Step(0, [share], repeats=-len(talk.tokens) % 16 or 1))
        talk.take(share, done.sampled[0])
    assert talk.output[:12] == alone(reference, Talk(PROMPTS[1], BLOCKS[1]), 12)


def test_nothing_is_compiled_after_the_start(llama):
    import triton

    compiled = []
    world = World(llama, "triton", graphs=True)
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        talk_all(world)
        alone(world, Talk(tokens_of(33, seed=3), [9, 4, 7]), 3)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []
