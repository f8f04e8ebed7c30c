"""Logs of every process: one line an event, to standard error and to a file of the process.

Life of a line in a file: formatted where it is logged, since only there it is known which request
is served; queued; written by a thread. A disk that is full or hangs holds up that thread alone:
lines that find the queue full or cannot be written are counted, and the next line that can be
written says how many there were.

docs/logs.md describes the lines. `kvrelay logs` reads them, in either format.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvrelay.engine.settings import ConfigError, Section, state_folder

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The request that is served: its id, and before it, with a slash, what the client calls it."""

_BY_ENVIRONMENT = (
    ("level", "KVRELAY_LOG_LEVEL", ("debug", "info", "warning", "error")),
    ("format", "KVRELAY_LOG_FORMAT", ("text", "json")),
)
RANKS_VARIABLE = "KVRELAY_LOG_OF_WORKER"  # for ranks: how the worker that starts them logs
MAX_QUEUED = 10_000  # lines that wait to be written; further ones are dropped
MAX_TEXT = 16_384  # characters of a message, and of a traceback
FLUSH_S = 1.0  # at the end of a process, for what waits to be written
CHECK_S = 5.0  # between two looks at how large a file is that more than lines go to
MIB = 1 << 20


class LogSection(Section, frozen=True):
    """Lines about what happens, of every process: docs/logs.md."""

    # debug, info, warning or error; "": KVRELAY_LOG_LEVEL, or else info
    level: Literal["", "debug", "info", "warning", "error"] = ""
    format: Literal["", "text", "json"] = ""  # "": KVRELAY_LOG_FORMAT, or else text
    access: bool = False  # a line for each request, when it ends
    # prompts in lines of requests, and the messages of exceptions that requests raise
    prompts: bool = False
    # for the files of each machine's processes; "": logs in the state directory
    folder: str = ""
    # size at which a process begins another file; the one before it is kept; 0: no files
    file_mib: Annotated[float, Meta(ge=0.0, le=4096.0)] = 16.0
    # size of all files together; beyond it the oldest go when a process starts
    total_mib: Annotated[float, Meta(ge=1.0)] = 1024.0

    def resolved(self, state_dir: str, port: int) -> LogSection:
        """What children and workers get: the environment is read, and `folder` is that of the
        server at `port`; where it is on each machine, that machine says. Raises ConfigError."""
        found: dict[str, Any] = {}
        for name, variable, right in _BY_ENVIRONMENT:
            found[name] = getattr(self, name) or os.environ.get(variable, "").lower()
            if found[name] not in ("", *right):
                given = f"{variable} = {os.environ[variable]!r}"
                raise ConfigError(f"{given}: expected {', '.join(right[:-1])} or {right[-1]}")
        base = self.folder or (f"{state_dir}/logs" if state_dir else "")
        if base and not base.startswith(("/", "~")):
            base = str(Path(base).absolute())  # workers are started elsewhere
        folder = f"{base}/{port}" if base else str(port)
        return replace(self, folder=folder, **found)

    @property
    def path(self) -> Path:
        """The folder on this machine, of a section that is `resolved`."""
        path = Path(self.folder).expanduser()
        return path if "/" in self.folder else state_folder() / "logs" / path


# What must not be in a log, whoever puts it into a message: passwords and tokens.
_MASKS = (
    (re.compile(r"(\w+://)[^/\s@'\"]*@"), r"\1***@"),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"), r"\1***"),
    (re.compile(r"(?i)([?&;](?:password|passwd|token|secret|api_key|key)=)[^&;\s'\"]+"), r"\1***"),
    (re.compile(r"(?i)(\b(?:x-api-key|api_key|hf_token|password)['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]+"),
     r"\1***"),
)  # fmt: skip
# One event is one line, whatever a client has put into a path.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in _ESCAPES if code >= 127}
_ESCAPES |= {9: "\\t", 10: "\\n", 13: "\\r"}


def masked(text: str) -> str:
    for pattern, shown in _MASKS:
        text = pattern.sub(shown, text)
    return text


def _bounded(text: str) -> str:
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]}... ({left} characters more)"


