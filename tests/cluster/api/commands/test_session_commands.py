"""`kvrelay sessions` and `kvrelay chat --session` against a running server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.main import main
from kvrelay.cluster.config import TenantEntry
from kvrelay.router.messages import (
    SessionCommand,
    SessionOp,
    SessionRefusal,
    SessionReply,
    SessionState,
)
from tests.cluster.api.conftest import Served, serve
from tests.cluster.api.test_sessions import info, shown


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "150")
    for name in ("KVRELAY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str, **options: Any) -> Any:
        return CliRunner().invoke(main, arguments, **options)

    return invoke


@pytest.fixture
def pages(served: Served) -> Served:
    """A router with five sessions, which come in pages of two."""
    held = [
        replace(info(f"s{i}", SessionState.PARKED), last_used_s=100.0 - i, pinned=i == 3)
        for i in range(5)
    ]

    def answer(command: SessionCommand) -> SessionReply:
        if command.op is SessionOp.LIST:
            rest = [session for session in held if session.session > command.session]
            return SessionReply(
                command.command_id, sessions=tuple(rest[:2]), has_more=len(rest) > 2
            )
        name = command.argument if command.op is SessionOp.FORK else command.session
        found = () if command.op is SessionOp.CLOSE else (info(name),)
        return SessionReply(command.command_id, sessions=found, done={"decode-0": 6})

    served.router.answer_command = answer
    return served


def test_list_shows_all_pages_the_last_used_first(pages: Served, run: Any) -> None:
    result = run("sessions", "list", "--url", pages.url)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "parked" in line]
    assert [next(f"s{i}" for i in range(5) if row.split()[0] == f"s{i}") for row in rows] == [
        "s4",
        "s3",
        "s2",
        "s1",
        "s0",
    ]
    assert [("pinned" in row) for row in rows] == [False, True, False, False, False]
    for text in ("100", "6", "4", "1.6 min", "8.4 min"):
        assert f" {text}" in rows[0]
    found = json.loads(run("sessions", "list", "--url", pages.url, "--json").output)
    assert [session["id"] for session in found] == ["s4", "s3", "s2", "s1", "s0"]


def test_an_empty_list_says_how_a_session_is_made(served: Served, run: Any) -> None:
    served.router.answer_command = lambda command: SessionReply(command.command_id)
    result = run("sessions", "list", "--url", served.url)
    assert "prompt_cache_key" in result.output
    assert json.loads(run("sessions", "list", "--url", served.url, "--json").output) == []


def test_show_says_which_workers_hold_the_kv(pages: Served, run: Any) -> None:
    result = run("sessions", "show", "a [red]b[/]/c\x1b", "--url", pages.url)
    assert result.exit_code == 0, result.output
    assert "a [red]b[/]/c\N{REPLACEMENT CHARACTER}" in result.output
    assert "decode-0: 6 in device, 4 in host of 6 blocks" in result.output
    assert "prefill-0: 6 in device of 6 blocks" in result.output
    assert pages.router.commands[-1].session == "a [red]b[/]/c\x1b"
    result = run("sessions", "show", "s", "--url", pages.url, "--json")
    assert json.loads(result.output) == shown("s")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["park", "s"], "s is parked: decode-0 6 blocks"),
        (["resume", "s"], "s is resumed: decode-0 6 blocks"),
        (["pin", "s"], "s is pinned: decode-0 6 blocks"),
        (["unpin", "s"], "s is unpinned: decode-0 6 blocks"),
        (["fork", "s", "t"], "t begins with the 100 tokens of s"),
        (["close", "s"], "s is closed: decode-0 6 blocks"),
    ],
)
def test_actions_say_what_was_done(
    pages: Served, run: Any, arguments: list[str], said: str
) -> None:
    result = run("sessions", *arguments, "--url", pages.url)
    assert (result.exit_code, result.output) == (0, f"{said}\n")
    command = pages.router.commands[-1]
    assert [str(command.op), command.session] == arguments[:2]
    assert command.argument == (arguments[2] if len(arguments) > 2 else "")
    result = run("sessions", *arguments, "--url", pages.url, "--json")
    assert json.loads(result.output)["id"] == arguments[-1]


def test_what_the_server_refuses_is_one_line(served: Served, run: Any) -> None:
    served.router.answer_command = lambda command: SessionReply(
        command.command_id, SessionRefusal.CONFLICT, "session 's' is active: a turn is running"
    )
    result = run("sessions", "park", "s", "--url", served.url)
    assert result.exit_code == 1
    assert result.output == "Error: session 's' is active: a turn is running\n"
    result = run("sessions", "park", "", "--url", served.url)
    assert (result.exit_code, result.output) == (1, "Error: a session's name is not empty\n")
    result = run("sessions", "list", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:9" in result.output


def test_chat_names_its_session(served: Served, run: Any) -> None:
    result = run("chat", "--url", served.url, "--session", "my chat", input="one\ntwo\n/exit\n")
    assert result.exit_code == 0, result.output
    assert [submit.session for submit in served.router.submits] == ["my chat", "my chat"]
    run("chat", "--url", served.url, "hi")
    assert served.router.submits[-1].session is None


def test_a_key_comes_from_an_option_or_from_the_environment(tokenizer: Tokenizer, run: Any) -> None:
    entries = [TenantEntry(name, keys=(f"{name}-key",)) for name in ("red", "blue")]
    context = {"tenants": Tenants.of(entries, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        served.router.answer_command = lambda command: SessionReply(command.command_id)
        listing = ("sessions", "list", "--url", served.url)
        result = run(*listing)
        assert result.exit_code == 1
        assert "No API key was given" in result.output
        assert run(*listing, env={"OPENAI_API_KEY": "blue-key"}).exit_code == 0
        both = {"KVRELAY_API_KEY": "red-key\n", "OPENAI_API_KEY": "blue-key"}
        assert run(*listing, env=both).exit_code == 0
        assert run(*listing, "--api-key", "blue-key", env=both).exit_code == 0
        assert [c.tenant for c in served.router.commands] == ["blue", "red", "blue"]
        assert run("chat", "hi", "--url", served.url, env=both).exit_code == 0
        assert served.router.submits[-1].tenant == "red"
        for wrong in ("wrong", "schlüssel", "a\x00b"):
            result = run(*listing, "--api-key", wrong)
            assert result.exit_code == 1
            assert result.output.startswith("Error: ")
            assert wrong not in result.output
