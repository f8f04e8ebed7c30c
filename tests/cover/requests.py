"""The mix of requests that each cluster gets, and what a plain worker answers to it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import llguidance

from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.service_class import ServiceClass
from tests.cover.checkpoints import END, FIRST_BYTE, Checkpoints
from tests.cover.settings import YES, Row
from tests.support.local import Completion, LocalCluster

TIMEOUT_S = 240.0
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "is": {"type": "boolean"}},
    "required": ["name", "is"],
    "additionalProperties": False,
}
GRAMMAR: dict[str, Any] = {
    "grammar": llguidance.LLMatcher.grammar_from_json_schema(SCHEMA),
    "stop_token_ids": (END,),
}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {70: 2.0, 80: -100.0},
    "bad_words": ((70, 71), (99,)),
}
LOGPROBS: dict[str, Any] = {"logprobs": 3}


@dataclass(frozen=True)
class Asked:
    """One request. `fields`: as of LocalCluster.submit; `kind`: of the checkpoint that answers."""

    kind: str
    prompt: list[int]
    sampling: SamplingParams
    model: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """How long the requests of a mix are, in tokens: the longest prompt, and each answer."""

    longest: int
    count: int


USUAL, SHORT = Size(95, 24), Size(28, 6)  # what an interpreter computes is short


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_BYTE, FIRST_BYTE + 256) for _ in range(length)]


def mix_of(row: Row, made: Checkpoints, other: str, size: Size) -> list[Asked]:
    """Greedy and seeded, plain, with each of what the row has, and with all of it; `other`: the
    kind of the second model."""
    kind = row["model"]
    own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # changes to the sampling, and fields
    if row["adapters"] == YES:
        own.append(({}, {"adapter": made.adapter(kind)}))
    own += [
        (changes, {})
        for name, changes in (
            *(("grammars", GRAMMAR), ("penalties", PENALTIES)),
            ("logprobs", LOGPROBS),
        )
        if row[name] == YES
    ]
    if row["classes"] == YES:
        own.append(({}, {"priority": ServiceClass.BATCH.priority}))
        own.append(({}, {"priority": ServiceClass.PRIORITY.priority}))
    sampled: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for one, fields in own:
        sampled |= one
        asked |= fields
    longest = size.longest
    found = [
        Asked(kind, prompt_of(longest * 3 // 4, 1), GREEDY),
        Asked(kind, prompt_of(longest // 2, 2), SEEDED),
        *(
            Asked(kind, prompt_of(longest - 4 * at, 3 + at), replace(GREEDY, **one), "", fields)
            for at, (one, fields) in enumerate(own)
        ),
        Asked(kind, prompt_of(longest // 2 + 4, 20), replace(SEEDED, **sampled), "", asked),
    ]
    if row["models"] == "two":
        found += [
            Asked(other, prompt_of(longest * 3 // 4, 1), GREEDY, other),
            Asked(other, prompt_of(longest // 2, 21), SEEDED, other),
        ]
        if row["adapters"] == YES:
            fields = {"adapter": made.adapter(other)}
            found.append(Asked(other, prompt_of(longest, 3), GREEDY, other, fields))
    return [replace(each, sampling=replace(each.sampling, max_tokens=size.count)) for each in found]


def submit_all(
    cluster: LocalCluster, asked: Iterable[Asked], *, to: Sequence[str] = ("router-0",)
) -> list[Future[Completion]]:
    """All at once, to the routers in turn."""
    return [
        cluster.submit(
            each.prompt,
            each.sampling,
            timeout_s=TIMEOUT_S,
            model=each.model,
            router=to[at % len(to)],
            **each.fields,
        )
        for at, each in enumerate(asked)
    ]


def ended(cluster: LocalCluster, futures: Iterable[Future[Completion]]) -> list[Completion]:
    answers = [future.result(TIMEOUT_S + 10) for future in futures]
    cluster.check()
    failed = [answer.failed for answer in answers if answer.failed is not None]
    assert not failed, failed
    return answers


@dataclass(frozen=True)
class Plain:
    """A worker with nothing set but what numbers depend on. Those of quantized weights depend on
    the number of ranks too: what is added up in another order is then rounded."""

    quantization: Literal["none", "int8", "int4"]
    kv_dtype: Literal["auto", "float8_e4m3"]
    num_ranks: int = 1

    def cluster(self, model: Path, **tiers: Any) -> LocalCluster:
        engine = EngineSection(
            num_blocks=512,
            num_speculative_tokens=0,
            kv_dtype=self.kv_dtype,
            threads=self.num_ranks,
            tensor_parallel_size=self.num_ranks,
        )
        options: dict[str, Any] = {"quantization": self.quantization, "prefill": 0, **tiers}
        return LocalCluster(model, engine=engine, **options)

    def answers(self, asked: Sequence[Asked], models: dict[str, Path]) -> list[Completion]:
        """Answers in the order of `asked`. `models`: the checkpoint of each kind."""
        found: dict[int, Completion] = {}
        for kind in dict.fromkeys(each.kind for each in asked):
            mine = [(at, each) for at, each in enumerate(asked) if each.kind == kind]
            with self.cluster(models[kind]) as cluster:
                # To one that serves nothing else, no model and no class has a name.
                plain = [replace(each, model="") for _, each in mine]
                answers = ended(cluster, submit_all(cluster, plain))
            found |= {at: answer for (at, _), answer in zip(mine, answers, strict=True)}
        return [found[at] for at in range(len(asked))]


def differences(
    asked: Sequence[Asked], answers: Sequence[Completion], right: Sequence[Completion]
) -> list[str]:
    """A line for each answer that is not the plain worker's."""
    found = []
    for at, (each, answer, known) in enumerate(zip(asked, answers, right, strict=True)):
        what = f"request {at} of {each.kind} ({len(each.prompt)} tokens, {sorted(each.fields)})"
        if answer.tokens != known.tokens:
            found.append(f"{what}: {answer.tokens}, not {known.tokens}")
        elif not _as_likely(answer, known):
            found.append(f"{what}: other log-probabilities")
    return found


def _as_likely(answer: Completion, known: Completion) -> bool:
    pairs = list(zip(answer.logprobs, known.logprobs, strict=False))
    return len(answer.logprobs) == len(known.logprobs) and all(
        abs(one.logprob - other.logprob) < 2e-3 for one, other in pairs
    )
