"""`truncation: auto`: what is left out of a conversation that does not fit, and what never is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.api.openai.schema import Message
from kvrelay.cluster.api.responses import truncation
from kvrelay.cluster.api.responses.truncation import first_that_fits, units_of, with_their_calls
from kvrelay.cluster.api.text.tokenizer import ChatPrompt, Tokenizer
from kvrelay.router.admission.admission import IncomingCall
from tests.cluster.api.conftest import MAX_MODEL_LEN, Served, wait_until
from tests.cluster.api.responses.asking import (
    PATH,
    WEATHER,
    ask,
    post,
    refused,
    stream,
    user,
)
from tests.cluster.api.tools.templates import OSLO, as_new, prompt, says, serve_template

AUTO: dict[str, Any] = {"truncation": "auto"}
ROOM = MAX_MODEL_LEN // truncation.ROOM_SHARE
STEP = 2 * MAX_MODEL_LEN // truncation.STEP_SHARE  # in tokens, at most: four characters each or two
# Refuses what Mistral's and Gemma's do: two in a row, or the assistant first.
ALTERNATING = """\
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
[{{ message.role }}]{{ message.content }}
{% endfor %}
"""


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def long_chat(num_turns: int, words: int = 12) -> list[dict[str, Any]]:
    """Numbered turns, and a last question."""
    turns = [
        each
        for i in range(num_turns)
        for each in (user(f"Question {i}: {'why ' * words}?"), said(f"Answer {i}: so."))
    ]
    return [*turns, user("And now?")]


def num_tokens(served: Served, index: int = -1) -> int:
    return len(served.router.submits[index].tokens)


def first_said(served: Served) -> str:
    """The first message of the prompt that is no system message."""
    turns = prompt(served).split("<|im_start|>")[1:]
    return next(turn for turn in turns if not turn.startswith("system"))


def test_what_fits_is_left_as_it_is(served: Served) -> None:
    for given_items in ("Hi", long_chat(5)):
        ask(served, given_items)
        for way in ("auto", "disabled", None):
            answer = ask(served, given_items, truncation=way)
            assert answer.truncation == (way or "disabled")
        submits = served.router.submits[-4:]
        assert {submit.tokens for submit in submits} == {submits[0].tokens}


def test_without_it_a_conversation_that_is_too_long_is_refused(served: Served) -> None:
    for changes in ({}, {"truncation": None}, {"truncation": "disabled"}):
        error = refused(served, long_chat(40), **changes)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert served.router.submits == []


@pytest.mark.parametrize("as_stream", [False, True])
def test_the_oldest_are_left_out_until_the_rest_fits(served: Served, as_stream: bool) -> None:
    items = long_chat(40)
    if as_stream:
        answer = stream(served, items, **AUTO)[-1]["response"]
    else:
        answer = post(served, items, **AUTO).json()
    assert (answer["status"], answer["truncation"]) == ("completed", "auto")
    assert num_tokens(served) <= MAX_MODEL_LEN - ROOM
    kept = sum(prompt(served).count(f"<|im_start|>{role}") for role in ("user", "assistant")) - 1
    assert answer["usage"]["input_tokens"] == num_tokens(served)
    ask(served, items[-kept:])  # of what is left, the same prompt
    assert served.router.submits[-1].tokens == served.router.submits[-2].tokens
    assert num_tokens(served) > MAX_MODEL_LEN - ROOM - STEP


def test_from_step_to_step_the_turns_begin_alike(served: Served) -> None:
    """So their prefix is cached. If each turn left out just enough, none would have one."""
    items = long_chat(40)
    asked: list[tuple[int, ...]] = []
    for turn in range(24):
        ask(served, [*items, said(f"Answer {turn}."), user(f"And then, {turn}?")], **AUTO)
        items += [said(f"Answer {turn}."), user(f"And then, {turn}?")]
        asked.append(served.router.submits[-1].tokens)
        assert len(asked[-1]) <= MAX_MODEL_LEN - ROOM
    # The end of a prompt, which invites an answer, is none of the next one's.
    num_kept = sum(b[: len(a) - 8] == a[:-8] for a, b in pairwise(asked))
    assert num_kept >= 16
    assert num_kept < len(asked) - 1, "something was left out on the way"


def test_the_answer_that_is_asked_for_has_room(served: Served) -> None:
    items = long_chat(40)
    for wanted in (1, 40, 200):
        ask(served, items, max_output_tokens=wanted, **AUTO)
        submit = served.router.submits[-1]
        assert submit.sampling.max_tokens == wanted
        assert MAX_MODEL_LEN - wanted - STEP < len(submit.tokens) <= MAX_MODEL_LEN - wanted
    ask(served, items, max_output_tokens=100_000, **AUTO)
    half = MAX_MODEL_LEN // truncation.MOST_SHARE
    assert half - STEP < num_tokens(served) <= half


def test_instructions_and_system_messages_stay(served: Served) -> None:
    items: list[dict[str, Any]] = long_chat(40)
    items.insert(2, {"role": "developer", "content": "Be kind."})
    ask(served, items, instructions="Be brief.", **AUTO)
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
    assert prompt(served).startswith(begin)
    assert "Answer 1:" not in prompt(served)
    assert prompt(served).endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    assert num_tokens(served) <= MAX_MODEL_LEN - ROOM


def call(call_id: str, text: str = "") -> list[dict[str, Any]]:
    """What the model thought, the call, and its output."""
    thought = {"type": "reasoning_text", "text": f"Thought {call_id}."}
    return [
        {"type": "reasoning", "summary": [], "content": [thought]},
        {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": OSLO},
        {"type": "function_call_output", "call_id": call_id, "output": f"Output {call_id}. {text}"},
    ]


def test_a_call_goes_with_its_output_and_its_reasoning(thinking: Served) -> None:
    """Also after the last question, where an agent works: what it has to answer stays."""
    calls = [item for i in range(30) for item in call(f"c{i}", "dry " * (i % 7))]
    ask(thinking, [user("Where is it dry?"), *calls], tools=[WEATHER], **AUTO)
    text = prompt(thinking)
    assert "Where is it dry?" in text
    outputs = [i for i in range(30) if f"Output c{i}." in text]
    assert 2 < len(outputs) < 20
    assert outputs == list(range(30 - len(outputs), 30))
    assert [i for i in range(30) if f"Thought c{i}." in text] == outputs
    assert text.count("<tool_call>") == len(outputs)


def message(role: str, *calls: str, of: str | None = None) -> Message:
    made = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in calls
    ]
    return Message(role=role, content="x", tool_calls=made or None, tool_call_id=of)  # type: ignore[arg-type]


def test_what_goes_together_and_what_never_goes() -> None:
    tool, system, asked, told = "tool", message("system"), message("user"), message("assistant")
    two = message("assistant", "a", "b")
    out_a, out_b, out_c = (message(tool, of=name) for name in "abc")
    assert units_of([system, asked, told, asked]) == [[1], [2]]
    assert units_of([asked]) == []
    assert units_of([asked, told, told]) == [[1]]
    assert units_of([told, told, system]) == [[0], [1]]
    assert units_of([asked, two, out_a, out_b, asked]) == [[0], [1, 2, 3]]
    assert units_of([two, out_a, told, out_b, asked]) == [[0, 1, 3], [2]]
    assert units_of([asked, two, out_a, told, out_b]) == [[3]]  # the last output is answered
    assert units_of([out_c, two, out_a, asked]) == [[0], [1, 2]]
    again = message("assistant", "a")  # an id twice: an output is of the call before it
    assert units_of([two, out_a, again, out_a, asked]) == [[0, 1], [2, 3]]


def test_a_chain_is_cut_like_a_conversation_that_is_sent(served: Served) -> None:
    says(served, "So.")
    made = None
    for i in range(30):
        changes = {} if made is None else {"previous_response_id": made.id}
        made = ask(served, f"Question {i}: {'why ' * 12}?", **changes, **AUTO)
    assert made is not None
    assert MAX_MODEL_LEN - ROOM - STEP < num_tokens(served) <= MAX_MODEL_LEN - ROOM
    assert "Question 28:" in prompt(served)
    assert "Question 3:" not in prompt(served)
    # What is left out of a prompt is not left out of what is kept.
    error = refused(served, "Why?", previous_response_id=made.id)
    assert error["code"] == "context_length_exceeded"
    (item,) = served.openai().responses.input_items.list(made.id)
    assert item.to_dict()["content"][0]["text"].startswith("Question 29:")  # type: ignore[index]
    assert len(served.router.submits) == 30


def test_a_chain_of_very_many_turns_is_read_back_as_far_as_that_goes(
    thinking: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.responses.call.MAX_TURNS", 2)
    says(thinking, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', "Dry.")
    first = ask(thinking, "Is it dry?", tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": "", "output": "An output."}
    output["call_id"] = first.output[0].call_id  # type: ignore[union-attr]
    second = ask(thinking, [output, user("Well?")], previous_response_id=first.id)
    third = ask(thinking, "Sure?", previous_response_id=second.id)
    error = refused(thinking, "So?", previous_response_id=third.id)
    assert error["message"].startswith("A conversation has at most 2 turns")
    ask(thinking, "So?", previous_response_id=third.id, **AUTO)
    assert [text in prompt(thinking) for text in ("Is it dry?", "An output.")] == [False, False]
    assert all(text in prompt(thinking) for text in ("Well?", "Dry.", "Sure?", "So?"))


def test_outputs_without_their_calls_are_none() -> None:
    called = {"type": "custom_tool_call", "call_id": "a"}
    outputs = [{"type": "custom_tool_call_output", "call_id": name} for name in "ab"]
    items = [*outputs, called, user("Hi")]
    assert with_their_calls(items) == [outputs[0], called, user("Hi")]


def test_one_in_the_background_is_cut_too(served: Served) -> None:
    begun = post(served, long_chat(40), background=True, **AUTO).json()
    assert begun["truncation"] == "auto"

    def status() -> str:
        found: str = served.http.get(f"{PATH}/{begun['id']}").json()["status"]
        return found

    wait_until(lambda: status() != "in_progress")
    assert status() == "completed"
    assert num_tokens(served) <= MAX_MODEL_LEN - ROOM


def test_what_never_goes_may_be_too_long(served: Served) -> None:
    """Then all else goes: as much room as there can be; and without any, it is refused."""
    items = [*long_chat(10)[:-1], user("why " * 480)]
    ask(served, items, **AUTO)
    assert first_said(served).startswith("user\nwhy why")
    assert MAX_MODEL_LEN - ROOM < num_tokens(served) < MAX_MODEL_LEN
    items[-1] = user("why " * 600)
    error = refused(served, items, **AUTO)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "the prompt has 6" in error["message"]  # of what is left


@pytest.mark.parametrize("wrong", ["middle", "", 5, True])
def test_another_way_is_refused(served: Served, wrong: Any) -> None:
    error = refused(served, truncation=wrong)
    assert error["message"] == f"'truncation': Input should be 'auto' or 'disabled', got {wrong!r}"
    assert error["param"] == "truncation"


@pytest.fixture
def alternating(smollm2_dir: Path, tmp_path: Path) -> Iterator[Served]:
    with serve_template(smollm2_dir, tmp_path, ALTERNATING) as server, as_new(server) as served:
        yield served


def test_a_template_that_wants_the_user_first_has_them(alternating: Served) -> None:
    """Whole turns go there. Words of many lengths: each end of a prompt comes to be tried."""
    for words in range(8, 20):
        ask(alternating, long_chat(40, words), **AUTO)
        assert prompt(alternating).startswith("[user]Question ")
        turn = num_tokens(alternating) // (prompt(alternating).count("[user]") - 1)
        limit = MAX_MODEL_LEN - ROOM
        assert limit - 2 * turn - STEP < num_tokens(alternating) <= limit
    assert "roles must alternate" in refused(alternating, [said("Hi")], **AUTO)["message"]


@pytest.mark.parametrize("text", ["why ", "xq7 ", "unbelievable ", "\n\n\n\n", "🤔"])
def test_few_prompts_are_tokenised_and_none_that_is_much_too_long(
    served: Served, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    lengths: list[int] = []
    tokenise = Tokenizer.chat_prompt

    def watched(self: Tokenizer, messages: Any, *args: Any, **options: Any) -> ChatPrompt:
        found = tokenise(self, messages, *args, **options)
        lengths.append(len(found.tokens))
        return found

    items = [each for i in range(300) for each in (user(text * (1 + i % 9)), said(f"So {i}."))]
    ask(served, items[:3], **AUTO)
    monkeypatch.setattr(Tokenizer, "chat_prompt", watched)
    ask(served, items[:3], **AUTO)
    assert len(lengths) == 1  # it fits
    lengths.clear()
    ask(served, [*items, user("And now?")], **AUTO)
    assert 1 < len(lengths) <= 5, lengths
    assert max(lengths) < 4 * MAX_MODEL_LEN, lengths
    assert num_tokens(served) in lengths


def test_admission_expects_no_more_than_fits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[IncomingCall] = []
    monkeypatch.setattr(served.ctx, "refuse_early", lambda call: expected.append(call))
    ask(served, long_chat(200), **AUTO)
    assert [call.num_prompt_tokens for call in expected] == [MAX_MODEL_LEN]


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 120)), min_size=1, max_size=60),
    st.integers(0, 4000),
)
def test_the_first_that_fits_is_found(parts: list[tuple[int, int]], limit: int) -> None:
    """Whatever characters say of tokens: against a look at each."""
    places = range(len(parts))
    sizes = [sum(size for size, _ in parts[i:]) for i in places]
    tokens = [sum(num for _, num in parts[i:]) for i in places]
    measured: list[int] = []

    async def measure(place: int) -> int:
        measured.append(place)
        return tokens[place]

    found = asyncio.run(first_that_fits(sizes, limit, measure))
    expected = next((i for i in places if tokens[i] <= limit), len(parts) - 1)
    assert found == expected
    assert found in measured
    assert len(set(measured)) == len(measured) <= 5 + ceil(log2(len(parts)))


def test_characters_that_say_nothing_of_tokens_do_not_make_it_slow() -> None:
    """As of reasoning, where a template leaves it out."""
    measured: list[int] = []

    async def measure(place: int) -> int:
        measured.append(place)
        return 10_000 - place

    sizes = range(1_000_000, 0, -1000)
    assert asyncio.run(first_that_fits(sizes, 9_100, measure)) == 900
    assert len(measured) <= 5 + ceil(log2(1000))
