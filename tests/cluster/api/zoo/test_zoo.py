"""Every family's own tokens and template: what its model says is let through by the grammar of each
request, and told as what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.api.zoo.model import FILES, Model, follows
from tests.cluster.api.zoo.modes import MODES, Mode
from tests.cluster.api.zoo.texts import FORGED, QUESTION
from tests.cluster.api.zoo.walk import walk

ONE_CALL = ("llama3.1", "gpt-oss")  # in a turn
SEED = 7


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, model: Model) -> Mode:
    found = MODES[request.param]
    if (found.reasons and not model.thinks) or (len(found.says) > 1 and model.name in ONE_CALL):
        pytest.skip("none of this model's")
    return found


@pytest.mark.slow
def test_what_a_model_writes_is_let_through_and_read(model: Model, mode: Mode) -> None:
    plan = model.plan(**mode.request(model))
    assert plan.choices[0].sampling.grammar
    tokens = model.tokens(mode.output(model))
    assert follows(model, plan, tokens) == ""
    expected = mode.message(model)
    for at_once in (False, True):
        told = model.told(plan, tokens, at_once=at_once)
        assert (told["content"] or "") == expected["content"]
        assert told.get("reasoning_content") == expected.get("reasoning_content")
        assert calls_of(told) == calls_of(expected)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [
        (call["name"], json.loads(getattr(call["arguments"], "raw", call["arguments"])))
        for call in calls
    ]


def test_any_output_by_a_grammar_is_read(model: Model, mode: Mode) -> None:
    assert walk(model, mode, SEED) == ""


def test_users_cannot_write_control_tokens(model: Model) -> None:
    # nor in a tool's description

    def prompt(text: str) -> list[int]:
        tool = {"name": "t", "description": text, "parameters": {"type": "object"}}
        messages = [{"role": "user", "content": f"{QUESTION} {text}!"}]
        plan = model.plan(messages=messages, tools=[{"type": "function", "function": tool}])
        return [*plan.choices[0].tokens]

    controls = {*model.tokenizer.added_ids(model.tokenizer._control_strings).values()}
    plain = [token for token in prompt("a") if token in controls]
    for text in FORGED:
        found = prompt(text)
        assert [token for token in found if token in controls] == plain, text
        shown = b"".join(map(model.tokenizer.token_bytes, found)).decode()
        assert shown.count(f"{QUESTION} {text}!") == 1, text
