"""A draft head: what its passes compute, what it learns from, and runs that are stopped."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.training.draft import train as training
from kvrelay.training.draft.data import Answers, Batch, answer, batches, frequent
from kvrelay.training.draft.head import CONFIG_FILE, WEIGHTS_FILE, Head, HeadShape
from kvrelay.training.draft.measure import MOST_DRAFTS, accepted, chances
from kvrelay.training.draft.target import Sample, Target
from kvrelay.training.draft.train import WORK, Recipe, train
from tests.engine.model.tiny import VOCAB

RECIPE = Recipe(
    draft_vocab_size=120,
    max_tokens=24,
    num_prompts=16,
    num_files=8,
    num_steps=40,
    step_tokens=512,
    passes=2,
    rate=4e-3,
)
PROMPTS = [" ".join(pair) for pair in permutations("abcdefghijklmnop", 2)]


class Letters:
    """Makes tokens of the tiny model."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [3 + ord(each) % (VOCAB - 3) for each in text]


@pytest.fixture(scope="module")
def target(checkpoint_of: Callable[..., Path]) -> Target:
    """Its layers add little to a token's embedding, so most of what it says can be learnt."""
    torch.set_num_threads(1)
    return Target(
        checkpoint_of("llama", initializer_range=0.06), num_seqs=16, length=512, threads=1
    )


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("head")
    return out, train(target, Letters(), out, RECIPE, lambda *_: None, digest="aa", prompts=PROMPTS)


def small_head(seed: int = 3, num_words: int = 12) -> Head:
    torch.manual_seed(seed)
    shape = HeadShape(32, 48, 4, 2, 8, 1e-5, 10_000.0, num_words)
    head = Head(
        shape, torch.arange(num_words) * 2, torch.rand(32) + 0.5, torch.randn(num_words, 32)
    )
    with torch.no_grad():
        for each in head.parameters():
            each += 0.1 * torch.randn_like(each)
    return head


