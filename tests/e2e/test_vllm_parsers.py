"""The parsers of a real vLLM beside the API, in all three APIs, whole and streamed.

KVRELAY_VLLM_PYTHON is the interpreter of an environment that has it (docs/engines.md). The router
is a script, but for the last tests, where a server with a worker of vLLM serves a small checkpoint
of random weights, which a grammar has say what a model of such a dialect says.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.serving import served as servers
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
from kvrelay.decode_worker.vllm.parser_process import MODULE, ParserProcess
from tests.cluster.api.conftest import Served, serve, wait_until
from tests.cluster.api.output.test_vllm_parsers import children
from tests.cluster.api.reply_formats import FORMATS
from tests.cluster.api.tools.templates import (
    OSLO,
    SPOKEN,
    THINKING,
    THOUGHT,
    WEATHER,
    says,
    tokenizer_with,
)
from tests.e2e.serving import all_up, wait_for
from tests.e2e.test_vllm import START_S, assert_clean, client
from tests.e2e.test_vllm_models import checkpoint
from tests.support.vllm_settings import small

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


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Served]:
    folder = tmp_path_factory.mktemp("dialect")
    path = checkpoint(folder, "granite")
    (path / "chat_template.jinja").write_text(THINKING)
    settings = small(folder, START_S) | {
        "model.name": str(path),
        "model.served_name": "m",
        "engine.runs": "vllm",
        "engine.python": PYTHON,
        "engine.block_size": 32,
        "cluster.prefill": 0,
        "cluster.decode": 1,
        "api.tool_parser": "olmo3",
        "api.reasoning_parser": "granite",
    }
    with servers.Served(settings) as served:
        wait_for(served.url, all_up, START_S, "not up")
        yield served


def hear(url: str, said: str, on_chunk: Callable[[], None] | None = None) -> Any:
    """The thought, text, calls and end of a chat whose model says this; streamed if somebody
    listens."""
    chat: Any = client(url).chat.completions
    only = {"structured_outputs": {"regex": re.escape(said)}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Oslo?"}], "max_tokens": 1000}
    answer = chat.create(**asked, tools=[WEATHER], extra_body=only, stream=on_chunk is not None)
    calls: list[str] = []
    thought = text = ended = ""
    for part in answer if on_chunk else [answer]:
        [choice] = part.choices
        message = choice.delta if on_chunk else choice.message
        thought += getattr(message, "reasoning_content", None) or ""
        text += message.content or ""
        for call in message.tool_calls or ():
            calls += [call.function.name] if call.function.name else []
            calls += [call.function.arguments] if call.function.arguments else []
        ended = choice.finish_reason or ended
        if on_chunk:
            on_chunk()
    return thought.strip(), text.strip(), (calls[:1], "".join(calls[1:])), ended


def test_a_model_of_vllms_dialect_is_served_whole_and_streamed(
    served_model: servers.Served,
) -> None:
    url, none = served_model.url, ([], "")
    for on_chunk in (None, lambda: None):
        # In streams this parser leaves calls in the text as well, as with vLLM's own server.
        left = CALL if on_chunk else ""
        assert hear(url, CALL, on_chunk) == ("", left, (["weather"], OSLO), "tool_calls")
        assert hear(url, SPOKEN, on_chunk) == ("", SPOKEN, none, "stop")
        said = f"{THOUGHTS} {SPOKEN}"
        assert hear(url, said, on_chunk) == (THOUGHT, SPOKEN, none, "stop")
    assert_clean(url)


def test_its_parsers_are_killed_in_mid_stream_and_the_clients_answer_is_whole(
    served_model: servers.Served,
) -> None:
    long = " ".join(f"{THOUGHT} ({number})" for number in range(12))
    counted, killed = 0, list[psutil.Process]()

    def kill_all() -> None:
        nonlocal counted
        counted += 1
        if counted == 12:
            killed.extend(parsers())
            for process in killed:
                process.kill()

    said = f"Here is my thought process: {long} Here is my response: {SPOKEN}"
    found = hear(served_model.url, said, kill_all)
    assert counted > 24
    assert len(killed) == 1
    assert found == (long, SPOKEN, ([], ""), "stop")
    assert hear(served_model.url, CALL, lambda: None)[2] == (["weather"], OSLO)
    assert_clean(served_model.url)


def parsers() -> list[psutil.Process]:
    """Those of the servers that this process has started."""
    own = psutil.Process().children(recursive=True)
    alive = (each for each in own if each.status() != psutil.STATUS_ZOMBIE)
    return [each for each in alive if MODULE in each.cmdline()]
