"""Parameters of vLLM and SGLang that OpenAI does not have: what each does to an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from kvrelay.cluster.api.text import tokenizer as tokenizer_module
from kvrelay.cluster.api.text.tokenizer import MANY_CHARS, Tokenizer
from kvrelay.engine.request import SamplingParams
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served
from tests.cluster.api.test_answers import ANSWER, ASK
from tests.cluster.api.test_bad_input import error_of
from tests.cluster.api.tools.templates import (
    CALL,
    SPOKEN,
    WEATHER,
    allows,
    call_text,
    events_of,
    says,
)

TIME = call_text("clock", "{}")
TWO = f"{SPOKEN}\n{CALL}\n{TIME}"
CLOCK = {"type": "function", "function": {"name": "clock"}}
PATHS = {
    "/v1/chat/completions": {"model": MODEL, "messages": ASK},
    "/v1/completions": {"model": MODEL, "prompt": "Hello there, how are you today?"},
}


ASK_FOR = PATHS["/v1/chat/completions"]


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<n>"],
        "tags": [
            {
                "begin": "<n>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</n>",
            }
        ],
    },
}


SHOWN: dict[str, Any] = {"skip_special_tokens": False}


def post(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    response = served.post(PATHS[path] | fields, path)
    assert response.status_code == 200, response.text
    return response.json()


def chat(served: Served, **fields: Any) -> ChatCompletion:
    """By the real client, which passes what it does not know on."""
    made: ChatCompletion = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, extra_body=fields
    )
    return made


def sampling(served: Served, **fields: Any) -> SamplingParams:
    """Of a completion with such fields; a chat with them is sampled alike."""
    post(served, **fields)
    post(served, "/v1/completions", max_tokens=MAX_MODEL_LEN, **fields)
    chat_like, found = (submit.sampling for submit in served.router.submits[-2:])
    for name in ("bad_words", "allowed_token_ids", "top_k", "repetition_penalty"):
        assert getattr(chat_like, name) == getattr(found, name)
    return found


def test_bad_words_are_banned_as_they_are_and_within_a_text(
    served: Served, tokenizer: Tokenizer
) -> None:
    found = sampling(served, bad_words=["Paris", " no"]).bad_words
    for text in ("Paris", " Paris", " no"):
        assert tuple(tokenizer.encode(text)) in found
    assert len(found) == len(set(found)) == 3
    assert sampling(served, bad_words=None).bad_words == ()
    for wrong in ([""], ["  "], [7], "Paris", ["x"] * 129, ["x" * 257]):
        error = error_of(served.post(PATHS["/v1/completions"] | {"bad_words": wrong}), 400)
        assert error["param"].startswith("bad_words") or error["param"] == "messages"


def test_only_token_ids_of_the_tokenizer_are_allowed(served: Served, tokenizer: Tokenizer) -> None:
    assert sampling(served, allowed_token_ids=[5, 6, 5]).allowed_token_ids == (5, 6)
    for wrong in ([], [tokenizer.vocab_size], [-1], ["5"], list(range(1025))):
        for path, body in PATHS.items():
            error = error_of(served.post(body | {"allowed_token_ids": wrong}, path), 400)
            assert error["param"].startswith("allowed_token_ids")
    (word,) = tokenizer.encode("Paris")
    body = ASK_FOR | {"allowed_token_ids": [word], "bad_words": ["Paris"]}
    assert error_of(served.post(body), 400)["param"] == "bad_words"


@pytest.mark.parametrize("top_k", [2**31, 2**40, 2**64, 10**30])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(served: Served, top_k: int) -> None:
    assert sampling(served, top_k=top_k).top_k == 0
    assert sampling(served, top_k=40).top_k == 40


def test_a_number_is_the_clients_else_the_models(
    served: Served, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    monkeypatch.setattr(tokenizer, "sampling_defaults", recommended)
    found = sampling(served, temperature=0.0, top_k=None, min_p=0.5)
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.0, 20, 1.1)
    assert (found.min_p, found.top_p, found.presence_penalty) == (0.5, 1.0, 0.0)
    body = {"model": MODEL, "input": "Hello", "min_tokens": 2, "temperature": 1.5}
    assert served.post(body, "/v1/responses").status_code == 200
    found = served.router.submits[-1].sampling
    assert (found.temperature, found.top_k, found.min_tokens) == (1.5, 20, 2)


@pytest.mark.parametrize("penalty", [1e-40, 0.0099, 0, -1])
def test_a_repetition_penalty_that_makes_logits_infinite_is_refused(
    served: Served, penalty: float
) -> None:
    error = error_of(served.post(ASK_FOR | {"repetition_penalty": penalty}), 400)
    assert error["param"] == "repetition_penalty"
    assert "0.01" in error["message"]


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64])
def test_a_seed_that_is_no_64_bit_number_is_refused(served: Served, seed: int) -> None:
    assert error_of(served.post(ASK_FOR | {"seed": seed}), 400)["param"] == "seed"


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_is_told_where_that_is_asked_for(served: Served, name: str) -> None:
    answer = chat(served, stop=["France"], **{name: True}).choices[0]
    assert answer.message.content == " The capital of France"
    assert (answer.finish_reason, answer.to_dict()["stop_reason"]) == ("stop", "France")
    plain = chat(served, stop=["France"]).choices[0]
    assert plain.message.content == " The capital of "
    text = post(served, "/v1/completions", stop="of Fr", max_tokens=20, **{name: True})
    assert text["choices"][0]["text"] == " The capital of Fr"
    chunks = served.openai().completions.create(
        **PATHS["/v1/completions"],
        stop="of Fr",
        max_tokens=20,
        stream=True,
        extra_body={name: True},
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == " The capital of Fr"


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
def test_special_tokens_are_told_where_that_is_asked_for(
    served: Served, tokenizer: Tokenizer, path: str
) -> None:
    text = "One<|im_start|>two"
    served.router.answer = lambda submit: [*tokenizer.encode(text), *tokenizer.eos_token_ids[:1]]
    body = PATHS.get(path, {"model": MODEL, "input": "Hello"})
    skipped: tuple[dict[str, Any], ...] = ({}, {"skip_special_tokens": True})
    for fields, told in (*((each, "Onetwo") for each in skipped), (SHOWN, text)):
        answer = served.post(body | fields, path).json()
        if "choices" in answer:
            (choice,) = answer["choices"]
            assert (choice.get("text") or choice["message"]["content"]) == told
        else:
            assert answer["output"][0]["content"][0]["text"] == told
    if path == "/v1/completions":
        ended = post(served, path, **SHOWN, include_stop_str_in_output=True)["choices"][0]
        assert ended["text"] == f"{text}<|im_end|>"


def test_stop_reason_is_the_string_or_the_token(served: Served, tokenizer: Tokenizer) -> None:
    (france,) = tokenizer.encode(" France")
    (end,) = tokenizer.eos_token_ids
    for fields, reason, text in (
        ({}, None, ANSWER),
        ({"stop_token_ids": [france]}, france, " The capital of"),
        ({"stop_token_ids": [france], "include_stop_str_in_output": True}, france, ANSWER[:22]),
        ({"stop_token_ids": [end]}, None, ANSWER),
        ({"max_tokens": 2}, None, " The capital"),
    ):
        for path in PATHS:
            choice = post(served, path, **{"max_tokens": 20} | fields)["choices"][0]
            assert choice["stop_reason"] == reason
            assert (choice.get("text") or choice["message"]["content"]) == text
    chunks = list(
        served.openai().chat.completions.create(
            model=MODEL, messages=ASK, stream=True, extra_body={"stop_token_ids": [france]}
        )
    )
    assert [chunk.choices[0].to_dict().get("stop_reason") for chunk in chunks][-1] == france


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(4)),
        ({"truncate_prompt_tokens": 4000}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
    ],
)
def test_a_prompt_is_cut_to_the_tokens_that_are_asked_for(
    served: Served, fields: dict[str, Any], kept: slice
) -> None:
    for path in (*PATHS, "/v1/embeddings"):
        body = PATHS.get(path) or {"model": MODEL, "input": "Hello there, how are you today?"}
        assert served.post(body, path).status_code == 200
        assert served.post(body | fields, path).status_code == 200
        whole, cut = (submit.tokens for submit in served.router.submits[-2:])
        assert cut == whole[kept]


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(served: Served) -> None:
    long = "one two three " * MAX_MODEL_LEN
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 12}
    post(served, "/v1/completions", prompt=long, **fields)
    assert len(served.router.submits[-1].tokens) == MAX_MODEL_LEN - 12
    post(served, "/v1/completions", prompt=long, echo=True, **fields)
    submit = served.router.submits[-1]
    assert submit.sampling.max_tokens == 12
    for wrong in (0, -2):
        body = PATHS["/v1/completions"] | {"truncate_prompt_tokens": wrong}
        error = error_of(served.post(body, "/v1/completions"), 400)
        assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings"])
def test_a_prompt_of_any_length_is_cut_as_if_it_were_tokenised_whole(
    served: Served, tokenizer: Tokenizer, path: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 32 characters for each token of the context, and little of it is tokenised."""
    rng = random.Random(7)
    words = ["a", "the", "It's", "naïve\n\n", "", "12345", "def", "f(x):", "你好", "\U0001f600"]
    words += ["<|im_end|>", "...", "http://x.y/z?q=1", "unbelievable"]
    text = " ".join(rng.choices(words, k=5000))
    assert MANY_CHARS * MAX_MODEL_LEN < len(text) < 60_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {}
    body |= {"prompt": text} if path == "/v1/completions" else {}
    body |= {"input": text} if "embed" in path else {}
    assert served.post(body, path).status_code == 400
    encoded: list[int] = []
    encode = tokenizer_module._encode

    def counted(used: Any, text: str, special: bool) -> list[int]:
        encoded.append(len(text))
        return encode(used, text, special)

    if "chat" in path:
        whole = tokenizer.chat_prompt(body["messages"]).tokens
    else:
        whole = tokenizer.encode(text, is_prompt=path == "/v1/completions")
    monkeypatch.setattr(tokenizer_module, "_encode", counted)
    cut = {"truncate_prompt_tokens": 40, "truncation_side": side}
    assert served.post(body | cut, path).status_code == 200
    kept = whole[:40] if side == "right" else whole[-40:]
    assert list(served.router.submits[-1].tokens) == kept
    assert sum(encoded) < 10_000
    if path == "/v1/completions":
        echo = post(served, path, **body, **cut, echo=True, max_tokens=0)["choices"][0]["text"]
        assert echo == tokenizer.decode(kept, skip_special_tokens=False)


