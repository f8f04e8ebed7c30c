"""What the Containerfile says, and what is built from it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.operations import container
from tests.operations.container import CONTAINERFILE, ROOT, ContainerError, parse
from tests.structure import PACKAGES


def test_lines_that_go_on_are_one_step() -> None:
    text = "# said first\nARG A=1\n\nRUN one \\\n    # said in between\n    && two\nUSER 1:2\n"
    steps = [(step.line, step.name, step.text) for step in parse(text)]
    assert steps == [(2, "ARG", "A=1"), (4, "RUN", "one     && two"), (7, "USER", "1:2")]
    with pytest.raises(ContainerError, match="line 1"):
        parse("RUN one \\\n")


@pytest.mark.slow
def test_what_is_copied_is_in_the_context() -> None:
    known = [*container.context_files()]
    assert Path("pyproject.toml") in known
    assert not any(path.is_relative_to("tests") for path in known)
    for step in parse(CONTAINERFILE.read_text()):
        flags, words = step.words() if step.name == "COPY" else ({}, [])
        for source in words[:-1] if "from" not in flags else ():
            assert source == "." or any(path.is_relative_to(source) for path in known), step


def test_packages_of_the_wheel_are_in_the_context() -> None:
    """The folders that `kvrelay` links to, and the data that pyproject.toml says belongs to it."""
    known = {path.parts[0] for path in container.context_files()}
    assert {"kvrelay", *PACKAGES} <= known
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["license-files"]) <= known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RUN true", "before the first FROM"),
        ("FROM docker.io/library/alpine:3", "expected python:VERSION-slim-CODENAME"),
        ("", "has no FROM"),
    ],
)
def test_a_file_that_cannot_be_carried_out_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match=says):
        container.Build(tmp_path).run(parse(text))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(container.what_is_missing()), reason=container.what_is_missing())
def test_the_image_is_built_and_answers(tmp_path: Path) -> None:
    container.check(tmp_path)
