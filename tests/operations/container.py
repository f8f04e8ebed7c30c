"""`python -m tests.operations.container`: builds and runs the image where there is no podman.

The steps of deploy/Containerfile are carried out as root in folders. Its base is made by
debootstrap: the Debian that the base's tag names, with that Debian's Python instead of the tag's.
Then the entrypoint runs as the image's user, with the image's environment, in namespaces of its
own without a network, until a client has an answer; SIGTERM has to end it with exit code 0.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import click
import psutil

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy/Containerfile"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What images named python:*-slim-* have, by the names of Debian's packages.
PYTHON_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates,netbase,tzdata"
# How this machine reaches package indexes; the files that they name are there in a step as well.
PASSED_ON = re.compile(r"PIP_\w+|SSL_CERT_FILE|\w+_proxy|\w+_PROXY")
NEEDED = ("debootstrap", "unshare", "nsenter", "chroot", "mount", "git")
READY_S, STOP_S = 600.0, 90.0
KEY = "the-key-of-clients"
# Sets up a root as a container's: its devices, processes, shared memory; then what follows.
ENTER = """set -e
root=$1 binds=$2; shift 2
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for each in null zero full random urandom tty; do
    touch "$root/dev/$each"; mount --bind "/dev/$each" "$root/dev/$each"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=2g tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
for each in $binds; do
    if [ -d "$each" ]; then mkdir -p "$root$each"; else
        mkdir -p "$(dirname "$root$each")"; touch "$root$each"
    fi
    mount --bind "$each" "$root$each"
done
ip link set lo up 2>/dev/null || true
exec "$@"
"""
ASK = """import json, sys, urllib.request
path, body = sys.argv[1:]
headers = {"authorization": "Bearer %s", "content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000" + path, body.encode() or None, headers)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


class ContainerError(Exception):
    """A step that failed, or one that is not known here."""


@dataclass(frozen=True, slots=True)
class Step:
    line: int
    name: str
    text: str

    def words(self) -> tuple[dict[str, str], list[str]]:
        """Returns its flags (--from=build) and its other words."""
        words = shlex.split(self.text)
        flags = [word for word in words if word.startswith("--")]
        pairs = (flag[2:].partition("=") for flag in flags)
        return {name: value for name, _, value in pairs}, words[len(flags) :]


def parse(text: str) -> list[Step]:
    """Reads a Containerfile; lines that end with a backslash go on in the next."""
    steps: list[Step] = []
    begun: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or begun):
            continue
        if not begun:
            first = number
        begun.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            name, _, rest = "".join(begun).strip().partition(" ")
            steps.append(Step(first, name.upper(), rest.strip()))
            begun = []
    if begun:
        raise ContainerError(f"line {first}: {begun[0]!r} goes on after the end of the file")
    return steps


def debian_of(image: str) -> str:
    """Returns the codename of the Debian below an image of Python."""
    if found := re.fullmatch(r"(?:docker\.io/library/)?python:[\d.]+-slim-([a-z]+)", image):
        return found[1]
    raise ContainerError(f"base {image!r}: expected python:VERSION-slim-CODENAME of Debian")


def context_files() -> Iterator[Path]:
    """Lists what a build sees of the checkout: files that git knows and nothing ignores."""
    ignored = (CONTAINERFILE.parent / "Containerfile.containerignore").read_text().split()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        parents = [str(each) for each in (Path(name), *Path(name).parents)]
        patterns = [pattern.removeprefix("**/") for pattern in ignored]
        if not any(fnmatch.fnmatch(each, p) for each in parents for p in patterns):
            yield Path(name)


