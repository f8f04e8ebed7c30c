"""What becomes of each field of a request at vLLM: it has a name there, is edited in by us, or is
refused in words; and of a stream that was lost."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

from kvrelay.cluster.api.constraints.calls import Before, answer_grammar
from kvrelay.cluster.api.constraints.grammar import grammar_of
from kvrelay.decode_worker.vllm.draws import keep_draws
from kvrelay.decode_worker.vllm.parameters import (
    EDITS,
    FATES,
    depends_on_output,
    options,
    structure,
    unsupported,
)
from kvrelay.engine.request import Pooling, ReasoningBudget, SamplingParams
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.worker.test_vllm_worker import GREEDY, PROMPTS, assert_clean, greedy
from tests.worker.test_vllm_worker import cluster as cluster
from tests.worker.test_vllm_worker import model_dir as model_dir

PLAIN = SamplingParams(max_tokens=8, temperature=0.5, is_seeded=False)
OTHERWISE: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.7,
    "top_p": 0.0,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "stop_token_ids": (2,),
    "min_tokens": 3,
    "seed": 5,
    "is_seeded": True,
    "logprobs": 2,
    "logprob_token_ids": (4,),
    "allowed_token_ids": (4, 5),
    "bad_words": ((4, 5),),
    "grammar": "start: /a/",
    "reasoning": ReasoningBudget(4, 2),
    "prompt_logprobs": 1,
    "pooling": Pooling.MEAN,
}
NO_EFFECT = {"prediction": (4, 5), "expands": True}  # on what comes


def test_every_field_of_a_request_has_a_fate() -> None:
    names = {each.name for each in fields(SamplingParams)}
    assert FATES.keys() == names
    assert OTHERWISE.keys() | NO_EFFECT.keys() == names


@pytest.mark.parametrize("edits", [True, False])
@pytest.mark.parametrize("name", OTHERWISE)
def test_no_field_is_dropped(name: str, edits: bool) -> None:
    other = replace(PLAIN, **{name: OTHERWISE[name]})
    if why := unsupported(other, edits=edits):
        assert "400" in FATES[name]
        assert "vLLM" in why
        return
    other = replace(other, is_seeded=True) if name == "seed" else other
    assert options(other, sent=False, edits=edits) != options(PLAIN, sent=False, edits=edits)


def test_a_seed_is_given_only_where_a_client_has_given_one() -> None:
    assert options(PLAIN, sent=False)["seed"] is None
    assert options(PLAIN, (1, 2), sent=True)["seed"] is None
    seeded = replace(PLAIN, seed=7, is_seeded=True)
    assert options(seeded, sent=False)["seed"] == 7
    assert options(seeded, (1, 2), sent=True)["seed"] not in (7, None)
    # Where nothing else holds a stream to what it was, draws have to be repeated.
    drawn = replace(PLAIN, seed=7, grammar="start: /a/")
    assert options(drawn, sent=False)["seed"] is None
    assert options(drawn, sent=False, edits=False)["seed"] == 7


class _Runner:
    """Samples as vLLM's does: of all rows that have a generator, and of those whose prompt is not
    computed to its end the draw is taken back."""

    def __init__(self) -> None:
        self.rows = [torch.Generator().manual_seed(7) for _ in range(2)]
        self.input_batch = SimpleNamespace(generators=dict(enumerate(self.rows)))
        self.discard_request_mask = SimpleNamespace(np=np.array([True, False]))

    def sample_tokens(self) -> dict[int, int]:
        found = self.input_batch.generators.items()
        drawn = {row: int(torch.randint(1 << 30, (1,), generator=g)) for row, g in found}
        for row in np.nonzero(self.discard_request_mask.np)[0]:
            if (generator := self.input_batch.generators.get(int(row))) is not None:
                generator.set_offset(generator.get_offset() - 4)
        return drawn


def test_a_seed_gives_the_same_draws_however_long_the_prompt_takes() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        _Runner().sample_tokens()
    runner = _Runner()
    assert keep_draws(SimpleNamespace(model_runner=runner))
    first, second = runner.sample_tokens(), runner.sample_tokens()
    assert (set(first), set(second)) == ({1}, {1})
    runner.discard_request_mask.np[:] = False
    drawn = [runner.sample_tokens()[0] for _ in range(2)]
    assert drawn == [first[1], second[1]]
    assert list(runner.input_batch.generators.values()) in (runner.rows, runner.rows[::-1])
    assert not keep_draws(SimpleNamespace(model_runner=object()))


def test_what_depends_on_the_output_is_generated_again() -> None:
    assert not depends_on_output(replace(PLAIN, bad_words=((1,),), repetition_penalty=2.0))
    for name in ("bad_words", "grammar", "presence_penalty", "frequency_penalty"):
        assert depends_on_output(replace(PLAIN, **{name: OTHERWISE[name]})), name
    again = options(replace(PLAIN, grammar="start: /a/"), (), (5, 6), sent=True)
    assert again["max_tokens"] == 8
    assert again["extra_args"] == {EDITS: {"known": [5, 6]}}


# Grammars of several parts


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}


class Bytes:
    """A tokenizer of bytes, with an end."""

    eos_token_id, bos_token_id, unk_token_id = 256, None, None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def allowed(matcher: Any) -> list[int]:
    mask = allocate_token_bitmask(1, 257)
    fill_next_token_bitmask(matcher, mask)
    bits = np.unpackbits(mask.numpy().view("uint8")[0], bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[:257])]


@pytest.mark.parametrize(
    "answer",
    [
        grammar_of("json", CITY, {}),
        grammar_of("regex", "[ab}]+@answer", {}),
        grammar_of("grammar", 'start: "x" B | "}"\nB: /[}"]+/', {}),
        grammar_of("choice", ["@answer", "a/b", "{"], {}),
    ],
    ids=["schema", "regular expression", "lark", "texts"],
)
def test_parts_of_a_grammar_are_one_that_allows_the_same(answer: str) -> None:
    parts = answer_grammar(answer, lambda name: None, Before.MAY_THINK)
    assert len(json.loads(parts)["grammars"]) == 2
    one = llguidance.grammar_from("grammar", structure(parts)["grammar"])
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    for seed in range(8):
        draws, num_steps = random.Random(seed), 0
        both = [llguidance.LLMatcher(tokenizer, each) for each in (parts, one)]
        while not both[0].is_stopped() and num_steps < 60:
            first, second = map(allowed, both)
            assert first == second
            token = draws.choice(first)
            assert all(each.consume_token(token) for each in both)
            num_steps += 1
        assert num_steps
        assert both[0].is_stopped() == both[1].is_stopped()


def test_a_part_that_is_not_there_is_refused_in_words() -> None:
    lacks = '{"grammars": [{"lark_grammar": "start: @b"}, {"name": "a", "lark_grammar": "x"}]}'
    assert structure(lacks) == {}
    assert "vLLM" in unsupported(replace(PLAIN, grammar=lacks))


# Rows of logits


@pytest.fixture
def row_edits(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm_stand_in.install(monkeypatch)
    from kvrelay.decode_worker.vllm.edits import RowEdits

    return RowEdits


def row(*banned: int) -> torch.Tensor:
    logits = torch.arange(8, dtype=torch.float32)
    logits[list(banned)] = -torch.inf
    return logits


def left(logits: torch.Tensor) -> list[int]:
    return torch.flatten(torch.nonzero(logits != -torch.inf)).tolist()


def test_stop_tokens_wait_for_min_tokens_unless_a_grammar_has_left_nothing_else(
    row_edits: Any,
) -> None:
    edit = row_edits(min_tokens=2, stops=[1, 7, 99])
    assert left(edit([], row())) == [0, 2, 3, 4, 5, 6]
    assert left(edit([3], row(0, 2, 3, 4, 5, 6))) == [1, 7]
    assert left(edit([3, 4], row())) == [*range(8)]


def test_reasoning_ends_where_its_budget_does(row_edits: Any) -> None:
    edit = row_edits(budget=[2, 5, 4], before=[0, 4])
    assert left(edit([3], row())) == [*range(8)]
    assert left(edit([3, 3], row())) == [5]
    assert left(edit([3, 3], row(5))) == [0, 1, 2, 3, 4, 6, 7], "a grammar forbids it"
    assert left(edit([3, 3, 5], row())) == [*range(8)]


def test_an_output_begins_with_what_is_known_of_it(row_edits: Any) -> None:
    edit = row_edits(known=[3, 2])
    assert [left(edit(output, row())) for output in ([], [3])] == [[3], [2]]
    assert left(edit([3, 2], row())) == [*range(8)]


# Over the whole worker


def test_bans_and_budgets_hold_at_a_worker(cluster: LocalCluster) -> None:
    prompt, few = PROMPTS[1], replace(GREEDY, max_tokens=12)
    first, second, *_ = greedy(prompt, 12)
    [one] = cluster.generate([prompt], replace(few, bad_words=((first,),)))
    assert one.tokens[0] == (first + 1) % 256
    [two] = cluster.generate([prompt], replace(few, bad_words=((first, second),)))
    assert two.tokens[:2] == [first, (second + 1) % 256]
    [thinks] = cluster.generate([prompt], replace(few, reasoning=ReasoningBudget(3, 9)))
    assert thinks.tokens[3] == 9
    assert thinks.tokens[:3] == greedy(prompt, 3)
    assert_clean(cluster)


def test_without_a_seed_no_two_streams_are_the_same(cluster: LocalCluster) -> None:
    drawn = replace(GREEDY, temperature=0.8, max_tokens=20, is_seeded=False)
    answers = cluster.generate([PROMPTS[0]] * 6, drawn)
    assert len({tuple(each.tokens) for each in answers}) == 6
    seeds = {each.seed for each in vllm_stand_in.LLMEngine.made}
    assert len(seeds) == 2, "each worker has draws of its own"
    again = cluster.generate([PROMPTS[0]] * 3, replace(drawn, is_seeded=True, seed=3))
    assert len({tuple(each.tokens) for each in again}) == 1
