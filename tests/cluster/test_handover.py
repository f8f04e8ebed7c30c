"""A program becomes another one, and goes on with its children, sockets and channels."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.processes import handover
from kvrelay.cluster.processes.handover import Handover, HandoverError, try_out
from kvrelay.cluster.processes.supervised import Inherited

pytestmark = pytest.mark.anyio

CHILD = """
import sys
import kvrelay.cluster.processes.orders
from kvrelay.engine.wire.channel import BlockingChannel, inherited
end = BlockingChannel(inherited(sys.argv[1]))
while True:
    end.send(end.receive())
"""

# Starts a child, becomes itself, and asks the child once more.
PROGRAM = """
import asyncio, os, socket, subprocess, sys
from dataclasses import replace
from pathlib import Path
from kvrelay.cluster.processes.handover import *
from kvrelay.cluster.processes.handover import RunningRouter
from kvrelay.cluster.processes.orders import Stop
from kvrelay.cluster.processes.supervised import Child
from kvrelay.engine.wire.channel import Channel, inherited

async def main():
    heard = asyncio.Queue()
    child = Child("router-0", heard.put_nowait, lambda code: heard.put_nowait(code))
    found = taken_over()
    if found is None:
        mine, its = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-c", sys.argv[1], str(its.fileno())], pass_fds=[its.fileno()]
        )
        channel = await Channel.over(mine)
        channel.send(Stop(1.0))
        print(os.getpid(), process.pid, (await channel.receive()).drain_s, flush=True)
        number, messages, unread = await channel.detach()
        listening = socket.create_server(("127.0.0.1", 0))
        router = RunningRouter("router-0", 1, process.pid, number, unread)
        here = Handover(Path("/"), own_command(), "", {"router-0": listening.fileno()}, (router,))
        socket.create_connection(listening.getsockname()).close()
        become(here.command, os.environ["PYTHONPATH"], here)
    (router,) = found.routers
    await child.resume(router.pid, inherited(str(router.channel)), router.unread)
    child.send(Stop(2.0))
    said = await asyncio.wait_for(heard.get(), 20)
    connected, _ = inherited(str(found.sockets["router-0"])).accept()
    print(os.getpid(), router.pid, said.drain_s, "VARIABLE" in os.environ, flush=True)
    child.kill()
    print(await asyncio.wait_for(heard.get(), 20), flush=True)

asyncio.run(main())
"""


def test_a_program_that_becomes_itself_goes_on_with_its_child_and_its_sockets(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), CHILD],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    before, after, code = (line.split() for line in done.stdout.splitlines())
    assert after[:2] == before[:2], "one process, with one child"
    assert (before[2], after[2]) == ("1.0", "2.0")
    assert code == [str(-signal.SIGKILL)]


async def test_a_child_that_was_inherited_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = Inherited(process.pid)
    assert child.returncode is None
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.wait_for(child.wait(), 20) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        Inherited(process.pid)
    process.returncode = 0  # it was waited for


async def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    found = Handover(tmp_path, ("kvrelay",))
    with pytest.raises(HandoverError, match="No such file"):
        await try_out(["/no/such/kvrelay"], "", found)
    failing = [sys.executable, "-c", "raise SystemExit('error: k.toml: no such key')"]
    with pytest.raises(HandoverError, match=r"cannot take over: k\.toml: no such key"):
        await try_out(failing, "", found)
    assert await try_out([sys.executable, "-c", "print('kvrelay 9')"], "", found) == "kvrelay 9"


async def test_a_trial_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TRIAL_S", 0.2)
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(HandoverError, match=r"not done with its check after 0\.2 s"):
        await try_out(hanging, "", Handover(tmp_path, ("kvrelay",)))


def test_a_link_is_followed_anew_and_what_runs_is_known_by_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        script = tmp_path / version / "bin" / "kvrelay"
        script.parent.mkdir(parents=True)
        script.touch(mode=0o755)
    (current := tmp_path / "current").symlink_to("1.0")
    script = current / "bin" / "kvrelay"
    monkeypatch.setattr(sys, "argv", [str(script), "serve"])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", str(script), "serve"])
    assert handover.own_command() == (str(script), "serve")
    found = handover.installed(handover.own_command(), "", None)
    assert found.command == (str(tmp_path / "1.0" / "bin" / "kvrelay"), "serve")
    # An interpreter of a virtual environment is a link; only its folder is followed.
    python = current / "bin" / "python"
    python.symlink_to(sys.executable)
    words = [str(python), "-m", "kvrelay.cluster.cli.main", "serve"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/main.py", "serve"])
    monkeypatch.setattr(sys, "orig_argv", words)
    assert handover.own_command() == tuple(words)
    found = handover.installed(handover.own_command(), str(current), None)
    assert found.command[0] == str(tmp_path / "1.0" / "bin" / "python")
    assert found.python_path == str(tmp_path / "1.0")
