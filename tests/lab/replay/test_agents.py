"""Sessions of coding agents: what the published fields mean, and that a turn waits for the answer
before it."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.agents.dynamo import by_agents, rows
from kvrelay.lab.cli.replay import replay_command
from kvrelay.lab.replay.agents import Draw
from kvrelay.lab.replay.at_once import most_at_once
from kvrelay.lab.replay.lines import TraceError
from kvrelay.lab.replay.readers import read_trace
from kvrelay.lab.replay.replay import Replay, replay
from kvrelay.lab.replay.report import summary
from kvrelay.lab.replay.trace import Trace, TraceRequest
from tests.lab.replay.replay_kit import checked, config

BLOCK = 64


def turn(t: float, tokens: int, out: int, first_id: int = 1, **changes: Any) -> dict[str, Any]:
    ids = list(range(first_id, first_id + tokens // BLOCK))
    made = {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": ids, "api_time": 2.0}
    return {**made, **changes}


def session(name: str, *requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = {"id": name, "block_size": BLOCK, "tool_tokens": 128, "system_tokens": 64}
    return {**made, "requests": list(requests), **changes}


def subagent(t: float, duration_ms: int | None, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "duration_ms": duration_ms, "requests": list(requests)}


GROWS = session("grows", turn(0, 200, 30), turn(10, 300, 20), turn(20, 390, 10))
DELEGATES = session(
    "delegates",
    turn(0, 200, 30),
    subagent(30.0, 27_900, turn(0, 128, 5, first_id=100), turn(10, 260, 5, first_id=100)),
    subagent(40.0, 37_900, turn(0, 128, 5, first_id=200), turn(30, 260, 5, first_id=200)),
    turn(50, 300, 20),
)


def read(tmp_path: Path, *sessions: dict[str, Any], **draw: Any) -> Trace:
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(map(json.dumps, sessions)))
    return read_trace(path, draw=Draw(**draw))


def by_turn(trace: Trace, name: str) -> list[TraceRequest]:
    return [each for each in trace.requests if each.session == name]


def test_a_turn_waits_for_the_one_before_and_thinks(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, think_scale=0.5)
    assert [request.after for request in trace.requests] == [(), (0,), (1,)]
    assert [request.think_s for request in trace.requests] == [0.0, 4.0, 4.0]
    assert [request.turn for request in trace.requests] == [0, 1, 2]


def test_a_longer_think_time_counts_as_the_longest(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, max_think_s=5.0, think_scale=0.5)
    assert [request.think_s for request in trace.requests] == [0.0, 2.5, 2.5]
    assert read(tmp_path, GROWS, max_think_s=8.0).requests[1].think_s == 8.0


def test_the_ids_of_a_prompt_take_four_bytes_each(tmp_path: Path) -> None:
    far = session("far", turn(0, 200, 30, first_id=1 << 40), turn(9, 300, 5, first_id=1 << 40))
    for request in read(tmp_path, GROWS, far).requests:
        count = -(-request.input_length // BLOCK)
        assert memoryview(request.block_ids).nbytes == 4 * count  # type: ignore[arg-type]


def test_for_a_peer_each_agent_is_a_chain_of_turns(tmp_path: Path) -> None:
    chains = by_agents(read(tmp_path, DELEGATES))
    by_name: dict[str | None, list[TraceRequest]] = {}
    for each in chains.requests:
        by_name.setdefault(each.session, []).append(each)
    assert sorted([r.input_length for r in its] for its in by_name.values()) == [
        [128, 260], [128, 260], [200, 300],
    ]  # fmt: skip
    made = list(rows(chains))
    assert ["delay" in row for row in made] == [bool(r.turn) for r in chains.requests]
    assert all("timestamp" in row for row in made if "delay" not in row)
    assert not chains.answers


def test_an_answer_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS)
    first, second, third = trace.requests
    assert second.block_ids[: len(first.block_ids)] == first.block_ids
    assert [each.reusable for each in trace.requests] == [0, 230, 320]
    parts = [(p.start, p.end, p.request) for each in trace.answers.values() for p in each]
    assert parts == [(8, 38, 0), (44, 64, 1)]
    assert third.block_ids[4] in trace.answers


def test_an_answer_that_is_not_kept_is_not_in_the_next_prompt(tmp_path: Path) -> None:
    trace = read(tmp_path, session("a", turn(0, 200, 30), turn(10, 220, 5)))
    assert not trace.answers
    assert trace.requests[1].reusable == 200


def test_subagents_run_side_by_side_within_their_parents_request(tmp_path: Path) -> None:
    trace = read(tmp_path, DELEGATES)
    requests = trace.requests
    begun = [each for each in requests if each.after == (0,)]
    assert [each.think_s for each in begun] == pytest.approx([0.1, 0.1])
    (last,) = (each for each in requests if each.input_length == 300)
    ends = [n for n, each in enumerate(requests) if each.input_length == 260]
    assert set(last.after) == {0, *ends}
    assert last.think_s == pytest.approx(50 - (2.1 + 30 + 2))
    assert {each.session for each in requests} == {"delegates"}


def test_a_subagent_without_a_duration_is_not_waited_for(tmp_path: Path) -> None:
    aside = subagent(2.0, None, turn(0, 128, 5, first_id=100))
    trace = read(tmp_path, session("a", turn(0, 200, 30), aside, turn(9, 300, 20)))
    (last,) = (each for each in trace.requests if each.input_length == 300)
    assert (last.after, last.think_s) == ((0,), 7.0)


def test_sessions_share_nothing_unless_their_system_prompts_are_to_be_equal(
    tmp_path: Path,
) -> None:
    other = {**GROWS, "id": "other"}
    apart = read(tmp_path, GROWS, other)
    ids = [set(each.block_ids) for name in ("grows", "other") for each in by_turn(apart, name)[:1]]
    assert not ids[0] & ids[1]
    shared = read(tmp_path, GROWS, other, share_prompts=True)
    first, second = (by_turn(shared, name)[0].block_ids for name in ("grows", "other"))
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:])


def test_the_seed_draws_the_sessions_and_their_starts(tmp_path: Path) -> None:
    sessions = [{**GROWS, "id": f"s{number}"} for number in range(8)]
    first, again, other = (
        read(tmp_path, *sessions, sessions=5, start_rate=0.1, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    names = {each.session for each in first.requests}
    assert len(names) == 5
    more = read(tmp_path, *sessions, sessions=20)
    assert len({each.session for each in more.requests}) == 20


def test_a_session_ends_before_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, session("long", turn(0, 500, 3)), max_input=350)
    assert [each.input_length for each in trace.requests] == [200, 300]
    assert trace.notes == ("1 sessions begin with a longer prompt: they are left out",)


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lzma.compress])
def test_files_may_be_packed_and_in_a_folder(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "one.json").write_bytes(pack(json.dumps(GROWS, indent=1).encode()))
    (tmp_path / "two.jsonl").write_bytes(pack(json.dumps(DELEGATES).encode()))
    (tmp_path / "README.md").write_text("not a session")
    trace = read_trace(tmp_path)
    assert {each.session for each in trace.requests} == {"grows", "delegates"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (session("a", turn(0, 200, 30, hash_ids=[1])), "request 0: hash_ids has 1 ids; an input"),
        (session("a", turn(0, 200, 30), turn(-1, 200, 30)), "request 1: t is -1; expected seconds"),
        (session("a", turn(0, 200, 30, api_time="2")), "request 0: api_time is '2'; expected sec"),
        (session("a", turn(0, 200, -1)), "request 0: out is -1; expected a whole number from 0"),
        (session("a", subagent(1, 1, turn(0, 0, 1))), "request 0: request 0: in is 0; expected"),
        (session("a", block_size=0), "block_size is 0; expected a whole number from 1"),
        (session("a"), "requests has none; expected at least one"),
        ({"id": 3, "requests": []}, "id is 3; expected a text"),
    ],
)
def test_a_bad_session_is_one_line_with_file_number_and_value(
    tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        read(tmp_path, GROWS, line)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'sessions.jsonl'}, line 2: ")
    assert "\n" not in message


def test_other_traces_have_no_sessions_to_draw(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}')
    with pytest.raises(TraceError, match="are for sessions of agents"):
        read_trace(path, draw=Draw(sessions=2))


def test_no_turn_is_sent_before_what_it_waits_for_has_ended(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, DELEGATES)
    _, result = checked(trace, config(block_size=16, num_blocks=400))
    ends = {s.request_id: s.at_s + (s.e2e_s or 0.0) for s in result.samples}
    for number, request in enumerate(trace.requests):
        (sample,) = (s for s in result.samples if s.request_id == f"r{number}")
        if request.after:
            ended = max(ends[f"r{before}"] for before in request.after)
            assert sample.at_s == pytest.approx(ended + request.think_s)


def test_a_slow_cluster_delays_the_next_turn(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS)
    _, fast = checked(trace, config())
    _, slow = checked(trace, config(max_num_batched_tokens=16))
    assert slow.samples[-1].at_s > fast.samples[-1].at_s


def test_answers_are_found_in_the_cache_by_the_next_turn(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS)
    result = replay(trace, config(block_size=16, num_blocks=400, num_prefill=0, num_decode=1))
    cached = [sum(sample.cached.values()) for sample in result.samples]
    # The last token of an answer has no KV; whole blocks count.
    assert cached == [0, 229 // 16 * 16, 319 // 16 * 16]


def test_a_session_ends_with_a_refused_turn(tmp_path: Path) -> None:
    trace = read(tmp_path, session("a", turn(0, 200, 30), turn(9, 3000, 9), turn(99, 3100, 9)))
    result = replay(trace, config(num_blocks=20))
    assert [sample.refused is None for sample in result.samples] == [True, False]
    assert result.num_unasked == 1


def test_at_once_holds_a_session_back_until_one_has_ended(tmp_path: Path) -> None:
    trace = read(tmp_path, *({**GROWS, "id": f"s{number}"} for number in range(5)))
    _, result = checked(trace, config(at_once=2))
    spans = [
        (min(s.at_s for s in its), max(s.at_s + (s.e2e_s or 0.0) for s in its))
        for name in {sample.session for sample in result.samples}
        if (its := [sample for sample in result.samples if sample.session == name])
    ]
    at_once = [sum(begin <= start < end for begin, end in spans) for start, _ in spans]
    assert max(at_once) == 2
    assert sum(start == 0.0 for start, _ in spans) == 2


def test_the_search_ends_beside_the_first_number_that_fails(tmp_path: Path) -> None:
    sessions = [{**GROWS, "id": f"s{number}"} for number in range(12)]
    trace = read(tmp_path, *sessions, think_scale=0.0)
    cluster = config(num_prefill=0, num_decode=1, num_blocks=2000, block_size=16)
    tries = most_at_once(trace, cluster, ttft_s=0.06)
    passed = [each.at_once for each in tries if each.passed]
    failed = [each.at_once for each in tries if not each.passed]
    assert 0 < max(passed) < min(failed)
    assert min(failed) - max(passed) <= max(1, max(passed) // 8)
    assert most_at_once(trace, cluster, ttft_s=60.0)[-1].at_once == 12


def test_what_sessions_have_shown_is_in_the_figures(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, {**GROWS, "id": "other"})
    found = summary(replay(trace, config(block_size=16, num_blocks=400)))
    assert [found["turns"][each]["requests"] for each in ("first", "later")] == [2, 4]
    sessions = found["sessions"]
    assert (sessions["sessions"], sessions["unasked"]) == (2, 0)
    assert sessions["reusable_tokens"] == 2 * (230 + 320)
    assert 0.9 < sessions["reused_share"] <= 1.0
    assert sessions["gpu_s"] == pytest.approx(5 * found["virtual_s"] / 2)


def test_a_prompt_made_of_the_one_before_has_the_same_tokens(tmp_path: Path) -> None:
    trace = read(tmp_path, GROWS, DELEGATES)
    run = Replay(trace, config())
    for number, request in enumerate(trace.requests):
        assert run._tokens(request) == Replay(trace, config())._tokens(request), number
        assert len(run._tokens(request)) == request.input_length


def test_the_command_replays_sessions_and_searches(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(json.dumps({**GROWS, "id": f"s{n}"}) for n in range(6)))
    common = ["--block-size", "64", "--json", "-"]
    plain = ["--sessions", "3", "--at-once", "1", "--plot", str(tmp_path / "a.png"), *common]
    replayed = CliRunner().invoke(replay_command, [str(path), *plain])
    found = json.loads(replayed.stdout)["results"][0]
    assert (found["requests"], found["sessions"]["sessions"]) == (9, 3)
    assert (tmp_path / "a.png").stat().st_size
    searched = CliRunner().invoke(replay_command, [str(path), "--find-at-once", *common])
    policies = json.loads(searched.stdout)["policies"]
    assert policies["prefix"]["sessions_at_once"] == 6  # all there are
    assert [each["sessions_at_once"] for each in policies["prefix"]["tries"]] == [4, 6]
    tables = CliRunner().invoke(replay_command, [str(path), "--find-at-once", "--block-size", "64"])
    assert "4 (0), 6 (0)" in tables.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["synthetic:chat", "--at-once", "3"], "--at-once is for sessions of agents"),
        (["PATH", "--copies", "2"], "of sessions there are --sessions, --start-rate"),
        (["PATH", "--limit", "2"], "these are sessions; --sessions takes some of them"),
        (["PATH", "--max-input", "9"], "no session has a prompt of at most 9 tokens"),
    ],
)
def test_options_that_do_not_go_with_the_traffic_are_one_line(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps(GROWS))
    given = [str(path) if each == "PATH" else each for each in arguments]
    result = CliRunner().invoke(replay_command, given)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