def test_a_text_whose_tokens_depend_on_all_of_it_is_refused(served: Served) -> None:
    """Where a token of "a" ends depends on how many came before it."""
    long = "a" * (MANY_CHARS * MAX_MODEL_LEN + 999)
    for text, most in ((long, 40), ("no words " * 5000, MAX_MODEL_LEN)):
        found = served.post({"prompt": text, "truncate_prompt_tokens": most}, "/v1/completions")
        assert found.status_code == 400
        assert "maximum context length" in found.text


def test_a_template_gets_what_the_request_says(served: Served, tokenizer: Tokenizer) -> None:
    chat(served)
    chat(served, add_generation_prompt=False)
    whole, cut = (submit.tokens for submit in served.router.submits)
    begun = len(tokenizer.encode("<|im_start|>assistant\n"))
    assert cut == whole[:-begun]
    tokens = [
        served.post({"messages": ASK, "add_generation_prompt": flag}, "/tokenize").json()["tokens"]
        for flag in (True, False)
    ]
    assert [tuple(each) for each in tokens] == [whole, cut]


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "documents", "chat_template"]
)
def test_options_of_a_template_do_not_replace_the_conversation(served: Served, name: str) -> None:
    error = error_of(served.post(ASK_FOR | {"chat_template_kwargs": {name: []}}), 400)
    assert error["param"] == "chat_template_kwargs"
    assert repr(name) in error["message"]


