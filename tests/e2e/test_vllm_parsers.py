"""The parsers of a real vLLM beside the API, in all three APIs, whole and streamed.

KVRELAY_VLLM_PYTHON is the interpreter of an environment that has it (docs/engines.md). The router
is a script: what a model would have to say is in the dialects of models that are not here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
from kvrelay.decode_worker.vllm.parser_process import ParserProcess
from tests.cluster.api.conftest import Served, serve, wait_until
from tests.cluster.api.output.test_vllm_parsers import children
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

PYTHON = os.environ.get("KVRELAY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="KVRELAY_VLLM_PYTHON names no interpreter with vLLM"),
]
THOUGHTS = f"Here is my thought process: {THOUGHT} Here is my response:"
CALL = '<function_calls>weather(city="Oslo")</function_calls>'


@pytest.fixture(scope="module")
def server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("parsers")
    made = tokenizer_with(smollm2_dir, folder, THINKING)
    settings = ApiSettings(request_timeout_s=400, tool_parser="olmo3", reasoning_parser="granite")
    parsers = VllmParsers(ParserProcess(PYTHON, folder, *settings.vllm_parsers))
    with serve(made, settings, context={"vllm_parsers": parsers}) as running:
        running.http.timeout = 400
        yield running


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    with as_new(server):
        yield server


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.api.endpoint)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_says_is_told_apart(served: Served, form: Format, stream: bool) -> None:
    served.router.per_output = 1
    says(served, f"{THOUGHTS}{CALL}")
    answer = form.ask(served, stream=stream, **form.tools("weather"), **form.thinks)
    assert (answer.thought.strip(), answer.text.strip()) == (THOUGHT, "")
    assert (answer.names, answer.arguments, answer.ended) == (["weather"], OSLO, form.ended[2])
    says(served, f"{THOUGHTS}{SPOKEN}")
    answer = form.ask(served, stream=stream, **form.tools("weather"), **form.thinks)
    assert (answer.thought.strip(), answer.text.strip()) == (THOUGHT, SPOKEN)
    assert (answer.names, answer.ended) == ([], form.ended[0])


def test_a_call_that_a_parser_finds_in_no_part_of_a_stream_is_found_at_its_end(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    made = tokenizer_with(smollm2_dir, tmp_path, THINKING)
    settings = ApiSettings(request_timeout_s=400, tool_parser="phi4_mini_json")
    process = ParserProcess(PYTHON, tmp_path, *settings.vllm_parsers)
    with serve(made, settings, context={"vllm_parsers": VllmParsers(process)}) as served:
        served.http.timeout = 400
        says(served, f'functools[{{"name": "weather", "arguments": {OSLO}}}]')
        for form in FORMATS:
            answer = form.ask(served, stream=True, **form.tools("weather"))
            assert (answer.names, answer.arguments) == (["weather"], OSLO)


def test_kill_9_in_the_middle_of_many_streams_fails_none(served: Served) -> None:
    says(served, f"{THOUGHTS}{SPOKEN}")
    served.router.per_output, served.router.delay_s = 1, 0.1
    chat, answers = FORMATS[0], []

    def ask() -> None:
        answers.append(chat.ask(served, stream=True))

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.router.submits) == len(threads))
    time.sleep(1.0)
    [process] = children()
    process.kill()
    for thread in threads:
        thread.join(200)
    assert [(a.thought.strip(), a.text.strip()) for a in answers] == [(THOUGHT, SPOKEN)] * 60


def test_names_are_those_of_this_vllm(smollm2_dir: Path) -> None:
    why = ParserProcess(PYTHON, smollm2_dir, "granite5", "").check()
    assert why.startswith("api.tool_parser = 'granite5': vLLM has ")
    assert " granite4," in why
    why = ParserProcess(PYTHON, smollm2_dir, "lfm2", "").check()
    assert "cannot be used with the tokenizer" in why
