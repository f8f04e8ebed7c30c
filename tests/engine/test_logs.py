"""Lines of logs: what is in them, what never is, and files that stay within their bounds."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.engine import logs
from kvrelay.engine.logs import REQUEST, LineFormatter, LogFile, LogSection, Sink, masked, prune
from kvrelay.engine.settings import ConfigError

PROMPT, QUESTION = "the prompt itself", "my secret question"
SECRETS = [
    ("redis://me:hunter2@h:6379/0 is away", "hunter2"),
    ("rediss://h:6379?password=hunter2&db=1", "hunter2"),
    ("POST https://collector/v1?token=hunter22", "hunter22"),
    ("authorization: Bearer sk-abcdefgh12345", "sk-abcdefgh12345"),
    ("headers {'x-api-key': 'sk-abcdefgh12345'}", "sk-abcdefgh12345"),
    ("HF_TOKEN=hf_abcdefgh", "hf_abcdefgh"),
]


def record(text: str, *args: object, error: BaseException | None = None, **fields: object) -> str:
    """What a formatter is given."""
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("kvrelay.test", logging.WARNING, "", 0, text, args, info)
    made.created = 1_700_000_000.0625
    made.fields = fields
    return made  # type: ignore[return-value]


def raised() -> ValueError:
    try:
        try:
            raise KeyError(PROMPT)
        except KeyError as cause:
            raise ValueError(QUESTION) from cause
    except ValueError as error:
        return error


def test_an_event_is_a_line_with_time_level_process_logger_and_request() -> None:
    token = REQUEST.set("mine/0af3")
    try:
        shown = LineFormatter("router-0").format(record("%d left", 3, path="/v1 x", ms=1.5))
        told = json.loads(LineFormatter("router-0", json=True).format(record("left", ms=1.5)))
    finally:
        REQUEST.reset(token)
    assert shown == (
        "2023-11-14T22:13:20.062Z warning  router-0 kvrelay.test [mine/0af3] 3 left"
        ' path="/v1 x" ms=1.5'
    )
    assert told == {
        "time": "2023-11-14T22:13:20.062Z",
        "level": "warning",
        "process": "router-0",
        "logger": "kvrelay.test",
        "request_id": "0af3",
        "client_request_id": "mine",
        "message": "left",
        "ms": 1.5,
    }


def test_nothing_that_a_client_sends_makes_a_line_of_its_own() -> None:
    text = "GET /a\n2023-11-14T22:13:20.062Z info forged\x1b[2J\u2028x"
    for json_lines in (False, True):
        shown = LineFormatter("router-0", json=json_lines).format(record("%s", text))
        assert len(shown.splitlines()) == 1
        assert "\x1b" not in shown


def test_a_traceback_is_one_line_of_json_and_indented_in_text() -> None:
    told = LineFormatter("p", json=True).format(record("failed", error=raised()))
    assert "\n" not in told
    assert "ValueError: my secret question" in json.loads(told)["exception"]
    _, *trace = LineFormatter("p").format(record("failed", error=raised())).splitlines()
    assert trace
    assert all(line.startswith("    ") for line in trace)


@pytest.mark.parametrize("json_lines", [False, True])
def test_an_exception_of_a_request_is_logged_without_its_message(json_lines: bool) -> None:
    token = REQUEST.set("0af3")
    try:
        shown = LineFormatter("p", json=json_lines).format(record("failed", error=raised()))
        asked = LineFormatter("p", json=json_lines, prompts=True)
        assert "my secret question" in asked.format(record("failed", error=raised()))
    finally:
        REQUEST.reset(token)
    assert QUESTION not in shown
    assert PROMPT not in shown
    assert all(words in shown for words in ("ValueError", "KeyError", "in raised"))


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_passwords_and_keys_are_masked_in_messages_and_tracebacks(text: str, secret: str) -> None:
    assert secret not in masked(text)
    for json_lines in (False, True):
        shown = LineFormatter("p", json=json_lines).format(record("%s", text, error=OSError(text)))
        assert secret not in shown
    assert masked("x-api-key is missing; 12:30 http://h:80/a@b") == (
        "x-api-key is missing; 12:30 http://h:80/a@b"
    )


def test_a_message_is_bounded() -> None:
    assert len(LineFormatter("p").format(record("x" * 10**6))) < logs.MAX_TEXT + 200


def test_a_file_and_the_one_before_it_stay_within_their_bounds(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a" / "router-0.log", 100)
    for number in range(50):
        file.write(b"line %02d ........\n" % number)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert sizes.keys() == {"router-0.log", "router-0.old.log"}
    assert max(sizes.values()) <= 100
    assert b"line 49" in (tmp_path / "a/router-0.log").read_bytes()
    assert (tmp_path / "a/router-0.log").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_moved_or_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "router-0.log"
    file = LogFile(path, 1000)
    file.write(b"one\n")
    path.rename(tmp_path / "moved")
    file.write(b"two\n")
    assert path.read_bytes() == b"two\n"
    path.unlink()
    file.write(b"three\n")
    assert path.read_bytes() == b"three\n"


def test_a_disk_without_room_at_the_start_is_used_once_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, errors = os.open, [errno.ENOSPC, errno.ENOSPC]

    def full(path: Path, flags: int, mode: int) -> int:
        if errors:
            raise OSError(errors.pop(), "no")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    file = LogFile(tmp_path / "decode-0.log", 1000)
    with pytest.raises(OSError, match="no"):
        file.write(b"lost\n")
    file.write(b"there\n")
    assert (tmp_path / "decode-0.log").read_bytes() == b"there\n"
    errors.append(errno.EROFS)  # nobody will make room there
    with pytest.raises(OSError, match="no"):
        LogFile(tmp_path / "decode-1.log", 1000)


class Disk:
    """A target that is full, or that waits, as long as the test says."""

    def __init__(self) -> None:
        self.is_full = False
        self.lines: list[bytes] = []
        self.hang_s = 0.0

    def write(self, data: bytes) -> None:
        time.sleep(self.hang_s)
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.lines.append(data)

    def check(self) -> None:
        pass


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def sink(disk: Disk) -> Sink:
    sink = Sink(disk)
    sink.setFormatter(LineFormatter("p"))
    return sink


def test_a_full_disk_fails_nobody_and_says_later_what_is_lost(disk: Disk, sink: Sink) -> None:
    disk.is_full = True
    for number in range(7):
        sink.handle(record("line %d", number))  # type: ignore[arg-type]
    sink.flush()
    assert sink.num_dropped == 7
    disk.is_full = False
    sink.handle(record("again"))  # type: ignore[arg-type]
    sink.handle(record("and again"))  # type: ignore[arg-type]
    sink.flush()
    text = b"".join(disk.lines).decode()
    assert "7 lines before this one are lost\n" in text
    assert text.count("lost") == 1
    assert text.endswith("again\n")


def test_a_disk_that_hangs_holds_up_nobody(
    disk: Disk, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED", 100)
    disk.hang_s = 0.5
    began_at = time.monotonic()
    for number in range(1000):
        sink.handle(record("line %d", number))  # type: ignore[arg-type]
    assert time.monotonic() - began_at < 0.4
    assert 890 <= sink.num_dropped <= 900


def test_arguments_that_do_not_fit_a_message_are_counted(disk: Disk, sink: Sink) -> None:
    sink.handle(record("%d", "no number"))  # type: ignore[arg-type]
    assert sink.num_dropped == 1


def test_the_oldest_files_go_first_and_those_of_now_stay(tmp_path: Path) -> None:
    (tmp_path / "8000").mkdir()
    for age_s in (0, 100, 200, 300):
        path = tmp_path / "8000" / f"{age_s}.log"
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - age_s,) * 2)
    (tmp_path / "nginx").mkdir()  # where log.folder is /var/log
    others = tmp_path / "nginx/access.log"
    others.write_bytes(b"x" * 100)
    os.utime(others, (0, 0))
    prune(tmp_path, 250)
    assert {path.stem for path in tmp_path.glob("*/*")} == {"0", "100", "access"}
    prune(tmp_path, 0)
    assert {path.stem for path in tmp_path.glob("*/*")} == {"0", "access"}


def test_settings_come_from_the_environment_where_the_file_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = LogSection(format="json").resolved("", 8000)
    assert (found.level, found.format) == ("debug", "json")
    assert found.path == tmp_path / "kvrelay/logs/8000"
    assert LogSection(level="error").resolved("", 0).level == "error"
    assert LogSection().resolved("/state", 1).path == Path("/state/logs/1")
    assert LogSection(folder="here").resolved("/state", 1).path == Path("here/1").absolute()
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"KVRELAY_LOG_LEVEL = 'loud': expected debug, info"):
        LogSection().resolved("", 8000)


WORKER = """
import ctypes, faulthandler, logging, os, sys, threading, time
from kvrelay.engine import logs
section = logs.LogSection(folder=sys.argv[1], file_mib=0.002, level="info")
logs.CHECK_S = 0.05
logs.set_up(section, "decode-0", takes_stderr=True)
log = logging.getLogger("kvrelay.test")
logging.getLogger("other").info("of a library")
log.info("begins")
os.write(2, b"NCCL WARN of a library\\n" * 200)
time.sleep(0.5)
log.info("goes on")
threading.Thread(target=lambda: 1 / 0, name="mine").start()
time.sleep(0.2)
logging.shutdown()
faulthandler._sigsegv()
"""


def test_what_libraries_write_and_a_crash_are_in_the_file_of_a_worker(tmp_path: Path) -> None:
    folder = tmp_path / "logs/8000"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(folder)], capture_output=True, check=False, timeout=60
    )
    assert done.returncode < 0
    assert done.stderr == b""
    assert b"NCCL WARN" in (folder / "decode-0.old.log").read_bytes()  # and rotated
    text = (folder / "decode-0.log").read_text()
    assert "decode-0 kvrelay.test goes on" in text
    assert "thread mine has ended\n    Traceback" in text
    assert "Fatal Python error: Segmentation fault" in text
    assert "of a library" not in text