def test_special_tokens_may_be_left_out(
    served: Served, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str, *, add_special_tokens: bool = True, **more: bool) -> list[int]:
        return [5, 6, 7] if add_special_tokens else [6, 7]

    monkeypatch.setattr(tokenizer, "encode", encode)
    for path, body in (
        ("/v1/completions", PATHS["/v1/completions"]),
        ("/v1/embeddings", {"model": MODEL, "input": "Hello"}),
    ):
        for flag, expected in ((None, (5, 6, 7)), (True, (5, 6, 7)), (False, (6, 7))):
            assert served.post(body | {"add_special_tokens": flag}, path).status_code == 200
            assert served.router.submits[-1].tokens == expected
    error = error_of(served.post(ASK_FOR | {"add_special_tokens": True}), 400)
    assert error["param"] == "add_special_tokens"


def test_a_chat_may_ask_for_special_tokens_where_there_are_none(served: Served) -> None:
    asked = [served.post(ASK_FOR | {"add_special_tokens": flag}) for flag in (None, False, True)]
    assert {each.status_code for each in asked} == {200}
    assert len({each.tokens for each in served.router.submits}) == 1


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": "(yes|no)"}, "yes", "maybe"),
        ({"ebnf": 'root ::= "a" "b"+'}, "abb", "a"),
        ({"grammar": 'root ::= "a" "b"+'}, "abb", "a"),
        ({"json_schema": '{"type": "integer"}'}, "12", '"12"'),
        ({"json_schema": {"type": "integer"}}, "12", '"12"'),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [
                        {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"},
                    ],
                    "triggers": ["<n>"],
                }
            },
            "Well: <n>7</n>.",
            "Well: <n>x</n>.",
        ),
        ({"response_format": TAGS}, "Well: <n>7</n>.", "Well: <n>x</n>."),
    ],
    ids=str,
)
def test_sglang_says_what_an_output_matches(
    served: Served, fields: dict[str, Any], good: str, bad: str
) -> None:
    for path in PATHS:
        post(served, path, **fields)
        assert allows(served, good)
        assert not allows(served, bad)
    both = fields | {"guided_choice": ["x"]}
    assert "one thing" in error_of(served.post(ASK_FOR | both), 400)["message"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"at_least_one": True}, "at_least_one"),
        ({"stop_after_first": True}, "stop_after_first"),
        ({"type": "sequence"}, "sequence"),
        ({"tags": [{"begin": "<n>", "content": {"type": "any_text"}, "end": ""}]}, "json_schema"),
    ],
)
def test_what_a_structural_tag_cannot_say_is_refused(
    served: Served, changes: dict[str, Any], word: str
) -> None:
    form = TAGS | {"format": TAGS["format"] | changes}
    error = error_of(served.post(ASK_FOR | {"response_format": form}), 400)
    assert error["param"] == "response_format"
    assert word in error["message"]


