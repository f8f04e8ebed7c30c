"""`kvrelay serve` whose model says what a script says.

`python -m tests.agents.scripted FOLDER kill serve ARGUMENTS`. FOLDER is the one that agents
work in. `kill`, or `live`: whether the worker that writes the third call is killed when a part of
it has been sent."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.openai import generation, plan
from kvrelay.cluster.api.openai.parts import Piece
from kvrelay.cluster.api.openai.schema import ChatRequest
from kvrelay.cluster.api.output.dialect import Reading
from kvrelay.cluster.cli.main import main as main_command
from kvrelay.router.messages import Output
from tests.agents.agents import COMMAND, answer_to

FOLDER, HOW = "KVRELAY_SCRIPT_FOLDER", "KVRELAY_SCRIPT_HOW"
BUSY_FROM, KILL_AT = 50, 200  # tokens of the answer; what works in between is what writes it


class Killer:
    """Kills the worker that writes the answer which holds `COMMAND`, once."""

    def __init__(self) -> None:
        self.is_done = False
        self._ctx: ApiContext | None = None
        self._before: dict[int, float] = {}

    def arm(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    def on_tokens(self, num_tokens: int) -> None:
        if self._ctx is None or self.is_done or num_tokens < BUSY_FROM:
            return
        pids = [each.pid for each in self._ctx.operations.status().workers if each.pid is not None]
        spent = {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids}
        if not self._before:
            self._before = spent
        elif num_tokens >= KILL_AT:
            self.is_done = True
            os.kill(max(pids, key=lambda pid: spent[pid] - self._before[pid]), signal.SIGKILL)


class WatchedChoice(generation.Choice):
    killer: Killer

    def absorb(self, output: Output) -> Piece:
        piece = super().absorb(output)
        self.killer.on_tokens(self.num_tokens)
        return piece


def use_script() -> None:
    """In the process of a router."""
    folder, kills = Path(os.environ[FOLDER]), os.environ[HOW] == "kill"
    killer = WatchedChoice.killer = Killer()

    async def scripted(ctx: ApiContext, request: ChatRequest, reading: Reading) -> str:
        answer = answer_to(request, reading.given, folder)
        if kills and json.dumps(COMMAND) in answer:
            killer.arm(ctx)
        return await ctx.constraints.check(partial(str, f"start: {json.dumps(answer)}"))

    plan.constrain_chat = scripted  # type: ignore[attr-defined]
    generation.Choice = WatchedChoice  # type: ignore[misc]


def main() -> None:
    os.environ[FOLDER], os.environ[HOW] = str(Path(sys.argv.pop(1)).resolve()), sys.argv.pop(1)
    site = Path(__file__).parent / "site"
    os.environ["PYTHONPATH"] = os.pathsep.join((str(site), str(site.parents[2])))
    main_command()


if __name__ == "__main__":
    main()
