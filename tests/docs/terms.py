"""The table of terms of a routing cost in docs/explain.md, made from the fields of `Seconds`.

`python -m tests.docs.terms` rewrites what stands between the two `terms` marks.
"""

from __future__ import annotations

from kvrelay.router.placement.cost import LATER, TERMS
from tests.docs.modules import between_marks
from tests.structure import ROOT

PAGE = ROOT / "docs/explain.md"


def with_terms(page: str) -> str:
    """Gives the page a row for each term."""
    lines = ["| term | seconds of | before the first token |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {term.text} | {'no' if term.when == LATER else 'yes'} |"
        for name, term in TERMS.items()
    ]
    return between_marks(page, "terms", "\n".join(lines))


if __name__ == "__main__":
    PAGE.write_text(with_terms(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
