"""Machines of one's own: what HOSTS.toml may say, what is asked of a machine, and what is told."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvrelay.cluster.cli.flags import warn_of_secrets
from kvrelay.cluster.cli.hosts import down, up
from kvrelay.cluster.config import ConfigError, load_config, read_overrides
from kvrelay.cluster.hosts import agent
from kvrelay.cluster.hosts.agent import Answer, Ping
from kvrelay.cluster.hosts.launch import (
    HostEntry,
    Hosts,
    Launch,
    LaunchError,
    Remote,
    SshSection,
    read_hosts,
    settings_text,
)
from kvrelay.engine.wire.channel import PREAMBLE, PROTOCOL, Hello, frame

OF_ANOTHER_VERSION = PREAMBLE + frame(Hello(PROTOCOL, "7.0"))
OF_ANOTHER_VERSION = OF_ANOTHER_VERSION.replace(b"protocol\x01", b"protocol\x09")
OTHER_VERSION = "printf %b " + "".join(rf"\\0{byte:03o}" for byte in OF_ANOTHER_VERSION)
SECRET = "sk-of-nobody-else"
HERE = ("env", "KVRELAY_TEST_HOST={host}")  # a way to a machine that is this one


def written(folder: Path, text: str) -> Path:
    file = folder / "HOSTS.toml"
    file.write_text(text)
    return file


def ssh(folder: Path, **more: object) -> SshSection:
    settings: dict[str, object] = {"command": HERE, "python": sys.executable, **more}
    return SshSection(folder=str(folder / "{host}"), **settings)  # type: ignore[arg-type]


def test_a_file_of_hosts_is_read_with_its_defaults(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[[host]]\nname = "one"\naddress = "10.0.0.1"\n[[host]]\nname = "two"\n'
        '[serve]\nconfig = "kvrelay.toml"\n',
    )
    hosts = read_hosts(file)
    assert [host.reached_at for host in hosts.host] == ["10.0.0.1", "two"]
    assert hosts.ray_address == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"kvrelay\.toml"):
        settings_text(file, hosts)
    (tmp_path / "kvrelay.toml").write_text("[cluster]\ndecode = 2\n")
    assert settings_text(file, hosts) == "[cluster]\ndecode = 2\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no machines"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"\n', "a is there more than once"),
        ('[[host]]\nname = "a"\n[ray]\nport = 70000\n', "ray.port = 70000: expected at most 65535"),
        ('[[host]]\nname = "a"\n[ssh]\nuser = "b"\n', "ssh.user is not a setting"),
        ("[[host]]\n", "name is missing"),
        ("host = [", "not TOML"),
    ],
)
def test_what_is_wrong_is_one_line_without_a_traceback(
    tmp_path: Path, text: str, said: str
) -> None:
    found = CliRunner().invoke(up, [str(written(tmp_path, text))])
    assert found.exit_code == 1
    assert said in found.output.replace("\n", " ")
    assert "Traceback" not in found.output


def test_a_machine_is_asked_by_a_process_there(tmp_path: Path) -> None:
    """Whatever its login shell says first."""
    greets = ("sh", "-c", 'echo Welcome to {host}; exec "$@"', "sh")
    remote = Remote(HostEntry("one"), ssh(tmp_path, command=greets))
    answer = remote.ask(Ping(remote.folder))
    assert answer.error == ""
    assert answer.versions["python"] == sys.version.split()[0]
    assert remote.folder.endswith("/one")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": ("false",)}, "exit code 1"),
        ({"command": ("no-such-command",)}, "not installed here"),
        ({"command": ("sh", "-c", "echo No route to host >&2; exit 255", "{host}")}, "No route"),
        ({"python": "/usr/bin/python-of-nowhere"}, "python-of-nowhere"),
        ({"command": ("sh", "-c", OTHER_VERSION, "{host}")}, "protocol 9 (kvrelay 7.0), and this"),
    ],
)
def test_who_cannot_be_reached_is_told_in_one_line(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    remote = Remote(HostEntry("one"), ssh(tmp_path, **changes))
    answer = remote.ask(Ping(remote.folder))
    assert said in answer.error
    assert "\n" not in answer.error


def test_ssh_gets_the_host_and_one_command_for_its_shell() -> None:
    remote = Remote(HostEntry("me@far"), SshSection(python="~/a b/python"))
    assert remote.ssh_command() == [
        *("ssh", "-o", "BatchMode=yes", "me@far"),
        "~/'a b/python' -m kvrelay.cluster.hosts.agent",
    ]


def test_a_token_is_given_once_and_another_is_not_overwritten(tmp_path: Path) -> None:
    assert agent.give_token("one", tmp_path).error == ""
    file = tmp_path / ".ray/auth_token"
    assert file.read_text() == "one"
    assert file.stat().st_mode & 0o777 == 0o600
    assert agent.give_token("one", tmp_path).error == ""
    assert "another token" in agent.give_token("two", tmp_path).error
    assert file.read_text() == "one"


def test_others_can_read_nothing_of_what_up_writes(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "kvrelay.toml").touch(0o644)  # as earlier versions made it
    (folder / "server.log").touch(0o644)
    before = os.umask(0o022)
    try:
        settings = '[[tenant]]\nname = "a"\nkeys = ["sk-secret"]\n'
        answer = agent.handle_command(agent.StartServer(str(folder), settings, ("--help",), 30.0))
        assert "server has ended" in answer.error
        script = "import time; print('I am up', flush=True); time.sleep(60)"
        new = tmp_path / "new"
        agent._start(new, "thing", [sys.executable, "-c", script], "I am up", 20.0)
        agent._stop(new, "thing", 10.0)
    finally:
        os.umask(before)
    files = [*folder.iterdir(), *new.iterdir()]
    names = {"kvrelay.toml", "overrides.json", "server.log", "thing.log"}
    assert {file.name for file in files} == names
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert new.stat().st_mode & 0o777 == 0o700
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("one")
    token.chmod(0o644)  # as Ray makes it
    assert agent.give_token("one", tmp_path).error == ""
    assert token.stat().st_mode & 0o777 == 0o600


def test_what_is_started_lives_on_and_is_started_once(tmp_path: Path) -> None:
    script = "import time; print('I am up', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script]
    assert agent._start(tmp_path, "thing", command, "I am up", 20.0).error == ""
    pid = json.loads((tmp_path / "thing.running").read_text())["pid"]
    assert agent._start(tmp_path, "thing", command, "I am up", 20.0).error == ""
    assert json.loads((tmp_path / "thing.running").read_text())["pid"] == pid
    assert os.getsid(pid) == pid  # a hangup here is none there
    assert agent._stop(tmp_path, "thing", 10.0).result == "ended"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert agent._stop(tmp_path, "thing", 10.0).result == "was not running"


def test_the_log_of_the_one_before_stays_until_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it ended is in there."""

    def crash(text: str) -> Answer:
        command = [sys.executable, "-c", f"raise SystemExit({text!r})"]
        return agent._start(tmp_path, "thing", command, "up", 20.0)

    assert "first reason" in crash("first reason: it was up").result  # its words, and not...
    while agent._find(tmp_path / "thing.running")[0] is not None:
        time.sleep(0.01)
    answer = crash("second reason")
    assert "second reason" in answer.error
    assert "first reason" not in answer.error  # ...those of the one before it
    assert "first reason" in (tmp_path / "thing.log").read_text()
    monkeypatch.setattr(agent, "MAX_LOG_BYTES", 10)
    crash("third reason")
    assert (tmp_path / "thing.log").read_text().strip() == "third reason"
    assert "second reason" in (tmp_path / "thing.old.log").read_text()


