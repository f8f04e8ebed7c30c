"""What a stranger finds at a server that each recipe of the pages starts: listeners, routes, files,
processes, logs, Ray.

`python -m tests.operations.scan [RECIPE ...]` starts one after the other, each in a network
namespace of its own, and looks from another one, and from here as another user. It prints the table
and rewrites it in docs/security.md. Needs root. Exit code 1: somebody could use what was found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.network import Hosts, what_is_missing
from tests.structure import ROOT

PAGE = ROOT / "docs/security.md"
PORT = 8000
READY_S = 240.0
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
STRANGER = ROOT / "tests/operations/stranger.py"
PROMPT = "my password is hunter2"
# What anybody may have: whether it lives, its pages without content, its document.
PUBLIC = {"/health", "/health/live", "/health/ready", "/ping", "/version", "/docs"} | {
    "/openapi.json",
    "/console",
    "/console/",
}
BIN = Path(sys.executable).parent


@dataclass
class Started:
    """A server of one recipe. Its processes are those in its namespace."""

    url: str
    log: Path  # what it said
    secrets: dict[str, str] = field(default_factory=dict)  # given to it
    prints_key: bool = False


Start = Any  # (folder, address) -> the command, its environment, further secrets


def environment(folder: Path) -> dict[str, str]:
    """A user's, as after a login; kernels and models are those of this user."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": cache}
    return kept | home | {"RAY_TMPDIR": str(folder / "ray")}


def make_serve(folder: Path, address: str) -> tuple[list[str], dict[str, str]]:
    """`make serve`: as the Makefile's rule has it."""
    rule = re.search(r"@exec \$\(BIN\)/(kvrelay serve.*)", (ROOT / "Makefile").read_text())
    assert rule is not None
    command = rule[1].replace("$(PORT)", str(PORT)).replace("$(ARGS)", "")
    return own(command), {}


def container(folder: Path, address: str) -> tuple[list[str], dict[str, str]]:
    """CMD of the Containerfile, with its ENV."""
    text = (ROOT / "deploy/Containerfile").read_text()
    command = json.loads(text[text.rindex("CMD ") + 4 :])
    variables = re.search(r"ENV PATH=\S+ \\\n((?:.*\\\n)*.*)", text)
    assert variables is not None
    pairs = (each.split("=") for each in variables[1].replace("\\", "").split())
    return own(shlex.join(command)), dict(pairs)


def up(folder: Path, address: str) -> tuple[list[str], dict[str, str]]:
    """`kvrelay up` with the page's HOSTS.toml of one machine, over something like ssh."""
    entry = f'name = "here"\naddress = "{address}"\nray_args = ["--num-cpus=2"]\n'
    (folder / "HOSTS.toml").write_text(
        f'[ssh]\ncommand = ["env", "HERE={{host}}"]\npython = "{sys.executable}"\n'
        f'folder = "{folder}/kept"\n'
        '[serve]\nconfig = "kvrelay.toml"\nargs = ["--host", "0.0.0.0"]\n'
        f"[[host]]\n{entry}"
    )
    (folder / "kvrelay.toml").write_text(
        '[[tenant]]\nname = "team"\nkeys = ["sk-of-the-scan-0001"]\n'
    )
    # It returns when all is up; what it started goes on.
    return own(f"kvrelay up {folder}/HOSTS.toml && sleep infinity"), {}


