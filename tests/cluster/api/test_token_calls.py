"""`/inference/v1/generate` and the `render` routes: a chat as tokens, and tokens for tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.cluster.api.openai.token_calls import PATH, RENDER
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served
from tests.cluster.api.tools.templates import WEATHER

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Will it rain in Oslo?"}]
TOKENS = [10, 20, 30]


def generate(served: Served, tokens: list[int] = TOKENS, **changes: Any) -> dict[str, Any]:
    sampling = changes.pop("sampling_params", {})
    body = {"token_ids": tokens, "sampling_params": sampling} | changes
    response = served.post(body, PATH)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(served: Served, **changes: Any) -> str:
    body = {"token_ids": TOKENS, "sampling_params": {}} | changes
    response = served.post({k: v for k, v in body.items() if v is not ...}, PATH)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def completed(served: Served, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": TOKENS, "return_token_ids": True} | changes
    response = served.post(body, "/v1/completions")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_tokens_are_those_of_a_completion(served: Served) -> None:
    sampling = {"max_tokens": 30, "temperature": 0.5, "seed": 3, "n": 2, "stop": ["xyz"]}
    told = generate(served, request_id="mine", sampling_params=sampling)
    same = completed(served, **sampling)
    assert [choice["token_ids"] for choice in told["choices"]] == [
        choice["token_ids"] for choice in same["choices"]
    ]
    assert [choice["finish_reason"] for choice in told["choices"]] == ["stop", "stop"]
    assert told["request_id"] == "generate-tokens-mine"
    assert (told["usage"], told["prompt_logprobs"]) == (same["usage"], None)
    first, second = (submit.sampling for submit in served.router.submits[::2])
    assert first == second
    assert served.router.submits[0].tokens == tuple(TOKENS)


def test_a_stream_has_the_same_tokens(served: Served) -> None:
    whole = generate(served)["choices"][0]
    options = {"include_usage": True}
    body = {"token_ids": TOKENS, "sampling_params": {}, "stream": True, "stream_options": options}
    lines = served.post(body, PATH).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [t for choice in choices for t in choice["token_ids"]] == whole["token_ids"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])
    assert len({chunk["request_id"] for chunk in chunks}) == 1


def test_without_a_bound_there_are_as_many_as_fit_and_defaults_are_vllms(served: Served) -> None:
    """Not the 16 of a completion, nor what the model's makers recommend."""
    generate(served)
    sampling = served.router.submits[-1].sampling
    assert sampling.max_tokens == MAX_MODEL_LEN - len(TOKENS)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_log_probabilities_have_ids(served: Served) -> None:
    sampling = {"logprobs": 2, "max_tokens": 4}
    choice = generate(served, sampling_params=sampling)["choices"][0]
    same = completed(served, **sampling)["choices"][0]["logprobs"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"][: len(content)]
    assert [entry["logprob"] for entry in content] == same["token_logprobs"]
    for entry in content:
        assert entry["token"] == f"token_id:{entry['token_id']}"
        assert [top["rank"] for top in entry["top_logprobs"]] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ...}, "'token_ids' is missing"),
        ({"sampling_params": ...}, "'sampling_params' is missing"),
        ({"token_ids": []}, "'token_ids': List should have at least 1 item"),
        ({"token_ids": ["a"]}, "'token_ids[0]': Input should be a valid integer"),
        ({"token_ids": [-1]}, "'token_ids': "),
        ({"token_ids": [10**9]}, "'token_ids': "),
        ({"token_ids": [1] * MAX_MODEL_LEN}, "maximum context length"),
        ({"sampling_params": {"max_tokens": 0}}, "'max_tokens': "),
        ({"sampling_params": {"temperature": -1}}, "'temperature': "),
        ({"sampling_params": {"logprobs": 21}}, "'logprobs': "),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "'extra_args': {'a': 1} is not supported"),
        ({"output_mode": "text"}, "'output_mode': 'text' is not supported"),
        ({"features": {"mm_hashes": {}}}, "'features': "),
        ({"kv_transfer_params": {"a": 1}}, "'kv_transfer_params': KV is moved by this server"),
        ({"stream_options": {}}, "'stream_options' is only allowed where 'stream' is true"),
    ],
)
def test_what_is_wrong_is_named(served: Served, changes: dict[str, Any], message: str) -> None:
    assert message in refused(served, **changes)


def test_another_model_is_not_found(served: Served) -> None:
    body = {"token_ids": TOKENS, "sampling_params": {}, "model": "other"}
    assert served.post(body, PATH).status_code == 404
    for path, asked in zip(RENDER, ({"messages": MESSAGES}, {"prompt": "Hi"}), strict=True):
        assert served.post({**asked, "model": "other"}, path).status_code == 404


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.3, "top_k": 5, "seed": 7, "max_tokens": 20, "min_tokens": 2},
        {"n": 2, "seed": 7, "logit_bias": {"5": -1.5}, "stop": ["a", "b"], "bad_words": ["x"]},
        {"response_format": JSON},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "response_format": JSON},
        {"logprobs": True, "top_logprobs": 3, "stop_token_ids": [9], "ignore_eos": True},
    ],
)
def test_a_rendered_chat_is_sampled_as_the_chat(served: Served, asked: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "seed": 1, **asked}
    response = served.post(body, RENDER[0])
    assert response.status_code == 200, response.text
    assert served.router.submits == []
    rendered = response.json()
    assert rendered["request_id"].startswith("chatcmpl-")
    told = served.post(rendered, PATH)
    assert told.status_code == 200, told.text
    by_tokens = [*served.router.submits]
    answer = served.post(body | {"return_token_ids": True}, CHAT).json()
    by_chat = served.router.submits[len(by_tokens) :]
    assert [(s.tokens, s.sampling) for s in by_tokens] == [(s.tokens, s.sampling) for s in by_chat]
    ids = [choice["token_ids"] for choice in told.json()["choices"]]
    assert ids == [choice["token_ids"] for choice in answer["choices"]]


def test_rendered_texts_are_one_request_each(served: Served) -> None:
    body = {"model": MODEL, "prompt": ["Hi", "Ho ho"], "seed": 2, "n": 2, "max_tokens": 5}
    rendered = served.post(body, RENDER[1]).json()
    assert len(rendered) == 2
    for each in rendered:
        assert served.post(each, PATH).status_code == 200
    by_tokens = [*served.router.submits]
    served.post(body, "/v1/completions")
    by_text = served.router.submits[len(by_tokens) :]
    assert [(s.tokens, s.sampling) for s in by_tokens] == [(s.tokens, s.sampling) for s in by_text]


def test_what_cannot_be_rendered_is_refused(served: Served) -> None:
    for path, asked in zip(RENDER, ({"messages": []}, {"prompt": []}), strict=True):
        response = served.post({"model": MODEL, **asked}, path)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
