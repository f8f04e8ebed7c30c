"""Log-probabilities of a response's text: whole, streamed, kept, and of nothing but the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.api.openai.parts import TokenText
from kvrelay.cluster.api.responses.format import TextLogprobs
from tests.cluster.api.conftest import ANSWER, MODEL, Served, wait_until
from tests.cluster.api.responses.asking import (
    PATH,
    WEATHER,
    Event,
    ask,
    post,
    refused,
    shape,
    stream,
)
from tests.cluster.api.tools.templates import CALL, SPOKEN, THOUGHT, prompt, says

REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"
WANTED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
PER_OUTPUT = pytest.mark.parametrize("per_output", [1, 3, 1000])


def text_of(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


def parts_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of its messages."""
    output: list[dict[str, Any]] = response["output"]
    return [part for item in output if item["type"] == "message" for part in item["content"]]


def of_events(events: list[Event]) -> list[dict[str, Any]]:
    """The entries of all deltas. Every other event that ends a text has the same."""
    found = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    by_kind = {event["type"].removeprefix("response."): event for event in events}
    assert by_kind["output_text.done"]["logprobs"] == found
    (part,) = parts_of(events[-1]["response"])
    assert part["logprobs"] == found
    return found


@PER_OUTPUT
def test_a_text_has_those_of_its_tokens(served: Served, per_output: int) -> None:
    served.router.per_output = per_output
    tokens = served.ctx.tokenizer.encode(ANSWER)
    answer = post(served, **WANTED).json()
    (part,) = parts_of(answer)
    assert (part["text"], text_of(part["logprobs"])) == (ANSWER, ANSWER)
    assert len(part["logprobs"]) == len(tokens)
    first = part["logprobs"][0]
    assert (first["token"], first["logprob"]) == (" The", -0.5)
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.5]
    assert first["top_logprobs"][0]["token"] == " The"
    assert answer["top_logprobs"] == 2
    assert of_events(stream(served, **WANTED)) == part["logprobs"]


@PER_OUTPUT
def test_every_event_has_what_belongs_to_it(served: Served, per_output: int) -> None:
    """A delta the tokens of its text; the part that has just begun none."""
    served.router.per_output = per_output
    events = stream(served, **WANTED)
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert text_of(event["logprobs"]) == event["delta"]
    done = {event["type"].removeprefix("response."): event for event in events}
    (part,) = parts_of(done["completed"]["response"])
    assert done["content_part.done"]["part"] == part
    assert done["output_item.done"]["item"]["content"] == [part]
    assert done["content_part.added"]["part"]["logprobs"] == []


@PER_OUTPUT
def test_neither_reasoning_nor_calls_have_any(thinking: Served, per_output: int) -> None:
    thinking.router.per_output = per_output
    says(thinking, REASONED)
    whole = post(thinking, tools=[WEATHER], **WANTED).json()
    (part,) = parts_of(whole)
    # The token of the full stop may have the line break after it, which is no text any more.
    assert (part["text"], text_of(part["logprobs"]).strip()) == (SPOKEN, SPOKEN)
    events = stream(thinking, tools=[WEATHER], **WANTED)
    assert of_events(events) == part["logprobs"]
    reasoning, _, call = events[-1]["response"]["output"]
    assert "logprobs" not in reasoning["content"][0]
    assert "logprobs" not in call
    named = {event["type"] for event in events if "logprobs" in event}
    assert named == {"response.output_text.delta", "response.output_text.done"}


def test_each_of_two_texts_has_its_own(thinking: Served) -> None:
    says(thinking, f"One 🤔 two.\n{CALL}\nThree.")
    for answer in (
        post(thinking, tools=[WEATHER], **WANTED).json(),
        stream(thinking, tools=[WEATHER], **WANTED)[-1]["response"],
    ):
        first, second = parts_of(answer)
        assert (first["text"], text_of(first["logprobs"]).strip()) == ("One 🤔 two.", "One 🤔 two.")
        assert (second["text"], text_of(second["logprobs"]).strip()) == ("Three.", "Three.")


@PER_OUTPUT
def test_characters_of_several_tokens(served: Served, per_output: int) -> None:
    said = " 🤔👋é 漢字\n\n🤔 "
    assert len(served.ctx.tokenizer.encode(said)) > len(said)
    served.router.per_output = per_output
    says(served, said)
    (part,) = parts_of(post(served, **WANTED).json())
    assert (part["text"], text_of(part["logprobs"])) == (said, said)
    assert of_events(stream(served, **WANTED)) == part["logprobs"]


