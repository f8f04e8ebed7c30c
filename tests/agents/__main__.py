"""`python -m tests.agents`: each agent reads a file, changes it and runs a command, in a
scratch folder, and again with the worker killed that writes its last call.

The agents come from npm: `npm install @anthropic-ai/claude-code @openai/codex opencode-ai
@qwen-code/qwen-code` in some folder, and `--bin FOLDER/node_modules/.bin`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.cli.own_key import OwnKey
from tests.agents.agents import (
    AFTER,
    AGENTS,
    BEFORE,
    COPY,
    FILE,
    FIRST_TEXT,
    MODEL,
    PACKAGES,
    Agent,
)
from tests.support.random_model import make_model

AGENT_TIMEOUT_S = 180.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
# Without draft tokens the last call takes a second to write, in which a worker can die.
CONFIG = """
[api]
port = 0
[model]
served_name = "scripted"
[engine]
num_speculative_tokens = 0
"""


@dataclass(frozen=True, slots=True)
class Run:
    agent: Agent
    killed: bool
    is_right: bool
    lost: int  # attempts that the killed worker took with it
    seconds: float
    cached: float  # share of the prompt tokens
    said: str
    sessions: str  # how many turns each has; "": there is none


@contextmanager
def scripted_server(model: Path, folder: Path, *, kills: bool) -> Iterator[str]:
    """URL of a server whose model does the task in `folder`."""
    config = folder.parent / "kvrelay.toml"
    state = f'[sessions]\nstate_dir = "{folder.parent / "state"}"\n'
    config.write_text(CONFIG + state, encoding="utf-8")
    log = (folder.parent / "server.log").open("w+", encoding="utf-8")
    how = "kill" if kills else "live"
    command = [
        sys.executable,
        "-m",
        "tests.agents.scripted",
        str(folder),
        how,
        "serve",
        str(model),
    ]
    process = subprocess.Popen(
        [*command, "--config", str(config)], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        yield server_url(process, Path(log.name))
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
        log.close()


def server_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for word in log.read_text(encoding="utf-8").split():
            if word.startswith("http://") and word.endswith("/v1"):
                return word.removesuffix("/v1")
        time.sleep(0.2)
    raise click.ClickException(f"the server did not start:\n{log.read_text()[-2000:]}")


def run_agent(agent: Agent, command: str, model: Path, *, kills: bool) -> Run:
    with tempfile.TemporaryDirectory(prefix="kvrelay-agent-") as scratch:
        home, folder = Path(scratch) / "home", Path(scratch) / "work"
        home.mkdir()
        folder.mkdir()
        (folder / FILE).write_text(FIRST_TEXT, encoding="utf-8")
        with scripted_server(model, folder, kills=kills) as url:
            settings = agent.prepare(home, url)
            kept = {key: os.environ[key] for key in ("PATH", "LANG", "TERM") if key in os.environ}
            began = time.monotonic()
            try:
                done = subprocess.run(
                    [command, *agent.arguments],
                    cwd=folder,
                    env={**kept, "HOME": str(home), **settings},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=AGENT_TIMEOUT_S,
                    check=False,
                )
                said = done.stdout + done.stderr
            except subprocess.TimeoutExpired:
                said = f"it was not done within {AGENT_TIMEOUT_S:g} s"
            seconds = time.monotonic() - began
            totals = httpx.get(f"{url}/status", auth=OwnKey()).json()["totals"]
            sessions = tried_sessions(url)
        after = FIRST_TEXT.replace(BEFORE, AFTER)
        files = [folder / FILE, folder / COPY]
        is_right = all(path.exists() and path.read_text() == after for path in files)
        cached = totals["cached_tokens"] / max(1, totals["prompt_tokens"])
        lost = sum(totals["retries"].values())
        return Run(agent, kills, is_right, lost, seconds, cached, said, sessions)


def tried_sessions(url: str) -> str:
    """Parks, resumes and forks the session that an agent has left."""
    with httpx.Client(base_url=f"{url}/v1", auth=OwnKey(), timeout=60) as client:
        found = client.get("/sessions").json()["data"]
        if not found:
            return ""
        path = f"/sessions/{quote(found[0]['id'], safe='')}"
        states = [client.post(f"{path}/{do}").json()["state"] for do in ("park", "resume")]
        fork = client.post(f"{path}/fork", json={"id": "fork"}).json()
        assert states == ["parked", "idle"], states
        assert fork.get("num_tokens") == found[0]["num_tokens"], (fork, found)
        return ", ".join(f"{each['num_turns']} turns" for each in found)


def table(runs: Sequence[Run]) -> Table:
    names = "agent", "endpoint", "worker killed", "files", "attempts lost", "cached", "sessions"
    made = Table(*names, "s")
    for run in runs:
        made.add_row(
            run.agent.name,
            run.agent.endpoint,
            "yes" if run.killed else "no",
            "as they should be" if run.is_right else "[red]wrong",
            str(run.lost),
            f"{run.cached:.0%}",
            run.sessions or "-",
            f"{run.seconds:.1f}",
        )
    return made


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([agent.command for agent in AGENTS]))
@click.option("--bin", "folder", type=click.Path(exists=True, path_type=Path), help="Of agents.")
def main(names: Sequence[str], folder: Path | None) -> None:
    """Coding agents against a scripted model; all that are installed, or those named."""
    console = Console()
    chosen = [agent for agent in AGENTS if not names or agent.command in names]
    commands = {}
    for agent in chosen:
        found = shutil.which(agent.command, path=str(folder.resolve()) if folder else None)
        if found is None:
            raise click.ClickException(f"no {agent.command}: npm install {PACKAGES}")
        commands[agent.name] = found
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="kvrelay-model-") as place:
        model = make_model(Path(place) / MODEL)
        for agent in chosen:
            for kills in (False, True):
                with console.status(f"{agent.name}{', a worker dies' if kills else ''}"):
                    runs.append(run_agent(agent, commands[agent.name], model, kills=kills))
    console.print(table(runs))
    wrong = [run for run in runs if not run.is_right or (run.killed and not run.lost)]
    wrong += [run for run in runs if not run.sessions]
    for run in wrong:
        console.print(f"[red]{run.agent.name}[/red] said:\n{run.said[-2000:]}", markup=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
