"""What one caller may cost: bytes, tokenising, turns, places and requests a minute."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvrelay.cluster.api.calls import num_common
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.openai.generation import Generation
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from kvrelay.engine.request import RequestSpec, SamplingParams
from tests.cluster.api.conftest import MAX_MODEL_LEN, MODEL, Served, serve, wait_until
from tests.cluster.api.test_bad_input import error_of

ASK = [{"role": "user", "content": "Hi"}]
TEXT = "Some words of a prompt, 1234567890. "
ENTRIES = (
    TenantEntry("gold", keys=("gold-key",)),
    TenantEntry("batch", keys=("batch-key",)),
    TenantEntry("slow", keys=("slow-key",), requests_per_minute=2),
)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    context = {"tenants": Tenants.of(ENTRIES, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        yield served


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}-key"}


CALL: dict[str, Any] = {
    "type": "function",
    "id": "c",
    "function": {"name": "f", "arguments": json.dumps({"a": TEXT * 90_000})},
}
LONG = TEXT * 90_000  # 3 MiB
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL]}]}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": "Hi", "suffix": LONG}),
    ("/v1/embeddings", {"input": [LONG]}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize(("path", "body"), LARGE)
def test_what_fits_no_context_is_not_tokenised_to_its_end(
    shared: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = shared.ctx.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(shared.ctx.tokenizer, "encode", counted)
    response = shared.http.post(path, json=body | {"model": MODEL}, headers=of("gold"))
    assert response.status_code == 400, response.text[:300]
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in response.text
    assert "at least " in response.text
    assert sum(encoded) < 100_000


def test_a_prediction_is_tokenised_as_far_as_there_is_room(shared: Served) -> None:
    body = {"model": MODEL, "messages": ASK, "prediction": {"type": "content", "content": LONG}}
    response = shared.http.post("/v1/chat/completions", json=body, headers=of("gold"))
    assert response.status_code == 200
    assert 0 < len(shared.router.submits[-1].sampling.prediction) < MAX_MODEL_LEN


def test_text_that_has_few_tokens_is_counted_to_its_end(tokenizer: Tokenizer) -> None:
    tokenizer.check_length(" " * 100_000, 3_000)
    tokenizer.check_length("a " * 40, 10)  # too short to be looked at


class Held:
    """A large piece of work of one tenant, which takes until it is let go."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.num_begun = threading.Event(), 0
        encode = served.ctx.tokenizer.encode

        def held(text: str, **options: Any) -> list[int]:
            if "hold" in text:
                self.num_begun += 1
                assert self.go_on.wait(20)
                text = "Hi"
            return encode(text, **options)

        monkeypatch.setattr(served.ctx.tokenizer, "encode", held)


def in_background(served: Served, path: str, body: dict[str, Any], key: str) -> list[int]:
    statuses: list[int] = []

    def post() -> None:
        with httpx.Client(base_url=served.url, timeout=30) as http:
            statuses.append(http.post(path, json=body, headers=of(key)).status_code)

    threading.Thread(target=post, daemon=True).start()
    return statuses


