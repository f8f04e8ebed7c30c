"""The table of a worker's facts in docs/status.md, made from the fields that have them.

`python -m tests.docs.worker_facts` rewrites what stands between the two `facts` marks.
"""

from __future__ import annotations

from kvrelay.router.status import WORKER_FACTS
from tests.docs.modules import between_marks
from tests.structure import ROOT

PAGE = ROOT / "docs/status.md"


def with_facts(page: str) -> str:
    """The page, with a row for each fact and its gauge, without `kvrelay_worker_`."""
    rows = [
        (f"`{name}`", fact.text, f"`{fact.metric}`" if fact.metric else "")
        for name, fact in WORKER_FACTS.items()
    ]
    lines = ["| field | meaning | `kvrelay_worker_` |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return between_marks(page, "facts", "\n".join(lines))


if __name__ == "__main__":
    PAGE.write_text(with_facts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
