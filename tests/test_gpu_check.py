"""The one command for a GPU: its parts are there, and it reports the result of each."""

from __future__ import annotations

import ast

from tests.gpu.__main__ import PARTS, ROOT, Part, page_of, run


def test_every_file_with_tests_for_a_gpu_is_in_a_part() -> None:
    paths = {arg for part in PARTS for arg in part.args if arg.startswith("tests/")}
    assert all((ROOT / path).is_file() for path in paths)
    marked = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        names = {
            ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if _is_mark(node)
        }
        if names & {"pytest.mark.gpu"}:
            marked.add(file.relative_to(ROOT).as_posix())
    assert marked == paths


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "gpu"


def test_all_parts_fit_in_25_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 25 * 60


def test_a_part_that_fails_or_hangs_is_told_with_its_last_lines() -> None:
    parts = (
        Part("good", ("-c", "print('one')"), 30.0),
        Part("bad", ("-c", "raise SystemExit('two')"), 30.0),
        Part("slow", ("-c", "import time; print('three', flush=True); time.sleep(60)"), 2.0),
    )
    outcomes = [run(part) for part in parts]
    assert [each.result for each in outcomes] == ["passed", "failed", "not done in 2 s"]
    page = page_of(outcomes, "a card")
    assert "| good | passed | " in page
    assert "## bad" in page
    assert "two" in page.split("## bad")[1]
    assert "## good" not in page
