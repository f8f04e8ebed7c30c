"""`kvrelay logs`: one order of what all processes have logged, and only what was asked for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrelay.cluster.cli import logs as command
from kvrelay.cluster.cli.logs import Event, logs

REQUEST = "0af3" * 8
CONTROLLER = """\
2026-01-31T08:00:01.000Z info     controller kvrelay decode-0 is up (epoch 1, decode, 10.0.0.1, \
cpu, started in 9.1 s); log: {folder}/decode-0.log
2026-01-31T08:00:02.000Z info     controller kvrelay decode-1 is up (epoch 1, decode, 10.0.0.2, \
cuda, started in 9.1 s); log: /elsewhere/logs/8000/decode-1.log
2026-01-31T08:00:05.000Z warning  controller kvrelay decode-1 (epoch 1) is gone: why; again in 1 s
"""
ROUTER = f"""\
{{"time":"2026-01-31T08:00:03.000Z","level":"info","process":"router-0","logger":"kvrelay.access",\
"request_id":"{REQUEST}","client_request_id":"mine","message":"request","path":"/a b","ms":1.5}}
{{"time":"2026-01-31T08:00:04.000Z","level":"error","process":"router-0","logger":"kvrelay",\
"message":"bad\\u001b[2J","exception":"Traceback\\n  ValueError"}}
"""
OLD = "2026-01-31T07:00:00.000Z info     decode-0 kvrelay.build begins\n"
WORKER = f"""\
NCCL of a library
2026-01-31T08:00:03.500Z warning  decode-0 kvrelay {REQUEST}-0: its step failed
    Traceback (most recent call last):
    ValueError
Fatal Python error: Segmentation fault
{{"time": no JSON
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs/8000"
    folder.mkdir(parents=True)
    texts = {"controller": CONTROLLER.replace("{folder}", str(folder)), "router-0": ROUTER}
    texts |= {"decode-0.old": OLD, "decode-0": WORKER}
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    (tmp_path / "kvrelay.toml").write_text(f'[sessions]\nstate_dir = "{tmp_path}"\n')
    return folder


def shown(folder: Path, *options: str) -> str:
    config = str(folder.parents[1] / "kvrelay.toml")
    found = CliRunner().invoke(logs, ["--config", config, *options], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_files_of_both_formats_are_merged_by_time(folder: Path) -> None:
    lines = shown(folder).splitlines()
    times = [line[11:23] for line in lines if line.startswith("2026")]
    assert times == sorted(times)
    assert len(times) == 7
    at = next(number for number, line in enumerate(lines) if "its step failed" in line)
    assert lines[at + 1 : at + 5] == [
        "    Traceback (most recent call last):",
        "    ValueError",
        "    Fatal Python error: Segmentation fault",
        '    {"time": no JSON',
    ]
    assert any("NCCL of a library" in line for line in lines)
    assert any(line.endswith('mine request path="/a b" ms=1.5') for line in lines)


def test_nothing_in_a_file_speaks_to_the_terminal(folder: Path) -> None:
    text = shown(folder)
    assert "\x1b" not in text
    assert r"bad\x1b[2J" in text


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        (["--worker", "decode-0", "--since", "2026-01-31T08"], ["decode-0"]),
        (["--level", "error"], ["router-0"]),
        (["--since", "2026-01-31T08:00:05"], ["controller"]),
        (["--lines", "2"], ["router-0", "controller"]),
        (["--request", "mine"], ["router-0", "decode-0"]),  # what the client calls it,
        (["--request", REQUEST], ["router-0", "decode-0"]),  # the server,
        (["--request", f"chatcmpl-{REQUEST}"], ["router-0", "decode-0"]),  # and its answer
        (["--request", "another"], []),
    ],
)
def test_only_what_was_asked_for_is_shown(
    folder: Path, options: list[str], processes: list[str]
) -> None:
    lines = [line for line in shown(folder, *options).splitlines() if line.startswith("2026")]
    assert [line.split()[2] for line in lines] == processes


def test_of_a_worker_elsewhere_it_says_where(folder: Path) -> None:
    config = str(folder.parents[1] / "kvrelay.toml")
    found = CliRunner().invoke(logs, ["--config", config, "--worker", "decode-1"])
    assert found.stdout == ""
    assert found.stderr == (
        "decode-1 runs on 10.0.0.2: its log there is /elsewhere/logs/8000/decode-1.log\n"
    )


def test_where_there_are_none_it_says_where_some_are(folder: Path) -> None:
    config = str(folder.parents[1] / "kvrelay.toml")
    found = CliRunner().invoke(logs, ["--config", config, "--port", "9000"])
    assert found.exit_code == 1
    assert "there are no logs in" in found.output
    assert "(--port): 8000" in found.output
    found = CliRunner().invoke(logs, ["--folder", str(folder.parent), "--level", "error"])
    assert "router-0" in found.output  # the last server that was there
    found = CliRunner().invoke(logs, ["--since", "yesterday", "--config", config])
    assert "'yesterday': expected 90s, 10m" in found.output


def test_what_comes_is_followed_into_the_next_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.01)
    came: list[str] = []
    has_come = threading.Event()

    class EnoughError(Exception):
        pass

    def show(event: Event) -> None:
        came.append(event.message)
        has_come.set()
        if event.message == "last":
            raise EnoughError

    path = folder / "decode-0.log"
    tail = command._Tail(path)
    tail.skip()

    def write(text: str) -> None:
        with path.open("a") as file:
            file.write(f"2026-01-31T09:00:00.000Z info     decode-0 kvrelay {text}")

    def run() -> None:
        write("one\n")
        write("tw")
        assert has_come.wait(10)
        with path.open("a") as file:
            file.write("o\n")
        path.rename(folder / "decode-0.old.log")
        write("last\n")

    writer = threading.Thread(target=run)
    writer.start()
    with pytest.raises(EnoughError):
        command.follow(folder, show, {path: tail})
    writer.join()
    assert [message for message in came if message in ("one", "two", "last")] == [
        "one",
        "two",
        "last",
    ]
