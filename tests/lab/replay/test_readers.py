"""Traces of others: what is read, what is mended and told, and what is refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvrelay.lab.replay.lines import TraceError
from kvrelay.lab.replay.readers import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def mooncake(**changes: object) -> str:
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    return json.dumps({**line, **changes})


def write(folder: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_mooncake_trace_is_read_with_what_only_some_lines_have(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mooncake(),
        "",
        mooncake(timestamp=3000, hash_ids=[0, 2], session_id=7, tenant="a", priority=-1),
    )
    trace = read_trace(path)
    first, second = trace.requests
    assert (trace.name, trace.block_tokens, trace.notes) == ("trace", 512, ())
    assert (first.at_s, first.input_length, first.output_length) == (0.0, 600, 5)
    assert (first.session, first.tenant, first.priority) == (None, "", 0)
    assert (second.at_s, second.session, second.tenant, second.priority) == (3.0, "7", "a", -1)
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]


@pytest.mark.parametrize("stamp", ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.68+00:00"])
def test_an_azure_trace_of_either_year_is_read_whatever_it_is_called(
    tmp_path: Path, stamp: str
) -> None:
    rows = f"ContextTokens,TIMESTAMP,GeneratedTokens\r\n374,{stamp},44\r\n9,{stamp[:17]}50,1\r\n"
    path = write(tmp_path, rows, name="a.jsonl")
    trace = read_trace(path)
    assert [(r.input_length, r.output_length) for r in trace.requests] == [(374, 44), (9, 1)]
    assert trace.requests[1].at_s == pytest.approx(3.32, abs=1e-3)
    assert not trace.requests[0].block_ids
    assert "nothing is reused" in trace.notes[0]


def test_gzip_and_a_byte_order_mark_make_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + AZURE.encode()))
    assert len(read_trace(path).requests) == 2


def test_a_limit_takes_the_first_and_does_not_look_at_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), mooncake(timestamp=1), "not a request")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, limit=3)


def test_arrivals_are_sorted_counted_from_the_first_and_told(tmp_path: Path) -> None:
    lines = [mooncake(timestamp=t, output_length=n) for t, n in ((9000, 1), (5000, 2), (5000, 3))]
    trace = read_trace(write(tmp_path, *lines))
    assert [(r.at_s, r.output_length) for r in trace.requests] == [(0, 2), (0, 3), (4, 1)]
    assert "sorted" in trace.notes[0]


def test_a_request_without_an_answer_gets_one_and_that_is_told(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, mooncake(output_length=0), mooncake()))
    assert [r.output_length for r in trace.requests] == [1, 5]
    assert trace.notes == ("1 requests without an answer get one of 1 token",)


def test_equal_ids_after_different_beginnings_become_different_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, mooncake(hash_ids=[0, 9]), mooncake(hash_ids=[1, 9])))
    first, second = (r.block_ids for r in trace.requests)
    assert not set(first) & set(second)
    assert "1 hash_ids follow different beginnings" in trace.notes[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (mooncake(timestamp=-1), "timestamp is -1; expected milliseconds"),
        (mooncake(timestamp=True), "timestamp is True"),
        (mooncake(timestamp=float("nan")), "timestamp is nan"),
        (mooncake(input_length=0, hash_ids=[]), "input_length is 0; expected a whole number from"),
        (mooncake(input_length="600"), "input_length is '600'"),
        (mooncake(output_length=1.5), "output_length is 1.5"),
        (mooncake(output_length=1 << 40), f"output_length is {1 << 40}"),
        (mooncake(hash_ids=[1]), "hash_ids has 1 ids; an input_length of 600 takes 2 blocks of"),
        (mooncake(hash_ids=[1, "2"]), "hash_ids has '2'"),
        (mooncake(hash_ids="1"), "hash_ids is '1'; expected a list"),
        (mooncake(tenant=[]), r"tenant is \[\]; expected a text"),
        (mooncake(priority=None), "priority is None"),
        ('{"timestamp": 0, "input_length": 3}', "there is no output_length among"),
        ('{"timestamp": 0,', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("x" * 500, "is not JSON"),
    ],
)
def test_a_bad_line_is_one_line_with_file_number_and_value(
    tmp_path: Path, line: str, words: str
) -> None:
    path = write(tmp_path, mooncake(), "", line)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'; expected one like 2023-11-16"),
        ("2023-11-16 18:15:46,0,1", "ContextTokens is '0'; expected a whole number, 1 or more"),
        ("2023-11-16 18:15:46,1,-1", "GeneratedTokens is '-1'"),
        ("2023-11-16 18:15:46,1e3,1", "ContextTokens is '1e3'"),
        ("2023-11-16 18:15:46,99999999999,1", "ContextTokens is 99999999999; expected at most"),
        ("2023-11-16 18:15:46,1", "has 2 columns; expected 3"),
    ],
)
def test_a_bad_row_is_one_line_with_file_number_and_value(
    tmp_path: Path, row: str, words: str
) -> None:
    path = write(tmp_path, *AZURE.split(), row, name="azure.csv")
    path.write_text(AZURE + row)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 4: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it"),
        (b"a,b,c\n1,2,3\n", "neither a Mooncake trace"),
        (b"\xff\xfe\x00", "byte 0xff is not UTF-8"),
        (gzip.compress(AZURE.encode(), mtime=0)[:-12], "end-of-stream|CRC"),
        (gzip.compress(b"x", mtime=0)[:10] + b"garbage", "invalid"),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="no file in it is called"):
        read_trace(tmp_path)
