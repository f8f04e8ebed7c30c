"""The corpus of JSON schemas that people have written, and the benchmark that measures it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.structured.__main__ import main, summary, try_schema
from benchmarks.structured.ordered import in_schema_order
from tests.cluster.api.constraints.conftest import Matching

CORPUS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["name"])
def test_schemas_that_people_have_written_are_kept(
    matching: Matching, case: dict[str, Any]
) -> None:
    tried = try_schema(matching.vocabulary, **case)
    assert tried.refused == ""
    assert tried.accepted == []
    assert tried.rejected == []
    assert tried.num_valid > 0
    assert tried.num_invalid > 0


def test_what_is_refused_is_told_by_its_keyword(matching: Matching) -> None:
    schemas = [{"oneOf": [{}, {}]}, {"not": {}}, {"items": {"not": {}}}, {"$ref": "#/a"}, {}]
    tests = [{"valid": True, "data": {"é": 1}}, {"valid": False, "data": "accepted"}]
    found = summary(try_schema(matching.vocabulary, "", schema, tests) for schema in schemas)
    assert found["refused"] == {
        'Unimplemented keys: ["not"]': 2,
        "a 'oneOf' whose alternatives may both be valid is not supported": 1,
        "Pointer '/a' does not exist": 1,
    }
    assert (found["schemas"], found["valid"], found["valid_rejected"]) == (5, 1, 0)
    assert (found["invalid"], found["invalid_accepted"]) == (1, 1)
    assert found["compile_ms"]["max"] > 0


def test_the_benchmark_prints_a_table_and_writes_results(smollm2_dir: Path, tmp_path: Path) -> None:
    corpus, results = tmp_path / "corpus.jsonl.gz", tmp_path / "results.json"
    with gzip.open(corpus, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(case) + "\n" for case in CORPUS[:3])
    run = CliRunner().invoke(main, ["schemas", str(corpus), "--json", str(results)])
    assert run.exit_code == 0, run.output
    assert "3 JSON schemas of corpus.jsonl.gz" in run.output
    assert "invalid instances accepted" in run.output
    found = json.loads(results.read_text())
    assert found["schemas"] == 3
    assert found["refused"] == {}
    assert found["wrong"] == []


def object_of(*names: str, **more: Any) -> dict[str, Any]:
    return {"properties": {name: {} for name in names}, **more}


@pytest.mark.parametrize(
    ("schema", "order"),
    [
        ({}, "abcd"),
        (object_of("c", "a"), "cabd"),
        (object_of("c", required=["d", "c"]), "cdab"),
        ({"allOf": [object_of("d"), object_of("c")], **object_of("b")}, "dcba"),
        ({**object_of("b"), "$ref": "#/$defs/x", "$defs": {"x": object_of("d")}}, "bdac"),
        ({"anyOf": [object_of("x", required=["x"]), object_of("d", "a")]}, "dabc"),
        ({"oneOf": [object_of("d")], **object_of("c")}, "cdab"),
        ({"anyOf": [{"type": "string"}, {"const": 1}, object_of("c")]}, "cabd"),
        ({"anyOf": [{"properties": {"a": {"const": 2}, "d": {}}}, object_of("c")]}, "cabd"),
    ],
)
def test_keys_are_put_into_the_order_of_the_schema(schema: Any, order: str) -> None:
    assert "".join(in_schema_order(schema, dict.fromkeys("abcd", 1))) == order
    inner = {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}
    assert "".join(in_schema_order(inner, [dict.fromkeys("abcd", 1)])[0]) == order
