"""What was used by whom: the sum of what the answers say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.cluster.api.batches.store import BatchStore
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.keys.keys import MAX_SERIES, OTHER, Keys
from kvrelay.cluster.api.keys.metrics import KeyCollector
from kvrelay.cluster.api.keys.record import Counts
from kvrelay.cluster.api.keys.store import FILE, KeyStore
from kvrelay.cluster.api.tenants import Tenant, Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.main import main
from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed
from tests.cluster.api.batches.test_batches import begin, ended, line, rows
from tests.cluster.api.conftest import AS_OPERATOR, MODEL, OPERATORS_KEY, Served, serve, wait_until
from tests.cluster.api.keys.test_keys import BODY, ENTRIES, bearer, make, revoke
from tests.cluster.api.keys.test_stores import USAGE as SOME
from tests.cluster.api.test_bad_input import error_of

USAGE = "/v1/organization/usage/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}


def opened(tokenizer: Tokenizer, folder: Path) -> Any:
    context = {
        "tenants": Tenants.of(ENTRIES, b"a secret"),
        "keys": Keys(KeyStore(folder / FILE)),
        "batches": BatchStore(folder),
    }
    return serve(tokenizer, ApiSettings(), context=context)


@pytest.fixture
def served(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Served]:
    with opened(tokenizer, tmp_path) as running:
        yield running


def of(usage: Any) -> Counts:
    """What an answer says, of either API."""
    asked = usage.get("prompt_tokens", usage.get("input_tokens"))
    made = usage.get("completion_tokens", usage.get("output_tokens"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
    if "input_tokens" in usage and "cache_read_input_tokens" in usage:  # Anthropic's leaves it out
        asked += cached + usage.get("cache_creation_input_tokens", 0)
    return Counts(1, asked, cached, made)


def counted(served: Served, key: str = OPERATORS_KEY, **params: Any) -> dict[Any, Counts]:
    asked = {"start_time": int(time.time()) - 86_400, **params}
    response = served.http.get(USAGE, params=asked, headers=bearer(key))
    assert response.status_code == 200, response.text
    found: dict[Any, Counts] = {}
    for bucket in response.json()["data"]:
        for each in bucket["results"]:
            by = tuple(each[name] for name in params.get("group_by", ()))
            had = Counts(
                each["num_model_requests"],
                each["input_tokens"],
                each["input_cached_tokens"],
                each["output_tokens"],
            )
            found[by] = found.get(by, Counts()).plus(had)
    return found


def streamed(served: Served, key: str, body: Any) -> Any:
    """The `usage` of a stream's last chunk, and how many of its chunks have text."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    response = served.http.post("/v1/chat/completions", json=body | more, headers=bearer(key))
    lines = [each[6:] for each in response.text.splitlines() if each.startswith("data: {")]
    return [json.loads(each) for each in lines]


