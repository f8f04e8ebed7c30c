"""Outputs that match a schema are the same, whichever way they are served: the real model."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kvrelay.cluster.api.constraints.schema import schema_grammar
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.config import RouterConfig
from tests.support.local import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.e2e]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["city", "river", "mountain"]},
        "facts": {
            "type": "array",
            "items": {"type": "string", "maxLength": 40},
            "minItems": 2,
            "maxItems": 2,
        },
        "visited": {"type": "boolean"},
    },
    "required": ["name", "kind", "facts", "visited"],
    "additionalProperties": False,
}
PLACES = ("Paris", "the Nile", "Mount Fuji", "Zürich", "the Amazon")


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    asked = [f"Describe {place} as a JSON object." for place in PLACES]
    return [tokenizer.chat_prompt([{"role": "user", "content": text}]).tokens for text in asked]


def test_the_same_objects_by_one_worker_two_pools_and_under_preemption(
    smollm2_dir: Path, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(
        max_tokens=160,
        temperature=1.0,
        seed=3,
        stop_token_ids=tokenizer.eos_token_ids,
        grammar=schema_grammar(SCHEMA),
    )
    ways = {
        "without drafts": (0, EngineSection(num_speculative_tokens=0)),
        "one pool": (0, EngineSection()),
        "two pools": (1, EngineSection(max_num_batched_tokens=32)),
        "preempted": (0, EngineSection(num_blocks=48, block_size=4, max_model_len=192)),
    }
    answers = {}
    for name, (prefill, engine) in ways.items():
        router = RouterConfig(policy="round_robin" if prefill else "prefix")
        with LocalCluster(smollm2_dir, prefill=prefill, engine=engine, router=router) as cluster:
            done = cluster.generate(prompts, sampling)
            assert [each.failed for each in done] == [None] * len(prompts)
            assert {each.finish for each in done} == {FinishReason.STOP}
            answers[name] = [each.tokens for each in done]
            core = cluster.workers["decode-0"].node.core
            if name == "preempted":
                assert cluster.run(lambda core=core: core.scheduler.num_preemptions) > 0
            if name == "one pool":
                counters = cluster.run(lambda core=core: dict(core.counters))
                assert counters["draft_tokens_accepted"] > 30
            cluster.wait_idle()
    first = next(iter(answers.values()))
    for name, tokens in answers.items():
        assert tokens == first, name
    for tokens in first:
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), SCHEMA)
