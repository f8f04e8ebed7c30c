"""`kvrelay.example.toml`, written from the settings and their comments in the source.

`make example` writes the file; a test compares it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap

from msgspec import Struct

from kvrelay.cluster.config import AdapterEntry, Config, ModelEntry, TenantEntry
from kvrelay.engine.settings import settings_of

EXAMPLES: dict[str, Struct] = {  # tables that there may be several of
    "tenant": TenantEntry("search", keys=("a-long-random-text",), key_hashes=("...",)),
    "models": ModelEntry("small", "smollm2-135m", aliases=("gpt-4o-mini",)),
    "adapters": AdapterEntry("tuned", "adapters/tuned"),
}


def example_toml() -> str:
    """The text of `kvrelay.example.toml`: every setting with its default and its comment."""
    about = "with its default. Options of the command win."
    parts = [f"# Every setting of `kvrelay serve --config FILE`, {about}\n"]
    for name in Config.__struct_fields__:
        table = EXAMPLES.get(name) or getattr(Config(), name)
        about = " ".join((type(table).__doc__ or "").split()).partition(". ")[0].rstrip(".")
        rows = [(f"[[{name}]]" if name in EXAMPLES else f"[{name}]", about)]
        comments = _comments(type(table))
        for key in settings_of(type(table)):
            rows.append((f"{key} = {json.dumps(getattr(table, key))}", comments[key]))
        start = "# " if name in EXAMPLES else ""
        column = max(len(row) for row, _ in rows) + 2
        for row, comment in rows:
            wrapped = textwrap.wrap(comment, 98 - len(start) - column, break_on_hyphens=False)
            parts.append(f"{start}{row:<{column}}# {wrapped[0]}" if wrapped else start + row)
            parts += [f"{start}{'':<{column}}# {words}" for words in wrapped[1:]]
        parts.append("")
    return "\n".join(parts)


def _comments(kind: type[Struct]) -> dict[str, str]:
    """Setting -> the comment in the source, beside or above it."""
    found = {}
    comment: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if above := re.fullmatch(r"    # (.+)", line):
            comment.append(above[1])
        elif setting := re.fullmatch(r"    (\w+): .*?(?:  # (.+))?", line):
            found[setting[1]] = " ".join([*comment, setting[2] or ""]).strip()
            comment = []
    return found


if __name__ == "__main__":
    sys.stdout.write(example_toml())