def systemd(folder: Path, address: str) -> tuple[list[str], dict[str, str]]:
    """The two units, by their ExecStart, Environment, EnvironmentFile and UMask."""
    (folder / "etc").mkdir(mode=0o700)
    config = (ROOT / "kvrelay.example.toml").read_text()
    config = re.sub(r'^address = ""', 'address = "auto"', config, flags=re.MULTILINE)
    config = re.sub(r'^host = "127.0.0.1"', 'host = "0.0.0.0"', config, flags=re.MULTILINE)
    (folder / "etc/kvrelay.toml").write_text(config)
    (folder / "etc/kvrelay.toml").chmod(0o600)
    commands, variables = (
        [],
        {
            "RAY_START": f"--head --port=6379 --node-ip-address={address} --num-cpus=2",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "7" * 64,
            "KVRELAY_API_KEY": "sk-of-the-scan-0001",
            "KVRELAY_OPERATIONS_KEY": "operations-key-of-the-scan",
        },
    )
    for name in ("kvrelay-ray", "kvrelay"):
        unit = (ROOT / f"deploy/systemd/{name}.service").read_text()
        for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE):
            variables |= dict(each.split("=") for each in line.split())
        (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        assert "UMask=0077" in unit
        commands.append(command.replace("/opt/kvrelay/.venv/bin/", ""))
    ray, serve = (each.replace("/etc/kvrelay", f"{folder}/etc") for each in commands)
    places = {"HOME": folder / "lib", "XDG_STATE_HOME": folder / "lib"}
    variables |= {name: str(path) for name, path in places.items()}
    variables.pop("XDG_CACHE_HOME")
    (folder / "lib").mkdir(mode=0o755)
    wait = f"until {BIN}/ray status >/dev/null 2>&1; do sleep 1; done"
    return own(f"umask 077; {BIN}/{ray} & {wait}; {serve}"), variables


def own(command: str) -> list[str]:
    """In a shell, with the programs of this environment."""
    return ["bash", "-c", f"PATH={BIN}:$PATH; {command}"]


RECIPES = {"make serve": make_serve, "container": container, "kvrelay up": up, "systemd": systemd}


@contextlib.contextmanager
def started(recipe: str, hosts: Hosts, folder: Path) -> Iterator[Started]:
    """Ready on the first host, with umask 022, and used once. Ends all of its namespace."""
    for name in ("home", "ray"):
        (folder / name).mkdir()
    command, variables = RECIPES[recipe](folder, hosts.address(0))
    log = folder / "log"
    env = environment(folder) | variables
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*hosts.inside(0), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            umask=0o022,
            start_new_session=True,
        )
    secrets = {k: v for k, v in variables.items() if k.endswith(("_KEY", "_TOKEN"))}
    secrets |= {"key of a tenant": "sk-of-the-scan-0001"}
    try:
        deadline = time.monotonic() + READY_S
        while not any("Ready: " in text or "\nup: " in text for text in logs(folder)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{recipe} did not become ready:\n" + log.read_text()[-3000:])
            time.sleep(0.5)
        yield Started(f"http://{hosts.address(0)}:{PORT}", log, secrets)
    finally:
        for pid in pids_of(hosts):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)


def logs(folder: Path) -> list[str]:
    return [
        path.read_text(errors="replace") for path in (folder / "log", *folder.rglob("server.log"))
    ]


def pids_of(hosts: Hosts) -> list[int]:
    listed = ["ip", "netns", "pids", hosts.names[0]]
    return [
        int(pid) for pid in subprocess.run(listed, capture_output=True, text=True).stdout.split()
    ]


def listeners(pids: list[int]) -> dict[tuple[str, int], str]:
    """What listens in the namespace of these processes: by address and port, the process."""
    by_inode: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError, psutil.Error):
            title = name_of(psutil.Process(pid).cmdline())
            for handle in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{handle}")
                    if target.startswith("socket:["):
                        by_inode.setdefault(target[8:-1], title)
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            address, _, port = parts[1].partition(":")
            if parts[3] == "0A":
                packed = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                where = socket.inet_ntop(family, packed).removeprefix("::ffff:")
                found[where, int(port, 16)] = by_inode.get(parts[9], "?")
    return found


TITLES = (
    ("kvrelay.cluster.processes.worker", "worker"),
    ("kvrelay.cluster.processes.child router", "router, API"),
    ("kvrelay.cluster.processes.child controller", "controller"),
    ("gcs_server", "Ray's GCS"),
    ("raylet/raylet", "raylet"),
    ("runtime_env/agent", "Ray's runtime_env agent"),
    ("dashboard/agent", "Ray's dashboard agent"),
    ("dashboard/dashboard", "Ray's dashboard"),
    ("log_monitor", "Ray's log monitor"),
    ("monitor.py", "Ray's monitor"),
    ("client.server", "Ray's client server"),
    ("ray::", "Ray worker"),
    ("serve", "API (kvrelay serve)"),
)


def name_of(command: list[str]) -> str:
    line = " ".join(command)
    return next((title for part, title in TITLES if part in line), line[:60])


