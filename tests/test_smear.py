"""A capability is spoken of where it lives, and in few other files.

Words in code count, in strings too, comments and docstrings do not. Where this fails, a file has
learnt of a capability that it did not know: use the hook that is named, or raise the number here in
a commit that says why.
"""

from __future__ import annotations

import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router", "cluster")
BEGINS = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
"""Tokens after which a string is a docstring."""


class Capability(NamedTuple):
    """What it is called in code, what its own files are called, and how many others may know it."""

    words: str
    own: str
    most: int
    hook: str  # what others use in place of its name


CAPABILITIES = {
    "adapters": Capability(
        r"[Aa]dapter|[Ll]ow_?[Rr]ank",
        r"adapter|lora|low_rank",
        99,
        "engine.needs.Need for a request, engine.model.terms for rows, engine.plug for a worker",
    ),
    "several models": Capability(
        r"by_model|of_model|ModelEntry|ForModel|ModelStatus|\bfurther\b|served_models|use_models"
        r"|UseModels|with_models?\b",
        r"models",
        99,
        "router.models at a router, ApiContext.models in the API",
    ),
    "versions of weights": Capability(
        r"[Ww]eights?(Version|Change|Order|Status|Updates?)|WeightsChanged|UpdateMode|PauseMode"
        r"|load_version|use_loaded|begin_version|pins_weights|weight_version",
        r"weights|version",
        99,
        "engine.plug in a worker, and the handlers of messages in a router or controller",
    ),
    "tenants": Capability(
        r"[Tt]enant",
        r"tenant|access|limiter",
        99,
        "a caller's salt, class of service and limits, as the API gives them to a request",
    ),
    "ranks": Capability(
        r"\b[Rr]anks?\b|tensor_parallel",
        r"rank|parallel",
        99,
        "engine.model.parallel.ops.Member for a runner, worker.build.Ranks for a worker",
    ),
    "drafters": Capability(
        r"[Dd]rafter|draft_config|medusa|eagle|\b[Mm]tp\b",
        r"draft|mtp|medusa|eagle",
        99,
        "ScheduledSeq.num_drafts for a step, engine.model.drafter for a runner",
    ),
}


@cache
def code_of_rooms() -> dict[str, str]:
    """The code of each product file by its path, without comments and docstrings."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {str(path.relative_to(ROOT)): code_of(path) for path in paths}


def code_of(path: Path) -> str:
    """The tokens of a file, with spaces between them."""
    found, before = [], tokenize.ENCODING
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                continue
            if token.type != tokenize.STRING or before not in BEGINS:
                found.append(token.string)
            before = token.type
    return " ".join(found)


def foreign(capability: Capability) -> list[str]:
    """Files that speak of it and are not its own."""
    words, own = re.compile(capability.words), re.compile(capability.own)
    return [p for p, code in code_of_rooms().items() if words.search(code) and not own.search(p)]


@pytest.mark.parametrize("name", list(CAPABILITIES))
def test_a_capability_is_spoken_of_in_few_files(name: str) -> None:
    capability = CAPABILITIES[name]
    found = foreign(capability)
    told = f"{name}: {len(found)} files know of it, {capability.most} may: {', '.join(found)}"
    assert len(found) <= capability.most, f"{told}; the others use {capability.hook}"


@pytest.mark.parametrize("name", list(CAPABILITIES))
def test_what_is_no_more_spoken_of_is_not_allowed_for(name: str) -> None:
    """Lower the number with the files, so that none comes back."""
    assert len(foreign(CAPABILITIES[name])) == CAPABILITIES[name].most


def test_only_code_counts(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('"""An adapter."""\n\n\ndef f():\n    """Its adapter."""\n    g()  # adapter\n')
    assert "adapter" not in code_of(path)
    path.write_text('f("adapter")\n')
    assert "adapter" in code_of(path)
