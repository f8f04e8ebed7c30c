"""What a check has found."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from msgspec import Struct


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # it serves, slower or less safely than it could
    FAIL = "fail"  # it does not serve as it is set
    SKIPPED = "skipped"  # nothing here to check, or not asked for


class Finding(Struct, frozen=True):
    """What one check has found. `fix`: what to do, unless all is well."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.FAIL, found, fix)


def rm(folders: Iterable[Path]) -> str:
    """The command that removes these, to be pasted."""
    return shlex.join(["rm", "-r", *map(str, folders)])


def skipped(check: str, found: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, found)
