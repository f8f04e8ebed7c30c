"""A runbook as a program: its blocks of shell commands, by what the comment before them says.

Life of a run: the preconditions hold because the fault is there; diagnosis only looks; steps mend;
the postconditions hold. A command that fails is the failure of the runbook.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.structure import ROOT

FOLDER = ROOT / "docs/runbooks"
KINDS = ("precondition", "diagnosis", "step", "postcondition")
STEP_TIMEOUT_S = 240.0
HOLDS_WITHIN_S = {"precondition": 10.0, "diagnosis": 0.0, "step": 0.0, "postcondition": 90.0}
_BLOCK = re.compile(r"^<!-- (\w+) -->\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ALERT = re.compile(r"^This runbook says what to do when `(KVRelay\w+)` fires\.$", re.MULTILINE)
_NOT_RUN = re.compile(r"^<!-- no fault is injected: (.*) -->$", re.MULTILINE)
SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation", "Done when")


class Broken(Exception):
    """A command of a runbook failed; the message has the command and what it wrote."""


@dataclass(frozen=True, slots=True)
class Book:
    name: str
    alert: str
    blocks: tuple[tuple[str, str], ...]  # kind, commands
    not_run: str  # why no fault is injected; "": one is

    def run(self, environment: Mapping[str, str], before_steps: Callable[[], object]) -> None:
        """Raises Broken. `environment`: the variables of docs/runbooks/README.md. `before_steps`
        is called before the first that mends something."""
        first_step = [kind for kind, _ in self.blocks].index("step")
        for number, (kind, commands) in enumerate(self.blocks):
            if number == first_step:
                before_steps()
            deadline = time.monotonic() + HOLDS_WITHIN_S[kind]
            while (problem := shell(commands, environment)) is not None:
                if time.monotonic() > deadline:
                    raise Broken(f"{self.name}, {kind}:\n{commands}{problem}")
                time.sleep(1.0)


def shell(commands: str, environment: Mapping[str, str]) -> str | None:
    """What the commands wrote if they failed, else None."""
    text = f"source {FOLDER}/functions.sh\nset -o pipefail\n{commands}"
    command = ["bash", "-c", text]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done within {STEP_TIMEOUT_S:g} s"
    return None if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout[-2000:]}"


def read(path: Path) -> Book:
    """Raises ValueError if it has not the form of a runbook that is carried out."""
    text = path.read_text(encoding="utf-8")
    alert, blocks = _ALERT.search(text), tuple(_BLOCK.findall(text))
    headings = tuple(re.findall(r"^## (.*)$", text, re.MULTILINE))
    kinds = [kind for kind, _ in blocks]
    if alert is None or headings != SECTIONS:
        raise ValueError(f"{path.name}: wants its alert, and the sections {SECTIONS}")
    if text.count("```bash") != len(blocks) or sorted(kinds, key=KINDS.index) != kinds:
        raise ValueError(f"{path.name}: each block wants one of {KINDS} before it, in this order")
    if not {"precondition", "step", "postcondition"} <= {*kinds}:
        raise ValueError(f"{path.name}: wants a precondition, a step and a postcondition")
    not_run = _NOT_RUN.search(text)
    return Book(path.stem, alert[1], blocks, not_run[1] if not_run else "")


@dataclass(frozen=True, slots=True)
class Clue:
    """What else names the fault of a runbook: a row of the table of README.md."""

    line: str  # a regular expression for the server's log
    check: str  # as `kvrelay doctor` calls it


def clues() -> dict[str, Clue]:
    """Reads that table, by the name of the runbook."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| `([\w-]+)` \| ([^|]+) \|$", text, re.MULTILINE)
    return {
        page: Clue(re.escape(line).replace("N", r"\d+"), check.strip())
        for line, page, check in rows
    }


def books() -> dict[str, Book]:
    """Reads those of alerts; other pages of the folder are read by people only."""
    paths = sorted(FOLDER.glob("*.md"))
    return {p.stem: read(p) for p in paths if _ALERT.search(p.read_text(encoding="utf-8"))}