def test_they_come_only_where_they_are_included(served: Served) -> None:
    """As OpenAI documents it: `top_logprobs` says how many, not whether."""
    for answer in (
        post(served, top_logprobs=2).json(),
        stream(served, top_logprobs=2)[-1]["response"],
    ):
        assert parts_of(answer)[0]["logprobs"] == []
        assert answer["top_logprobs"] == 2
    assert [submit.sampling.logprobs for submit in served.router.submits] == [None, None]


def test_without_a_number_each_token_has_its_own_alone(served: Served) -> None:
    answer = post(served, include=WANTED["include"]).json()
    (part,) = parts_of(answer)
    assert text_of(part["logprobs"]) == ANSWER
    assert [entry["top_logprobs"] for entry in part["logprobs"]] == [[]] * len(part["logprobs"])
    assert answer["top_logprobs"] == 0
    assert served.router.submits[0].sampling.logprobs == 0


def test_a_number_out_of_range_is_refused(served: Served) -> None:
    for wrong in (-1, 21):
        error = refused(served, include=WANTED["include"], top_logprobs=wrong)
        assert error["param"] == "top_logprobs"
        assert f"got {wrong}" in error["message"]


def test_what_is_kept_has_them(served: Served) -> None:
    for made in (
        post(served, **WANTED).json(),
        stream(served, **WANTED)[-1]["response"],
    ):
        assert parts_of(made)[0]["logprobs"]
        assert served.http.get(f"{PATH}/{made['id']}").json() == made
    begun = post(served, background=True, **WANTED).json()

    def found() -> Any:
        return served.http.get(f"{PATH}/{begun['id']}").json()

    wait_until(lambda: found()["status"] == "completed")
    assert parts_of(found()) == parts_of(made)


def test_an_answer_with_them_is_continued_by_its_text(served: Served) -> None:
    first = post(served, **WANTED).json()
    ask(served, "Why?", previous_response_id=first["id"])
    assert f"assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nWhy?" in prompt(served)
    given_back = [{"role": "user", "content": "Hi"}, *first["output"]]
    ask(served, [*given_back, {"role": "user", "content": "Why?"}])
    assert f"assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nWhy?" in prompt(served)


def test_openais_client_reads_them(served: Served) -> None:
    message = ask(served, **WANTED).output[0]
    assert message.type == "message"
    content = message.content[0]
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert "".join(entry.token for entry in content.logprobs) == ANSWER
    with served.openai().responses.stream(model=MODEL, input="Hi", **WANTED) as opened:
        deltas = [event for event in opened if event.type == "response.output_text.delta"]
    told = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in content.logprobs]


def test_a_stream_that_fails_has_those_that_came(thinking: Served) -> None:
    says(thinking, f"{SPOKEN}\n{CALL}")
    thinking.router.fail_after = len(thinking.ctx.tokenizer.encode(f"{SPOKEN}\n{CALL}")) - 2
    events = stream(thinking, tools=[WEATHER], **WANTED)
    assert shape(events)[-1] == "failed"
    (part,) = parts_of(events[-1]["response"])
    assert text_of(part["logprobs"]).strip() == SPOKEN


def taken(lengths: list[int], spans: list[tuple[int, int]], at_once: int) -> list[bytes]:
    """Tokens of texts of `lengths`, named by their numbers, that come as the spans are read."""
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    left = [TokenText(i, None, offset) for i, offset in enumerate(offsets)]
    logprobs, found = TextLogprobs(), []
    for begin, end in spans:
        for at in range(begin, end, at_once):
            upto = min(end, at + at_once)
            new = [token for token in left if token.offset < upto]
            del left[: len(new)]
            logprobs.add(new, tuple(b"%d" % token.token for token in new))
            found += logprobs.take([(at, upto)])
    return found


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 40), max_size=8, unique=True).map(sorted),
    st.integers(1, 50),
)
def test_a_token_belongs_where_it_has_a_character(
    lengths: list[int], ends: list[int], at_once: int
) -> None:
    """Against the same, character by character. A token without one belongs to the next."""
    total = sum(lengths)
    ends = [min(end, total) for end in ends]
    spans = [(b, e) for b, e in zip(ends[::2], ends[1::2], strict=False) if b < e]
    expected = []
    for i, length in enumerate(lengths):
        begin = sum(lengths[:i])
        place = range(begin, begin + max(1, length))
        if any(b <= at < e for at in place for b, e in spans):
            expected.append(b"%d" % i)
    assert taken(lengths, spans, at_once) == expected
