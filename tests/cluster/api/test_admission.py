"""Priorities, shares of tenants, and refusals for lack of room, as clients of the API see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from kvrelay.engine.request import Refusal
from kvrelay.engine.service_class import TIERS as TIER_CLASSES
from kvrelay.engine.service_class import ServiceClass
from kvrelay.router.admission.admission import IncomingCall
from kvrelay.router.messages import Failed, Submit, TenantShare
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served, serve
from tests.cluster.api.test_bad_input import error_of

ASK = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": ASK}
ENTRIES = (
    TenantEntry("gold", keys=("gold-key",), weight=3.0, max_concurrent=4, min_priority=-5),
    TenantEntry("batch", keys=("batch-key",), max_queued=100, min_priority=20),
    TenantEntry("night", keys=("night-key",), service_tier="batch"),
)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    context = {"tenants": Tenants.of(ENTRIES, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        yield served


def submitted(served: Served, key: str, **body: Any) -> Submit:
    headers = {"authorization": f"Bearer {key}"}
    response = served.http.post("/v1/chat/completions", json=CHAT | body, headers=headers)
    assert response.status_code == 200, response.text
    return served.router.submits[-1]


def test_the_priority_that_is_asked_for_is_the_routers(served: Served) -> None:
    for priority, expected in ((None, 0), (7, 7), (-100, -100)):
        assert served.post(CHAT | {"priority": priority}).status_code == 200
        assert served.router.submits[-1].priority == expected
    served.post({"model": MODEL, "prompt": "Hi", "priority": 3}, "/v1/completions")
    assert served.router.submits[-1].priority == 3


@pytest.mark.parametrize("priority", [101, -101, 1.5, "1"])
def test_a_priority_out_of_range_is_named(served: Served, priority: Any) -> None:
    error = error_of(served.post(CHAT | {"priority": priority}), 400)
    assert error["param"] == "priority"


def test_the_router_is_told_which_calls_come_from_one_address(served: Served) -> None:
    def caller_at(host: str) -> str:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=host)) as http:
            answer = http.post(f"{served.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        return served.router.submits[-1].caller

    one, other = caller_at("127.0.0.1"), caller_at("127.0.0.2")
    assert one
    assert other
    assert one != other
    assert caller_at("127.0.0.1") == one
    assert not any("127" in each for each in (one, other)), "nothing of the address is in it"


def test_who_calls_is_told_before_a_prompt_is_read(
    served: Served, calls: list[IncomingCall]
) -> None:
    served.post(CHAT)
    calls_refused = calls[:]
    served.ctx.refuse_early = lambda call: None
    served.post(CHAT)
    assert calls_refused[0].caller == served.router.submits[-1].caller != ""


def test_a_tenants_share_goes_with_its_requests(shared: Served) -> None:
    submit = submitted(shared, "gold-key")
    assert (submit.tenant, submit.share) == ("gold", TenantShare(3.0, 4, 0))
    assert submitted(shared, "batch-key").share == TenantShare(1.0, 0, 100)


def test_a_key_gets_no_better_priority_than_its_tenants(shared: Served) -> None:
    assert submitted(shared, "gold-key", priority=-5).priority == -5
    assert submitted(shared, "batch-key").priority == 20  # without a word, its best
    headers = {"authorization": "Bearer batch-key"}
    body = CHAT | {"priority": 0}
    error = error_of(shared.http.post("/v1/chat/completions", json=body, headers=headers), 400)
    assert error["param"] == "priority"
    assert "0 goes before 20" in error["message"]


@pytest.mark.parametrize(("retry_after_s", "told"), [(0.2, "1"), (4.0, "4"), (4.01, "5")])
def test_an_overloaded_router_is_a_429_with_whole_seconds(
    served: Served, retry_after_s: float, told: str
) -> None:
    served.router.refuse = Failed("", Refusal.OVERLOADED, "too much", retry_after_s)
    response = served.post(CHAT)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert response.headers["retry-after"] == told


@pytest.fixture
def calls(served: Served) -> Iterator[list[IncomingCall]]:
    """What the router is asked before a prompt is tokenised; it refuses all."""
    asked: list[IncomingCall] = []

    def refuse(call: IncomingCall) -> Failed:
        asked.append(call)
        return Failed("", Refusal.OVERLOADED, "too much", 7.0)

    kept, served.ctx.refuse_early = served.ctx.refuse_early, refuse
    yield asked
    served.ctx.refuse_early = kept


def test_what_is_plainly_too_much_is_refused_before_it_is_submitted(
    served: Served, calls: list[IncomingCall]
) -> None:
    response = served.post(CHAT | {"stream": True})
    assert error_of(response, 429)["message"] == "too much"
    assert response.headers["retry-after"] == "7"
    assert served.router.submits == []


def test_a_call_that_is_repeated_has_the_same_name(
    served: Served, calls: list[IncomingCall]
) -> None:
    for body in (CHAT, CHAT, CHAT | {"seed": 1}):
        served.post(body)
    first, second, other = calls
    assert first == second
    assert first.name != other.name


def test_the_size_of_a_call_is_told_before_it_is_known(
    served: Served, calls: list[IncomingCall]
) -> None:
    served.post(CHAT | {"priority": 2})
    served.post(CHAT | {"max_completion_tokens": 9})
    served.post({"model": MODEL, "prompt": ["x" * 400, "y" * 400]}, "/v1/completions")
    served.post({"model": MODEL, "prompt": [5] * 30, "max_tokens": 3}, "/v1/completions")
    sizes = [(call.priority, call.num_prompt_tokens, call.max_tokens) for call in calls]
    assert sizes == [(2, 1, MAX_MODEL_LEN), (0, 1, 9), (0, 200, 16), (0, 30, 3)]


def test_the_name_of_a_call_goes_with_its_requests(served: Served) -> None:
    for body in (CHAT | {"n": 2, "seed": 5}, CHAT):
        assert served.post(body).status_code == 200
    first, second, other = (submit.call for submit in served.router.submits)
    assert first == second != other != b""


TIERS = (("auto", "default"), *((name, name) for name in ("default", "flex", "priority", "batch")))


@pytest.mark.parametrize(("asked", "told"), TIERS)
def test_a_service_tier_is_a_class_and_told_back(served: Served, asked: str, told: str) -> None:
    for path, extra in (
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"messages": None, "prompt": "Hi"}),
        ("/v1/responses", {"messages": None, "input": "Hi"}),
    ):
        answer = served.post(CHAT | extra | {"service_tier": asked}, path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["service_tier"] == told
        assert served.router.submits[-1].service_class is TIER_CLASSES[told]


def test_an_unknown_service_tier_is_refused_by_the_names_of_those_there_are(
    served: Served,
) -> None:
    for path, extra in (("/v1/chat/completions", {}), ("/v1/responses", {"input": "Hi"})):
        error = error_of(served.post(CHAT | extra | {"service_tier": "gold"}, path), 400)
        assert error["param"] == "service_tier"
        assert all(name in error["message"] for name in ("auto", "default", "flex", "priority"))


def test_a_priority_and_a_tier_that_contradict_each_other_are_refused(served: Served) -> None:
    assert served.post(CHAT | {"priority": 7, "service_tier": "flex"}).status_code == 200
    error = error_of(served.post(CHAT | {"priority": 7, "service_tier": "default"}), 400)
    assert (error["param"], "'flex'" in error["message"]) == ("service_tier", True)


def test_a_tenant_gets_its_own_tier_and_none_above_what_it_may_ask_for(shared: Served) -> None:
    assert submitted(shared, "night-key").service_class is ServiceClass.BATCH
    assert submitted(shared, "night-key", service_tier="flex").service_class is ServiceClass.FLEX
    answer = shared.http.post(
        "/v1/chat/completions",
        json=CHAT | {"service_tier": "priority"},
        headers={"authorization": "Bearer batch-key"},
    )
    assert answer.json()["service_tier"] == "flex"
    assert shared.router.submits[-1].priority == 20
    assert submitted(shared, "gold-key", service_tier="priority").priority == -5


def test_anthropics_tiers_are_told_in_the_usage(served: Served) -> None:
    body = CHAT | {"max_tokens": 5}
    for asked, priority, told in ((None, 0, "standard"), ("standard_only", 0, "standard")):
        answer = served.post(body | {"service_tier": asked}, "/v1/messages")
        assert answer.json()["usage"]["service_tier"] == told
        assert served.router.submits[-1].priority == priority
    error = served.post(body | {"service_tier": "priority"}, "/v1/messages").json()["error"]
    assert "standard_only" in error["message"]
