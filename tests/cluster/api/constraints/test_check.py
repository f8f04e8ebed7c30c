"""Grammars are checked before their requests are served: in a thread, with a deadline, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cluster.api.constraints import grammar as module
from cluster.api.constraints.grammar import Constraints, choice_grammar, grammar_of
from cluster.api.constraints.schema import SchemaError
from tests.cluster.api.constraints.conftest import Matching

Test = Callable[[Constraints], Coroutine[Any, Any, Any]]


class Checking:
    """Runs tests in a loop, with constraints that are closed after each."""

    def __init__(self) -> None:
        self.compiled: list[str] = []  # grammars
        self.num_vocabularies = 0
        self.threads: set[str] = set()

    def run(self, test: Test) -> Any:
        async def inside() -> Any:
            constraints = Constraints(Path("model"), ())
            try:
                return await asyncio.wait_for(test(constraints), 10)
            finally:
                constraints.close()

        return asyncio.run(inside())


@pytest.fixture
def checking(matching: Matching, monkeypatch: pytest.MonkeyPatch) -> Checking:
    found = Checking()
    compile_grammar = module.compile_grammar

    def compile_counted(vocabulary: Any, grammar: str) -> Any:
        found.compiled.append(grammar)
        found.threads.add(threading.current_thread().name)
        return compile_grammar(vocabulary, grammar)

    def read_vocabulary(*_: Any) -> Any:
        found.num_vocabularies += 1
        return matching.vocabulary

    monkeypatch.setattr(module, "compile_grammar", compile_counted)
    monkeypatch.setattr(module, "read_vocabulary", read_vocabulary)
    return found


def choice(*texts: str) -> Callable[[], str]:
    return lambda: choice_grammar(list(texts))


def test_a_grammar_is_compiled_once_and_not_in_the_loop(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        first = await constraints.check(choice("a"))
        assert first == choice_grammar(["a"])
        assert await constraints.check(choice("b")) == choice_grammar(["b"])
        assert await constraints.check(choice("a")) == first

    checking.run(test)
    assert checking.compiled == [choice_grammar(["a"]), choice_grammar(["b"])]
    assert checking.num_vocabularies == 1
    assert len(checking.threads) == 1
    assert threading.current_thread().name not in checking.threads


def test_the_vocabulary_is_read_once_ahead_of_the_first_grammar(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        constraints.warm_up()
        while not checking.num_vocabularies:
            await asyncio.sleep(0.001)
        await constraints.check(choice("a"))

    checking.run(test)
    assert checking.num_vocabularies == 1


def test_the_grammars_that_were_used_last_are_remembered(
    checking: Checking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 2)

    async def test(constraints: Constraints) -> None:
        for text in ("a", "b", "a", "c", "a", "b"):
            await constraints.check(choice(text))

    checking.run(test)
    assert checking.compiled == [choice_grammar([text]) for text in ("a", "b", "c", "b")]


def test_what_is_wrong_is_remembered_too(checking: Checking) -> None:
    async def test(constraints: Constraints) -> list[str]:
        told = []
        for _ in range(2):
            with pytest.raises(SchemaError) as error:
                await constraints.check(lambda: grammar_of("json", {"not": {}}, {}))
            told.append(str(error.value))
        return told

    assert checking.run(test) == ['Unimplemented keys: ["not"]'] * 2
    assert len(checking.compiled) == 1


# Kind, value, what is told of what only compiling finds.
WRONG: list[tuple[str, Any, str]] = [
    ("json", {"oneOf": [{}, {}]}, "let each require a property"),
    ("json", {"properties": {"a": {"uniqueItems": True}}}, '"uniqueItems"'),
    ("json", {"$ref": "#"}, "no text matches it"),
    ("regex", "(?=a)b", "look-around, .* is not supported"),
    ("regex", "a(", "unclosed group"),
    ("grammar", "start: other", "unknown name"),
    ("grammar", "start: start", "no text matches it"),
]


@pytest.mark.parametrize(("kind", "value", "told"), WRONG)
def test_what_does_not_compile_is_refused_in_one_line(
    checking: Checking, kind: str, value: Any, told: str
) -> None:
    async def test(constraints: Constraints) -> None:
        with pytest.raises(SchemaError, match=told) as error:
            await constraints.check(lambda: grammar_of(kind, value, {}))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) <= 300
        assert not str(error.value).endswith(":")

    checking.run(test)


def test_what_cannot_be_made_is_refused_as_it_says(checking: Checking) -> None:
    async def test(constraints: Constraints) -> None:
        with pytest.raises(SchemaError, match="'choice' is a list"):
            await constraints.check(choice())
        assert await constraints.check(choice("a"))  # the thread goes on

    checking.run(test)


def test_what_takes_too_long_is_refused_and_does_not_stop_the_others(
    checking: Checking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    def slow() -> str:
        go_on.wait(5)
        return choice_grammar(["slow"])

    async def test(constraints: Constraints) -> None:
        waiting = asyncio.create_task(constraints.check(slow))
        await asyncio.sleep(0)
        with pytest.raises(SchemaError, match=r"^it was not compiled within 0\.05 s$"):
            await constraints.check(choice("a"))  # it waits behind the other
        with pytest.raises(SchemaError, match=r"^it was not compiled within 0\.05 s$"):
            await waiting
        go_on.set()
        monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 5.0)
        assert await constraints.check(choice("a")) == choice_grammar(["a"])
        assert await constraints.check(choice("slow")) == choice_grammar(["slow"])

    checking.run(test)
    # What nothing waited for any more was not begun; what had begun was remembered.
    assert checking.compiled == [choice_grammar(["slow"]), choice_grammar(["a"])]


def test_the_models_own_tokens_are_read(smollm2_dir: Path) -> None:
    async def test() -> None:
        constraints = Constraints(smollm2_dir, ())
        try:
            assert await constraints.check(choice("a")) == choice_grammar(["a"])
        finally:
            constraints.close()

    asyncio.run(test())
