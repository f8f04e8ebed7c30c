"""Tokens, documents, pages of other origins, rates: what clients ask beside generating."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from kvrelay.cluster.api.app import create_app
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.limiter import CALLER, RateLimits
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.api.utility.openapi import document
from tests.cluster.api.conftest import MODEL, Served, serve

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


def test_a_text_becomes_tokens_and_text_again(served: Served, tokenizer: Tokenizer) -> None:
    text = "Zürich is 🦙 nice"
    body = {"prompt": text, "return_token_strs": True}
    answer = served.post(body, "/tokenize").json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    # As the vocabulary has them: a space is Ġ, and the bytes of half a character can be told apart.
    assert answer["token_strs"][-1] == "Ġnice"
    assert "\ufffd" not in "".join(answer["token_strs"])
    assert len(answer["token_strs"]) == answer["count"]
    back = served.post({"tokens": answer["tokens"]}, "/detokenize")
    assert back.json() == {"prompt": text}


def test_special_tokens_become_text_again(served: Served, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    back = served.post({"tokens": tokenizer.encode(text)}, "/detokenize")
    assert back.json() == {"prompt": text}


def test_what_a_client_needs_to_do_without_the_models_files(
    served: Served, tokenizer: Tokenizer
) -> None:
    info = served.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert info["sep_token"] is None
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer.chat_template is not None
    assert info["chat_template"] == tokenizer.chat_template.source
    assert served.http.get("/tokenizer_info?model=other").status_code == 404


@pytest.mark.parametrize("named", [True, False])
def test_a_chat_becomes_the_tokens_that_it_is_answered_with(served: Served, named: bool) -> None:
    body = HELLO if named else {"messages": HELLO["messages"]}
    tokens = served.post(body, "/tokenize").json()["tokens"]
    served.post(HELLO)
    assert list(served.router.submits[-1].tokens) == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": []}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: object, param: str | None) -> None:
    answer = served.post(body, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_another_model_is_not_served(served: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert served.post({**body, "model": "other"}, path).status_code == 404


def test_token_ids_come_with_the_answer(served: Served) -> None:
    chat = {**HELLO, "return_token_ids": True}
    answer = served.post(chat).json()
    sent = served.router.submits[-1]
    assert answer["prompt_token_ids"] == list(sent.tokens)
    choice = answer["choices"][0]
    assert choice["token_ids"] == served.router.answer(sent)
    text = {"model": MODEL, "prompt": "Hello", "return_token_ids": True}
    choice = served.post(text, "/v1/completions").json()["choices"][0]
    assert choice["prompt_token_ids"] == list(served.router.submits[-1].tokens)
    with served.http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert chunks[0]["prompt_token_ids"] == list(served.router.submits[-1].tokens)
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = [token for each in choices for token in each.get("token_ids", ())]
    assert streamed == served.router.answer(served.router.submits[-1])
    streamed_text = {**text, "stream": True, "n": 2, "max_tokens": 3}
    choices = choices_of(served, "/v1/completions", streamed_text)
    told = [(c["index"], c["prompt_token_ids"]) for c in choices if "prompt_token_ids" in c]
    prompt = list(served.router.submits[-1].tokens)
    assert sorted(told) == [(0, prompt), (1, prompt)]
    firsts = {c["index"]: c for c in reversed(choices)}
    assert all("prompt_token_ids" in first for first in firsts.values())
    unasked = [served.post(HELLO).json(), served.post({"prompt": "Hi"}, "/v1/completions").json()]
    for answer in unasked:
        found = {**answer, **answer["choices"][0]}
        names = ("token_ids", "prompt_token_ids", "prompt_logprobs")
        assert [found[name] for name in names] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_that_make_no_text_by_themselves_come_too(
    served: Served, tokenizer: Tokenizer, stream: bool
) -> None:
    """Parts of a character, and special tokens, each in an output of its own."""
    tokens = tokenizer.encode(" é 🦜.<|im_start|> a")
    served.router.answer, served.router.per_output = lambda _: tokens, 1
    body = {"model": MODEL, "prompt": "Hello", "return_token_ids": True, "stream": stream}
    body["max_tokens"] = len(tokens)
    choices = choices_of(served, "/v1/completions", body)
    assert [token for each in choices for token in each.get("token_ids", ())] == tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stop": [" France"]}, {"stop_token_ids": [3]}])
@pytest.mark.parametrize("chat", [False, True])
def test_each_token_id_has_its_log_probability(
    served: Served, tokenizer: Tokenizer, fields: dict[str, Any], chat: bool, stream: bool
) -> None:
    """What ends an answer is no part of its text, but trainers need it as any other."""
    text = tokenizer.encode("The capital of France")
    end = [*fields.get("stop_token_ids", tokenizer.eos_token_ids)][:1]
    served.router.answer = lambda _: [*text, *end]
    body = {**fields, "model": MODEL, "return_token_ids": True, "stream": stream}
    body["max_tokens"] = len(text) + 1
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asks = {"messages": HELLO["messages"], "logprobs": True} if chat else {"prompt": "Hi"}
    choices = choices_of(served, path, {"logprobs": 1, **body, **asks})
    shown = [each["logprobs"] for each in choices if each["logprobs"]]
    key = "content" if chat else "token_logprobs"
    num_shown = sum(len(each[key]) for each in shown)
    ids = [token for each in choices for token in each.get("token_ids", ())]
    assert num_shown == len(ids)
    assert ids == text + ([] if "stop" in fields else end)
    plain = choices_of(served, path, {"logprobs": 1, **body, **asks, "return_token_ids": False})
    assert sum(len(each["logprobs"][key]) for each in plain if each["logprobs"]) < num_shown


def choices_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.http.stream("POST", path, json=body) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines()]
    return [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]


def test_the_document_has_the_routes_of_this_server(served: Served) -> None:
    found = served.http.get("/openapi.json").json()
    assert found == document(create_app(served.ctx).routes, [MODEL])
    assert "/v1/chat/completions" in found["paths"]
    assert "/drain" in found["paths"]
    (place,) = found["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert place["name"] == "name"
    assert found["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]


def test_the_page_loads_nothing(served: Served) -> None:
    page = served.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text
    assert "http" not in page.text


def test_the_server_says_that_it_is_there_and_its_version(served: Served) -> None:
    assert served.http.get("/ping").status_code == served.http.post("/ping").status_code == 200
    assert served.http.get("/version").json()["version"]


def test_pages_of_chosen_origins_may_call(served: Served, tokenizer: Tokenizer) -> None:
    asks = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    path = "/v1/chat/completions"
    assert "access-control-allow-origin" not in served.http.options(path, headers=asks).headers
    settings = ApiSettings(cors_origins="https://page.example")
    with serve(tokenizer, settings) as opened:
        allowed = opened.http.options(path, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        answer = opened.http.post(path, json=HELLO, headers={"origin": "https://page.example"})
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = opened.http.options(path, headers={**asks, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


TENANT = Tenant("team", b"salt", requests_per_minute=3, tokens_per_minute=100)


def test_requests_of_a_minute_are_counted_and_come_back() -> None:
    rates = RateLimits()
    for _ in range(3):
        rates.admit(0.0, TENANT, 1)
    with pytest.raises(ApiError) as refused:
        rates.admit(0.0, TENANT, 1)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == pytest.approx(20.0)
    assert "3 requests a minute" in refused.value.message
    rates.admit(20.0, TENANT, 1)
    with pytest.raises(ApiError):
        rates.admit(20.1, TENANT, 1)


def test_tokens_count_when_it_is_known_how_many_they_were() -> None:
    rates = RateLimits()
    rates.admit(0.0, TENANT, 10)
    rates.settle(0.0, TENANT, 10, 130)  # the bucket owes 30 tokens
    headers = rates.headers(0.0, TENANT)
    assert headers["x-ratelimit-limit-tokens"] == "100"
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    with pytest.raises(ApiError, match="100 tokens a minute"):
        rates.admit(0.0, TENANT, 10)
    rates.admit(24.1, TENANT, 10)
    rates.settle(24.1, TENANT, 10, 0)  # it was refused later, and took nothing


def test_an_address_leaves_others_of_its_key_something_of_each_minute() -> None:
    """One takes all while it is alone, and each request that comes back as soon as it does."""
    tenant, rates = Tenant("team", b"salt", requests_per_minute=60), RateLimits()

    def admit(now: float, address: str) -> str:
        """Returns "", or why not."""
        token = CALLER.set(("team", address))
        try:
            rates.admit(now, tenant, 1)
        except ApiError as error:
            return error.message
        finally:
            CALLER.reset(token)
        return ""

    assert [admit(0.0, "greedy") for _ in range(70)].count("") == 60
    assert admit(0.0, "other")
    had, why = Counter[str](), Counter[str]()
    for tenths in range(1, 1200):
        for address in ("greedy", "other", "greedy"):
            refused = admit(tenths / 10, address)
            had[address] += not refused
            why[address] += "left to other addresses, since this one has had its" in refused
    assert 115 <= had.total() <= 120
    assert had["other"] >= 50
    assert had["greedy"] >= 20
    assert why["greedy"] > 50
    for number in range(100):
        assert not admit(200.0 + 60 * number, str(number))
    (buckets,) = rates._buckets.values()
    assert len(buckets["requests"].had) == 1


def test_a_prompt_larger_than_a_minute_is_served_from_a_full_bucket() -> None:
    rates = RateLimits()
    rates.admit(0.0, TENANT, 1000)
    with pytest.raises(ApiError):
        rates.admit(60.0, TENANT, 1)


def test_tenants_without_rates_have_no_headers() -> None:
    rates = RateLimits()
    for _ in range(1000):
        rates.admit(0.0, Tenant("free", b""), 10**6)
    assert rates.headers(0.0, Tenant("free", b"")) == {}
