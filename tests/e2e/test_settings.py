"""Each setting that touches every request, on once: all four APIs, whole and streamed, with tools
and schemas.

One server a setting, and the answers of one without any to compare with: what computes KV or
weights in fewer bits may say something else, and nothing else may.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.cluster.api.calls import APIS, NUM_CALLS, answers_of, asked
from tests.cluster.api.test_tracing import PREFIXES, Collector, attributes
from tests.cluster.state.stores import Server
from tests.e2e.serving import samples, urls_of, wait_until

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]

KEY, OTHER_KEY = "the-long-key-of-red", "the-long-key-of-blue"


class World:
    """A server with its setting on, and what it needs beside it."""

    def __init__(self, served: Served, folder: Path, headers: dict[str, str]) -> None:
        self.served, self.folder = served, folder
        tls: Any = True
        if served.url.startswith("https"):
            tls = ssl.create_default_context(cafile=str(folder / "tls" / "ca.pem"))
        self.http = httpx.Client(verify=tls, headers=headers, timeout=120, auth=OwnKey())
        self.collector: Collector | None = None
        self.redis = ""
        self.exact = 0.0  # `log_probability` without a setting

    def get(self, path: str, url: str = "") -> httpx.Response:
        response = self.http.get((url or self.served.url) + path)
        assert response.status_code == 200, response.text
        return response

    def status(self, url: str = "") -> Any:
        return self.get("/status", url).json()

    def counts(self, url: str) -> dict[str, float]:
        """Requests that its router has answered, by endpoint; none that failed."""
        found: dict[str, float] = {}
        for labels, count in samples(self.get("/metrics", url).text, "kvrelay_requests_total"):
            endpoint, outcome = labels["endpoint"], labels["outcome"]
            # Bugs are counted from nought on, and metrics are asked for without the key first.
            if count and endpoint in NUM_CALLS:
                assert outcome in ("stop", "length", "tool_calls"), (endpoint, outcome)
                found[endpoint] = found.get(endpoint, 0) + count
        return found

    def counters(self) -> dict[str, int]:
        """Adds the counters of all workers up."""
        found: dict[str, int] = {}
        for worker in self.status()["workers"]:
            for name, count in worker["counters"].items():
                found[name] = found.get(name, 0) + count
        return found


def counted_answers(world: World, url: str) -> dict[tuple[str, str], Any]:
    """What all APIs of a router say, whose metrics count every call."""
    before = world.counts(url)
    found = answers_of(world.http, url)
    wanted = {name: before.get(name, 0) + count for name, count in NUM_CALLS.items()}
    # What ends is counted after its last byte.
    wait_until(lambda: world.counts(url) == wanted)
    return found


def log_probability(world: World) -> float:
    """Asks for one token after a prompt of more than a block, and returns its log-probability."""
    body = asked(APIS[0].plain) | {"max_tokens": 1, "logprobs": True, "cache_salt": "none has it"}
    (choice,) = world.http.post(world.served.url + APIS[0].path, json=body).json()["choices"]
    return float(choice["logprobs"]["content"][0]["logprob"])


# What shows that a setting is on, after all calls.


def every_call_is_traced(world: World) -> None:
    collector = world.collector
    assert collector is not None

    def roots() -> list[str]:
        found = (attributes(span) for span in [*collector.spans])
        return [a["gen_ai.response.id"] for a in found if "gen_ai.request.model" in a]

    wait_until(lambda: len(roots()) >= sum(NUM_CALLS.values()), 30)
    for endpoint, count in NUM_CALLS.items():
        own = {each for each in roots() if each.startswith(PREFIXES[endpoint])}
        assert len(own) == count, endpoint


def metrics_are_for_operators(world: World) -> None:
    for path in ("/metrics", "/status"):
        assert httpx.get(world.served.url + path, timeout=30).status_code == 401


def all_is_encrypted(world: World) -> None:
    assert world.served.url.startswith("https://")
    with pytest.raises(httpx.HTTPError):
        httpx.get(world.served.url.replace("https", "http") + "/health", timeout=30)


def tenants_are_apart(world: World) -> None:
    api = APIS[0]
    url, body = world.served.url + api.path, asked(api.plain)
    assert httpx.post(url, json=body, timeout=30).status_code == 401
    for key, is_cached in ((KEY, True), (OTHER_KEY, False)):
        headers = {"authorization": f"Bearer {key}"}
        usage = world.http.post(url, json=body, headers=headers).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == is_cached


def a_session_is_in_the_store(world: World) -> None:
    state = world.status()["state"]
    assert state["up"]
    assert state["store"] == world.redis
    body = asked(APIS[0].plain) | {"prompt_cache_key": "talk", "prompt_cache_retention": "24h"}
    world.http.post(world.served.url + APIS[0].path, json=body).raise_for_status()
    with Redis.from_url(world.redis) as store:
        wait_until(lambda: any(store.scan_iter("*:session:*")), 30)


def numbers_are_bytes(world: World) -> None:
    """Less exact than without the setting, and not by much."""
    found, exact = log_probability(world), world.exact
    assert 0 < abs(found - exact) < 0.5, (found, exact)


def no_drafts(world: World) -> None:
    assert world.counters().get("draft_tokens", 0) == 0


def a_session_comes_back_from_disk(world: World) -> None:
    url, api = world.served.url, APIS[0]
    body = asked(api.plain) | {"prompt_cache_key": "talk", "prompt_cache_retention": "24h"}
    text = " ".join(f"On day {day} the ship sailed {day * 7 % 31} miles." for day in range(30))
    body["messages"] = [{"role": "user", "content": text}]

    def turn() -> tuple[str, dict[str, int]]:
        answer = world.http.post(url + api.path, json=body).json()
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["message"]["content"], details["cached_tokens_by_source"]

    def held(tier: str) -> list[int]:
        """Returns its blocks, one number a worker."""
        workers = world.get("/v1/sessions/talk").json()["workers"]
        return [worker["blocks"][tier] for worker in workers]

    said, _ = turn()
    wait_until(lambda: max(held("device"), default=0) > 10, 30)
    parked = world.http.post(url + "/v1/sessions/talk/park")
    assert parked.status_code == 200, parked.text
    wait_until(lambda: max(held("disk")) > 10 and not any(held("device")), 30)
    again, sources = turn()
    assert again == said
    assert sources.get("disk", 0) > 100, sources


def both_are_up(world: World) -> None:
    assert len(urls_of(world.served)) == 2
    assert [each["state"] for each in world.status()["routers"]] == ["up", "up"]


def one_pool(world: World) -> None:
    assert [worker["role"] for worker in world.status()["workers"]] == ["decode"]
    assert world.counters().get("handoffs_done", 0) == 0


@dataclass(frozen=True)
class Setting:
    values: dict[str, object]  # but for those that are made in the test
    shows: Callable[[World], None]
    changes_tokens: bool = False
    headers: dict[str, str] = field(default_factory=dict)


BEARER = {"authorization": f"Bearer {KEY}"}
TENANTS = "".join(
    f'[[tenant]]\nname = "{name}"\nkeys = ["{key}"]\n'
    for name, key in (("red", KEY), ("blue", OTHER_KEY))
)
DISK = {"tiers.host_gib": 0, "tiers.disk_gib": 1.0, "tiers.disk_after_s": 0.1}
SETTINGS = {
    "tracing": Setting({}, every_call_is_traced),
    "metrics": Setting({"api.operations_key": KEY}, metrics_are_for_operators, headers=BEARER),
    "tls": Setting({"tls.api": True, "tls.frames": True}, all_is_encrypted),
    "tenants": Setting({}, tenants_are_apart, headers=BEARER),
    "redis": Setting({}, a_session_is_in_the_store),
    "int8": Setting({"model.quantization": "int8"}, numbers_are_bytes, changes_tokens=True),
    "fp8-kv": Setting({"engine.kv_dtype": "float8_e4m3"}, numbers_are_bytes, changes_tokens=True),
    "no-drafts": Setting({"engine.num_speculative_tokens": 0}, no_drafts),
    "disk": Setting(DISK, a_session_comes_back_from_disk),
    "two-routers": Setting({"cluster.routers": 2}, both_are_up),
    "one-pool": Setting({"cluster.prefill": 0}, one_pool),
}


@contextmanager
def world_of(
    folder: Path, values: dict[str, object], headers: dict[str, str] | None = None
) -> Iterator[World]:
    """It stops without an error."""
    with Served({"sessions.state_dir": str(folder), **values}) as served:
        world = World(served, folder, headers or {})
        yield world
        world.http.close()
        assert served.stop() == 0
        assert "Traceback" not in "".join(served.lines)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str], Any], float]:
    """The answers and a log-probability without any setting."""
    with world_of(tmp_path_factory.mktemp("plain"), {}) as world:
        found = counted_answers(world, world.served.url)
        assert world.counters()["draft_tokens"] > 0, "what shows that they are off elsewhere"
        return found, log_probability(world)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_all_four_apis_answer_with_a_setting_on(
    name: str,
    tmp_path: Path,
    plain: tuple[dict[tuple[str, str], Any], float],
    redis: str,
    collector: Collector,
) -> None:
    setting, tenants = SETTINGS[name], tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    own: dict[str, dict[str, object]] = {
        "tracing": {"tracing.endpoint": collector.url},
        "tenants": {"tenants.file": str(tenants)},
        "redis": {"state.url": redis},
        "disk": {"tiers.disk_path": str(tmp_path / "kv")},
    }
    values = {**setting.values, **own.get(name, {})}
    answers, exact = plain
    with world_of(tmp_path, values, setting.headers) as world:
        world.collector, world.redis, world.exact = collector, redis, exact
        for url in urls_of(world.served):
            found = counted_answers(world, url)
            assert setting.changes_tokens or found == answers
        setting.shows(world)