def test_what_was_up_is_up_also_when_its_log_was_rotated(tmp_path: Path) -> None:
    script = "import time; print('I am up: here', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script]
    answer = agent._start(tmp_path, "thing", command, "I am up: ", 20.0)
    assert answer.result == "here"
    (tmp_path / "thing.log").write_bytes(b"")
    assert agent._start(tmp_path, "thing", command, "I am up: ", 0.5) == answer
    assert agent._stop(tmp_path, "thing", 10.0).result == "ended"


def test_a_log_that_is_emptied_while_it_is_read_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "thing.log"
    log.write_bytes(b"one\ntwo\n")
    assert agent._read_on(log, 4) == ("two\n", 8)
    log.write_bytes(b"new\n")
    assert agent._read_on(log, 8) == ("new\n", 4)


def test_what_does_not_start_says_why_and_what_is_stubborn_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such device')"]
    answer = agent._start(tmp_path, "thing", command, "up", 20.0)
    assert "no such device" in answer.error
    assert "thing.log" in answer.error
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    command = [sys.executable, "-u", "-c", stubborn]
    assert agent._start(tmp_path, "thing", command, "up", 20.0).error == ""
    assert "by force" in agent._stop(tmp_path, "thing", 0.5).result


def test_a_number_that_came_again_is_not_taken_for_what_was_started(tmp_path: Path) -> None:
    kept = agent.Running(os.getpid(), time.time() + 5)
    (tmp_path / "ray.running").write_bytes(agent.msgspec.json.encode(kept))
    assert agent._stop(tmp_path, "ray", 0.1).result == "was not running"


def test_machines_with_other_versions_are_refused_before_anything_starts(tmp_path: Path) -> None:
    launch = Launch(Hosts((HostEntry("a"), HostEntry("b"))), lambda *_: None, tmp_path)
    same, other = Answer(versions={"ray": "2.1"}), Answer(versions={"ray": "2.2"})
    a, b = launch._remotes
    with pytest.raises(LaunchError, match=r"a has ray 2.1, and b has 2.2; install the same"):
        launch._check_versions({a: same, b: other})


