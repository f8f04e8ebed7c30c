"""Outputs that match a grammar: the same tokens by the kernels, by torch, with drafts, and on a
worker that takes over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch

from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.sampling import grammar as module
from kvrelay.engine.model.sampling.grammar import Grammars
from kvrelay.engine.request import ReasoningBudget, SamplingParams
from kvrelay.engine.step import Sampled, ScheduledSeq, Step, StepDone
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import Talk

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "population", "capital"],
    "additionalProperties": False,
}
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides=STYLE)
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, stop_token_ids=(2,), grammar=GRAMMAR)
DRAWN = replace(GREEDY, temperature=1.0, seed=7)
BLOCK = 16


@pytest.fixture(scope="module", params=["default", 1, 31, 64, 267])
def model_dir(
    request: pytest.FixtureRequest, smollm2_dir: Path, make_padded_model: Callable[[int], Path]
) -> Path:
    """The default model, and models whose embedding has so many rows more than the tokenizer."""
    return smollm2_dir if request.param == "default" else make_padded_model(request.param)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return model_runner(model_dir, num_blocks=160, threads=2)


@pytest.fixture(scope="module")
def prompt(smollm2_dir: Path) -> list[int]:
    ids: list[int] = tokenizer_of(smollm2_dir).encode("A city as JSON, Paris:\n").ids
    return ids


def tokenizer_of(smollm2_dir: Path) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def text_of(smollm2_dir: Path, tokens: list[int]) -> str:
    return str(tokenizer_of(smollm2_dir).decode(tokens))


class Output(Talk):
    """One sequence that is generated step by step, in blocks of its own."""

    def __init__(
        self, name: str, prompt: list[int], sampling: SamplingParams, first_block: int = 0
    ) -> None:
        super().__init__(prompt, list(range(first_block, first_block + 16)), sampling)
        self.name = name
        self.forced: tuple[int, ...] = ()
        self.num_passes = 0

    def share(self, *, drafts: bool) -> ScheduledSeq:
        has_room = drafts and len(self.tokens) == self.num_computed + 1
        room = min(-len(self.tokens) % BLOCK, 7) if has_room else 0
        return replace(self.next(draft=self.forced[:room]), request_id=self.name)

    def take(self, share: ScheduledSeq, sampled: Sampled | None) -> None:
        assert sampled is not None
        super().take(share, sampled)
        self.num_passes += 1
        self.forced = sampled.forced

    @property
    def is_done(self) -> bool:
        count = len(self.output)
        return self.sampling.finish_reason(self.tokens[-1] if count else None, count) is not None


def run(runner: ModelRunner, *seqs: ScheduledSeq) -> StepDone:
    return runner.execute(Step(0, list(seqs)))


def generate(
    runner: ModelRunner, output: Output, *, drafts: bool = False, most: int = 1000
) -> list[int]:
    while not output.is_done and len(output.output) < most:
        share = output.share(drafts=drafts)
        done = run(runner, share)
        if not done.waiting:  # else the grammar still compiles, and the step is run again
            output.take(share, *done.sampled)
    return output.output


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_output_matches_its_schema_however_it_is_computed(
    runner: ModelRunner, prompt: list[int], smollm2_dir: Path, sampling: SamplingParams
) -> None:
    kind = "greedy" if sampling is GREEDY else "drawn"
    tokens = generate(runner, Output(f"{kind}-1", prompt, sampling))
    assert tokens[-1] == 2, "it ends where the text is complete"
    value = json.loads(text_of(smollm2_dir, tokens[:-1]))
    assert set(value) == {"name", "population", "capital"}
    # by torch, which also says how likely each was
    told = Output(f"{kind}-2", prompt, replace(sampling, logprobs=0))
    assert generate(runner, told) == tokens
    # with the tokens that have to follow verified in one pass
    drafted = Output(f"{kind}-3", prompt, sampling)
    assert generate(runner, drafted, drafts=True) == tokens
    assert drafted.num_passes < 0.7 * len(tokens)


@pytest.mark.slow
def test_another_worker_goes_on_in_mid_output(
    runner: ModelRunner, prompt: list[int], model_dir: Path
) -> None:
    whole = generate(runner, Output("whole", prompt, DRAWN))
    other = model_runner(model_dir, num_blocks=64, threads=2)
    for cut in (1, 5, len(whole) - 1):
        begun = Output(f"begun-{cut}", prompt, DRAWN)
        generate(runner, begun, most=cut)
        taken = Output(f"begun-{cut}", prompt, DRAWN)
        taken.tokens = list(begun.tokens)
        assert generate(other, taken) == whole


@pytest.mark.slow
def test_one_of_a_batch_has_a_grammar_and_the_others_have_none(
    runner: ModelRunner, prompt: list[int]
) -> None:
    free = replace(GREEDY, grammar="", max_tokens=12)
    expected = generate(runner, Output("free-alone", prompt, free))
    constrained = generate(runner, Output("constrained-alone", prompt, GREEDY))[:12]
    outputs = [Output("a", prompt, GREEDY), Output("b", prompt, free, first_block=16)]
    for _ in range(12):
        shares = [output.share(drafts=False) for output in outputs]
        for output, share, sampled in zip(
            outputs, shares, run(runner, *shares).sampled, strict=True
        ):
            output.take(share, sampled)
    assert [output.output for output in outputs] == [constrained, expected]


def test_an_output_that_is_complete_ends_although_more_tokens_were_asked_for(
    runner: ModelRunner, prompt: list[int]
) -> None:
    word = llguidance.LLMatcher.grammar_from_regex("(yes|no)")
    output = Output("short", prompt, replace(GREEDY, grammar=word, min_tokens=30))
    assert generate(runner, output)[-1] == 2
    assert len(output.output) < 30


@pytest.mark.slow
def test_bans_and_biases_count_among_the_tokens_that_a_grammar_allows(
    runner: ModelRunner, prompt: list[int], smollm2_dir: Path
) -> None:
    word = llguidance.LLMatcher.grammar_from_regex("(yes|no)")
    plain = replace(GREEDY, grammar=word)
    found = generate(runner, Output("words", prompt, plain))
    for name, changes in (("banned", {"bad_words": ((found[0],),)}),
                          ("biased", {"logit_bias": {found[0]: -100.0}})):  # fmt: skip
        others = generate(runner, Output(name, prompt, replace(plain, **changes)))
        assert others[0] != found[0], "another of the tokens that the grammar allows"
        texts = {text_of(smollm2_dir, tokens[:-1]) for tokens in (found, others)}
        assert texts <= {"yes", "no"}
    narrow = replace(plain, allowed_token_ids=tuple(found[:-1]))
    tokens = generate(runner, Output("words-3", prompt, narrow))
    assert tokens == found, "the end stays possible where nothing else is"


def test_a_grammar_that_cannot_be_kept_ends_its_own_request_alone(
    runner: ModelRunner, prompt: list[int]
) -> None:
    bad = Output("bad", prompt, replace(GREEDY, grammar="start: nothing_like_it"))
    good = Output("good", prompt, replace(GREEDY, grammar=""), first_block=16)
    shares = [each.share(drafts=False) for each in (bad, good)]
    while (done := run(runner, *shares)).waiting:  # it still compiles
        pass
    assert list(done.ungrammatical) == [0]
    assert "nothing_like_it" in done.ungrammatical[0]
    assert done.sampled[0] is None
    assert done.sampled[1] is not None
    strays = Output("strays", prompt, GREEDY)
    strays.tokens.append(99)  # a token that the grammar does not allow
    assert list(run(runner, strays.share(drafts=False)).ungrammatical) == [0]


@pytest.mark.slow
def test_masks_are_the_same_on_the_device_and_in_the_kernels(
    runner: ModelRunner, prompt: list[int], model_dir: Path
) -> None:
    from kvrelay.engine.model.sampling.sampler import allowed

    config = runner.config
    grammars = Grammars(model_dir, config.eos_token_ids, config.vocab_size, 1)
    share = Output("masks", prompt, GREEDY).share(drafts=False)
    assert grammars.follow([share]) == {}
    masks = grammars.masks([share])
    bits = allowed(masks, torch.zeros(1, config.vocab_size))[0]
    by_words = [bool(masks[0, i // 32] >> (i % 32) & 1) for i in range(config.vocab_size)]
    assert bits.tolist() == by_words
    assert 0 < int(bits.sum()) < 20, "an object begins with a bracket"


def mixed(prompt: list[int]) -> list[Output]:
    """Makes one request of each kind, in one step."""
    word = llguidance.LLMatcher.grammar_from_regex("(yes|no)")
    plain = replace(GREEDY, grammar="", max_tokens=12)
    kinds = [
        plain,
        replace(plain, temperature=1.0, seed=3, top_k=2**31, top_p=0.9),
        replace(plain, logprobs=2),
        replace(plain, logit_bias={99: 5.0}, repetition_penalty=1.2),
        replace(plain, reasoning=ReasoningBudget(2, 17)),
        GREEDY,
        replace(DRAWN, logprobs=0),
        replace(GREEDY, grammar=word, presence_penalty=0.5, min_tokens=3),
    ]
    return [
        Output(f"mixed-{number}", prompt, each, 16 * number) for number, each in enumerate(kinds)
    ]


def test_eight_requests_of_all_kinds_are_sampled_in_one_step(
    runner: ModelRunner, prompt: list[int]
) -> None:
    outputs = mixed(prompt)
    for _ in range(5):
        outputs = [output for output in outputs if not output.is_done]
        shares = [output.share(drafts=False) for output in outputs]
        done = run(runner, *shares)
        assert done.error is None
        assert [index for index, each in enumerate(done.sampled) if each is None] == []
        for output, share, sampled in zip(outputs, shares, done.sampled, strict=True):
            output.take(share, sampled)


@pytest.mark.parametrize("fails", ["follow", "mask", "advance"])
def test_whatever_fails_in_a_grammar_is_its_own_outputs(
    runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """No batch is lost with it."""
    outputs = mixed(prompt)
    names = [output.name for output in outputs if output.sampling.grammar]
    bad = names[1]
    grammars = runner.grammars
    if fails == "mask":
        executor = grammars._executor

        class Failing:
            def __getattr__(self, name: str) -> Any:
                compute = getattr(executor, name)

                def failing(asked: list[Any], *place: Any) -> None:
                    if any(each[0] is grammars._outputs[bad].matcher for each in asked):
                        raise ValueError("Invalid buffer size")
                    compute(asked, *place)

                return failing

        monkeypatch.setattr(grammars, "_executor", Failing())
    else:
        name = {"follow": "_follow", "advance": "_advanced"}[fails]
        method = getattr(grammars, name)

        def failing(seq: ScheduledSeq, *rest: Any) -> Any:
            if seq.request_id == bad:
                raise ZeroDivisionError
            return method(seq, *rest)

        monkeypatch.setattr(grammars, name, failing)
    done = run(runner, *(output.share(drafts=False) for output in outputs))
    (index,) = (number for number, output in enumerate(outputs) if output.name == bad)
    assert done.error is None
    assert list(done.ungrammatical) == [index]
    assert [number for number, each in enumerate(done.sampled) if each is None] == [index]


def test_logits_that_are_no_numbers_end_their_own_request(
    runner: ModelRunner, prompt: list[int]
) -> None:
    outputs = mixed(prompt)
    for number in (1, 6):
        broken = replace(outputs[number].sampling, logit_bias={5: float("nan"), 28: float("nan")})
        outputs[number].sampling = broken
    done = run(runner, *(output.share(drafts=False) for output in outputs))
    assert done.error is None
    assert set(done.unsampled) == {1, 6}
    assert [number for number, each in enumerate(done.sampled) if each is None] == [1, 6]


def test_a_vocabulary_is_read_once_ahead_of_the_first_grammar(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(module, "read_vocabulary", lambda path, *_: read.append(path))
    monkeypatch.setattr(module, "compile_grammar", lambda vocabulary, grammar: grammar)
    grammars = Grammars(smollm2_dir, (), 100, 1)
    assert read == []
    grammars.warm_up()
    assert grammars.prepare("a").result(10) == "a"
    grammars.warm_up()
    assert read == [smollm2_dir]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [[], [5, 6, 7]])
def test_reasoning_ends_when_its_budget_is_used_up(
    runner: ModelRunner, prompt: list[int], drafts: list[int]
) -> None:
    """By the kernels, by torch (with log-probabilities), and with drafts."""
    end, start, most = 17, 18, 4
    for logprobs in (None, 0):
        for begins_with in (None, start):
            budget = ReasoningBudget(most, end, begins_with)
            free = SamplingParams(temperature=0.0, max_tokens=20, logprobs=logprobs)
            bound = replace(free, reasoning=budget)
            context = [*prompt] if begins_with is None else [*prompt, start]
            tokens: list[int] = []
            while len(tokens) < most + 2:
                seq = decode(context + tokens, bound, len(prompt), drafts if tokens else [])
                (sampled,) = runner.execute(Step(0, [seq])).sampled
                assert sampled is not None
                tokens += [sampled.token, *sampled.more]
            plain: list[int] = []
            while len(plain) < most:
                seq = decode(context + plain, free, len(prompt), [])
                (sampled,) = runner.execute(Step(0, [seq])).sampled
                assert sampled is not None
                plain.append(sampled.token)
            assert tokens[:most] == plain
            assert tokens[most] == end
            assert end not in tokens[most + 1 :]


def decode(
    tokens: list[int], sampling: SamplingParams, num_prompt: int, drafts: list[int]
) -> ScheduledSeq:
    """Its whole context in one step, or the last token and drafts after it."""
    start = len(tokens) - 1 if drafts else 0
    if drafts:  # they stay in one block
        drafts = drafts[: -len(tokens) % BLOCK]
    return ScheduledSeq(
        request_id=f"budget-{len(tokens)}",
        tokens=tokens[start:],
        start=start,
        block_ids=list(range(4)),
        sample=True,
        sampling=sampling,
        context=tokens,
        num_prompt_tokens=num_prompt,
        draft_tokens=drafts,
    )


def test_a_budget_that_is_not_used_up_changes_nothing() -> None:
    budget = ReasoningBudget(3, end=9, start=8)
    assert not budget.is_used_up([1, 2, 3, 4])  # it does not reason
    assert not budget.is_used_up([8, 1, 2])
    assert budget.is_used_up([8, 1, 2, 3])
    assert not budget.is_used_up([8, 1, 9, 3, 4, 5, 6])
    assert ReasoningBudget(0, end=9).is_used_up([])


def schema(number: int) -> str:
    """A grammar that no other test has."""
    return llguidance.LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {f"n{number}": {"type": "integer"}}}, overrides=STYLE
    )


class Slow:
    """Grammars compile when they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        compile_grammar = module.compile_grammar

        def slow(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
            assert self.go_on.wait(20)
            return compile_grammar(vocabulary, grammar)

        monkeypatch.setattr(module, "compile_grammar", slow)


def test_a_grammar_that_still_compiles_holds_up_its_own_output_alone(
    runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    waits = Output("waits", prompt, replace(GREEDY, grammar=schema(1)))
    other = Output("other", prompt, replace(GREEDY, grammar=""), first_block=16)
    for _ in range(3):
        shares = [each.share(drafts=False) for each in (waits, other)]
        began = time.perf_counter()
        done = run(runner, *shares)
        assert time.perf_counter() - began < 1.0
        assert (done.waiting, done.ungrammatical, done.sampled[0]) == ({0}, {}, None)
        other.take(shares[1], done.sampled[1])
    alone = run(runner, waits.share(drafts=False))
    assert (alone.waiting, alone.sampled) == ({0}, [None])
    slow.go_on.set()
    runner.grammars.prepare(schema(1)).result(20)
    share = waits.share(drafts=False)
    done = run(runner, share)
    assert done.waiting == frozenset()
    waits.take(share, done.sampled[0])
    assert other.output == generate(
        runner, Output("again", prompt, other.sampling, 16), most=len(other.output)
    )


def test_a_grammar_that_does_not_compile_in_time_ends_its_output(
    runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    output = Output("never", prompt, replace(GREEDY, grammar=schema(2)))
    assert run(runner, output.share(drafts=False)).waiting == {0}
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.0)
    done = run(runner, output.share(drafts=False))
    slow.go_on.set()
    assert (done.waiting, done.ungrammatical) == (frozenset(), {0: "not compiled within 0 s"})


@pytest.mark.slow
def test_grammars_are_kept_by_their_bytes(
    smollm2_dir: Path, runner: ModelRunner, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(smollm2_dir, (2,), runner.config.vocab_size, 1)
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 2_000_000)
    monkeypatch.setattr(module, "BYTES_A_SECOND", 0)
    large = [schema(i) + " " * 50_000 for i in range(4)]  # 0.8 MB each, it is said
    shares = [
        Output(f"kept-{i}", prompt, replace(GREEDY, grammar=grammar)).share(drafts=False)
        for i, grammar in enumerate(large)
    ]
    for grammar, share in zip(large, shares, strict=True):
        grammars.prepare(grammar).result(20)
        assert grammars.follow([share]) == {}
    assert list(grammars._compiled) == large[2:]
    assert sum(grammars._sizes.values()) <= module.MAX_COMPILED_BYTES
    assert grammars.follow([]) == {}
    assert list(grammars._outputs) == ["kept-2", "kept-3"]  # they hold their grammars


@pytest.mark.slow
def test_memory_of_a_grammar_is_estimated_by_how_long_it_takes(
    smollm2_dir: Path, runner: ModelRunner
) -> None:
    grammars = Grammars(smollm2_dir, (2,), runner.config.vocab_size, 1)
    bomb = llguidance.LLMatcher.grammar_from_json_schema({"type": "integer", "multipleOf": 99_991})
    grammars.prepare(bomb).result(30)
    grammars.prepare(schema(3)).result(20)
    assert grammars._sizes[bomb] > max(8 * 2**20, 16 * grammars._sizes[schema(3)])


AMBIGUOUS = llguidance.LLMatcher.grammar_from_lark('start: s\ns: s s | s s s | "a" | ""')


@pytest.mark.slow
def test_a_grammar_whose_masks_take_too_long_ends_its_own_output(
    runner: ModelRunner, prompt: list[int], smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MASK_BUDGET_S", 0.004)
    grammars = runner.grammars
    for each in (AMBIGUOUS, GRAMMAR):
        grammars.prepare(each).result(20)
    letter = tokenizer_of(smollm2_dir).encode("a").ids[0]
    slow = Output("ambiguous", prompt, replace(GREEDY, grammar=AMBIGUOUS))
    other = Output("beside", prompt, DRAWN, first_block=16)
    failed: dict[int, str] = {}
    while not failed and len(slow.output) < 250:
        shares = [each.share(drafts=False) for each in (slow, other)]
        assert grammars.follow(shares) == {}
        grammars.masks(shares)
        _, failed = grammars.advance(shares, [Sampled(letter), None])
        slow.tokens.append(letter)
        slow.num_computed = len(slow.tokens) - 1
    assert list(failed) == [0]
    assert "ms to find, at most 4: the grammar has too many ways" in failed[0]