def test_closed_objects_are_said_in_the_schema(served: Served) -> None:
    options = {"json": {"type": "object"}, "disable_additional_properties": True}
    error = error_of(served.post(ASK_FOR | {"structured_outputs": options}), 400)
    assert error["param"] == "structured_outputs"


def test_log_probabilities_of_a_prompt_are_told_as_in_vllm(
    served: Served, tokenizer: Tokenizer
) -> None:
    for path in PATHS:
        body = post(served, path, prompt_logprobs=2)
        submit = served.router.submits[-1]
        told = (body if "chat" in path else body["choices"][0])["prompt_logprobs"]
        assert submit.sampling.prompt_logprobs == 2
        assert (len(told), told[0]) == (len(submit.tokens), None)
        for at, (token, each) in enumerate(zip(submit.tokens[1:], told[1:], strict=True), 1):
            name = tokenizer.token_bytes(token).decode()
            ranks = {0: 1, 1: 2}
            assert set(each) == {str(token), "0", "1"}
            if token not in ranks:
                mine = {"logprob": -0.25 * at, "rank": None, "decoded_token": name}
                assert each[str(token)] == mine
            assert [each[str(other)]["rank"] for other in ranks] == [1, 2]
    post(served, prompt_logprobs=1, n=2)
    asked = [submit.sampling.prompt_logprobs for submit in served.router.submits[-2:]]
    assert sorted(asked, key=str) == [1, None]
    body = post(served, "/v1/completions", prompt_logprobs=0, echo=True, logprobs=1, max_tokens=2)
    (choice,) = body["choices"]
    assert served.router.submits[-1].sampling.prompt_logprobs == 1
    assert all(len(each) == 1 for each in choice["prompt_logprobs"][1:])
    assert len(choice["logprobs"]["top_logprobs"][2]) == 2
    for fields in ({"prompt_logprobs": 6}, {"prompt_logprobs": -1}):
        assert error_of(served.post(ASK_FOR | fields), 400)["param"] == "prompt_logprobs"
    streamed = ASK_FOR | {"prompt_logprobs": 1, "stream": True}
    assert error_of(served.post(streamed), 400)["param"] == "prompt_logprobs"


