"""FlashInfer itself on a GPU, where it is installed.

`pytest -m gpu tests/gpu` on a machine with one; its kernels are compiled when they are first used.
"""

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.request import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.gpu.triton_world import World
from tests.engine.model.talks import Talk, step
from tests.engine.model.tiny import make_checkpoint, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [tokens_of(count, seed=count) for count in (37, 20, 5)]
BLOCKS = ([9, 4, 7, 1], [2, 11, 8], [3, 6])
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
TOLD = SamplingParams(temperature=0.0, logprobs=131)


def logprobs(world: World) -> list[torch.Tensor]:
    """Computes every token of the vocabulary after a prompt, one behind a prefix, and decodes of
    both."""
    long, other = Talk(PROMPTS[0], BLOCKS[0], TOLD), Talk(PROMPTS[1], BLOCKS[1], TOLD)
    world.run(long.next(20))
    long.num_computed = 20
    rows = []
    for _ in range(3):
        sampled = world.run(long.next(), other.next())
        rows += [torch.tensor([p for _, p in sorted(each.logprobs.top)]) for each in sampled]
        for talk, token in zip((long, other), (5, 9), strict=True):  # alike for every world
            talk.num_computed = len(talk.tokens)
            talk.tokens.append(token)
    return rows


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"head_dim": 128}),
        ("qwen3-moe", {"head_dim": 64}),
        ("gemma2", {"head_dim": 64}),
        ("gemma3", {"head_dim": 64}),
        ("deepseek3", LATENT),
    ],
)
def test_logits_stay_near_those_in_float32(tmp_path, monkeypatch, family, sizes, graphs):
    """Within what torch in bfloat16 loses, by a fifth."""
    pytest.importorskip("flashinfer")
    kind, changes = tiny.FAMILIES[family]
    monkeypatch.setitem(tiny.FAMILIES, family, (kind, {**changes, **sizes}))
    make_checkpoint(family, tmp_path)
    ours = World(tmp_path, "flashinfer", "bfloat16", graphs, "bfloat16")
    told = "; ".join(ours.notices)
    assert "computes attention" in told
    assert "differ" not in told
    assert "Error" not in told
    plain = World(tmp_path, "torch", "bfloat16", dtype="bfloat16")
    exact = logprobs(World(tmp_path, "torch"))
    lost = [
        torch.stack([(a - b).abs().mean() for a, b in zip(logprobs(world), exact, strict=True)])
        for world in (ours, plain)
    ]
    assert lost[0].mean() < 1.2 * lost[1].mean()


def test_captured_steps_give_the_tokens_of_steps_that_are_not(tmp_path, monkeypatch):
    pytest.importorskip("flashinfer")
    kind, changes = tiny.FAMILIES["llama"]
    monkeypatch.setitem(tiny.FAMILIES, "llama", (kind, {**changes, "head_dim": 64}))
    make_checkpoint("llama", tmp_path)
    outputs = []
    for graphs in (True, False):
        world = World(tmp_path, "flashinfer", "bfloat16", graphs, "bfloat16")
        talks = [Talk(*each) for each in zip(PROMPTS, BLOCKS, strict=True)]
        step(world, *talks)
        while len(talks[0].output) < 20:
            room = min(-len(talk.tokens) % 16 for talk in talks)
            step(world, *talks, repeats=max(1, min(room, 20 - len(talks[0].output))))
        outputs.append([talk.output for talk in talks])
    assert outputs[0] == outputs[1]
