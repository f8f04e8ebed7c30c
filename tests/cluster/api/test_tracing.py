"""Spans: a collector gets each call with its phases, and one that is gone holds nobody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvrelay.cluster.api import tracing as tracing_module
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.api.tracing import Tracing, traces_url
from kvrelay.cluster.config import ConfigError, load_config
from tests.cluster.api.calls import APIS, Api, asked, calls
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until
from tests.cluster.api.routed import PREFILL_S, RealRouter
from tests.cluster.api.test_explain import explanation, real_router

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A small OTLP collector: keeps every span that is sent to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        self.about: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    of_process = resource.resource.attributes
                    collector.about = {a.key: a.value.string_value for a in of_process}
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                collector.paths.add(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@contextmanager
def traced(
    tokenizer: Tokenizer, url: str, sample: float = 1.0, **options: Any
) -> Iterator[tuple[Served, Any]]:
    """A server that traces, and what becomes of its spans."""
    counts = {"sent": 0, "failed": 0, "dropped": 0}

    def count(outcome: str, spans: int) -> None:
        counts[outcome] += spans

    about = {"service.instance.id": "host/router-0"}
    tracing = Tracing(url, sample, count, about=about, **options)
    router: RealRouter = real_router(tokenizer)
    context = {"tracing": tracing}
    try:
        with serve(tokenizer, ApiSettings(), context=context, real_router=router) as served:
            yield served, counts
    finally:
        tracing.close()


def test_a_call_is_a_span_with_its_phases_inside(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    began_ns = time.time_ns()
    with traced(tokenizer, collector.url) as (served, counts):
        response = served.http.post("/v1/chat/completions", json=BODY, headers=headers)
        found = explanation(served, response.headers["x-request-id"])
    ended_ns = time.time_ns()
    assert collector.paths == {"/v1/traces"}
    assert collector.about["service.name"] == "kvrelay"
    assert collector.about["service.instance.id"] == "host/router-0"
    root = next(span for span in collector.spans if span.parent_span_id.hex() == CALLER)
    children = sorted(
        (s for s in collector.spans if s is not root), key=lambda s: s.start_time_unix_nano
    )
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert [span.name for span in children] == [phase["name"] for phase in found["phases"]]
    assert began_ns <= root.start_time_unix_nano < root.end_time_unix_nano <= ended_ns
    assert children[0].start_time_unix_nano == root.start_time_unix_nano
    for before, after in pairwise(children):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    lasted = {s.name: (s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for s in children}
    assert lasted["prefill"] == pytest.approx(PREFILL_S)
    told = attributes(root)
    assert root.name == f"chat {MODEL}"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] == found["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == found["usage"]["completion_tokens"]
    assert told["gen_ai.response.id"] == response.json()["id"]
    assert told["kvrelay.worker.decode"] == found["attempts"][0]["decode"]
    predicted_s = told["kvrelay.decision_to_first_token.predicted_s"]
    assert predicted_s == found["prediction"]["predicted_s"]
    (prefill,) = (span for span in children if span.name == "prefill")
    assert attributes(prefill)["kvrelay.worker"] == found["attempts"][0]["decode"]
    assert counts == {"sent": len(collector.spans), "failed": 0, "dropped": 0}


OPERATIONS = {"completions": "text_completion"}  # others are chats
PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS, ids=[*PREFIXES])
def test_every_api_is_traced_whole_streamed_with_tools_and_schemas(
    tokenizer: Tokenizer, collector: Collector, api: Api
) -> None:
    """Each on one connection: what fails after an answer closes it, and the next call with it."""
    prefix, operation = PREFIXES[api.endpoint], OPERATIONS.get(api.endpoint, "chat")
    with traced(tokenizer, collector.url) as (served, _):
        bodies = [asked(body) for _, of, body in calls() if of is api]
        bodies += [body | {"stream": True} for body in bodies]
        answers = [served.post(each, api.path) for each in bodies]
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        for answer in answers:
            assert explanation(served, prefix + answer.headers["x-request-id"])
    roots = [span for span in collector.spans if "gen_ai.request.model" in attributes(span)]
    assert {attributes(root)["gen_ai.operation.name"] for root in roots} == {operation}
    ids = {attributes(root)["gen_ai.response.id"] for root in roots}
    assert ids == {prefix + answer.headers["x-request-id"] for answer in answers}
    assert answers[0].json()["id"] in ids


def test_a_response_in_the_background_is_traced_and_completes(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    with traced(tokenizer, collector.url) as (served, _):
        made = served.post({"model": MODEL, "input": "Hi", "background": True}, "/v1/responses")
        path = f"/v1/responses/{made.json()['id']}"
        wait_until(lambda: served.http.get(path).json()["status"] != "in_progress")
        assert served.http.get(path).json()["status"] == "completed"


def test_who_calls_decides_for_its_own_and_the_sample_for_the_rest(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    with traced(tokenizer, collector.url, sample=0.0) as (served, _):
        for headers in ({}, {"traceparent": f"00-{TRACE}-{CALLER}-01"}):
            response = served.http.post("/v1/chat/completions", json=BODY, headers=headers)
            explanation(served, response.headers["x-request-id"])
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}


def test_a_failed_call_is_an_error(tokenizer: Tokenizer, collector: Collector) -> None:
    with traced(tokenizer, collector.url) as (served, _):
        served.post(BODY | {"max_tokens": 1})
        router = served.router
        for worker in router.workers.values():
            worker.is_silent = True
            router.kill(worker.node_id)
        served.ctx.settings = ApiSettings(request_timeout_s=0.2)
        refused = served.post(BODY)
    assert refused.is_error
    roots = [span for span in collector.spans if "gen_ai.request.model" in attributes(span)]
    assert [attributes(span).get("error.type") for span in roots] == [
        None,
        refused.json()["error"]["code"],
    ]
    assert [span.status.code for span in roots] == [0, 2]


@pytest.mark.slow
def test_a_dead_collector_costs_spans_and_nothing_else(
    tokenizer: Tokenizer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing_module, "EXPORT_TIMEOUT_S", 0.2)
    collector.close()
    options: Any = {"max_pending": 30, "export_every_s": 0.05}
    with traced(tokenizer, collector.url, **options) as (served, counts):
        for _ in range(5):
            assert served.post(BODY).status_code == 200
        wait_until(lambda: counts["dropped"] > 0 or counts["failed"] > 0)
        served.wait_idle()
    assert counts["sent"] == 0


def test_what_does_not_fit_into_the_queue_is_dropped_call_by_call(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    options: Any = {"max_pending": 30, "export_every_s": 3600.0}
    with traced(tokenizer, collector.url, **options) as (served, counts):
        for _ in range(4):
            explanation(served, served.post(BODY).headers["x-request-id"])
        assert counts["dropped"] > 0
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert {span.trace_id for span in collector.spans} == {span.trace_id for span in roots}
    assert counts["sent"] == len(collector.spans) <= 30


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://otlp.example/otlp/v1/traces", "https://otlp.example/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_is_asked_at_otlps_own(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    ("key", "value"), [("endpoint", "localhost:4318"), ("sample", 1.5), ("sample", -0.1)]
)
def test_a_wrong_setting_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"tracing.{key}"):
        load_config(None, {f"tracing.{key}": value})