def test_a_machine_that_does_not_answer_keeps_no_other_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def ask(remote: Remote, command: agent.AnyCommand, timeout_s: float = 0.0) -> Answer:
        asked.append((remote.host.name, type(command).__name__))
        if remote.host.name == "b":
            return Answer(error="no answer")
        return Answer(error="no GPU" * (asked[-1] == ("c", "StartRay")), result="at http://a")

    monkeypatch.setattr(Remote, "ask", ask)
    launch = Launch(Hosts(tuple(map(HostEntry, "abcd"))), lambda *_: None, tmp_path)
    assert launch.up("") == "at http://a"
    assert launch.left_out == ["b: reach: no answer", "c: ray: no GPU"]
    assert ("d", "StartRay") in asked
    assert ("a", "StartServer") in asked
    assert ("b", "GiveToken") not in asked
    monkeypatch.setattr(Launch, "up", lambda launch, *_: launch.left_out.append("b: gone") or "x")
    found = CliRunner().invoke(up, [str(written(tmp_path, '[[host]]\nname = "a"\n'))])
    assert found.exit_code == 1
    assert "up: x" in found.output
    assert "b: gone" in found.output


def test_settings_of_the_command_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[agent.AnyCommand] = []

    def ask(_: Remote, command: agent.AnyCommand, timeout_s: float = 0.0) -> Answer:
        asked.append(command)
        return Answer(result="at http://a")

    monkeypatch.setattr(Remote, "ask", ask)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    file = str(written(tmp_path, '[[host]]\nname = "a"\n'))
    given = {"engine.guard": False, "model.name": "7b", "engine.max_model_len": 512}
    words = [f"--set={key}={str(value).lower()}" for key, value in given.items()]
    words += ["--set", f"model.chat_template={tmp_path}/t.jinja", f"--set=api.key={SECRET}"]
    found = CliRunner().invoke(up, [file, *words])
    assert found.exit_code == 0, found.output
    (started,) = (each for each in asked if isinstance(each, agent.StartServer))
    wanted = {**given, "model.chat_template": "{{ messages }}", "api.key": SECRET}
    assert json.loads(started.overrides) == wanted
    assert SECRET not in " ".join(started.args)
    asked.clear()
    found = CliRunner().invoke(up, [file, "--set", "engine.guard=perhaps"])
    assert "engine.guard = 'perhaps': expected true or false" in found.output
    assert (found.exit_code, asked) == (1, [])


def test_a_secret_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def start(_folder: Path, _name: str, command: list[str], *_: object) -> Answer:
        started.extend(command)
        return Answer()

    monkeypatch.setattr(agent, "_start", start)
    overrides = json.dumps({"api.key": SECRET, "engine.block_size": 32})
    order = agent.StartServer(str(tmp_path / "kept"), "", ("--port", "0"), 1.0, overrides)
    assert agent.handle_command(order).error == ""
    assert SECRET not in " ".join(started)
    assert started[-2] == "--set"
    file = Path(started[-1].removeprefix("@"))
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_config(None, read_overrides(file)).api.key == SECRET
    for args in (["--api-key", SECRET], [f"--set=api.key={SECRET}"], [f"--api_key={SECRET}"]):
        text = f'[[host]]\nname = "a"\n[serve]\nargs = {json.dumps(args)}\n'
        refused = CliRunner().invoke(up, [str(written(tmp_path, text))])
        assert (refused.exit_code, SECRET in refused.output) == (1, False)
        assert "could read api.key in the command line" in " ".join(refused.output.split())
        monkeypatch.setattr(sys, "argv", ["kvrelay", "serve", *args])
        warn_of_secrets(Console())
        assert "warning: api.key is in the command" in capsys.readouterr().out


def test_a_server_has_its_time_to_drain_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, float] = {}

    def ask(_: Remote, command: agent.StopProcess, timeout_s: float) -> Answer:
        asked[command.what] = command.timeout_s
        assert timeout_s == command.timeout_s
        return Answer()

    monkeypatch.setattr(Remote, "ask", ask)
    (tmp_path / "kvrelay.toml").write_text("[cluster]\ndrain_s = 3600\n")
    file = written(tmp_path, '[[host]]\nname = "a"\n[serve]\nconfig = "kvrelay.toml"\n')
    assert CliRunner().invoke(down, [str(file)]).exit_code == 0
    assert asked == {"server": 3660.0, "ray": 60.0}


def test_all_that_cannot_be_reached_are_told_and_down_goes_on(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f'[ssh]\ncommand = ["false", "{{host}}"]\nfolder = "{tmp_path}"\n'
        '[[host]]\nname = "one"\n[[host]]\nname = "two"\n',
    )
    found = CliRunner().invoke(up, [str(file)])
    assert found.exit_code == 1
    assert "one: reach: exit code 1" in found.output
    assert "two: reach: exit code 1" in found.output
    found = CliRunner().invoke(down, [str(file)])
    assert found.exit_code == 1
    for line in ("one: end server", "two: end ray", "one: end ray"):
        assert line in found.output
