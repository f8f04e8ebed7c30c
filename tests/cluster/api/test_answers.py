"""Right requests, with the real `openai` client: whole answers and streams."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.cluster.api.openai.plan import choice_seed
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import ANSWER, MAX_MODEL_LEN, MODEL, Served

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_whole_chat_answer(served: Served, tokenizer: Tokenizer) -> None:
    served.router.num_cached_tokens, served.router.drafts = 16, (7, 2)
    answer = served.openai().chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint
    (submit,) = served.router.submits
    num_prompt = len(submit.tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == len(tokenizer.encode(ANSWER)) + 1
    assert answer.usage.total_tokens == num_prompt + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.usage.prompt_tokens_details.cache_write_tokens == num_prompt - 16
    made = answer.usage.completion_tokens_details
    assert made is not None
    assert (made.accepted_prediction_tokens, made.rejected_prediction_tokens) == (7, 2)
    assert list(submit.tokens) == tokenizer.chat_prompt(ASK).tokens
    assert submit.sampling.temperature == 0
    assert submit.sampling.max_tokens == MAX_MODEL_LEN - num_prompt
    assert submit.sampling.stop_token_ids == tokenizer.eos_token_ids
    assert served.router.cancels == []


def test_streamed_chat_answer_has_openais_chunks(served: Served) -> None:
    chunks = list(
        served.openai().chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, finish, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(c.choices[0].delta.content or "" for c in middle) == ANSWER
    assert all(c.choices[0].finish_reason is None for c in (first, *middle))
    assert len(middle) > 3  # it came in pieces
    assert (finish.choices[0].delta.content, finish.choices[0].finish_reason) == (None, "stop")
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 3
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_stream_without_usage_ends_with_done(served: Served) -> None:
    response = served.post({"model": MODEL, "messages": ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])
    assert '"usage"' not in response.text
    assert len(response.headers["x-request-id"]) == 32


def test_several_choices_have_seeds_of_their_own(served: Served, tokenizer: Tokenizer) -> None:
    served.router.answer = lambda submit: tokenizer.encode(f"seed {submit.sampling.seed}")
    answer = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, n=3, seed=5, max_tokens=100
    )
    seeds = [choice_seed(5, i) for i in range(3)]
    assert len(set(seeds)) == 3
    assert seeds[0] == 5
    assert [c.message.content for c in answer.choices] == [f"seed {seed}" for seed in seeds]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.finish_reason for c in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.router.submits[0].tokens)


def test_without_a_seed_each_request_draws_one(served: Served) -> None:
    for _ in range(2):
        served.openai().chat.completions.create(model=MODEL, messages=ASK)
    first, second = (submit.sampling.seed for submit in served.router.submits)
    assert first != second


def test_streamed_choices_are_told_apart_by_index(served: Served, tokenizer: Tokenizer) -> None:
    def answer(submit: Any) -> list[int]:
        return tokenizer.encode(f"choice with seed {submit.sampling.seed}")

    served.router.answer = answer
    texts = {0: "", 1: ""}
    finished = []
    for chunk in served.openai().chat.completions.create(
        model=MODEL, messages=ASK, n=2, seed=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
    assert texts == {i: f"choice with seed {choice_seed(1, i)}" for i in range(2)}
    assert sorted(finished) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_output", [1, 100])
def test_stop_string_across_tokens_cuts_exactly_and_cancels(
    served: Served, tokenizer: Tokenizer, stream: bool, per_output: int
) -> None:
    served.router.answer = lambda submit: tokenizer.encode("one two STOPHERE three") * 20
    served.router.per_output = per_output
    arguments: Any = {"model": MODEL, "messages": ASK, "stop": ["never", " STOPHERE"]}
    if stream:
        chunks = list(served.openai().chat.completions.create(**arguments, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = served.openai().chat.completions.create(**arguments).choices
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("one two", "stop")
    assert served.router.cancels == [served.router.submits[0].request_id]


def test_chat_logprobs_cover_the_text(served: Served, tokenizer: Tokenizer) -> None:
    served.router.answer = lambda submit: [*tokenizer.encode(" é 🦜."), tokenizer.eos_token_ids[0]]
    answer = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    data = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert data.decode() == choice.message.content == " é 🦜."
    assert {entry.logprob for entry in entries} == {-0.5}
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    streamed = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, stream=True
    )
    tokens = [
        entry
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in tokens] == [entry.token for entry in entries]
    assert tokens[0].top_logprobs == []


def test_a_completions_best_tokens_begin_with_the_chosen_one(served: Served) -> None:
    served.router.answer = lambda submit: [9, 400, *submit.sampling.stop_token_ids[:1]]
    chunks = served.openai().completions.create(
        model=MODEL, prompt="Hi", logprobs=0, extra_body={"logprob_token_ids": [7]}, stream=True
    )
    found = [chunk.choices[0].logprobs for chunk in chunks]
    assert found.pop() is None  # the chunk of the end has no token
    for each in found:
        assert each is not None
        assert each.top_logprobs
        assert [next(iter(top)) for top in each.top_logprobs] == each.tokens != []
        assert all(len(top) == 2 for top in each.top_logprobs)


def test_models_say_what_vllms_clients_read(served: Served) -> None:
    (card,) = served.http.get("/v1/models").json()["data"]
    assert card == served.http.get(f"/v1/models/{MODEL}").json()
    assert (card["id"], card["root"], card["parent"]) == (MODEL, MODEL, None)
    assert card["max_model_len"] == MAX_MODEL_LEN


def test_logprobs_end_where_a_stop_string_cuts(served: Served) -> None:
    (choice,) = (
        served.openai()
        .chat.completions.create(model=MODEL, messages=ASK, logprobs=True, stop=" France is")
        .choices
    )
    assert choice.message.content == " The capital of"
    assert choice.logprobs is not None
    tokens = "".join(entry.token for entry in choice.logprobs.content or [])
    assert tokens == " The capital of"


def test_completion_with_logprobs_and_offsets(served: Served) -> None:
    answer = served.openai().completions.create(
        model=MODEL, prompt="The capital of France", logprobs=1, max_tokens=4
    )
    (choice,) = answer.choices
    assert choice.text == " The capital of France"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [" The", " capital", " of", " France"]
    assert choice.logprobs.text_offset == [0, 4, 12, 15]
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_completion_takes_every_form_of_prompt(served: Served, tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("one"), tokenizer.encode("two words")
    forms: list[tuple[Any, list[list[int]]]] = [
        ("one", [one]),
        (["one", "two words"], [one, two]),
        (two, [two]),
        ([one, two], [one, two]),
    ]
    for form, prompts in forms:
        served.router.submits.clear()
        answer = served.openai().completions.create(model=MODEL, prompt=form, n=2)
        sent = [list(submit.tokens) for submit in served.router.submits]
        assert sent == [prompt for prompt in prompts for _ in range(2)]
        assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
        assert served.router.submits[0].sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_puts_the_prompt_first(
    served: Served, tokenizer: Tokenizer, stream: bool, as_tokens: bool
) -> None:
    prompt: Any = tokenizer.encode("Say it.") if as_tokens else "Say it."
    arguments: Any = {"model": MODEL, "prompt": prompt, "echo": True}
    if stream:
        chunks = served.openai().completions.create(**arguments, stream=True)
        text = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        text = served.openai().completions.create(**arguments).choices[0].text
    assert text == "Say it." + ANSWER


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_shows_special_tokens_of_the_prompt(
    served: Served, tokenizer: Tokenizer, as_tokens: bool, logprobs: int | None
) -> None:
    text = "<|im_start|>user Say it.<|im_end|>"
    prompt: Any = tokenizer.encode(text) if as_tokens else text
    answer = served.openai().completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=logprobs
    )
    (choice,) = answer.choices
    assert choice.text == text + ANSWER
    if choice.logprobs is not None:
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[:2] == [0, len("<|im_start|>")]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_chat_is_what_the_assistant_had_said(served: Served, stream: bool) -> None:
    said = [*ASK, {"role": "assistant", "content": "It is"}]
    for messages, begin in ((ASK, ""), (said, "It is")):
        asked: Any = {"messages": messages, "extra_body": {"echo": True}, "model": MODEL}
        if stream:
            chunks = served.openai().chat.completions.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = served.openai().chat.completions.create(**asked).choices[0].message.content
        assert text == begin + ANSWER


def test_every_sampling_parameter_reaches_the_router(served: Served, tokenizer: Tokenizer) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "prompt_cache_key": "key",
        "a_field_nobody_knows": {"x": 1},
    }
    served.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *ASK],
        max_completion_tokens=9,
        temperature=0.3,
        top_p=0.8,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"42": -100},
        seed=-1,
        user="someone",
        extra_body=extra,
    )
    (submit,) = served.router.submits
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.8, 5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.2, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({42: -100.0}, (7,))
    assert (sampling.max_tokens, sampling.seed) == (9, 2**63 - 1)
    assert "system\nBe brief." in tokenizer._tokenizer.decode(
        list(submit.tokens), skip_special_tokens=False
    )


def test_max_tokens_beyond_the_context_are_clamped(served: Served) -> None:
    served.openai().chat.completions.create(model=MODEL, messages=ASK, max_tokens=10**9)
    (submit,) = served.router.submits
    assert len(submit.tokens) + submit.sampling.max_tokens == MAX_MODEL_LEN


def test_models_are_listed(served: Served) -> None:
    client = served.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