def test_prompts_whose_log_probabilities_fit_into_no_frame_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.openai.plan.MAX_SCORED_TOKENS", 3)
    asked = [
        {"prompt": [5, 6, 7, 8], "prompt_logprobs": 1},
        {"prompt": [5, 6, 7, 8], "echo": True, "logprobs": 1},
    ]
    for fields in asked:
        error = error_of(served.post(fields, "/v1/completions"), 400)
        assert (error["param"], error["code"]) == ("prompt", "unencodable")
        assert "at most 3" in error["message"]
    assert error_of(served.post(ASK_FOR | {"prompt_logprobs": 1}), 400)["param"] == "messages"
    post(served, "/v1/completions", prompt=[5, 6, 7], prompt_logprobs=1)


def test_log_probabilities_of_tokens_that_are_asked_for(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = [9, 400, 9]
    body = post(served, logprobs=True, top_logprobs=5, logprob_token_ids=ids)
    submit = served.router.submits[-1]
    assert submit.sampling.logprob_token_ids == (9, 400)
    content = body["choices"][0]["logprobs"]["content"]
    names = [tokenizer.token_bytes(token).decode() for token in (9, 400)]
    assert [top["token"] for top in content[0]["top_logprobs"]] == names
    fields = {"logprobs": 0, "logprob_token_ids": [9]}
    (choice,) = post(served, "/v1/completions", **fields)["choices"]
    assert names[0] in choice["logprobs"]["top_logprobs"][0]
    for wrong in ({"logprob_token_ids": [9]}, {"logprobs": True, "logprob_token_ids": [-9]}):
        error = error_of(served.post(ASK_FOR | wrong), 400)
        assert error["param"] == "logprob_token_ids"


def test_tokens_may_be_told_by_their_ids(served: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    names = [f"token_id:{token}" for token in ids]
    fields = {"return_tokens_as_token_ids": True}
    content = post(served, logprobs=True, top_logprobs=1, **fields)["choices"][0]["logprobs"]
    assert [each["token"] for each in content["content"]] == names
    assert content["content"][0]["top_logprobs"][0]["token"] == names[0]
    assert content["content"][0]["bytes"] == list(tokenizer.token_bytes(ids[0]))
    (choice,) = post(served, "/v1/completions", logprobs=0, max_tokens=20, **fields)["choices"]
    assert choice["logprobs"]["tokens"] == names
    assert post(served, logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"] == " The"


@pytest.mark.parametrize("path", PATHS)
def test_each_chunk_may_have_the_usage_so_far(served: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = PATHS[path] | {"stream": True, "stream_options": options, "n": 2, "max_tokens": 20}
    client = served.openai()
    create: Any = client.chat.completions if "chat" in path else client.completions
    *chunks, last = create.create(**body)
    num_prompt = len(served.router.submits[-1].tokens)
    for index in range(2):
        mine = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        counts = [usage.completion_tokens for usage in mine]
        assert counts == sorted(counts)
        assert counts[-1] == last.usage.completion_tokens // 2
        assert all(usage.prompt_tokens == num_prompt for usage in mine)
        assert all(usage.total_tokens == num_prompt + usage.completion_tokens for usage in mine)
    assert last.choices == []


@pytest.mark.parametrize("path", PATHS)
def test_without_a_usage_there_is_none_so_far_either(served: Served, path: str) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    client = served.openai()
    create: Any = client.chat.completions if "chat" in path else client.completions
    chunks = [*create.create(**PATHS[path], stream=True, stream_options=options)]
    assert chunks[-1].choices[0].finish_reason
    assert {chunk.usage for chunk in chunks} == {None}


def test_without_parallel_calls_an_answer_has_one(served: Served) -> None:
    says(served, TWO)
    fields = {"tools": [WEATHER, CLOCK]}
    assert len(post(served, **fields)["choices"][0]["message"]["tool_calls"]) == 2
    choice = post(served, parallel_tool_calls=False, **fields)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (SPOKEN, "tool_calls")
    chunks = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, stream=True, parallel_tool_calls=False, **fields
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    arguments = [delta.function.arguments for delta in deltas if delta.function]
    assert "".join(filter(None, arguments)) == call["function"]["arguments"]


def test_the_bound_holds_in_every_api(served: Served) -> None:
    says(served, TWO)
    tools = [{"type": "function", **each["function"]} for each in (WEATHER, CLOCK)]
    body = {"model": MODEL, "input": "Oslo?", "tools": tools}
    for fields, num in (
        ({}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"max_tool_calls": 1}, 1),
        ({"max_tool_calls": 2}, 2),
    ):
        output = served.post(body | fields, "/v1/responses").json()["output"]
        assert [item["type"] for item in output].count("function_call") == num
    schema = {"input_schema": {"type": "object"}}
    message = {
        "model": MODEL,
        "max_tokens": 99,
        "messages": ASK,
        "tools": [{"name": "weather", **schema}, {"name": "clock", **schema}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    content = served.post(message, "/v1/messages").json()["content"]
    assert [block["type"] for block in content] == ["text", "tool_use"]
    events = events_of(served.post(message | {"stream": True}, "/v1/messages").text)
    starts = [data for name, data in events if name == "content_block_start"]
    assert [data["content_block"]["type"] for data in starts] == ["text", "tool_use"]


def test_a_stream_that_is_null_is_none(served: Served) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK, "stream": None}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert served.post(body, path).status_code == 200


def test_responses_are_sampled_as_vllm_has_it(served: Served) -> None:
    fields = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"5": 1.0},
        "stop": ["France"],
        "include_stop_str_in_output": True,
        "structured_outputs": {"regex": "[a-z]+"},
    }
    response = served.post({"model": MODEL, "input": "Hello"} | fields, "/v1/responses")
    assert response.status_code == 200, response.text
    found = served.router.submits[-1].sampling
    assert (found.top_k, found.min_p, found.logit_bias) == (7, 0.1, {5: 1.0})
    assert (found.repetition_penalty, found.presence_penalty) == (1.5, 0.5)
    assert found.grammar
    assert response.json()["output"][0]["content"][0]["text"] == " The capital of France"
    wrong = {"model": MODEL, "input": "Hello", "top_k": "many"}
    assert error_of(served.post(wrong, "/v1/responses"), 400)["param"] == "top_k"


def test_a_clients_name_of_its_request_is_told_and_is_no_key(served: Served) -> None:
    headers = {"x-request-id": "my-request:7"}
    body = PATHS["/v1/completions"]
    found = [served.http.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [each.headers["x-request-id"] for each in found] == ["my-request:7"] * 2
    ids = {submit.request_id for submit in served.router.submits}
    assert len(ids) == len({each.json()["id"] for each in found}) == 2
    assert not any("my-request" in each for each in ids)
    told = served.http.get("/requests/my-request:7/explanation")
    assert told.status_code == 200, told.text
    assert told.json()["id"] == found[1].json()["id"].removeprefix("cmpl-")
    for unsafe in ("a b", "x" * 129, "<b>", "a\tb", ""):
        answer = served.http.get("/v1/models", headers={"x-request-id": unsafe})
        assert answer.headers["x-request-id"] not in (unsafe, "my-request:7")