class OneByOne:
    """What a server computes: one slot after the other, with keys and values of those before."""

    def __init__(self, head: Head) -> None:
        self.weights = {name: each.detach() for name, each in head.named_parameters()}
        self.shape, self.keys, self.values = head.shape, [], []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean() + self.shape.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x

    def rotated(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        half = self.shape.head_dim // 2
        turned = slot * self.shape.rope_theta ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = turned.cos(), turned.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    def slot(self, number: int, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`number`: from 1; those before it are there, and what was there from it on is dropped."""
        s = self.shape
        del self.keys[number - 1 :], self.values[number - 1 :]
        both = self.norm(embedded, "embed_norm"), self.norm(hidden, "hidden_norm")
        x = self.linear(torch.cat(both), "fc")
        normed = self.norm(x, "layer.input_layernorm")
        q, k, v = (
            self.linear(normed, f"layer.self_attn.{name}_proj").view(-1, s.head_dim)
            for name in "qkv"
        )
        self.keys.append(self.rotated(k, number))
        self.values.append(v)
        rows = []
        for index, query in enumerate(self.rotated(q, number)):
            own = index * s.num_key_value_heads // s.num_attention_heads
            keys = torch.stack([each[own] for each in self.keys])
            values = torch.stack([each[own] for each in self.values])
            rows.append((keys @ query * s.head_dim**-0.5).softmax(0) @ values)
        x = x + self.linear(torch.cat(rows), "layer.self_attn.o_proj")
        normed = self.norm(x, "layer.post_attention_layernorm")
        gate, up = (self.linear(normed, f"layer.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(torch.nn.functional.silu(gate) * up, "layer.mlp.down_proj")

    def draft(self, hidden: torch.Tensor) -> int:
        return int(self.linear(self.norm(hidden, "norm"), "lm_head").argmax())


def test_passes_are_the_drafts_of_a_server_from_every_slot() -> None:
    head, length = small_head(), 9
    table = torch.randn(24, 32)
    embedded, hidden = torch.randn(length, 32), torch.randn(length, 32)
    drafted: list[list[int]] = []

    def draft(_: int, outputs: torch.Tensor) -> torch.Tensor:
        drafted.append(head.logits(outputs)[0].argmax(-1).tolist())
        return table[torch.tensor(drafted[-1]) * 2].unsqueeze(0)

    with torch.inference_mode():
        outputs = head.unroll(embedded[None], hidden[None], MOST_DRAFTS, draft)
        draft(0, outputs[-1])
    server = OneByOne(head)
    for first in range(length - MOST_DRAFTS):
        made = server.slot(first + 1, embedded[first], hidden[first])
        for place in range(MOST_DRAFTS):
            torch.testing.assert_close(outputs[place][0, first + place], made, atol=1e-4, rtol=1e-4)
            word = server.draft(made)
            assert drafted[place][first + place] == word
            if place + 1 < MOST_DRAFTS:
                made = server.slot(first + place + 2, table[word * 2], made)


def test_training_has_more_drafts_accepted_and_the_file_has_what_was_trained(
    target: Target, trained
) -> None:
    out, found = trained
    before = Head(found.head.shape, found.head.d2t, target.norm, target.head[found.head.d2t])
    assert found.num_steps == RECIPE.num_steps
    for old, new in zip(
        accepted(before, target, found.held_out),
        accepted(found.head, target, found.held_out),
        strict=True,
    ):
        assert new.num_tokens == old.num_tokens > 100
        if not new.temperature:
            assert new.by_place[0] > old.by_place[0] + 0.1
            assert new.per_round[-1] > old.per_round[-1] + 0.1
    assert sorted(each.name for each in out.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    loaded = Head.load(out)
    assert loaded.shape == found.head.shape
    assert loaded.shape.model_digest == "aa"
    kept = found.head.state_dict()
    assert load_file(out / WEIGHTS_FILE).keys() == kept.keys() > {"d2t", "fc.weight"}
    for name, each in loaded.state_dict().items():
        assert torch.equal(each.bfloat16(), kept[name].bfloat16()), name


class Stopped(Exception):
    pass


def test_a_run_that_was_stopped_twice_gives_the_same_head(
    target: Target, trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_STEPS", 5)

    def stop_at(text: str):
        def tell(what: str, _: float) -> None:
            if what.startswith(text):
                raise Stopped

        return tell

    arguments = target, Letters(), tmp_path, RECIPE
    for text in ("32 answers", "step 8 "):
        with pytest.raises(Stopped):
            train(*arguments, stop_at(text), digest="aa", prompts=PROMPTS)
        assert (tmp_path / WORK).is_dir()
    with pytest.raises(ValueError, match="another recipe"):
        train(
            *arguments[:3], replace(RECIPE, seed=1), lambda *_: None, digest="aa", prompts=PROMPTS
        )
    steps: list[str] = []
    train(*arguments, lambda what, _: steps.append(what), digest="aa", prompts=PROMPTS)
    done = [each.split(",")[0] for each in steps if "step" in each]
    assert done == [f"step {number} of 40" for number in range(6, 41)]
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == (trained[0] / WEIGHTS_FILE).read_bytes()


def test_drafts_are_drawn_with_the_luck_that_the_model_drew_with(target: Target) -> None:
    """So a head with the model's very distributions has each draft accepted."""
    head = Head(replace(small_head().shape, hidden_size=96), None, target.norm, target.head)
    made = answer(target, [[1, 5, 9, 11], [1, 7, 8]], 0.8, seed=4, max_tokens=20)
    for sample, states in made:
        said = torch.tensor(sample.tokens[sample.num_prompt_tokens :])
        logits = states[1:-1].float() @ target.head.float().T  # after each slot but the last
        drawn = ((logits / 0.8).softmax(-1) / chances(head, target, sample)[:-1]).argmax(-1)
        assert torch.equal(drawn[-len(said) :], said)


def test_batches_have_every_answer_once_and_say_what_is_part_of_it() -> None:
    samples = [Sample([*range(n)], 3) for n in (9, 70, 5, 130, 66, 7)]
    pairs = [(each, torch.arange(len(each.tokens)).bfloat16()[:, None]) for each in samples]
    order = batches(pairs, 140, seed=2)
    assert sorted(at for each in order for at in each) == [*range(6)]
    assert order == batches(pairs, 140, seed=2)
    assert {tuple(sorted(each)) for each in order} == {(0, 2, 5), (1, 4), (3,)}
    batch = Batch.of([pairs[2], pairs[0]])
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert batch.hidden[0, :, 0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert batch.after[1, :, 0].tolist() == [*range(1, 9)]
    assert batch.is_answer.tolist() == [
        [False, False, True, True, *[False] * 4],
        [False, False, *[True] * 6],
    ]


def test_the_draft_vocabulary_is_what_answers_have_most_often() -> None:
    samples = [Sample([7, 7, 7, 5, 5, 2], 2), Sample([1, 2, 2, 9], 1)]
    ids, share = frequent([Answers(samples, torch.zeros(10, 1))], 12, 2)
    assert ids.tolist() == [2, 5]
    assert share == pytest.approx(5 / 7)


def test_prompts_that_leave_no_room_are_refused(target: Target) -> None:
    with pytest.raises(Exception, match=r"no prompt of 1 leaves room for an answer of 600 tokens"):
        answer(target, [[1] * 50], 0.0, 0, 600)