def ask(prefix: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    with STRANGER.open() as script:
        code = script.read()
    done = subprocess.run(
        [*prefix, "/usr/bin/python3", "-c", code],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def routes() -> list[tuple[str, str]]:
    """All that the API has, by its source: those for operators are not in its document."""
    found = set()
    for path in sorted((ROOT / "cluster/api").rglob("*.py")):
        for method, route in re.findall(r'Route\(\s*"([A-Z]+)",\s*"(/[^"]+)"', path.read_text()):
            found.add((method, re.sub(r"\{[^}]*\}", "x", route)))
    return sorted(found)


def documented(url: str) -> list[tuple[str, str]]:
    paths = httpx.get(f"{url}/openapi.json", timeout=30).json()["paths"]
    return [
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in paths.items()
        for method in methods
        if method in ("get", "post", "delete")
    ]


@dataclass
class Found:
    """What is to be in the table, and what somebody could use."""

    listening: list[tuple[str, str, str]] = field(default_factory=list)  # who, where, what answers
    calls: str = "not reached"
    others: str = ""
    files: str = ""
    processes: str = ""
    wrong: list[str] = field(default_factory=list)


# Where clients have no keys, at the loopback address: every user of the machine may generate, and
# look at what has an id that cannot be guessed.
OF_CLIENTS = {"/v1/models", "/v1/conversations", "/tokenize", "/detokenize"}


def scan(server: Started, hosts: Hosts, folder: Path, from_here: bool) -> Found:
    """`from_here`: the API listens at the loopback address only."""
    found, pids = Found(), pids_of(hosts)
    secrets = [*server.secrets.values(), *kept_secrets(folder)]
    at = listeners(pids)
    outside = {port for where, port in at if not where.startswith(("127.", "::1"))}
    calls = sorted({*routes()})
    if not from_here:
        calls = sorted({*calls, *documented(server.url)})
    asked: dict[str, Any] = {"host": hosts.address(0), "ports": sorted(outside), "url": server.url}
    stranger = ask(hosts.inside(1), asked | {"calls": [] if from_here else calls})
    for (where, port), who in sorted(at.items(), key=lambda item: (item[1], item[0][1])):
        says = stranger["ports"].get(str(port), "this machine only")
        found.listening.append((who, where, says))
        if says.startswith("OPEN"):
            found.wrong.append(f"{who} at {where}:{port}: {says}")
    if not from_here:
        look_at_calls(found, stranger["calls"])

    own_url = f"http://127.0.0.1:{PORT}" if from_here else server.url
    use(hosts, own_url, next(iter(client_keys(folder)), ""))
    user = ask(
        [*hosts.inside(0), *NOBODY],
        {"url": own_url, "calls": calls, "roots": [str(folder)], "secrets": secrets, "pids": pids},
    )
    look_at_calls(found, user["calls"], "others", OF_CLIENTS if from_here else set())
    files, processes = user["files"], user["processes"]
    kept = {folder / name for name in ("HOSTS.toml", "kvrelay.toml", "log")}  # not the server's
    written = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    open_to_all = [p for p in written if stat.S_IMODE(p.stat().st_mode) & 0o077]
    readable = [path for path in files["reads"] if Path(path) not in kept]
    found.files = f"{len(written)} files, {len(readable)} readable by another user"
    found.files += f", {len(files['sockets'])} sockets" if files["sockets"] else ""
    if loose := [p for p in open_to_all if p not in kept and has_secret(p, secrets)]:
        found.wrong.append(f"files with secrets that others may read: {loose}")
    for what in ("secrets", "sockets", "writes"):
        if bad := [path for path in files[what] if Path(path) not in kept]:
            found.wrong.append(f"another user, {what}: {bad[:5]}")
    found.processes = "no secret in a command line, no environment readable"
    for what, seen in processes.items():
        if seen:
            titles = [name_of(psutil.Process(pid).cmdline()) for pid in seen[:5]]
            found.wrong.append(f"another user, {what} of processes: {titles}")
    for path in [*(folder / "ray").rglob("*.log"), *(folder / "ray").rglob("*.err")]:
        if has_secret(path, [*secrets, PROMPT]):
            found.wrong.append(f"a secret or a prompt is in the log {path.name}")
    return found


def client_keys(folder: Path) -> list[str]:
    """Keys that clients may have: one that was made, and the one that was given."""
    made = [path.read_text().strip() for path in folder.rglob("api.key")]
    return [*made, "sk-of-the-scan-0001"]


def use(hosts: Hosts, url: str, key: str) -> None:
    """A request as clients send it, so that what is kept of one is there to be found."""
    body = {"model": "smollm2-135m", "input": PROMPT, "max_output_tokens": 8}
    code = (
        "import sys, urllib.request\nurl, key, body = sys.argv[1:]\n"
        "headers = {'content-type': 'application/json', 'authorization': f'Bearer {key}'}\n"
        "request = urllib.request.Request(url + '/v1/responses', body.encode(), headers)\n"
        "assert urllib.request.urlopen(request, timeout=120).status == 200\n"
    )
    command = [*hosts.inside(0), "/usr/bin/python3", "-c", code, url, key, json.dumps(body)]
    subprocess.run(command, check=True, timeout=150)


def look_at_calls(
    found: Found, answers: list[list[Any]], where: str = "calls", allowed: Set[str] = frozenset()
) -> None:
    """Without a key, nothing but what is public may be answered, or `allowed`."""
    done = sorted({path for _, path, status in answers if 200 <= status < 300})
    codes = sorted({str(s) for _, path, s in answers if path not in PUBLIC and s >= 300})
    public = [path for path in done if path in PUBLIC]
    open_paths = [path for path in done if path not in PUBLIC | allowed]
    text = f"{len(answers)} calls: {len(public)} public ones answered"
    if known := [path for path in done if path in allowed]:
        text += f", {', '.join(known)} too"
    setattr(found, where, f"{text}, else {', '.join(codes)}")
    if open_paths:
        found.wrong.append(f"answered without a key ({where}): {open_paths}")


def has_secret(path: Path, secrets: list[str]) -> bool:
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        return any(secret.encode() in content for secret in secrets)
    return False


def kept_secrets(folder: Path) -> list[str]:
    """Those that the server has made itself."""
    names = ("api.key", "operations.key", "salt.secret", "auth_token")
    return [path.read_text().strip() for name in names for path in folder.rglob(name)]


def table(results: dict[str, Found]) -> str:
    lines = ["| recipe | who listens | where | what a stranger hears |", "|---|---|---|---|"]
    for recipe, found in results.items():
        grouped: dict[tuple[str, str, str], int] = {}
        for who, where, says in found.listening:
            key = (who, "every address" if where in ("0.0.0.0", "::") else where, says)
            grouped[key] = grouped.get(key, 0) + 1
        for (who, where, says), count in grouped.items():
            ports = f" ({count} ports)" if count > 1 else ""
            shown = re.sub(r"10\.213\.7\.\d+", "its address", where)
            lines.append(f"| {recipe} | {who}{ports} | {shown} | {says} |")
            recipe = ""
    for recipe, found in results.items():
        parts = {
            "API, from another host": found.calls,
            "as another user of the machine": found.others,
            "files": found.files,
            "`ps`": found.processes,
        }
        text = "; ".join(f"{what}: {seen}" for what, seen in parts.items())
        lines += ["", *textwrap.wrap(f"* **{recipe}**. {text}.", 100, subsequent_indent="  ")]
    return "\n".join(lines)


def scan_recipe(recipe: str) -> Found:
    with (
        tempfile.TemporaryDirectory(prefix="kvs", ignore_cleanup_errors=True) as name,
        Hosts(2) as hosts,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        with started(recipe, hosts, folder) as server:
            return scan(server, hosts, folder, from_here=recipe == "make serve")


def main() -> None:
    missing = what_is_missing()
    if missing:
        sys.exit(f"needs {missing}")
    results = {recipe: scan_recipe(recipe) for recipe in sys.argv[1:] or RECIPES}
    text = table(results)
    sys.stdout.write(text + "\n")
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        marks = re.compile(r"(<!-- scan -->\n).*?(<!-- end of scan -->)", re.DOTALL)
        PAGE.write_text(marks.sub(rf"\1\n{text}\n\n\2", page), encoding="utf-8")
    wrong = [f"{recipe}: {each}" for recipe, found in results.items() for each in found.wrong]
    sys.stdout.write("".join(f"{each}\n" for each in wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
