"""The guides in docs/guides, each carried out in a copy of the project.

A guide has code blocks of three kinds, in the order in which a reader follows them: one that begins
with a comment that names a file (it is created), a `diff` (it is applied), and `sh` with commands
of pytest (they have to pass).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure import PACKAGES, ROOT

GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
COPIED = (*PACKAGES, "tests", "pyproject.toml", "kvrelay.example.toml")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NEW_FILE = re.compile(r"(?:#|//) (\S+/\S+\.\w+)\n")
TIMEOUT_S = 170.0
# Files of the product that a first change may touch, beside its tests.
MOST_FILES = {
    "request-attribute": 3,
    "worker-gauge": 2,
    "api-endpoint": 2,
    "routing-term": 3,
    "kv-tier": 4,
    "sampling-parameter": 5,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what a guide may edit."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    shutil.copytree(ROOT / "kvrelay", tmp_path / "kvrelay", symlinks=True)
    return tmp_path


def apply(root: Path, diff: str) -> None:
    """Each hunk has to fit one place. Numbers of lines are not looked at: other edits move them."""
    for part in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
        header, _, body = part.partition("\n")
        path = root / header.removeprefix("+++ b/").strip()
        text = path.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines()
            old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            assert text.count(old) == 1, f"{path.name}: {text.count(old)} places for\n{old}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def run(root: Path, command: str) -> None:
    _, _, *arguments = words = shlex.split(command)
    assert words[:2] == ["python", "-m"], command
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "-q", "-p", "no:cacheprovider"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}"


# For half a minute it builds models in processes of its own.
SLOW = ("model-family", "kernel")


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(each, id=each.stem, marks=[pytest.mark.long] if each.stem in SLOW else [])
        for each in GUIDES
    ],
)
def test_a_guide_does_what_it_says(guide: Path, project: Path) -> None:
    commands, touched = 0, set[str]()
    for language, body in BLOCK.findall(guide.read_text(encoding="utf-8")):
        if language == "diff":
            apply(project, body)
            touched |= set(re.findall(r"^\+\+\+ b/(\S+)", body, flags=re.MULTILINE))
        elif language == "sh":
            for command in body.splitlines():
                run(project, command)
                commands += 1
        elif named := NEW_FILE.match(body):
            path = project / named[1]
            assert not path.exists(), f"{named[1]} is there already"
            path.write_text(body[named.end() :], encoding="utf-8")
            touched.add(named[1])
    assert commands
    product = {each for each in touched if not each.startswith("tests/")}
    assert len(product) <= MOST_FILES.get(guide.stem, len(product)), sorted(product)
