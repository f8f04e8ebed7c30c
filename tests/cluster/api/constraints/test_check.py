"""Grammars are checked before their requests are served: in a process that can be ended, once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.constraints import grammar as module
from kvrelay.cluster.api.constraints.calls import call_grammar
from kvrelay.cluster.api.constraints.grammar import Constraints, choice_grammar, grammar_of
from kvrelay.cluster.api.constraints.schema import MAX_OPTIONAL, SchemaError
from kvrelay.cluster.api.limiter import CALLER, LimitReached
from kvrelay.cluster.api.output.json_calls import Hermes
from kvrelay.cluster.api.output.tools import Tool
from kvrelay.engine.model.sampling.vocabulary import GrammarError
from tests.cluster.api.conftest import wait_until

Test = Callable[[Constraints], Coroutine[Any, Any, Any]]


class Checking:
    """Runs tests in a loop, with constraints that are closed after each."""

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_compiled = 0
        self._model_dir = model_dir
        asked = Constraints._asked

        async def counted(constraints: Constraints, call: bytes) -> bytes:
            self.num_compiled += 1
            return await asked(constraints, call)

        monkeypatch.setattr(Constraints, "_asked", counted)

    def run(self, test: Test) -> Any:
        async def inside() -> Any:
            constraints = Constraints(self._model_dir, ())
            try:
                return await asyncio.wait_for(test(constraints), 30)
            finally:
                constraints.close()

        return asyncio.run(inside())


@pytest.fixture
def checking(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Checking:
    # The machine may be busy: no test is about how long it takes.
    monkeypatch.setattr(module, "WAIT_S", 20.0)
    return Checking(smollm2_dir, monkeypatch)


def choice(*texts: str) -> Callable[[], str]:
    return partial(choice_grammar, list(texts))


def lark(text: str) -> Callable[[], str]:
    return partial(grammar_of, "grammar", text, {})


# Eight seconds of computing, in a form that is not looked into.
BOMB = lark('start: %json {"type": "integer", "multipleOf": 999983}')


def test_a_grammar_is_compiled_once(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        first = await constraints.check(choice("a"))
        assert first == choice_grammar(["a"])
        assert await constraints.check(choice("b")) == choice_grammar(["b"])
        assert await constraints.check(choice("a")) == first

    checking.run(test)
    assert checking.num_compiled == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("MAX_KNOWN", 2), ("MAX_KNOWN_BYTES", 25)])
def test_the_grammars_that_were_used_last_are_remembered(
    checking: Checking, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(module, name, value)

    async def test(constraints: Constraints) -> None:
        for text in ("a", "b", "a", "c", "a", "b"):
            await constraints.check(choice(text))

    checking.run(test)
    assert checking.num_compiled == 4


def test_what_is_wrong_is_remembered_too(checking: Checking) -> None:
    async def test(constraints: Constraints) -> list[str]:
        told = []
        for _ in range(2):
            with pytest.raises(SchemaError) as error:
                await constraints.check(partial(grammar_of, "json", {"not": {}}, {}))
            told.append(str(error.value))
        return told

    assert checking.run(test) == ['Unimplemented keys: ["not"]'] * 2
    assert checking.num_compiled == 1


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(count)}, **more}


ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
# Kind, value, what is told of what only compiling finds.
WRONG: list[tuple[str, Any, str]] = [
    ("json", {"oneOf": [{}, {}]}, "let each require a property"),
    ("json", {"properties": {"a": {"uniqueItems": True}}}, '"uniqueItems"'),
    ("json", {"$ref": "#"}, "no text matches it"),
    ("json", ITSELF, "does it require itself"),
    ("json", {"anyOf": [properties(300)] * 3}, "require more of the properties"),
    ("regex", "(?=a)b", "look-around, .* is not supported"),
    ("regex", "a(", "unclosed group"),
    ("grammar", "start: other", "unknown name"),
    ("grammar", "start: start", "no text matches it"),
    ("choice", [], "'choice' is a list"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "value", "told"), WRONG)
def test_what_does_not_compile_is_refused_in_one_line(
    checking: Checking, kind: str, value: Any, told: str
) -> None:
    async def test(constraints: Constraints) -> None:
        with pytest.raises(SchemaError, match=told) as error:
            await constraints.check(partial(grammar_of, kind, value, {}))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) <= 300
        assert not str(error.value).endswith(":")
        assert await constraints.check(choice("a"))  # it goes on

    checking.run(test)


def test_as_many_optional_properties_as_are_let_in_can_be_written(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        assert await constraints.check(partial(grammar_of, "json", properties(MAX_OPTIONAL), {}))
        for count in (MAX_OPTIONAL + 1, 510, 1000, 2000, 5000):
            with pytest.raises(SchemaError, match=r"are optional, at most 450|at most 2000"):
                await constraints.check(partial(grammar_of, "json", properties(count), {}))

    checking.run(test)


def test_what_takes_too_much_ends_alone(checking: Checking) -> None:
    """Another tenant's is compiled beside it, and the process stays."""

    async def of_other(constraints: Constraints) -> float:
        CALLER.set(("other",))
        began = time.monotonic()
        assert await constraints.check(choice("b"))
        return time.monotonic() - began

    async def test(constraints: Constraints) -> None:
        await constraints.check(choice("a"))  # the vocabulary has been read
        process = constraints._process
        CALLER.set(("one",))
        bombs = [asyncio.create_task(constraints.check(BOMB)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await asyncio.create_task(of_other(constraints)) < 1.0
        assert not any(bomb.done() for bomb in bombs)
        told = await asyncio.gather(*bombs, return_exceptions=True)
        assert {repr(error) for error in told} == {
            repr(SchemaError("it takes more than 1 s of computing or 128 MiB of memory to compile"))
        }
        assert constraints._process is process

    checking.run(test)
    assert checking.num_compiled == 3  # two of the bombs waited for what became of the first


def test_memory_is_bounded(checking: Checking, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(constraints: Constraints) -> None:
        with pytest.raises(SchemaError, match="128 MiB of memory"):
            await constraints.check(partial(bytes, 2**28))  # type: ignore[arg-type]

    checking.run(test)


def test_who_waits_too_long_is_sent_away_and_not_told_to_be_wrong(
    checking: Checking, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(constraints: Constraints) -> None:
        await constraints.check(choice("a"))
        monkeypatch.setattr(module, "WAIT_S", 0.2)
        bomb = asyncio.create_task(constraints.check(BOMB))
        await asyncio.sleep(0.05)
        with pytest.raises(LimitReached):
            await constraints.check(choice("b"))  # behind its own tenant's
        with pytest.raises(SchemaError):
            await bomb

    checking.run(test)


@pytest.mark.slow
def test_a_process_that_ends_is_started_again(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        await constraints.check(choice("a"))
        assert constraints._process is not None
        os.kill(constraints._process.pid, signal.SIGKILL)
        assert await constraints.check(choice("b")) == choice_grammar(["b"])

    checking.run(test)


@pytest.mark.slow
def test_the_process_ends_with_the_api(smollm2_dir: Path) -> None:
    constraints = Constraints(smollm2_dir, ())
    constraints.warm_up()
    process = constraints._process
    assert process is not None
    assert constraints._control is not None
    constraints._control.close()  # as when the API is killed
    wait_until(lambda: process.poll() is not None, 20.0)
    constraints.close()


def test_a_tokenizer_that_is_none_for_grammars_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        constraints = Constraints(tmp_path, ())
        try:
            with pytest.raises(GrammarError, match="no tokenizer for grammars"):
                await constraints.check(choice("a"))
        finally:
            constraints.close()

    asyncio.run(test())


def test_what_is_asked_for_is_bounded_before_it_is_copied(checking: Checking) -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"items": deep}

    async def test(constraints: Constraints) -> None:
        for value, told in (("x" * 2**21, "more than 1048576 bytes"), (deep, "nested more than")):
            with pytest.raises(SchemaError, match=told):
                await constraints.check(partial(grammar_of, "json", value, {}))

    checking.run(test)
    assert checking.num_compiled == 0


@pytest.mark.slow
def test_grammars_of_calls_reach_the_process(checking: Checking) -> None:
    tools = [Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)]
    make = partial(call_grammar, Hermes(), tools, {}.get, required=True, parallel=False)

    async def test(constraints: Constraints) -> None:
        assert await constraints.check(make) == make()

    checking.run(test)
