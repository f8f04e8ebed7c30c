"""docs/logs.md and the runbooks quote lines of logs that the code writes."""

from __future__ import annotations

import re

from tests.structure import PACKAGES, ROOT

# What stands for a value in a quoted line.
VALUE = re.compile(
    r"\b[A-Z]{2,}\b|\bN\b|\brouter-\d\b|\.\.\.|(?<=start )decode|HOST has come, HOST is gone|\)"
    r"|(?<=Ray: )started|restarts(?= then)"
)
LOGS, REDIS = ROOT / "docs/logs.md", ROOT / "docs/runbooks/redis.md"


def source() -> str:
    """All of it, without what divides one text into several."""
    parts = [path.read_text() for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    return re.sub(r'"\s*f?"', "", "\n".join(parts))


def quoted(page: str) -> list[str]:
    table = [line.partition("` |")[0][3:] for line in page.splitlines() if line.startswith("| `")]
    return [line for line in table if " " in line and "`" not in line]


def test_lines_that_operators_look_for_are_written_so() -> None:
    code = source()
    _, _, last = LOGS.read_text().partition("## Lines that operators act on")
    lines = quoted(last)
    assert len(lines) >= 19
    lines += re.findall(r"\* `(.+?)`", REDIS.read_text().partition("## Messages")[2])[:1]
    lines += ["state: URL is there; read in ... s", "N lines before this one are lost"]
    wrong = []
    for line in lines:
        pieces = [piece.strip(" ,;:()") for piece in VALUE.split(line)]
        wrong += [f"{line!r}: {piece!r}" for piece in pieces if piece not in code]
    assert not wrong, "\n".join(wrong)