@dataclass(slots=True)
class Stage:
    """An image that is being built: its root, and what the steps have set so far."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    args: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    stop_signal: signal.Signals = signal.SIGTERM

    def expand(self, text: str) -> str:
        return Template(text).substitute(self.args | self.env)

    def enter(
        self, command: Sequence[str], env: Mapping[str, str], *, alone: bool, binds: str = ""
    ) -> list[str]:
        """Returns what runs a command in it. `alone`: in a network of its own. `binds`: files and
        folders of this machine that are there too."""
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        namespaces += ["--net", "--ipc", "--uts"] if alone else []
        inside = ("chroot", f"--userspec={self.user}", "--groups=", str(self.root))
        settings = [f"{name}={value}" for name, value in env.items()]
        return [
            *namespaces, "sh", "-c", ENTER, "sh", str(self.root), binds,
            *inside, "/usr/bin/env", "-i", "-C", self.folder, *settings, *command,
        ]  # fmt: skip


class Build:
    """Carries steps out; owns the folders below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._globals: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}
        self._stage: Stage | None = None

    def run(self, steps: Sequence[Step]) -> Stage:
        for step in steps:
            began = time.monotonic()
            print(f"{step.name} {step.text[:88]}", flush=True)
            if step.name == "FROM":
                self._stage = self._from(step)
            elif step.name == "ARG" and self._stage is None:
                name, _, value = step.text.partition("=")
                self._globals[name] = value
            elif self._stage is None:
                raise ContainerError(f"line {step.line}: {step.name} before the first FROM")
            else:
                self._apply(step, self._stage)
            if (took := time.monotonic() - began) > 1:
                print(f"    {took:.0f} s", flush=True)
        if self._stage is None:
            raise ContainerError("the file has no FROM")
        return self._stage

    def _from(self, step: Step) -> Stage:
        words = Template(step.text).substitute(self._globals).split()
        base = self._base(debian_of(words[0]))
        stage = Stage(self._folder / f"stage-{len(self._stages)}")
        shutil.rmtree(stage.root, ignore_errors=True)
        subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(stage.root)], check=True)
        self._stages[words[2] if len(words) == 3 else str(len(self._stages))] = stage
        return stage

    def _base(self, codename: str) -> Path:
        base = self._folder / codename
        if not base.exists():
            made = base.with_suffix(".part")
            shutil.rmtree(made, ignore_errors=True)
            options = ("--variant=minbase", f"--include={PYTHON_PACKAGES}")
            with (self._folder / "debootstrap.log").open("wb") as log:
                subprocess.run(
                    ["debootstrap", *options, codename, str(made)],
                    check=True, stdout=log, stderr=log, env={**os.environ, "PATH": PATH},
                )  # fmt: skip
            (made / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            made.rename(base)
        return base

    def _apply(self, step: Step, stage: Stage) -> None:
        match step.name:
            case "RUN":
                self._shell(step, stage)
            case "COPY":
                self._copy(step, stage)
            case "ARG":
                name, _, value = step.text.partition("=")
                stage.args[name] = value
            case "ENV":
                pairs = (word.partition("=") for word in shlex.split(step.text))
                stage.env |= {name: stage.expand(value) for name, _, value in pairs}
            case "USER":
                stage.user = step.text
            case "WORKDIR":
                stage.folder = stage.expand(step.text)
                (stage.root / stage.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENTRYPOINT":
                stage.entrypoint, stage.command = json.loads(step.text), []
            case "CMD":
                stage.command = json.loads(step.text)
            case "STOPSIGNAL":
                stage.stop_signal = signal.Signals[step.text]
            case "EXPOSE":
                pass
            case _:
                raise ContainerError(f"line {step.line}: {step.name} is not known here")

    def _shell(self, step: Step, stage: Stage) -> None:
        passed_on = {k: v for k, v in os.environ.items() if PASSED_ON.fullmatch(k)}
        binds = " ".join(filter(os.path.exists, ["/etc/resolv.conf", *passed_on.values()]))
        env = {"HOME": "/root"} | passed_on | stage.args | stage.env
        command = stage.enter(("/bin/sh", "-c", step.text), env, alone=False, binds=binds)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise ContainerError(
                f"line {step.line}: exit code {done.returncode}\n{done.stdout[-3000:]}"
            )

    def _copy(self, step: Step, stage: Stage) -> None:
        flags, words = step.words()
        *sources, last = words
        target = stage.root / os.path.join(stage.folder, last).lstrip("/")
        if "from" in flags:
            (source,) = sources
            target.parent.mkdir(parents=True, exist_ok=True)
            origin = self._stages[flags["from"]].root / source.lstrip("/")
            subprocess.run(["cp", "-a", str(origin), str(target)], check=True)
            return
        if unknown := flags.keys() - {"from"}:
            raise ContainerError(f"line {step.line}: --{min(unknown)} is not known here")
        known = [*context_files()]
        for source in sources:
            found = [p for p in known if source == "." or p.is_relative_to(source)]
            if not found:
                raise ContainerError(f"line {step.line}: the context has no {source!r}")
            for path in found:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


@dataclass(slots=True)
class Container:
    """What runs the image from `start` to `stop`."""

    stage: Stage
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {"HOME": "/home/kvrelay", "KVRELAY_API_KEY": KEY} | self.stage.env
        command = [*self.stage.entrypoint, *self.stage.command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.stage.enter(command, env, alone=True), stdout=log, stderr=log
            )

    def first(self) -> psutil.Process:
        """Returns its process number 1, which gets the signals. Raises ContainerError."""
        assert self.process is not None
        for _ in range(100):
            if found := psutil.Process(self.process.pid).children():
                return found[0]
            time.sleep(0.1)
        raise ContainerError(f"it does not start:\n{self.log.read_text()[-3000:]}")

    def ask(self, path: str, body: str = "") -> str:
        """Asks as a client in its network; "" while nobody answers."""
        assert self.process is not None
        where = ("nsenter", "--net", f"--target={self.first().pid}")
        done = subprocess.run(
            [*where, sys.executable, "-c", ASK % KEY, path, body],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    def wait_ready(self) -> float:
        assert self.process is not None
        began = time.monotonic()
        while not self.ask("/health/ready"):
            if self.process.poll() is not None or time.monotonic() > began + READY_S:
                raise ContainerError(f"it is not ready:\n{self.log.read_text()[-3000:]}")
            time.sleep(1)
        return time.monotonic() - began

    def stop(self) -> int:
        """Sends its stop signal, and returns its exit code."""
        assert self.process is not None
        self.first().send_signal(self.stage.stop_signal)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise ContainerError(f"it does not end:\n{self.log.read_text()[-3000:]}") from None


def what_is_missing() -> str:
    """Says what a build needs and lacks; "" if nothing."""
    if os.geteuid() != 0:
        return "root, for chroot and mounts"
    path = f"{os.environ['PATH']}:{PATH}"
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"the commands {', '.join(missing)}" if missing else ""


def check(folder: Path) -> None:
    """Builds the image in `folder`, and runs it. Raises ContainerError."""
    stage = Build(folder).run(parse(CONTAINERFILE.read_text()))
    container = Container(stage, folder / "container.log")
    container.start()
    try:
        print(f"ready after {container.wait_ready():.0f} s", flush=True)
        models = json.loads(container.ask("/v1/models"))["data"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": models[0]["id"], "messages": question, "max_tokens": 16, "temperature": 0}
        answer = json.loads(container.ask("/v1/chat/completions", json.dumps(body)) or "{}")
        if "choices" not in answer:
            raise ContainerError(f"no answer:\n{container.log.read_text()[-3000:]}")
        owner = container.first().uids().real
        print(f"user {owner}: {answer['choices'][0]['message']['content']!r}", flush=True)
        code = container.stop()
    finally:
        assert container.process is not None
        container.process.kill()
    if code:
        raise ContainerError(f"exit code {code} after SIGTERM, expected 0")
    print("exit code 0 after SIGTERM")


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Keeps what is built in it.")
def main(folder: Path | None) -> None:
    """Build the image of deploy/Containerfile without podman, and run it once. Needs root,
    debootstrap and about 12 GB of disk."""
    if missing := what_is_missing():
        raise click.UsageError(f"this needs {missing}")
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            check(folder.resolve())
            return
        with tempfile.TemporaryDirectory() as made:
            check(Path(made))
    except (ContainerError, subprocess.CalledProcessError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
