"""A `kvrelay serve` of one's own, for the time of a measurement or a test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

READY_TIMEOUT_S = 240.0
RAY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0  # more than it takes to drain


def toml_text(settings: Mapping[str, object]) -> str:
    """ "section.key" -> value, or "section" -> tables of that name, as the text of a configuration
    file."""
    sections: dict[str, list[str]] = {}
    tables: list[str] = []
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if isinstance(value, list) and not key:
            tables += [f"[[{section}]]\n" + "\n".join(_rows(table)) + "\n" for table in value]
        else:
            sections.setdefault(section, []).extend(_rows({key: value}))
    parts = [f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items()]
    return "".join(parts + tables)


def _rows(table: Mapping[str, object]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: object) -> str:
    """TOML's texts, numbers and truth values are JSON's."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(_rows(value)) + "}"
    return json.dumps(value)


class OwnedServer:
    """A server that is ready from `with` to its end."""

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> object:
        raise NotImplementedError

    def _wait_ready(self) -> None:
        raise NotImplementedError


class Served(OwnedServer):
    """Owns the process from `with` to its end. What it wrote is in `lines`."""

    def __init__(
        self,
        settings: Mapping[str, object],
        *args: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        with_ray: bool = True,
    ) -> None:
        """`env`: variables to set beside those of this process. `prefix`: of the command, to run
        it elsewhere. `with_ray`: it is not ready before its Ray, whose start takes cores."""
        self._with_ray = with_ray
        self._start_s = float(settings.get("cluster.start_timeout_s", 0.0))  # type: ignore[arg-type]
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "kvrelay.toml"
        if "sessions.state_dir" not in settings:  # one server each
            settings = {**settings, "sessions.state_dir": f"{self._folder.name}/state"}
        path.write_text(toml_text(settings))
        command = [
            *prefix,
            sys.executable,
            "-m",
            "kvrelay.cluster.cli.main",
            "serve",
            "--config",
            str(path),
        ]
        self.process = subprocess.Popen(
            [*command, *(() if "--port" in args else ("--port", "0")), *args],
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        self._reader = threading.Thread(
            target=self.lines.extend, args=(self.process.stderr,), daemon=True
        )
        self._reader.start()

    def stop(self) -> int:
        """End the server; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self._reader.join(5)
            self._folder.cleanup()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + max(READY_TIMEOUT_S, self._start_s)
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if found := re.search(r"Ready: .* at (\S+)/v1", line):
                    self.url = found[1]
                    self._wait_for_ray()
                    return
            time.sleep(0.05)
        raise RuntimeError("the server did not become ready:\n" + "".join(self.lines))

    def _wait_for_ray(self) -> None:
        """Where there is a controller, and its log is not silent about that."""
        deadline = time.monotonic() + RAY_TIMEOUT_S
        while self._with_ray and time.monotonic() < deadline and self.process.poll() is None:
            text = "".join(list(self.lines))
            if "controller begins" not in text or re.search("Ray: (started|joined)", text):
                return
            time.sleep(0.05)
