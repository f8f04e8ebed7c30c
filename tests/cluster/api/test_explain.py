"""Where a request's time went: asked of the real application over a real router."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.explain import explain
from kvrelay.cluster.config import TenantEntry
from kvrelay.router.placement.cost import TERMS
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until
from tests.cluster.api.operations.test_operations import samples
from tests.cluster.api.routed import PREFILL_S, QUEUE_S, STEP_S, RealRouter

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
ENTRIES = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
RED = {"authorization": "Bearer red-key"}
BLUE = {"authorization": "Bearer blue-key"}


def real_router(tokenizer: Tokenizer) -> RealRouter:
    text = " The capital of France is Paris."
    return RealRouter([*tokenizer.encode(text), tokenizer.eos_token_ids[0]])


@pytest.fixture(scope="module")
def routed(tokenizer: Tokenizer) -> Iterator[Served]:
    with serve(tokenizer, ApiSettings(), real_router=real_router(tokenizer)) as served:
        yield served


def explanation(served: Served, name: str, **options: Any) -> dict[str, Any]:
    """It adds up: to what was measured in all, and to the first token."""
    path = f"/requests/{name}/explanation"
    wait_until(lambda: served.http.get(path, **options).status_code == 200)
    found: dict[str, Any] = served.http.get(path, **options).json()
    phases = found["phases"]
    assert all(phase["seconds"] >= 0 for phase in phases)
    assert sum(p["seconds"] for p in phases) == pytest.approx(found["e2e_s"], rel=0.05, abs=0.05)
    before = [p for p in phases if p["to_first"]]
    assert before == phases[: len(before)]
    if found["ttft_s"] is not None:
        assert sum(p["seconds"] for p in before) == pytest.approx(
            found["ttft_s"], rel=0.05, abs=0.05
        )
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in found["phases"]]


def seconds(found: dict[str, Any], name: str) -> float:
    return sum(p["seconds"] for p in found["phases"] if p["name"] == name)


@pytest.mark.parametrize("stream", [False, True])
def test_the_phases_sum_to_the_latency_that_was_measured(routed: Served, stream: bool) -> None:
    began = time.monotonic()
    response = routed.post(BODY | {"stream": stream})
    found = explanation(routed, response.headers["x-request-id"])
    # Known once the request has ended, which may be after its client has the last of a stream.
    assert found["e2e_s"] <= time.monotonic() - began
    assert [n for n in names(found) if n != "messages"] == [
        "receive",
        "tokenise",
        "queue",
        "route",
        "worker_queue",
        "prefill",
        "decode",
        "stream",
    ]
    assert seconds(found, "prefill") == pytest.approx(PREFILL_S)
    assert seconds(found, "worker_queue") == pytest.approx(QUEUE_S)
    num_steps = found["usage"]["completion_tokens"] - 1
    assert seconds(found, "decode") >= num_steps * STEP_S * 0.9
    assert found["ttft_s"] >= QUEUE_S + PREFILL_S


def test_the_id_of_the_answer_is_the_one_to_ask_for(routed: Served) -> None:
    response = routed.post(BODY)
    answer_id, call_id = response.json()["id"], response.headers["x-request-id"]
    assert explanation(routed, answer_id)["id"] == explanation(routed, call_id)["id"] == call_id
    text = routed.post({"model": MODEL, "prompt": "Hi"}, "/v1/completions").json()
    assert explanation(routed, text["id"])["endpoint"] == "completions"


def test_each_choice_has_its_own_explanation(routed: Served) -> None:
    call_id = routed.post(BODY | {"n": 2}).headers["x-request-id"]
    found = [explanation(routed, f"{call_id}-{i}") for i in range(2)]
    assert [f["request"] for f in found] == [f"{call_id}-0", f"{call_id}-1"]
    assert found[0]["num_choices"] == 2
    assert routed.http.get(f"/requests/{call_id}-2/explanation").status_code == 404


def test_a_stop_string_ends_it_early_and_it_still_adds_up(routed: Served) -> None:
    call_id = routed.post(BODY | {"stop": " France"}).headers["x-request-id"]
    found = explanation(routed, call_id)
    assert found["outcome"] == "stop"
    assert seconds(found, "prefill") == pytest.approx(PREFILL_S)


def test_a_client_that_goes_away_leaves_an_explanation(routed: Served) -> None:
    with routed.http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
        next(answer.iter_bytes())
        call_id = answer.headers["x-request-id"]
    found = explanation(routed, call_id)
    assert found["outcome"] == "cancelled"
    assert seconds(found, "prefill") == pytest.approx(PREFILL_S)


def test_every_attempt_is_shown_with_what_stood_beside_it(tokenizer: Tokenizer) -> None:
    router = real_router(tokenizer)
    with serve(tokenizer, ApiSettings(), real_router=router) as served:
        served.post(BODY)
        for worker in router.workers.values():
            worker.is_silent = True
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.post, BODY)
            wait_until(lambda: any(worker.num_ignored for worker in router.workers.values()))
            (chosen,) = (name for name, w in router.workers.items() if w.num_ignored)
            for worker in router.workers.values():
                worker.is_silent = False
            router.kill(chosen)
            call_id = asked.result(20).headers["x-request-id"]
        found = explanation(served, call_id)
    assert [(a["decode"] == chosen, a["cause"]) for a in found["attempts"]] == [
        (True, "worker_down"),
        (False, ""),
    ]
    assert seconds(found, "lost") > 0
    for attempt in found["attempts"]:
        best = attempt["decision"]["decode_candidates"][0]
        assert best["worker"] == attempt["decode"]
        assert sum(best["seconds"].values()) == pytest.approx(best["total_s"])
    assert "no other worker could take it" in found["attempts"][1]["decision"]["reason"]


def test_prediction_and_reality_stand_side_by_side(routed: Served) -> None:
    found = explanation(routed, routed.post(BODY).headers["x-request-id"])
    prediction = found["prediction"]
    assert prediction["real_s"] == pytest.approx(QUEUE_S + PREFILL_S, rel=1.0)
    assert prediction["predicted_s"] == found["attempts"][0]["decision"]["predicted_ttft_s"]
    gap_s = abs(prediction["predicted_s"] - prediction["real_s"])
    assert prediction["relative_error"] == pytest.approx(gap_s / prediction["real_s"])


def test_metrics_count_seconds_by_phase(routed: Served) -> None:
    before = samples(routed)
    explanation(routed, routed.post(BODY).headers["x-request-id"])
    after = samples(routed)
    for phase in ("tokenise", "queue", "route", "prefill", "decode", "stream"):
        key = ("kvrelay_phase_seconds_count", (("model", MODEL), ("phase", phase)))
        assert after[key] == before.get(key, 0) + 1, phase
    ratio = ("kvrelay_router_ttft_prediction_ratio_count", (("model", MODEL),))
    assert after[ratio] == before[ratio] + 1


def test_a_call_that_was_refused_at_the_door_is_not_there(routed: Served) -> None:
    call_id = routed.post(BODY | {"model": "unknown"}).headers["x-request-id"]
    response = routed.http.get(f"/requests/{call_id}/explanation")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


def test_the_last_ones_are_listed_youngest_first(routed: Served) -> None:
    ids = [routed.post(BODY).headers["x-request-id"] for _ in range(2)]
    explanation(routed, ids[1])
    found = routed.http.get("/requests", params={"limit": 2}).json()
    assert [call["id"] for call in found["data"]] == ids[::-1]
    for wrong in ("0", "513", "x"):
        assert routed.http.get("/requests", params={"limit": wrong}).status_code == 400


def test_tenants_see_their_own_and_nobody_without_a_key(tokenizer: Tokenizer) -> None:
    context = {"tenants": Tenants.of(ENTRIES, b"a secret")}
    router = real_router(tokenizer)
    with serve(tokenizer, ApiSettings(), context=context, real_router=router) as served:
        response = served.http.post("/v1/chat/completions", json=BODY, headers=RED)
        name = response.headers["x-request-id"]
        assert explanation(served, name, headers=RED)["outcome"] == "stop"
        path = f"/requests/{name}/explanation"
        assert served.http.get(path, headers=BLUE).status_code == 404
        assert served.http.get(path).status_code == 401
        assert served.http.get("/requests", headers=BLUE).json()["data"] == []
        assert served.http.get("/requests").status_code == 401


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(served: Served, *arguments: str) -> Any:
        return CliRunner().invoke(explain, ["--url", served.url, *arguments])

    return invoke


def test_the_command_shows_phases_prediction_and_candidates(routed: Served, run: Any) -> None:
    name = routed.post(BODY).headers["x-request-id"]
    found = explanation(routed, name)
    result = run(routed, name)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line.strip()}
    for phase in ("tokenise", "route", "worker_queue", "prefill", "decode", "stream"):
        assert re.search(r"\d+(\.\d+)? (s|ms|µs)\s+\d+\.\d%", rows[phase]), phase
    assert "100.0 ms" in rows["prefill"] or "0.100 s" in rows["prefill"]
    assert "█" in rows["prefill"]
    assert "predicted" in result.output
    assert "attempt 1: decode-" in result.output
    reason = found["attempts"][0]["decision"]["reason"]
    assert reason in " ".join(result.output.split())
    assert f"decode: {TERMS['decode'].text}" in lines
    candidates = found["attempts"][0]["decision"]["decode_candidates"]
    assert all(candidate["name"] in result.output for candidate in candidates)


def test_the_command_answers_json_and_lists(routed: Served, run: Any) -> None:
    name = routed.post(BODY).headers["x-request-id"]
    found = explanation(routed, name)
    assert json.loads(run(routed, name, "--json").output) == found
    listed = run(routed, "--last", "1")
    assert name in listed.output
    assert max(map(len, listed.output.splitlines())) <= 80


def test_an_unknown_id_is_one_line_and_exits_with_1(routed: Served, run: Any) -> None:
    result = run(routed, "chatcmpl-nothing")
    assert result.exit_code == 1
    assert len(result.output.strip().splitlines()) == 1
    assert "chatcmpl-nothing" in result.output
    assert run(routed).exit_code == 2


def test_nothing_is_explained_without_a_server(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx.Client, "request", refuse)
    result = CliRunner().invoke(explain, ["abc"])
    assert result.exit_code == 1
    assert "no server answers" in result.output


def test_it_says_which_token_broke_the_prefix_and_what_was_changed(routed: Served) -> None:
    def ask(*texts: str) -> str:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        answer = routed.post({**BODY, "messages": messages})
        found: str = answer.headers["x-request-id"]
        explanation(routed, found)
        return found

    first = ask("You are a guide. Today is Monday.", "Where is the harbour?")
    second = ask(
        "You are a guide. Today is Monday.", "Where is the harbour?", "At the sea.", "And the inn?"
    )
    third = ask(
        "You are a guide. Today is Friday.", "Where is the harbour?", "At the sea.", "And the inn?"
    )
    assert explanation(routed, second)["prefix"]["earlier"] == first
    broken = explanation(routed, third)["prefix"]
    assert broken["earlier"] == second
    assert not broken["is_continued"]
    assert broken["before"].endswith("Today is")
    assert broken["earlier_text"].startswith(" Monday")
    assert broken["text"].startswith(" Friday")
    shown = CliRunner().invoke(explain, [third, "--url", routed.url], env={"COLUMNS": "200"})
    assert f"prefix: the first {broken['common_tokens']} of" in shown.output
    assert f"tokens of {second}" in shown.output
    assert "came  ' Monday" in shown.output
    assert "comes ' Friday" in shown.output