def test_large_prompts_of_one_tenant_hold_up_its_own(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(shared, monkeypatch)
    monkeypatch.setattr(shared.ctx, "max_model_len", 200_000)
    large = TEXT * 5_000
    body = {"model": MODEL, "prompt": large + "hold", "max_tokens": 1}
    try:
        statuses = [in_background(shared, "/v1/completions", body, "batch") for _ in range(3)]
        wait_until(lambda: held.num_begun == 1)
        body = {"model": MODEL, "prompt": large, "max_tokens": 1}
        response = shared.http.post("/v1/completions", json=body, headers=of("gold"))
        assert response.status_code == 200, response.text[:300]
        assert held.num_begun == 1
    finally:
        held.go_on.set()
    wait_until(lambda: statuses == [[200]] * 3)


def test_bodies_count_until_they_are_understood(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller has most of the room; another's are taken meanwhile."""
    held = Held(shared, monkeypatch)
    monkeypatch.setattr(shared.ctx, "max_model_len", 200_000)
    # A body of 504,000 bytes counts as 440,000 or more, by how it arrives: three fit into 49 of 64
    # parts, four do not.
    monkeypatch.setattr(shared.ctx.bodies, "limit", 2_200_000)
    body = {"model": MODEL, "prompt": TEXT * 14_000 + "hold", "max_tokens": 1}
    small = body | {"prompt": TEXT * 5_000}
    large = body | {"prompt": TEXT * 14_000}
    try:
        statuses = [in_background(shared, "/v1/completions", body, "batch") for _ in range(6)]
        wait_until(lambda: statuses.count([429]) == 3)
        wait_until(lambda: shared.ctx.bodies.num_taken > 1_300_000)
        response = shared.http.post("/v1/completions", json=small, headers=of("gold"))
        assert response.status_code == 200, response.text[:300]
        refused = shared.http.post("/v1/completions", json=large, headers=of("batch"))
        error = error_of(refused, 429)
        assert error["message"] == "The bodies of other requests take all memory"
    finally:
        held.go_on.set()
    wait_until(lambda: statuses.count([200]) == 3)
    wait_until(lambda: shared.ctx.bodies.num_taken == 0)


# What costs work and generates nothing.
UTILITIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/messages/count_tokens", {"messages": ASK}),
]


@pytest.mark.parametrize(("path", "body"), UTILITIES)
def test_calls_that_generate_nothing_have_limits_too(
    shared: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(key: str) -> httpx.Response:
        return shared.http.post(path, json=body | {"model": MODEL}, headers=of(key))

    assert post("gold").status_code == 200
    monkeypatch.setattr(shared.ctx.live._shares, "limit", 0)
    monkeypatch.setattr(shared.ctx.live, "_retry_after_s", lambda: 1.0)
    refused = post("gold")
    assert refused.status_code == 429
    assert "are being served, which is the limit" in refused.text
    monkeypatch.undo()
    shared.ctx.rates._buckets.clear()
    assert [post("slow").status_code for _ in range(3)] == [200, 200, 429]


def test_responses_in_the_background_have_places_by_tenant(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.responses.routes.MAX_BACKGROUND", 3)
    monkeypatch.setattr(shared.router, "delay_s", 60)
    body = {"model": MODEL, "input": "Hi", "background": True}

    def begin(key: str) -> httpx.Response:
        return shared.http.post("/v1/responses", json=body, headers=of(key))

    responses = [begin("batch") for _ in range(3)]
    assert [each.status_code for each in responses] == [200, 200, 429]
    other = begin("gold")
    assert other.status_code == 200
    for key, each in (("batch", responses[0]), ("batch", responses[1]), ("gold", other)):
        path = f"/v1/responses/{each.json()['id']}/cancel"
        assert shared.http.post(path, headers=of(key)).json()["status"] == "cancelled"


def test_responses_that_are_asked_for_again_count_as_requests(shared: Served) -> None:
    shared.ctx.rates._buckets.clear()
    body = {"model": MODEL, "input": "Hi"}
    made = shared.http.post("/v1/responses", json=body, headers=of("slow")).json()["id"]
    paths = [f"/v1/responses/{made}", f"/v1/responses/{made}/input_items"]
    told = [shared.http.get(path, headers=of("slow")).status_code for path in paths]
    assert told == [200, 429]


def test_the_usage_of_many_prompts_is_counted_once_over() -> None:
    class Prompt:
        tokens, spec = (1, 2, 3), RequestSpec("", SamplingParams())

        def __init__(self, prompt: int) -> None:
            self.prompt = prompt

    def choice(prompt: int, num_cached: int) -> Any:
        return SimpleNamespace(
            plan=Prompt(prompt),
            weights=(),
            num_cached_tokens=num_cached,
            cached_by_source={"device": num_cached},
            num_tokens=2,
            num_reasoning_tokens=1,
            drafts=(0, 0),
        )

    choices = [choice(i // 2, 2 - i % 2) for i in range(16_384)]
    began = time.process_time()
    usage = Generation.usage(SimpleNamespace(choices=choices))  # type: ignore[arg-type]
    assert time.process_time() - began < 1.0  # a 20th of that; it was more than ten seconds
    assert usage["prompt_tokens"] == 3 * 8192
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8192  # the least of each prompt's
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 16_384


def test_prompts_are_compared_in_little_time() -> None:
    one, other = array("I", range(32_768)), array("I", [*range(32_767), 5])
    began = time.process_time()
    assert {num_common(one, other) for _ in range(128)} == {32_767}
    assert num_common(one, array("I", range(10))) == 10
    assert num_common(one, array("I")) == 0
    assert time.process_time() - began < 0.15  # on the loop; it was 0.4 s


def test_large_calls_do_not_hold_up_the_loop(tokenizer: Tokenizer) -> None:
    """Megabytes to tokenise and to write as text: health is answered in between."""
    tokens = list(range(1000, 1100)) * 1500
    calls = [("/detokenize", {"tokens": tokens}), ("/tokenize", {"prompt": TEXT * 20_000})]
    calls[1][1]["return_token_strs"] = True
    with serve(tokenizer, ApiSettings()) as served:
        served.ctx.max_model_len = 200_000
        for path, body in calls:
            answered = in_background(served, path, body, "none")
            longest = 0.0
            with httpx.Client(base_url=served.url, timeout=20) as other:
                while not answered:
                    began = time.monotonic()
                    other.get("/health")
                    longest = max(longest, time.monotonic() - began)
            assert answered == [200]
            assert longest < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("limiter", ["live", "commands"])
def test_a_tenant_that_takes_all_places_does_not_refuse_another(
    tokenizer: Tokenizer, limiter: str
) -> None:
    """The router answers none of the calls."""
    limits = ApiSettings(
        max_live_requests=8, max_session_commands=8, request_timeout_s=3.0, session_timeout_s=3.0
    )
    answered: list[int] = []

    def call(served: Served, key: str) -> None:
        with httpx.Client(base_url=served.url, headers=of(key), timeout=30) as http:
            if limiter == "live":
                answer = http.post("/v1/completions", json={"prompt": "Hi"})
            else:
                answer = http.get("/v1/sessions/s")
            answered.append(answer.status_code)

    with serve(tokenizer, limits, context={"tenants": Tenants.of(ENTRIES, b"a secret")}) as served:
        served.router.delay_s = 20.0
        places = getattr(served.ctx, limiter)
        for _ in range(8):
            threading.Thread(target=call, args=(served, "gold"), daemon=True).start()
        wait_until(lambda: places.num_taken + len(answered) == 8)
        assert (places.num_taken, answered) == (6, [429] * 2)
        threading.Thread(target=call, args=(served, "batch"), daemon=True).start()
        wait_until(lambda: places.num_taken == 7)
        wait_until(lambda: len(answered) == 9)
        assert sorted(answered) == [429] * 2 + [504] * 7
