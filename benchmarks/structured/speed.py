"""What masks cost a step, and what forced tokens bring.

Steps: a batch of decodes with and without a grammar that allows any text, in turns in one process.
Outputs: objects of a schema, with forced tokens fed as drafts and without; and a text of which a
prediction knows all but a tenth, with it and without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import llguidance

from kvrelay.cluster.api.constraints.schema import schema_grammar
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from tests.support.local import LocalCluster

BATCH, PROMPT, STEPS, BLOCK = 8, 64, 60, 16
# Any text that is so long that it does not end within the steps.
ANY_TEXT = llguidance.LLMatcher.grammar_from_lark("start: /(.|\\n){4000,}/")
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "date_of_birth": {"type": "string", "format": "date"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "city": {"type": "string", "maxLength": 20},
                "country": {"enum": ["Germany", "France", "Italy"]},
            },
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
        "is_subscribed": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "date_of_birth", "address", "is_subscribed"],
    "additionalProperties": False,
}


def step_seconds(runner: ModelRunner, grammar: str, prefix: str, prompt: Sequence[int]) -> float:
    """The median of decode steps of BATCH sequences, one pass each."""
    sampling = SamplingParams(max_tokens=10_000, temperature=0.0, grammar=grammar)
    tokens = [[*prompt, index + 10] for index in range(BATCH)]
    width = -(-(PROMPT + STEPS + 2) // BLOCK)

    def share(index: int, start: int) -> ScheduledSeq:
        blocks = list(range(index * width, (index + 1) * width))
        context = tokens[index]
        return ScheduledSeq(
            f"{prefix}-{index}", context[start:], start, blocks, True, sampling, context, PROMPT + 1
        )

    times = []
    for number in range(STEPS):
        start = 0 if number == 0 else len(tokens[0]) - 1
        step = Step(number, [share(index, start) for index in range(BATCH)])
        began = time.perf_counter()
        done = runner.execute(step)
        times.append(time.perf_counter() - began)
        for context, sampled in zip(tokens, done.sampled, strict=True):
            assert sampled is not None
            context.append(sampled.token)
    return median(times[1:])


def masked_steps(model: Path, rounds: int, threads: int) -> dict[str, float]:
    """Milliseconds of a step without and with masks, and the ratio: medians of rounds in turns."""
    width = -(-(PROMPT + STEPS + 2) // BLOCK)
    runner = ModelRunner(
        model,
        ModelSection(),
        EngineSection(num_blocks=BATCH * width, threads=threads).sized(gpu=False),
    )
    prompt = Tokenizer(model).encode("The river rises in the mountains. " * 20)[:PROMPT]
    plain, masked = [], []
    for number in range(rounds + 1):
        for grammar, times in (("", plain), (ANY_TEXT, masked))[:: 1 if number % 2 else -1]:
            seconds = step_seconds(runner, grammar, f"{number}-{bool(grammar)}", prompt)
            if number:  # the first round compiles
                times.append(seconds)
    ratios = [with_masks / without for with_masks, without in zip(masked, plain, strict=True)]
    return {
        "plain_ms": 1e3 * median(plain),
        "masked_ms": 1e3 * median(masked),
        "ratio": median(ratios),
    }


def forced_tokens(model: Path, rounds: int, batch: int) -> dict[str, float]:
    """Tokens a second of objects without and with forced tokens as drafts, and the ratio."""
    tokenizer = Tokenizer(model)
    asked = [
        tokenizer.chat_prompt(
            [{"role": "user", "content": f"Invent person {number} as JSON."}]
        ).tokens
        for number in range(batch)
    ]
    sampling = SamplingParams(
        max_tokens=200,
        temperature=0.0,
        stop_token_ids=tokenizer.eos_token_ids,
        grammar=schema_grammar(PERSON),
    )
    speeds: dict[int, list[float]] = {0: [], 7: []}
    answers: dict[int, list[list[int]]] = {}
    for number in range(rounds):
        for drafts in (0, 7) if number % 2 else (7, 0):
            engine = EngineSection(num_speculative_tokens=drafts)
            with LocalCluster(model, prefill=0, engine=engine, dtype="auto") as cluster:
                cluster.generate(asked[:1], replace(sampling, max_tokens=20))
                began = time.perf_counter()
                done = cluster.generate(asked, sampling)
                seconds = time.perf_counter() - began
            answers[drafts] = [each.tokens for each in done]
            speeds[drafts].append(sum(map(len, answers[drafts])) / seconds)
    assert answers[0] == answers[7], "drafts change no token"
    without, drafted = median(speeds[0]), median(speeds[7])
    return {"tokens_s": without, "drafted_tokens_s": drafted, "ratio": drafted / without}


def predicted(model: Path, rounds: int) -> dict[str, float]:
    """Tokens a second of one answer without and with a prediction of it, in which every tenth token
    is another, and the ratio. N-grams are looked up in both."""
    tokenizer = Tokenizer(model)
    asked = tokenizer.chat_prompt(
        [{"role": "user", "content": "Tell the story of a river from its spring to the sea."}]
    ).tokens
    plain = SamplingParams(max_tokens=300, temperature=0.0, stop_token_ids=tokenizer.eos_token_ids)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with LocalCluster(model, prefill=0, dtype="auto") as cluster:
        (known,) = cluster.generate([asked], plain)
        edited = [7 if place % 10 == 9 else token for place, token in enumerate(known.tokens)]
        given = replace(plain, prediction=tuple(edited))
        for number in range(rounds):
            for with_it in (False, True) if number % 2 else (True, False):
                began = time.perf_counter()
                (done,) = cluster.generate([asked], given if with_it else plain)
                speeds[with_it].append(len(done.tokens) / (time.perf_counter() - began))
                assert done.tokens == known.tokens, "a prediction changes no token"
    without, drafted = median(speeds[False]), median(speeds[True])
    return {"tokens_s": without, "predicted_tokens_s": drafted, "ratio": drafted / without}
