"""`python -m tests.agents.custom_tools`: SDKs as they are published force calls of custom tools
with grammars, on the default model, and each input is looked at by the client's own parser.

The SDKs come from PyPI and npm, each in some folder:

    pip install --target PY openai-agents lark
    npm install --prefix JS ai @ai-sdk/openai zod
    python -m tests.agents.custom_tools --python PY --node JS
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from tests.agents.__main__ import STOP_TIMEOUT_S, server_url

SDKS = Path(__file__).parent / "sdks"
TIMEOUT_S = 1200.0  # for all calls of one client
MAX_TOKENS = 300
CONFIG = """
[api]
port = 0
[sessions]
state_dir = "{folder}"
"""
# A model of this size does not end what may go on for ever: it says up to three lines of a change.
PATCH = """
start: begin hunk end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | change
add: "*** Add File: " filename LF ("+" LINE? LF)~1..3
change: "*** Update File: " filename LF ("@@ " LINE LF)? (SIGN LINE? LF)~1..3
filename: /[a-z]{1,12}\\.(py|txt)/
SIGN: "+" | "-" | " "
LINE: /[^\\n]{1,20}/
%import common.LF
"""
SUM = """
start: expr
expr: term (("+" | "-") term)~0..2
term: NUMBER | "(" expr ")"
NUMBER: /[0-9]{1,4}/
"""
WHEN = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9] [0-2][0-9]:[0-5][0-9] \"[a-z\\]{1,10}\""
TOOLS = (
    ("apply_patch", "lark", PATCH, "Change the greeting in hello.py."),
    ("calculate", "lark", SUM, "What is 17 plus 25?"),
    ("remember", "regex", WHEN, "Remember the meeting at noon."),
)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    syntax: str
    definition: str
    task: str

    @property
    def format(self) -> dict[str, str]:
        return {"type": "grammar", "syntax": self.syntax, "definition": self.definition}

    def as_json(self, model: str) -> str:
        about = {"name": self.name, "description": "Takes a text.", "format": self.format}
        asked = {"task": self.task, "model": model, "max_tokens": MAX_TOKENS}
        return json.dumps(about | asked)


Check = Callable[[str], bool]
"""Whether a text is in the grammar."""
Client = Callable[[str, Tool, str, int], Iterator[dict[str, Any]]]
"""Calls of a tool, by the server at a URL, the tool, the model, and how many."""


def checks(folder: Path) -> dict[str, Check]:
    """By Lark itself, which `folder` has, and by Python's regular expressions."""
    sys.path.append(str(folder))
    import lark

    def is_parsed(parser: Any, text: str) -> bool:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    found: dict[str, Check] = {}
    for name, syntax, definition, _ in TOOLS:
        if syntax == "regex":
            found[name] = lambda text, d=definition: re.fullmatch(d, text) is not None
        else:
            parser = lark.Lark(definition)
            found[name] = lambda text, p=parser: is_parsed(p, text)
    return found


def sdk(command: Sequence[str], **settings: str) -> Client:
    def run(url: str, tool: Tool, model: str, number: int) -> Iterator[dict[str, Any]]:
        done = subprocess.run(
            [*command, url, tool.as_json(model), str(number)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"{command[-1]}:\n{done.stderr[-3000:]}")
        yield from map(json.loads, done.stdout.splitlines())

    return run


def chats(url: str, tool: Tool, model: str, number: int) -> Iterator[dict[str, Any]]:
    """Chat completions, half of them as streams."""
    form = {"type": "grammar", "grammar": {"syntax": tool.syntax, "definition": tool.definition}}
    custom = {"name": tool.name, "description": "Takes a text.", "format": form}
    choice = {"type": "custom", "custom": {"name": tool.name}}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": tool.task}],
        "tools": [{"type": "custom", "custom": custom}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}},
        "max_tokens": MAX_TOKENS,
    }
    body["tool_choice"]["allowed_tools"]["tools"] = [choice]  # type: ignore[index]
    with httpx.Client(timeout=300) as http:
        for i in range(number):
            asked = body | {"seed": i, "parallel_tool_calls": False, "stream": i % 2 == 0}
            answer = http.post(f"{url}/v1/chat/completions", json=asked)
            answer.raise_for_status()
            if i % 2:
                (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
                yield {"input": call["custom"]["input"]}
                continue
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            parts = [c["custom"]["input"] for d in deltas for c in d.get("tool_calls", ())]
            yield {"input": "".join(parts), "parts": parts}


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """URL of a server of the default model, with a state of its own."""
    config = folder / "kvrelay.toml"
    config.write_text(CONFIG.format(folder=folder / "state"), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("kvrelay")), "serve", "--config", str(config)]
    with (folder / "server.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield server_url(process, Path(log.name))
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


@dataclass(slots=True)
class Tally:
    client: str
    tool: str
    num_calls: int = 0
    num_in_parts: int = 0  # that came in more than one
    wrong: list[str | None] = field(default_factory=list)
    seconds: float = 0.0


def tally(client: str, run: Client, url: str, tool: Tool, model: str, n: int, ok: Check) -> Tally:
    made, began = Tally(client, tool.name), time.monotonic()
    for call in run(url, tool, model, n):
        made.num_calls += 1
        text, parts = call["input"], call.get("parts")
        made.num_in_parts += len([part for part in parts or () if part]) > 1
        if text is None or not ok(text) or (parts is not None and "".join(parts) != text):
            made.wrong.append(text)
    made.seconds = time.monotonic() - began
    return made


@click.command()
@click.option("--python", "packages", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--node", type=click.Path(exists=True, path_type=Path), help="With node_modules.")
@click.option("--calls", default=50, help="Of each client and tool.")
@click.option("--url", default="", help="Of a server that runs; else one is started.")
def main(packages: Path, node: Path | None, calls: int, url: str) -> None:
    """Forced calls of custom tools by SDKs: all inputs are in the tool's grammar."""
    console = Console()
    oks = checks(packages)
    with tempfile.TemporaryDirectory(prefix="kvrelay-custom-") as place:
        path = os.pathsep.join(map(str, (packages, Path.cwd())))
        python = [sys.executable, str(SDKS / "agents_sdk.py")]
        clients: dict[str, Client] = {"chats": chats, "Agents SDK": sdk(python, PYTHONPATH=path)}
        if node is not None:
            shutil.copy(SDKS / "ai_sdk.mjs", node)  # imports are looked for beside the file
            clients["AI SDK"] = sdk(["node", str(node / "ai_sdk.mjs")])
        with server(Path(place)) if not url else _given(url) as base:
            model = httpx.get(f"{base}/v1/models").json()["data"][0]["id"]
            tallies = []
            for name, run in clients.items():
                for tool in (Tool(*each) for each in TOOLS):
                    with console.status(f"{name}: {tool.name}"):
                        made = tally(name, run, base, tool, model, calls, oks[tool.name])
                    tallies.append(made)
    table = Table("client", "tool", "calls", "in parts", "not in the grammar", "s")
    for each in tallies:
        counts = each.num_calls, each.num_in_parts, len(each.wrong)
        table.add_row(each.client, each.tool, *map(str, counts), f"{each.seconds:.1f}")
    console.print(table)
    for each in tallies:
        for text in each.wrong[:3]:
            console.print(f"{each.client}, {each.tool}: {text!r}", markup=False)
    sys.exit(1 if any(each.wrong or each.num_calls != calls for each in tallies) else 0)


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    main()