class LineFormatter(logging.Formatter):
    """Makes an event a line of text, or of JSON. A traceback follows in lines that begin with
    spaces, or is a value of the JSON. A record's `fields`, a dict, come after its message."""

    def __init__(self, process: str, *, json: bool = False, prompts: bool = False) -> None:
        super().__init__()
        self._process = process
        self._json = json
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        when = f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"
        level, request = record.levelname.lower(), REQUEST.get()
        message = masked(_bounded(record.getMessage().removeprefix(f"{self._process}: ")))
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self._trace(record, is_of_request=bool(request))
        if self._json:
            client, _, request_id = request.rpartition("/")
            line = {"time": when, "level": level, "process": self._process, "logger": record.name}
            line |= {"request_id": request_id} if request_id else {}
            line |= {"client_request_id": client} if client else {}
            line |= {"message": message, **fields} | ({"exception": trace} if trace else {})
            return msgspec.json.encode(line, enc_hook=str).decode().translate(_JSON_ESCAPES)
        named = f"[{request}] " if request else ""
        text = f"{when} {level:<8} {self._process} {record.name} {named}{message}"
        return "\n    ".join(map(one_line, [text + fields_text(fields), *trace.splitlines()]))

    def _trace(self, record: logging.LogRecord, *, is_of_request: bool) -> str:
        """The message of an exception may have a piece of the request that has raised it."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        if self._prompts or not is_of_request:
            return masked(_bounded("".join(traceback.format_exception(error)).rstrip()))
        parts: list[str] = []
        seen: BaseException | None = error
        while seen is not None and len(parts) < 8:
            where = "".join(traceback.format_tb(seen.__traceback__))
            parts.append(f"{where}{type(seen).__name__} (its message is shown with log.prompts)")
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        return _bounded("\n".join(reversed(parts)))


def one_line(text: str) -> str:
    """Without what ends a line, or means something to a terminal."""
    return text.translate(_ESCAPES)


def fields_text(fields: Mapping[str, Any]) -> str:
    """Returns them as they follow a message in a line of text: ` name=value`."""
    shown = {name: str(value) for name, value in fields.items()}
    for name, value in shown.items():
        if not re.fullmatch(r"[^\s\"=]+", value):
            shown[name] = msgspec.json.encode(value).decode()
    return "".join(f" {name}={value}" for name, value in shown.items())


class Target(Protocol):
    """Where lines go. Used by one thread."""

    def write(self, data: bytes) -> None:
        """All of it. Raises OSError."""
        ...

    def check(self) -> None:
        """Called now and then. Raises OSError."""
        ...


class Sink(logging.Handler):
    """Queues lines for a thread that writes them. Invariant: whoever logs waits for nothing, and
    gets no exception; at most MAX_QUEUED lines wait, and `num_dropped` counts those that went."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.num_dropped = 0
        self._target = target
        self._lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        threading.Thread(target=self._run, name="log-file", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # arguments that do not fit the message are no reason to fail a request
            self.num_dropped += 1
            return
        if self._lines.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
        else:
            self._lines.put(line)

    def flush(self) -> None:
        """Wait until all is written, for a bounded time."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_S)

    def _run(self) -> None:
        reported = 0
        while True:
            try:
                line = self._lines.get(timeout=CHECK_S)
            except Empty:
                with contextlib.suppress(OSError):
                    self._target.check()
                continue
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                dropped = self.num_dropped
                if lost := dropped - reported:
                    line = self._formatted(f"{lost} lines before this one are lost") + line
                self._target.write(line)
                reported = dropped
            except OSError:
                self.num_dropped += 1

    def _formatted(self, text: str) -> bytes:
        record = logging.LogRecord("kvrelay.logs", logging.WARNING, "", 0, text, (), None)
        return self.format(record).encode() + b"\n"


_PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)  # room may come


class LogFile:
    """A process' file, and the one before it. Invariant: each has at most `max_bytes`, and what
    comes to it between two checks otherwise. Who moves or removes it gets another one made.

    `takes_stderr`: standard error of the process is the file too, so that what libraries and the
    interpreter itself have to say last is there."""

    def __init__(self, path: Path, max_bytes: int, *, takes_stderr: bool = False) -> None:
        """Opens the file; one that there is no room for is opened later. Raises OSError."""
        self.path = path
        self._max_bytes = max_bytes
        self._takes_stderr = takes_stderr
        self._file = -1
        self._is_torn = False  # the last line has no end
        try:
            self._open()
        except OSError as error:
            if error.errno not in _PASSES:
                raise

    def write(self, data: bytes) -> None:
        self._look(len(data))
        try:
            _write_all(self._file, b"\n" * self._is_torn + data)
        except OSError:
            self._is_torn = True
            raise
        self._is_torn = False

    def check(self) -> None:
        self._look(0)

    def _look(self, more: int) -> None:
        if self._file < 0:
            self._open()
        mine = os.fstat(self._file)
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
            self._open()
        elif mine.st_size and mine.st_size + more > self._max_bytes:
            self.path.replace(self.path.with_suffix(".old.log"))
            self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        new = os.open(self.path, flags, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file = new
        if self._takes_stderr:
            os.dup2(new, 2)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def set_up(section: LogSection, process: str, *, takes_stderr: bool = False) -> None:
    """From now on this process, called `process`, logs as `section`, which is resolved, says.

    `takes_stderr`: nobody reads its standard error, which becomes its file; else warnings go there
    too, and all lines where a program reads it: a journal, or whoever runs containers."""
    level = logging.getLevelNamesMapping()[(section.level or "info").upper()]
    formatter = LineFormatter(process, json=section.format == "json", prompts=section.prompts)
    sinks: list[logging.Handler] = []
    why = ""
    if section.file_mib:
        try:
            prune(section.path.parent, int(section.total_mib * MIB))
            max_bytes = int(section.file_mib * MIB)
            path = section.path / f"{process}.log"
            sinks.append(Sink(LogFile(path, max_bytes, takes_stderr=takes_stderr)))
        except OSError as error:
            why = f"no lines are written to {section.path}: {error}"
    if not (takes_stderr and sinks):
        stderr = logging.StreamHandler()
        is_read = not takes_stderr and _is_read()
        stderr.setLevel(level if is_read or not sinks else max(level, logging.WARNING))
        sinks.append(stderr)
    for sink in sinks:
        sink.setFormatter(formatter)
    logging.raiseExceptions = False
    logging.basicConfig(handlers=sinks, level=logging.WARNING, force=True)
    logging.getLogger("kvrelay").setLevel(level)
    logging.captureWarnings(True)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(2)
    _log_exceptions()
    log = logging.getLogger("kvrelay.logs")
    log.info("process %d begins", os.getpid())  # what it writes without a time comes after this
    if why:
        log.warning("%s", why)


def _is_read() -> bool:
    """Whether a program reads standard error, rather than a person at a terminal, or nobody."""
    try:
        mode = os.fstat(2).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def show_all() -> None:
    """On standard error too, whoever reads it."""
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.NOTSET)


def _log_exceptions() -> None:
    """What nobody has caught is an event as others are."""
    log = logging.getLogger("kvrelay")

    def of_main(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.critical("the process ends", exc_info=(kind, error, trace))

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else "?"
            log.error("thread %s has ended", name, exc_info=args.exc_value)

    sys.excepthook, threading.excepthook = of_main, of_thread


def tell_ranks(section: LogSection, worker: str) -> None:
    """The ranks that this process starts from now on log as it does, each into a file of its own
    beside this one's."""
    os.environ[RANKS_VARIABLE] = msgspec.json.encode((worker, section)).decode()


def set_up_rank(rank: int) -> None:
    """In a process that has been started as rank `rank` of a worker; see `tell_ranks`."""
    if found := os.environ.get(RANKS_VARIABLE):
        worker, section = msgspec.json.decode(found, type=tuple[str, LogSection])
        set_up(section, f"{worker}-rank-{rank}", takes_stderr=True)


def files_of(folder: Path) -> list[Path]:
    """Lists those of all servers that log there. What others keep beside them is not ours."""
    return [path for path in folder.glob("*/*.log") if path.parent.name.isdigit()]


def prune(folder: Path, max_bytes: int) -> None:
    """Remove the oldest files below `folder` until all have `max_bytes` together, at most."""
    found = []
    for path in files_of(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for changed_at, size, path in sorted(found):
        if total <= max_bytes or time.time() - changed_at < CHECK_S:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
