"""Several conversations in one call, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import MODEL, Served

TALKS: list[Any] = [
    [{"role": "user", "content": "Say alpha"}],
    [
        {"role": "user", "content": "Say beta"},
        {"role": "assistant", "content": "beta"},
        {"role": "user", "content": "Again"},
    ],
]


def ask(served: Served, **fields: Any) -> Any:
    return served.post({"model": MODEL, **fields}, "/v1/chat/completions/batch")


def test_each_conversation_has_a_choice(served: Served, tokenizer: Tokenizer) -> None:
    served.router.answer = lambda submit: tokenizer.encode(f"{len(submit.tokens)} tokens")
    response = ask(served, messages=TALKS, max_tokens=20, logprobs=True, prompt_cache_key="talk")
    prompts = [tokenizer.chat_prompt(talk).tokens for talk in TALKS]
    assert [list(each.tokens) for each in served.router.submits] == prompts
    assert [each.session for each in served.router.submits] == [None, None]
    answer = response.json()
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    texts = [each["message"]["content"] for each in answer["choices"]]
    assert texts == [f"{len(prompt)} tokens" for prompt in prompts]
    assert all(each["logprobs"]["content"] for each in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": TALKS[0]},
        {"messages": [[]]},
        {"messages": []},
        {"messages": TALKS, "stream": True},
        {"messages": TALKS, "n": 2},
        {"messages": TALKS, "continue_final_message": True},
    ],
)
def test_what_is_not_several_chats_is_refused(served: Served, fields: dict[str, Any]) -> None:
    response = ask(served, **fields)
    assert response.status_code == 400
    name = [*fields][-1]
    assert name in response.json()["error"]["message"] or name == "messages"
    assert served.router.submits == []
