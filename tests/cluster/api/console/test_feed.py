"""The feed of the console: all there is at first, then what changed."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.console.history import History
from kvrelay.cluster.api.console.routes import GONE_TICKS, WORKER_FIELDS, Feed
from kvrelay.cluster.api.metrics import ApiMetrics
from tests.cluster.api.conftest import cluster_status
from tests.cluster.api.console.demo import Fleet


def worker(name: str, **changes: Any) -> dict[str, Any]:
    base = {"worker": name, "role": "decode", "state": "up", "epoch": 1, "num_blocks": 10}
    return base | changes


class Cluster:
    def __init__(self) -> None:
        self.value: dict[str, Any] = {"model": "tiny", "num_live": 0, "workers": []}
        self.history = History(ApiMetrics(CollectorRegistry()))
        self.feed = Feed(lambda: cluster_status(self.value), self.history, lambda: {"version": "1"})

    def set(self, *workers: dict[str, Any], **more: Any) -> None:
        self.value = self.value | more | {"workers": list(workers)}
        self.feed.tick()

    def news(self, tick: int, num_points: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.feed.changes(tick, num_points))
        return found


class Listener:
    """Puts together what it is told, as the page does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tick = 0
        self.workers: dict[str, list[Any]] = {}
        self.parts: dict[str, Any] = {}

    def listen(self) -> dict[str, Any]:
        news = self.cluster.news(self.tick)
        if news["full"]:
            self.workers, self.parts = {}, {}
        for name in news.get("gone", ()):
            self.workers.pop(name, None)
        self.workers |= news["workers"]
        self.parts |= news["parts"]
        self.tick = news["tick"]
        return news


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_the_first_event_has_all_and_the_next_only_what_changed(cluster: Cluster) -> None:
    states = {"kind": "state", "num_groups": 3, "num_used": 6, "num_cached": 2, "num_evicted": 1}
    cluster.set(worker("a", num_running=1, groups=[states]), worker("b"))
    listener = Listener(cluster)
    first = listener.listen()
    assert first["full"]
    assert first["parts"]["server"] == {"version": "1"}
    assert first["worker_fields"] == list(WORKER_FIELDS)
    assert set(first["workers"]) == {"a", "b"}
    row = dict(zip(WORKER_FIELDS, first["workers"]["a"], strict=True))
    assert (row["worker"], row["num_running"], row["decode_step_s"]) == ("a", 1, 0.0)
    assert row["groups"] == [states]
    cluster.set(worker("a", num_running=2, groups=[states]), worker("b"), num_live=1)
    news = listener.listen()
    assert not news["full"]
    assert set(news["workers"]) == {"a"}
    assert set(news["parts"]) == {"load"}
    cluster.feed.tick()
    news = listener.listen()
    assert (news["workers"], news["parts"], "gone" in news) == ({}, {}, False)


def test_noise_is_no_change(cluster: Cluster) -> None:
    cluster.set(worker("a", prefill_tokens_per_s=20_000.1))
    listener = Listener(cluster)
    listener.listen()
    cluster.set(worker("a", prefill_tokens_per_s=20_000.9))
    assert listener.listen()["workers"] == {}
    cluster.set(worker("a", prefill_tokens_per_s=20_020.0))
    assert set(listener.listen()["workers"]) == {"a"}


def test_workers_go_and_come_back(cluster: Cluster) -> None:
    cluster.set(worker("a"), worker("b"))
    listener = Listener(cluster)
    listener.listen()
    cluster.set(worker("a"))
    assert listener.listen()["gone"] == ["b"]
    cluster.set(worker("a"))
    assert "gone" not in listener.listen()
    cluster.set(worker("a"), worker("b", epoch=2))
    news = listener.listen()
    assert "gone" not in news
    assert set(news["workers"]) == {"b"}


def test_who_has_seen_too_little_gets_all_and_nothing_is_kept_for_it(cluster: Cluster) -> None:
    cluster.set(worker("a"), worker("b"))
    slow = Listener(cluster)
    slow.listen()
    cluster.set(worker("a"))
    for _ in range(GONE_TICKS + 1):
        cluster.feed.tick()
    assert slow.listen()["full"]
    assert set(slow.workers) == {"a"}
    assert cluster.feed._gone == {}


@pytest.mark.parametrize("seed", range(5))
def test_listeners_at_any_speed_see_the_same(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    listeners = [Listener(cluster) for _ in range(3)]
    for _ in range(200):
        names = [name for name in "abcdefgh" if draw.random() < 0.8]
        workers = [worker(name, num_running=draw.randrange(2)) for name in names]
        cluster.set(*workers, num_live=draw.randrange(3))
        for every, listener in enumerate(listeners):
            if draw.random() < 1 / (1 + 6 * every):
                listener.listen()
    for listener in listeners:
        listener.listen()
        assert listener.workers == listeners[0].workers
        assert {*listener.workers} == {w["worker"] for w in cluster.value["workers"]}
        assert listener.parts == json.loads(cluster.feed.changes(0, 0))["parts"]


def test_a_status_that_cannot_be_read_changes_nothing(cluster: Cluster) -> None:
    cluster.set(worker("a"))
    before = cluster.feed.changes(0, 0)

    def broken() -> dict[str, Any]:
        raise RuntimeError("broken")

    cluster.feed._status = broken
    with pytest.raises(RuntimeError):
        cluster.feed.tick()
    assert cluster.feed.changes(0, 0) == before


def test_points_are_told_once(cluster: Cluster) -> None:
    cluster.set()
    cluster.history.sample(1.0)
    assert [point[0] for point in cluster.news(0)["points"]] == [1.0]
    cluster.history.sample(2.0)
    assert [point[0] for point in cluster.news(1, 1)["points"]] == [2.0]
    assert cluster.news(1, 2)["points"] == []
    assert cluster.news(1, 2)["points_by_model"] == {}


def test_a_tick_of_1000_workers_does_not_hold_up_tokens() -> None:
    """It runs on the loop that streams them."""
    fleet = Fleet(1000)
    statuses = [fleet.status() for _ in range(6)]
    feed = Feed(lambda: statuses[-1], History(ApiMetrics(CollectorRegistry())), dict)
    feed.tick()
    took = []
    for status in statuses:
        statuses[-1] = status
        began = time.thread_time()
        feed.tick()
        feed.changes(feed.tick_number - 1, 0)
        took.append(time.thread_time() - began)
    assert min(took) < 0.05, took  # of processor time
