"""The tables in docs/command-line.md, made from the lists of flags.

`python -m tests.docs.flags` rewrites what stands between the two `flags` marks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from kvrelay.cluster.cli.flags import ALLOWED, HARMLESS, OWN, REFUSED, VLLM, Flag
from tests.docs.modules import between_marks
from tests.structure import ROOT

PAGE = ROOT / "docs/command-line.md"


def _row(name: str, flag: Flag) -> str:
    short = f", `-{flag.short}`" if flag.short else ""
    value = "" if flag.switch is None else f" = {str(flag.switch).lower()}"
    also = "".join(f", `{key}` = {str(given).lower()}" for key, given in flag.also.items())
    return f"| `--{name}`{short} | `{flag.setting}`{value}{also} |"


def _by_reason(listed: Mapping[str, str]) -> str:
    """One item for each reason, with all its flags."""
    found: dict[str, list[str]] = {}
    for name, why in listed.items():
        allowed = ALLOWED.get(name, ())
        shown = allowed if len(allowed) < 4 else (f"{allowed[0]} to {allowed[-1]}",)
        but = f" (but {', '.join(shown)})" if shown else ""
        found.setdefault(why, []).append(f"`--{name.rstrip('=+')}`{but}".replace("--O", "-O"))
    wrap = textwrap.TextWrapper(
        99, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(f"* {', '.join(names)}: {why}") for why, names in found.items())


def tables() -> str:
    rows = [_row(name, flag) for name, flag in (OWN | VLLM).items()]
    renamed = [
        f"* `--{name}`: "
        + "; ".join(
            f"`{ours}` is {', '.join(t for t, o in flag.values.items() if o == ours)}"
            for ours in dict.fromkeys(flag.values.values())
        )
        for name, flag in VLLM.items()
        if flag.values
    ]
    wrap = textwrap.TextWrapper(
        99, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n\n".join(
        [
            "### Obeyed\n\n| flag | setting |\n|---|---|\n" + "\n".join(rows),
            "Values that have another name here:\n\n" + "\n".join(map(wrap.fill, renamed)),
            "### So anyway\n\n" + _by_reason(HARMLESS),
            "### Refused\n\n" + _by_reason(REFUSED),
        ]
    )


def with_flags(page: str) -> str:
    return between_marks(page, "flags", tables())


if __name__ == "__main__":
    PAGE.write_text(with_flags(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
