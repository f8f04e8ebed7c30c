"""The parsers of a real vLLM beside the API, in all three APIs, whole and streamed.

KVRELAY_VLLM_PYTHON is the interpreter of an environment that has it (docs/engines.md). The router
is a script: what a model would have to say is in the dialects of models that are not here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
from kvrelay.decode_worker.vllm.parser_process import ParserProcess
from tests.cluster.api.conftest import Served, serve, wait_until
from tests.cluster.api.output.test_vllm_parsers import children
from tests.cluster.api.reply_formats import FORMATS
from tests.cluster.api.tools.templates import (
    OSLO,
    SPOKEN,
    THINKING,
    THOUGHT,
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


@contextmanager
def serving(smollm2_dir: Path, folder: Path, **names: str) -> Iterator[Served]:
    made = tokenizer_with(smollm2_dir, folder, THINKING)
    settings = ApiSettings(request_timeout_s=400, **names)
    parsers = VllmParsers(ParserProcess(PYTHON, folder, *settings.vllm_parsers))
    with serve(made, settings, context={"vllm_parsers": parsers}) as running:
        running.http.timeout = 400
        running.router.per_output = 1
        yield running


def test_calls_are_read(smollm2_dir: Path, tmp_path: Path) -> None:
    with serving(smollm2_dir, tmp_path, tool_parser="olmo3") as served:
        for form, stream in product(FORMATS, (False, True)):
            says(served, CALL)
            answer = form.ask(served, stream=stream, **form.tools("weather"))
            assert (answer.text, answer.names, answer.arguments) == ("", ["weather"], OSLO)
            assert answer.ended == form.ended[2]
            says(served, SPOKEN)
            answer = form.ask(served, stream=stream, **form.tools("weather"))
            assert (answer.text, answer.names, answer.ended) == (SPOKEN, [], form.ended[0])


def test_a_call_that_a_parser_finds_in_no_part_of_a_stream_is_found_at_its_end(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    with serving(smollm2_dir, tmp_path, tool_parser="phi4_mini_json") as served:
        says(served, f'functools[{{"name": "weather", "arguments": {OSLO}}}]')
        for form in FORMATS:
            answer = form.ask(served, stream=True, **form.tools("weather"))
            assert (answer.names, answer.arguments) == (["weather"], OSLO)


def test_kill_9_in_the_middle_of_many_streams_fails_none(smollm2_dir: Path, tmp_path: Path) -> None:
    chat, answers = FORMATS[0], []

    def ask() -> None:
        answers.append(chat.ask(served, stream=True))

    with serving(smollm2_dir, tmp_path, reasoning_parser="granite") as served:
        says(served, f"{THOUGHTS}{SPOKEN}")
        for form, stream in product(FORMATS, (False, True)):
            answer = form.ask(served, stream=stream, **form.thinks)
            assert (answer.thought.strip(), answer.text.strip()) == (THOUGHT, SPOKEN)
        num_before, served.router.delay_s = len(served.router.submits), 0.1
        threads = [threading.Thread(target=ask) for _ in range(60)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(served.router.submits) == num_before + len(threads))
        time.sleep(1.0)
        [process] = children()
        process.kill()
        for thread in threads:
            thread.join(300)
    assert [(a.thought.strip(), a.text.strip()) for a in answers] == [(THOUGHT, SPOKEN)] * 60


def test_names_are_those_of_this_vllm(smollm2_dir: Path) -> None:
    why = ParserProcess(PYTHON, smollm2_dir, "granite5", "").check()
    assert why.startswith("api.tool_parser = 'granite5': vLLM has ")
    assert " granite4," in why
    why = ParserProcess(PYTHON, smollm2_dir, "lfm2", "").check()
    assert "cannot be used with the tokenizer" in why
