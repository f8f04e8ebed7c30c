"""The process of vLLM's parsers (`parse`): how it is started, and whether vLLM knows the names."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.decode_worker.vllm.arguments import environment
from kvrelay.decode_worker.vllm.parse import Ready
from kvrelay.engine.config import EngineSection

MODULE = "kvrelay.decode_worker.vllm.parse"
START_S = 300.0  # vLLM's imports, on a machine that is busy
TOKENIZER_ARGUMENTS = ("tokenizer_mode", "trust_remote_code")
NOTHING = msgspec.json.encode(Ready(error="the process has ended"))


@dataclass(frozen=True, slots=True)
class ParserProcess:
    """What the process is started with."""

    python: str
    model: Path
    tool: str  # names, as vLLM has them; "": none
    reasoning: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # EngineArgs has these

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Returns the process, and the socket that it answers at. Raises OSError."""
        from kvrelay.worker.guardian import in_environment  # a router needs it for this alone

        options = {k: v for k, v in self.arguments.items() if k in TOKENIZER_ARGUMENTS}
        names = self.tool, self.reasoning, msgspec.json.encode(options).decode()
        env = {**os.environ, **environment(on_gpu=True), "OMP_NUM_THREADS": "1"}
        ours, theirs = socket.socketpair()
        with theirs:
            words = ["python", "-m", MODULE, str(theirs.fileno()), str(self.model), *names]
            words, env = in_environment(self.python, words, env)
            process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return process, ours

    def check(self) -> str:
        """Why vLLM has no such parsers for this model; "": it has. Raises OSError where it does not
        say so in START_S."""
        process, ours = self.start()
        ours.settimeout(START_S)
        try:
            with ours, ours.makefile("rb") as file:
                return msgspec.json.decode(file.readline() or NOTHING, type=Ready).error
        finally:
            process.kill()
            process.wait()


def parser_process(
    engine: EngineSection, model: Path, names: tuple[str, str]
) -> ParserProcess | None:
    """`names`: of the parsers of calls and of reasoning that are vLLM's. None: there are none."""
    if not any(names):
        return None
    return ParserProcess(engine.python, model, *names, arguments=engine.arguments)
