"""vLLM's parsers beside the API: what they say in every API, and what becomes of their process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.output import vllm_parsers
from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
from kvrelay.decode_worker.vllm import parser_process
from kvrelay.decode_worker.vllm.parser_process import ParserProcess
from tests.cluster.api.conftest import Served, serve, wait_until
from tests.cluster.api.reply_formats import FORMATS, Format
from tests.cluster.api.tools.templates import (
    OSLO,
    SPOKEN,
    THINKING,
    THOUGHT,
    as_new,
    says,
    tokenizer_with,
)

STAND_IN = Path(__file__).parents[3] / "support" / "parsers"
CALL, TIME = f"[[weather {OSLO}]]", "[[clock {}]]"
# What the model says; then the thought, text, names and arguments of calls; and why it ends.
SAID: dict[str, tuple[str, str, str, list[str], str, int]] = {
    "text": (SPOKEN, "", SPOKEN, [], "", 0),
    "nothing": ("", "", "", [], "", 0),
    "a call": (CALL, "", "", ["weather"], OSLO, 2),
    "text and a call": (f"{SPOKEN}{CALL}", "", SPOKEN, ["weather"], OSLO, 2),
    "all": (f"(({THOUGHT})){SPOKEN}{CALL}{TIME}", THOUGHT, SPOKEN, ["weather", "clock"], OSLO, 2),
}


def stand_in(folder: Path) -> Path:
    """An interpreter that has the stand-in."""
    python = folder / "python"
    words = f'PYTHONPATH="$PYTHONPATH:{STAND_IN}" STAND_IN_ONCE={folder}/once'
    python.write_text(f'#!/bin/sh\n{words} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def beside(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("beside")
    python = stand_in(folder)
    made = tokenizer_with(smollm2_dir, folder, THINKING)
    names = {"tool_parser": "brackets", "reasoning_parser": "stand_in"}
    settings = ApiSettings(request_timeout_s=20, **names)
    parsers = VllmParsers(ParserProcess(str(python), folder, *settings.vllm_parsers))
    with serve(made, settings, context={"vllm_parsers": parsers}) as running:
        yield running
    wait_until(lambda: not children())


@pytest.fixture
def served(beside: Served) -> Iterator[Served]:
    once = beside.ctx.tokenizer.directory / "once"
    once.unlink(missing_ok=True)
    with as_new(beside):
        yield beside


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if parser_process.MODULE in each.cmdline()
    ]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.api.endpoint)
@pytest.mark.parametrize("per_output", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_what_the_model_says_is_told_apart(
    served: Served, form: Format, said: str, stream: bool, per_output: int
) -> None:
    words, thought, text, names, arguments, ended = SAID[said]
    says(served, words)
    served.router.per_output = per_output
    thinks = {k: v for k, v in form.thinks.items() if thought}
    answer = form.ask(served, stream=stream, **form.tools("weather", "clock"), **thinks)
    assert (answer.thought, answer.text, answer.names) == (thought, text, names)
    assert answer.arguments.removesuffix("{}") == arguments
    assert answer.ended == form.ended[ended]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.api.endpoint)
def test_without_tools_what_looks_like_a_call_is_text(
    served: Served, form: Format, stream: bool
) -> None:
    says(served, f"(({THOUGHT})){CALL}")
    answer = form.ask(served, stream=stream, **form.thinks)
    assert (answer.thought, answer.text, answer.names) == (THOUGHT, CALL, [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_process_that_ends_is_started_again_and_nothing_is_lost_or_repeated(
    served: Served, stream: bool
) -> None:
    says(served, f'(({THOUGHT}))[[weather {{"city": "THE END"}}]]')
    chat = FORMATS[0]
    answer = chat.ask(served, stream=stream, **chat.tools("weather"))
    assert (served.ctx.tokenizer.directory / "once").exists()
    assert (answer.thought, answer.text, answer.names) == (THOUGHT, "", ["weather"])
    assert (answer.arguments, answer.ended) == ('{"city": "THE END"}', "tool_calls")


def test_kill_9_in_the_middle_of_many_streams_fails_none(served: Served) -> None:
    says(served, f"(({THOUGHT})){SPOKEN}{CALL}")
    served.router.per_output, served.router.delay_s = 1, 0.02
    chat, answers, killed = FORMATS[0], [], []

    def ask() -> None:
        answers.append(chat.ask(served, stream=True, **chat.tools("weather")))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.router.submits) == 12)
    time.sleep(0.3)
    for process in children():
        killed.append(process.pid)
        process.kill()
    for thread in threads:
        thread.join(30)
    assert killed
    said = {(each.thought, each.text, each.arguments, each.ended) for each in answers}
    assert said == {(THOUGHT, SPOKEN, OSLO, "tool_calls")}
    assert len(answers) == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["RAISE", "ENDS"])
def test_what_a_parser_cannot_read_is_text_as_the_model_wrote_it(
    served: Served, fault: str, stream: bool
) -> None:
    says(served, f"{SPOKEN} {fault} {CALL}")
    chat = FORMATS[0]
    answer = chat.ask(served, stream=stream, **chat.tools("weather"))
    assert (answer.text, answer.names) == (f"{SPOKEN} {fault} {CALL}", [])
    assert answer.ended == "stop"
    says(served, CALL)
    assert chat.ask(served, stream=stream, **chat.tools("weather")).names == ["weather"]


def test_half_a_call_is_an_error_and_never_a_whole_one(served: Served) -> None:
    says(served, '[[weather {"city": "a town with a long name RAISE"}]]')
    served.router.per_output, served.router.delay_s = 1, 0.02
    chat = FORMATS[0]
    response = chat.post(served, stream=True, **chat.tools("weather"))
    assert '"code":"parser_lost"' in response.text
    assert '"finish_reason":"tool_calls"' not in response.text


def test_a_parser_that_computes_for_ever_ends_and_others_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "ANSWER_S", 1.0)
    says(served, "SLEEP", CALL)
    chat, slow = FORMATS[0], []
    first = threading.Thread(target=lambda: slow.append(chat.ask(served, **chat.tools("weather"))))
    first.start()
    wait_until(lambda: len(served.router.submits) == 1)
    answer = chat.ask(served, stream=True, **chat.tools("weather"))
    first.join(20)
    assert answer.names == ["weather"]
    assert [each.text for each in slow] == ["SLEEP"]


def test_a_client_that_leaves_is_forgotten(served: Served) -> None:
    says(served, SPOKEN * 20)
    served.router.per_output, served.router.delay_s = 1, 0.05
    chat = FORMATS[0]
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "?"}], "stream": True}
    with served.http.stream("POST", chat.api.path, json=body | chat.tools("weather")) as response:
        next(response.iter_lines())
    served.wait_idle()
    says(served, CALL)
    served.router.delay_s = 0.0
    assert chat.ask(served, **chat.tools("weather")).names == ["weather"]


def test_a_call_is_not_demanded_behind_reasoning_that_only_vllm_reads(served: Served) -> None:
    chat = FORMATS[0]
    response = chat.post(served, **chat.tools("weather"), tool_choice="required")
    assert response.status_code == 400
    assert "reasoning of this model is read by a parser of vLLM" in response.text


@pytest.mark.parametrize(
    ("own", "words", "thought"),
    [
        ({"tool_parser": "brackets"}, f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}{CALL}", THOUGHT),
        (
            {"reasoning_parser": "stand_in"},
            f'(({THOUGHT})){SPOKEN}<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}'
            "\n</tool_call>",
            THOUGHT,
        ),
    ],
    ids=["their calls", "their reasoning"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_one_of_theirs_works_with_one_of_ours(
    smollm2_dir: Path, tmp_path: Path, own: dict[str, Any], words: str, thought: str, stream: bool
) -> None:
    made = tokenizer_with(smollm2_dir, tmp_path, THINKING)
    settings = ApiSettings(request_timeout_s=20, **own)
    process = ParserProcess(str(stand_in(tmp_path)), tmp_path, *settings.vllm_parsers)
    with serve(made, settings, context={"vllm_parsers": VllmParsers(process)}) as served:
        says(served, words)
        served.router.per_output = 1
        chat = FORMATS[0]
        answer = chat.ask(served, stream=stream, **chat.tools("weather"))
        assert (answer.thought, answer.text) == (thought, SPOKEN)
        assert (answer.names, answer.arguments) == (["weather"], OSLO)
        if "tool_parser" in own:
            says(served, '{"name": "weather", "parameters": {"city": "Oslo"}}')
            forced = {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}
            answer = chat.ask(served, stream=stream, **chat.tools("weather"), **forced)
            assert answer.names == ["weather"]


def test_names_that_vllm_does_not_have_are_refused_with_those_that_it_has(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    python = str(stand_in(tmp_path))
    assert ParserProcess(python, smollm2_dir, "brackets", "stand_in").check() == ""
    why = ParserProcess(python, smollm2_dir, "braces", "").check()
    assert why == "api.tool_parser = 'braces': vLLM has brackets, stand_in"
    why = ParserProcess(python, smollm2_dir, "", "aloud").check()
    assert why == "api.reasoning_parser = 'aloud': vLLM has brackets, stand_in"
    with pytest.raises(OSError, match="nowhere"):
        ParserProcess("/nowhere/python", smollm2_dir, "brackets", "").check()


def test_without_a_process_requests_are_refused_with_words(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    made = tokenizer_with(smollm2_dir, tmp_path, THINKING)
    settings = ApiSettings(request_timeout_s=20, tool_parser="brackets")
    process = ParserProcess(sys.executable, tmp_path, *settings.vllm_parsers)
    with serve(made, settings, context={"vllm_parsers": VllmParsers(process)}) as served:
        chat = FORMATS[0]
        response = chat.post(served, **chat.tools("weather"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "parser_lost")
        assert "No module named 'vllm'" in response.text
        assert chat.ask(served).text
