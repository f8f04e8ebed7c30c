"""A capability is spoken of where it lives, and in the files of smear.txt.

Words in code count, in strings too; comments and docstrings do not. Where this fails, a file has
learnt of a capability that it did not know: use the hook that is named. Or write the list anew by
`python -m tests.test_smear`, in a commit that says why the file has to know.
"""

from __future__ import annotations

import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("smear.txt")
ROOMS = ("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router", "cluster")
BEGINS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
"""Tokens after which a string is a docstring."""


class Capability(NamedTuple):
    """What it is called in code, what its own files are called, and what others use in place of
    its name."""

    words: str
    own: str
    hook: str


CAPABILITIES = {
    "adapters": Capability(
        r"[Aa]dapter|[Ll]ow_?[Rr]ank",
        r"adapter|lora|low_rank",
        "engine.needs for a request, engine.model.terms for rows of a batch",
    ),
    "models": Capability(
        r"by_model|of_model|ModelEntry|ForModel|ModelStatus|\bfurther\b|served_models|use_models"
        r"|UseModels|with_models?\b",
        r"models",
        "router.models at a router, ApiContext.models in the API",
    ),
    "weights": Capability(
        r"[Ww]eights?(Version|Change|Order|Status|Updates?)|WeightsChanged|UpdateMode|PauseMode"
        r"|load_version|use_loaded|begin_version|pins_weights|weight_version",
        r"weights|version",
        "engine.plug in a worker, InfoChange for who hears of it, handlers in the controller",
    ),
    "tenants": Capability(
        r"[Tt]enant",
        r"tenant|access|limiter|/keys",
        "what a tenant gives a request: its salt, class of service, share and limits",
    ),
    "ranks": Capability(
        r"\b[Rr]anks?\b|tensor_parallel",
        r"rank|parallel",
        "engine.model.parallel.ops.Member for a runner, worker.build.Ranks for a worker",
    ),
    "drafters": Capability(
        r"[Dd]rafter|draft_config|medusa|eagle|\b[Mm]tp\b",
        r"draft|mtp|medusa|eagle",
        "engine.scheduling.drafts for a scheduler, engine.model.drafter for a runner",
    ),
}


@cache
def code_of_rooms() -> dict[str, str]:
    """The code of each product file by its path."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {str(path.relative_to(ROOT)): code_of(path) for path in paths}


def code_of(path: Path) -> str:
    """The tokens of a file with spaces between them, without comments and docstrings."""
    found, before = [], tokenize.ENCODING
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.NL):
                continue
            if token.type != tokenize.STRING or before not in BEGINS:
                found.append(token.string)
            before = token.type
    return " ".join(found)


def foreign(capability: Capability) -> list[str]:
    """Files that speak of it and are not its own."""
    words, own = re.compile(capability.words), re.compile(capability.own)
    return [p for p, code in code_of_rooms().items() if words.search(code) and not own.search(p)]


def listed(name: str) -> list[str]:
    """Files that may speak of it."""
    pairs = (line.split() for line in LIST.read_text().splitlines())
    return [path for capability, path in pairs if capability == name]


@pytest.mark.parametrize("name", list(CAPABILITIES))
def test_no_other_file_learns_of_a_capability(name: str) -> None:
    new = sorted({*foreign(CAPABILITIES[name])} - {*listed(name)})
    told = f"{', '.join(new)}: {name} were nothing to it; use {CAPABILITIES[name].hook}"
    assert not new, f"{told}, or add it to {LIST.name} in a commit that says why"


@pytest.mark.parametrize("name", list(CAPABILITIES))
def test_a_file_that_has_forgotten_a_capability_is_not_listed(name: str) -> None:
    """So that it cannot learn of it again unseen."""
    gone = sorted({*listed(name)} - {*foreign(CAPABILITIES[name])})
    assert not gone, f"take these off {LIST.name}, {name}: {', '.join(gone)}"


def test_only_code_counts(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('"""An adapter."""\n\n\ndef f():\n    """Its adapter."""\n    g()  # adapter\n')
    assert "adapter" not in code_of(path)
    path.write_text('f(\n    "adapter")\n')
    assert "adapter" in code_of(path)


if __name__ == "__main__":
    found = {name: foreign(each) for name, each in CAPABILITIES.items()}
    LIST.write_text(
        "".join(f"{name} {path}\n" for name, all_of in found.items() for path in all_of)
    )
    print({name: len(all_of) for name, all_of in found.items()})