def test_usage_is_the_sum_of_the_answers_of_streams_failures_and_batches(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    groups = ["project_id", "api_key_id", "model"]
    with opened(tokenizer, tmp_path) as served:
        made = make(served, tenant="red")
        key, by = made["value"], ("red", made["id"], MODEL)
        total = Counts()
        for path, body in (
            ("completions", BODY),
            ("completions", BODY | {"n": 3}),
            ("chat/completions", CHAT),
            ("responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 16}),
            ("messages", CHAT),
        ):
            response = served.http.post(f"/v1/{path}", json=body, headers=bearer(key))
            total = total.plus(of(response.json()["usage"]))
        total = total.plus(of(streamed(served, key, CHAT)[-1]["usage"]))

        # What was refused has used nothing.
        served.router.refuse = Failed("", Refusal.QUEUE_FULL, "full", 1.0)
        error_of(served.http.post("/v1/completions", json=BODY, headers=bearer(key)), 429)
        served.router.refuse = None
        wrong = BODY | {"max_tokens": -1}
        error_of(served.http.post("/v1/completions", json=wrong, headers=bearer(key)), 400)

        # What failed in the middle has used what was generated.
        served.router.fail_after = 3
        (*_, last) = streamed(served, key, CHAT)
        assert "error" in last
        served.router.fail_after = None
        prompt = served.router.submits[-1].tokens
        total = total.plus(Counts(1, len(prompt), 0, 3))

        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
        batch = ended(client, begin(client, "\n".join(line(f"row-{i}") for i in range(5))))
        answers = rows(client, batch.output_file_id)
        assert len(answers) == 5
        for each in answers:
            total = total.plus(of(each["response"]["body"]["usage"]))

        served.http.post("/v1/completions", json=BODY, headers=bearer("blue-key"))
        found = counted(served, group_by=groups)
        assert found[by] == total
        assert set(found) == {by, ("blue", "", MODEL)}
        assert counted(served) == {(): total.plus(found["blue", "", MODEL])}
        assert set(counted(served, group_by=["api_key_id"])) == {(made["id"],), ("",)}
    with opened(tokenizer, tmp_path) as again:  # what a router has counted survives it
        assert counted(again, group_by=groups) == found
        metrics = make(again, scopes=["metrics"], tenant="")["value"]
        assert counted(again, metrics) == counted(again)
        error_of(again.http.get(USAGE, params={"start_time": 0}, headers=bearer(key)), 401)


def test_a_client_that_leaves_has_used_what_was_generated(
    served: Served, tokenizer: Tokenizer
) -> None:
    served.router.answer = lambda submit: tokenizer.encode("word " * 60)
    served.router.delay_s = 0.02
    body = BODY | {"stream": True, "max_tokens": 60}
    with served.http.stream("POST", "/v1/completions", json=body, headers=bearer("red-key")) as it:
        next(it.iter_lines())
    served.wait_idle()
    (found,) = counted(served, group_by=["project_id"]).values()
    assert found.requests == 1
    assert 0 < found.output < 60


def test_rows_of_a_key_that_is_revoked_fail(served: Served, tokenizer: Tokenizer) -> None:
    key = make(served)
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key["value"], max_retries=0)
    served.router.delay_s = 0.2
    batch = begin(client, "\n".join(line(f"row-{i}") for i in range(40)))
    wait_until(lambda: len(served.router.submits) > 0)
    revoke(served, key)
    served.router.delay_s = 0.0
    as_red = openai.OpenAI(base_url=f"{served.url}/v1", api_key="red-key", max_retries=0)
    batch = ended(as_red, batch)
    assert batch.request_counts.failed > 0
    (code,) = {each["error"]["code"] for each in rows(as_red, batch.error_file_id)}
    assert code == "tenant_unknown"
    assert "key" not in batch.model_dump()


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        ({}, "'start_time': expected seconds since 1970, got ''"),
        ({"start_time": "now"}, "got 'now'"),
        ({"start_time": 0, "bucket_width": "1h"}, "'bucket_width': expected 1d, got '1h'"),
        ({"start_time": 0, "group_by": "user_id"}, "expected project_id, api_key_id, model"),
        ({"start_time": 0, "limit": 0}, "limit"),
    ],
)
def test_what_is_wrong_with_a_question_is_said(served: Served, params: Any, wrong: str) -> None:
    response = served.http.get(USAGE, params=params, headers=AS_OPERATOR)
    assert wrong in error_of(response, 400)["message"]


def test_the_openai_client_and_the_command_read_it(served: Served) -> None:
    key = make(served, name="mine")
    served.http.post("/v1/completions", json=BODY, headers=bearer(key["value"]))
    client = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", admin_api_key=OPERATORS_KEY, max_retries=0
    )
    now = int(time.time())
    page = client.admin.organization.usage.completions(
        start_time=now - 3 * 86_400, limit=2, group_by=["api_key_id"]
    )
    assert (len(page.data), page.has_more) == (2, True)
    page = client.admin.organization.usage.completions(
        start_time=now - 3 * 86_400, page=page.next_page or "", group_by=["api_key_id"]
    )
    (result,) = [each for bucket in page.data for each in bucket.results]
    assert result.to_dict()["api_key_id"] == key["id"]
    given = ["usage", "--by", "key", "--url", served.url, "--operations-key", OPERATORS_KEY]
    said = CliRunner().invoke(main, given, env={"COLUMNS": "150"}).output
    assert f"mine ({key['id']})" in said
    assert "all" in said


def test_metrics_have_bounded_labels() -> None:
    keys, registry = Keys(), CollectorRegistry()
    KeyCollector(registry, keys)
    for number in range(MAX_SERIES + 50):
        keys.used(Tenant(f"t{number}", b""), "m", SOME)
    text = generate_latest(registry).decode()
    requests = [each for each in text.splitlines() if each.startswith("kvrelay_key_requests_total")]
    assert len(requests) == MAX_SERIES + 1
    (rest,) = [each for each in requests if f'tenant="{OTHER}"' in each]
    assert rest.endswith(" 50.0")
    assert 'kvrelay_key_tokens_total{key="",kind="output",model="m",tenant="t0"} 3.0' in text
