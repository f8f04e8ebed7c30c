"""`cache_control`: how long the KV is kept, and what the usage says of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.engine.kv.tier import DEFAULT_RETENTION, Retention
from tests.cluster.api.anthropic.claude import ASK, WEATHER, ask, post, stream
from tests.cluster.api.conftest import Served

SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
ONE_HOUR = Retention(3600.0)


def marked(mark: dict[str, Any], text: str = "Hi") -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": mark}


PLACES: list[dict[str, Any]] = [
    {"system": [marked(LONG)]},
    {"tools": [{**WEATHER, "cache_control": LONG}]},
    {"messages": [{"role": "user", "content": [marked(LONG)]}]},
    {"cache_control": LONG},
    {"system": [marked(SHORT)], "messages": [{"role": "user", "content": [marked(LONG)]}]},
]


def test_the_longest_time_that_is_asked_for_counts_wherever_it_stands(served: Served) -> None:
    served.ctx.retention_s, kept = 60.0, served.ctx.retention_s
    try:
        for changes in PLACES:
            ask(served, **changes)
            assert served.router.submits[-1].retention == ONE_HOUR, changes
        ask(served, system=[marked(SHORT)])
        assert served.router.submits[-1].retention == Retention(300.0)
    finally:
        served.ctx.retention_s = kept


def test_no_one_gets_less_than_what_the_server_keeps(served: Served) -> None:
    assert served.ctx.retention_s == DEFAULT_RETENTION.keep_s
    ask(served, system=[marked(SHORT)])
    assert served.router.submits[-1].retention == DEFAULT_RETENTION
    ask(served)
    assert served.router.submits[-1].retention is None


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
def test_the_parts_of_the_usage_sum_to_the_prompt(
    served: Served, is_marked: bool, as_stream: bool
) -> None:
    served.router.num_cached_tokens = 16
    served.router.cached_by_source = {"device": 16}
    changes = {"system": [marked(SHORT)]} if is_marked else {"system": "Hi"}
    if as_stream:
        events = stream(served, **changes)
        usage = events[-2]["usage"]
        begun = events[0]["message"]["usage"]
        assert begun | {"output_tokens": 0} == usage | {"output_tokens": 0}
        assert begun["output_tokens"] < usage["output_tokens"]
    else:
        usage = ask(served, **changes).usage.to_dict()
    num_prompt = len(served.router.submits[-1].tokens)
    rest = num_prompt - 16
    assert usage["cache_read_input_tokens"] == 16
    parts = (usage["input_tokens"], usage["cache_creation_input_tokens"])
    assert parts == ((0, rest) if is_marked else (rest, 0))
    assert usage["output_tokens"] == 8


@pytest.mark.parametrize("ttl", ["2h", 300, None, [], {}])
def test_a_time_to_live_that_there_is_not(served: Served, ttl: Any) -> None:
    response = post(served, messages=ASK, system=[marked({"type": "ephemeral", "ttl": ttl})])
    assert response.status_code == 400
    assert "'ttl' is '5m' or '1h', got" in response.json()["error"]["message"]
