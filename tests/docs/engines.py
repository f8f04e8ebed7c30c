"""The tables of docs/engines.md: what becomes of each setting, and of each field of a request, at
vLLM.

`python -m tests.docs.engines` rewrites what stands between their marks.
"""

from __future__ import annotations

from kvrelay.cluster.config_checks import AT_VLLM, AtVllm
from kvrelay.decode_worker.vllm.parameters import FATES
from tests.docs.modules import between_marks
from tests.docs.parameters import table
from tests.structure import ROOT

PAGE = ROOT / "docs/engines.md"


def settings() -> str:
    rows = [
        [f"`{name.removeprefix('engine.')}`", _taken(at), at.text] for name, at in AT_VLLM.items()
    ]
    return table(["setting", "values", "at vLLM"], rows)


def _taken(at: AtVllm) -> str:
    return " or ".join(str(each) or '""' for each in at.taken)


def fields() -> str:
    return table(["field", "at vLLM"], [[f"`{name}`", fate] for name, fate in FATES.items()])


def with_tables(page: str) -> str:
    return between_marks(between_marks(page, "settings", settings()), "fields", fields())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
