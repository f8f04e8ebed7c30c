"""Health, metrics and status; starting and stopping the server; a bug of ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.listening import PortTaken, bind_socket
from kvrelay.cluster.api.openai.formats import ChatFormat
from kvrelay.cluster.api.server import serve_app
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.api.utility import tokens
from kvrelay.cluster.status import ClusterStatus
from kvrelay.engine.stats import Role
from kvrelay.router.status import LinkLoss, Totals, WorkerStatus
from tests.cluster.api.conftest import MODEL, STATUS, Served, serve, wait_until
from tests.operations.prometheus import binary, would_fire

ASK = [{"role": "user", "content": "Hi"}]


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = served.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_says_why_not(served: Served) -> None:
    response = served.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    served.health[:] = [False, {"reasons": ["no worker is up"]}]
    response = served.http.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reasons": ["no worker is up"]}


def test_metrics_count_requests_tokens_and_latencies(served: Served, tokenizer: Tokenizer) -> None:
    served.router.num_cached_tokens = 3
    before = samples(served)
    answer = served.post({"model": MODEL, "messages": ASK}).json()
    served.post({"model": "unknown", "messages": ASK})
    served.wait_idle()
    after = samples(served)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    mine = {"model": MODEL}
    outcomes = {("stop", "200"): MODEL, ("model_not_found", "404"): ""}
    for (outcome, status), model in outcomes.items():
        ended = {"endpoint": "chat", "outcome": outcome, "model": model, "status": status}
        assert grown("kvrelay_requests_total", **ended) == 1
        assert grown("kvrelay_e2e_seconds_count", model=model) == 1
    assert grown("kvrelay_prompt_tokens_total", **mine) == answer["usage"]["prompt_tokens"]
    assert grown("kvrelay_output_tokens_total", **mine) == answer["usage"]["completion_tokens"]
    assert grown("kvrelay_cached_prompt_tokens_total", **mine) == 3
    assert grown("kvrelay_ttft_seconds_count", **mine) == 1
    assert grown("kvrelay_itl_seconds_count", **mine) >= 1
    assert grown("kvrelay_phase_seconds_count", phase="tokenise", **mine) == 1
    assert after["kvrelay_live_requests", (("model", MODEL),)] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "endpoint", "outcome"),
    [
        ("/v1/responses", b"{", "responses", "invalid_request_error"),
        ("/v1/responses", {"model": MODEL, "input": [{"type": "x"}]}, "responses", ""),
        ("/v1/responses", {"model": MODEL}, "responses", ""),
        ("/v1/messages/count_tokens", b"{", "count_tokens", ""),
        ("/v1/messages", b"{", "messages", ""),
        ("/tokenize", b"{", "tokenize", ""),
        ("/v1/sessions/x/fork", b"{", "sessions", ""),
    ],
)
def test_refusals_of_every_endpoint_are_counted(
    served: Served, path: str, body: Any, endpoint: str, outcome: str
) -> None:
    wanted = {("endpoint", endpoint), ("outcome", outcome or "invalid_request_error")}

    def count() -> float:
        found = samples(served).items()
        return sum(
            n for (name, on), n in found if name.endswith("requests_total") and wanted <= {*on}
        )

    before = count()
    assert served.post(body, path).status_code == 400
    assert count() == before + 1


def test_clients_invent_no_labels(served: Served) -> None:
    served.http.get("/v1/no-such-thing")
    served.http.get("/v1/models/no-such-model")
    served.http.request("NO-SUCH", "/v1/models")
    assert "no-such" not in served.http.get("/metrics").text.lower()


def test_every_answer_is_counted_by_its_route_and_status(served: Served) -> None:
    def counted() -> dict[tuple[str, ...], float]:
        names = ("method", "route", "status")
        return {
            tuple(dict(on)[each] for each in names): n
            for (name, on), n in samples(served).items()
            if name == "kvrelay_http_requests_total"
        }

    before = counted()
    served.http.get("/v1/models")
    served.http.head("/v1/models")
    served.http.get("/v1/models/unknown")
    served.http.put("/v1/models")
    served.http.get("/v1/unknown")
    served.post({"model": MODEL, "messages": ASK})
    after = counted()
    grown = {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}
    assert grown == {
        ("GET", "/v1/models", "200"): 1,
        ("HEAD", "/v1/models", "200"): 1,
        ("GET", "/v1/models/{name}", "404"): 1,
        ("PUT", "/v1/models", "405"): 1,
        ("GET", "", "404"): 1,
        ("POST", "/v1/chat/completions", "200"): 1,
        ("GET", "/metrics", "200"): 1,
    }


def _broken(*_: Any) -> Any:
    raise KeyError("a bug")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_bugs_are_errors_of_the_server_wherever_they_are_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    scrapes = [served.http.get("/metrics").text]
    before = samples(served)
    monkeypatch.setattr(ChatFormat, "chunks" if stream else "whole", _broken)
    for _ in range(5):
        with contextlib.suppress(httpx.RemoteProtocolError):  # a stream is cut
            answer = served.post({"model": MODEL, "messages": ASK, "stream": stream})
            assert answer.status_code == 500
    served.wait_idle()
    after = samples(served)
    scrapes.append(served.http.get("/metrics").text)

    def grown(name: str, *labels: tuple[str, str]) -> float:
        found = [key for key in after if key[0] == name and {*labels} <= {*key[1]}]
        return sum(after[key] - before.get(key, 0) for key in found)

    bug = ("outcome", "internal_error"), ("status", "500")
    assert grown("kvrelay_requests_total", ("endpoint", "chat"), *bug) == 5
    assert grown("kvrelay_requests_total") == 5
    route = ("route", "/v1/chat/completions")
    assert grown("kvrelay_http_requests_total", route, ("status", "500")) == 5
    duration = "gen_ai_server_request_duration_seconds_count"
    assert grown(duration, ("error_type", "internal_error")) == 5
    last = served.http.get("/requests").json()["data"][0]
    assert last["outcome"] == "internal_error"
    if binary("promtool") is not None:
        assert would_fire("KVRelayRequestsFail", scrapes)


def test_a_bug_of_a_route_that_generates_nothing_is_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = samples(served)
    monkeypatch.setattr(tokens, "text_tokens", _broken)
    assert served.post({"prompt": "a"}, "/tokenize").status_code == 500
    on = {"endpoint": "tokenize", "outcome": "internal_error", "status": "500", "model": ""}
    key = ("kvrelay_requests_total", tuple(sorted(on.items())))
    assert samples(served)[key] == before.get(key, 0) + 1


def test_metrics_show_the_cluster(served: Served) -> None:
    found = samples(served)
    decode = (("role", "decode"), ("worker", "decode-0"))
    assert (
        found["kvrelay_worker_up", (("model", MODEL), decode[0], ("state", "up"), decode[1])] == 1
    )
    assert found["kvrelay_worker_used_blocks", decode] == 40
    assert found["kvrelay_worker_running", decode] == 2
    assert found["kvrelay_worker_events_total", (("event", "preemptions"), *decode)] == 3
    assert found["kvrelay_router_requests_total", (("reason", "stop"),)] == 7
    assert found["kvrelay_router_prompt_tokens_total", ()] == 400
    by_source = "kvrelay_router_cached_tokens_by_source_total"
    assert found[by_source, (("source", "device"),)] == 60
    assert found[by_source, (("source", "disk"),)] == 40
    assert found["kvrelay_worker_host_blocks", decode] == 70
    assert found["kvrelay_worker_disk_blocks", decode] == 900
    assert found["kvrelay_router_live", ()] == 1


def test_status_is_the_routers(served: Served) -> None:
    assert served.http.get("/status").json() == STATUS


def test_what_is_not_known_is_left_out_of_the_status() -> None:
    totals = Totals(prompt_tokens=8, cached_tokens=4)
    totals.requests["stop"] += 3
    totals.cached_tokens_by_source["host"] += 4
    worker = WorkerStatus(worker="decode-0", role=Role.DECODE, state="up", num_inflight=0)
    link = LinkLoss("prefill-0", "decode-0", fetches=True, lost_share=0.5, wait_s=1.0)
    status = ClusterStatus(
        router="router-0",
        policy="seconds",
        model=MODEL,
        totals=totals,
        workers=[worker],
        bad_links=(link,),
    )
    plain = msgspec.json.decode(status.json())
    assert plain["model"] == MODEL
    assert plain["workers"] == [
        {"worker": "decode-0", "role": "decode", "state": "up", "num_inflight": 0}
    ]
    assert plain["bad_links"][0]["reader"] == "decode-0"
    assert plain["totals"]["requests"] == {"stop": 3}
    assert plain["totals"]["cached_tokens_by_source"] == {"host": 4}


def test_a_bug_is_logged_and_shows_no_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.ctx.operations, "status", broken)
    with caplog.at_level(logging.ERROR, "kvrelay.api"):
        response = served.http.get("/status")
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "secret detail" not in response.text
    assert "secret detail" in caplog.text


def test_a_port_that_is_taken_is_one_clear_line(served: Served) -> None:
    with pytest.raises(PortTaken, match=rf"port {served.port} of 127\.0\.0\.1 is taken"):
        bind_socket("127.0.0.1", served.port)
    with pytest.raises(PortTaken):
        asyncio.run(serve_app(lambda *_: None, "127.0.0.1", served.port))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="assign"):
        bind_socket("192.0.2.1", 0)


def test_tokens_are_sent_at_once() -> None:
    with bind_socket("127.0.0.1", 0) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.proto == socket.IPPROTO_TCP


@pytest.mark.slow
def test_stopping_waits_for_live_requests_but_not_for_ever(tokenizer: Tokenizer) -> None:
    answers: list[Any] = []

    def post(served: Served, max_tokens: int) -> None:
        # With a client of its own: that of `served` is closed as soon as the server has stopped.
        body = {"model": MODEL, "messages": ASK, "max_tokens": max_tokens}
        answers.append(httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=20))

    with serve(tokenizer, ApiSettings()) as served:
        served.router.answer = lambda submit: tokenizer.encode("word " * 400)
        served.router.delay_s = 0.1
        posts = [threading.Thread(target=post, args=(served, n)) for n in (5, 400)]
        for thread in posts:
            thread.start()
        wait_until(lambda: len(served.router.submits) == 2)
    for thread in posts:
        thread.join(20)
    assert answers[0].status_code == 200  # was done in time
    assert answers[1].status_code == 503  # was not; `serve` checked that nothing is left of it
    assert answers[1].json()["error"]["code"] == "shutting_down"
