"""The store in Redis, against a real server: what it keeps, and what an outage costs."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis import Redis
from redis.connection import parse_url

from kvrelay.cluster.api.cluster_metrics import ClusterCollector
from kvrelay.cluster.config import ClusterSection, Config, ConfigError, StateSection
from kvrelay.cluster.state import index_keys, redis, session_keys
from kvrelay.cluster.state.given import with_cluster_token, with_url
from kvrelay.cluster.state.opening import open_state
from kvrelay.cluster.status import ClusterStatus, StoreStatus
from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.tier import Retention
from kvrelay.router.sessions.session import DeleteSession, SaveSession, SessionsUpdated
from kvrelay.router.state import (
    ForgetView,
    IndexLoaded,
    IndexWriter,
    OthersLoads,
    SaveEvents,
    SaveLoads,
    SaveView,
    TenantLoad,
)
from tests.cluster.state.stores import (
    Server,
    Teller,
    events,
    names,
    opened,
    record,
    view,
    writer,
    written,
)


def test_what_one_router_has_kept_of_the_index_the_next_one_gets(
    server: Server, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_keys, "CHUNK_BYTES", 64 * HASH_BYTES)
    first = writer(tellers, server)
    big = view("decode-1", device=names(0, 1000), host=names(500, 129), disk=b"")
    for effect in (
        SaveView(view("decode-0", seq=1)),
        SaveView(big),
        SaveView(view("decode-2")),
        SaveEvents(events("decode-1", 8)),
    ):
        first.store.perform(effect)
    first.wait(lambda: first.store.status().unwritten == 0)
    for effect in (
        SaveView(view("decode-0", seq=9)),
        ForgetView("decode-2"),
        SaveEvents(events("decode-1", 9)),
    ):
        first.store.perform(effect)
    written(first)
    (loaded,) = opened(tellers, server, "router-1").of(IndexLoaded)
    assert loaded.views == (view("decode-0", seq=9), big)
    assert loaded.events == (events("decode-1", 8), events("decode-1", 9))
    (other_run,) = opened(tellers, server, run="run-2").of(IndexLoaded)
    assert other_run == IndexLoaded((), ())


def test_what_cannot_be_read_of_the_index_is_left_out(
    server: Server, tellers: list[Teller]
) -> None:
    first = writer(tellers, server)
    for number in range(4):
        first.store.perform(SaveView(view(f"decode-{number}")))
    first.store.perform(SaveEvents(events("decode-0", 8)))
    written(first)
    client = Redis.from_url(server.url)
    base = "test:model:index:run-1"
    client.hset(f"{base}:view:decode-0", "device.0", names(0, 99))
    client.hset(f"{base}:view:decode-1", "meta", b"\xc1")
    client.hdel(f"{base}:view:decode-2", "device.0")
    client.xadd(f"{base}:events", {"e": b"\x91\xc4\x01\x00"})
    second = opened(tellers, server, "router-1")
    (loaded,) = second.of(IndexLoaded)
    assert loaded == IndexLoaded((view("decode-3"),), (events("decode-0", 8),))
    assert second.store.status().unreadable == 4


def test_one_router_writes_the_index_and_another_takes_over(
    server: Server, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_keys, "LEASE_S", 1.0)
    first = writer(tellers, server)
    second = opened(tellers, server, "router-1")
    second.store.perform(SaveView(view("decode-0")))  # nobody has asked it to
    assert not second.of(IndexWriter)
    first.close()  # it leaves: at once
    second.wait(lambda: second.of(IndexWriter) == [IndexWriter(True)])
    third = opened(tellers, server, "router-0")
    assert third.of(IndexLoaded) == [IndexLoaded((), ())]
    # One that dies without a word is waited for until its lease is over.
    monkeypatch.setattr(second.store._index, "leave", lambda redis: None)
    second.close()
    third.wait(lambda: third.of(IndexWriter) == [IndexWriter(True)])


def test_sessions_are_known_to_the_other_router_and_to_the_next(
    server: Server, tellers: list[Teller]
) -> None:
    first, second = opened(tellers, server), opened(tellers, server, "router-1")
    first.store.perform(SaveSession(record("a", version=4, parked=True)))
    first.store.perform(SaveSession(record("ü /%\ud800", worker=None, pinned=True)))
    first.store.perform(SaveSession(record("ü /%", worker=None, pinned=True)))
    second.wait(lambda: sum(len(m.records) for m in second.of(SessionsUpdated)) == 2)
    third = opened(tellers, server, "router-0")
    for teller in (second, third):
        records = [r for m in teller.of(SessionsUpdated) for r in m.records]
        found = {r.session: r for r in records}
        for wanted in (
            record("a", version=4, parked=True),
            record("ü /%", worker=None, pinned=True),
        ):
            got = found[wanted.session]
            assert replace(got, age_s=50.0, idle_s=20.0) == wanted
            assert 20.0 <= got.idle_s < 40.0
            assert 50.0 <= got.age_s < 70.0
    assert first.of(SessionsUpdated) == []  # its own changes are no news to it
    assert first.store.status().unreadable == 1


def test_of_two_states_of_a_session_the_newer_stays(server: Server, tellers: list[Teller]) -> None:
    first, second = opened(tellers, server), opened(tellers, server, "router-1")

    def say(teller: Teller, change: SaveSession | DeleteSession) -> None:
        teller.store.perform(change)
        teller.wait(lambda: teller.store.status().unwritten == 0)

    say(first, SaveSession(record(version=5, num_turns=5)))
    say(second, SaveSession(record(version=4, num_turns=4)))
    say(second, SaveSession(record(version=5, num_turns=50, idle_s=10.0)))  # it was used later
    say(first, SaveSession(record(version=5, num_turns=500, idle_s=30.0)))
    say(second, DeleteSession("tenant", "s", 5))
    third = opened(tellers, server, "router-2")
    (learned,) = third.of(SessionsUpdated)
    assert [r.num_turns for r in learned.records] == [50]
    say(second, DeleteSession("tenant", "s", 6))
    first.wait(lambda: first.of(SessionsUpdated)[-1].closed == (("tenant", "s", 6),))
    say(third, SaveSession(record(version=6, num_turns=6)))  # a turn that ended meanwhile
    first.wait(lambda: [r.num_turns for r in first.of(SessionsUpdated)[-1].records] == [6])


def test_a_session_is_kept_as_long_as_its_retention(server: Server, tellers: list[Teller]) -> None:
    first = opened(tellers, server)
    first.store.perform(SaveSession(record("short", retention=Retention(120.0))))
    first.store.perform(SaveSession(record("endless", retention=Retention(1e30))))
    first.store.perform(SaveSession(record("pinned", pinned=True)))
    written(first)
    client = Redis.from_url(server.url)
    left = {n: client.ttl(f"test:model:session:tenant/{n}") for n in ("short", "endless", "pinned")}
    assert 90 <= left["short"] <= 100
    assert left["endless"] > 9 * 365 * 86_400
    assert left["pinned"] == -1


def test_a_router_that_was_too_slow_for_the_changes_reads_everything(
    server: Server, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tellers, server)
    first.store.perform(SaveSession(record("before")))
    first.wait(lambda: first.store.status().unwritten == 0)
    second = opened(tellers, server, "router-1")
    Redis.from_url(server.url).xtrim("test:model:sessions", maxlen=0, approximate=False)
    assert session_keys.MAX_CHANGES > 2
    with second.store._changed:  # as if it had been stopped
        monkeypatch.setattr(second.store, "_round", lambda: None)
    for number in range(5):
        first.store.perform(SaveSession(record(f"s{number}")))
        first.wait(lambda: first.store.status().unwritten == 0)
    Redis.from_url(server.url).xtrim("test:model:sessions", maxlen=2, approximate=False)
    monkeypatch.undo()
    second.wait(
        lambda: len({r.session for m in second.of(SessionsUpdated) for r in m.records}) == 6
    )


def test_each_router_hears_what_tenants_have_at_the_others(
    server: Server, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "LOADS_TTL_S", 0.8)
    monkeypatch.setattr(redis, "LOADS_S", 0.1)
    first, second = opened(tellers, server), opened(tellers, server, "router-1")
    load = {"a": TenantLoad(3, 500), "b": TenantLoad(1, 0)}
    first.store.perform(SaveLoads(load))
    second.wait(lambda: OthersLoads(load) in second.told)
    assert first.of(OthersLoads)[-1] == OthersLoads({})
    first.close()
    second.wait(lambda: second.of(OthersLoads)[-1] == OthersLoads({}))


def test_metrics_show_whether_the_store_is_there(server: Server, tellers: list[Teller]) -> None:
    shown = []
    for state in (writer(tellers, server).store.status(), StoreStatus()):
        registry = CollectorRegistry()
        status = ClusterStatus(router="router-0", policy="seconds", model="m", state=state)
        ClusterCollector(registry, lambda status=status: status)  # type: ignore[misc]
        shown.append(generate_latest(registry).decode())
    assert "kvrelay_state_up 1.0" in shown[0]
    assert "kvrelay_state_writes_index 1.0" in shown[0]
    assert "kvrelay_state_outages_total 0.0" in shown[0]
    assert "kvrelay_state" not in shown[1]


def test_the_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(state=StateSection(url="redis://user:hunter2@localhost:6379/0"))
    opened_state = open_state(config, "model", "run", "router-0", ("router-0",))
    assert opened_state.status().store == "redis://localhost:6379/0"
    assert "hunter2" not in str(opened_state.status())
    monkeypatch.setenv("KVRELAY_REDIS_URL", "redis://:hunter2@localhost:many")
    with pytest.raises(ConfigError, match="expected a port") as wrong:
        with_url(Config())
    assert "hunter2" not in str(wrong.value)
    monkeypatch.setenv("KVRELAY_REDIS_URL", "http://:hunter2@localhost")
    with pytest.raises(ConfigError, match="expected redis://HOST:PORT") as wrong:
        with_url(Config())
    assert "hunter2" not in str(wrong.value)
    monkeypatch.setenv("KVRELAY_REDIS_URL", "redis://localhost")
    assert with_url(Config()).state.url == "redis://localhost"


def test_a_password_of_any_characters_is_given_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_REDIS_USER", "a@b")
    passwords = [base64.b64encode(os.urandom(32)).decode() for _ in range(200)]
    for url in ("redis://redis:6379/1", "unix:///run/redis.sock"):
        for password in [*passwords, "%41", "a b/#?[]@:"]:
            monkeypatch.setenv("KVRELAY_REDIS_PASSWORD", password)
            found = parse_url(with_url(Config(state=StateSection(url=url))).state.url)
            assert (found["username"], found["password"]) == ("a@b", password)
            assert (found.get("host") or found["path"]) in ("redis", "/run/redis.sock")
    with pytest.raises(ConfigError, match="in one of the two"):
        with_url(Config(state=StateSection(url="redis://:x@redis")))


def test_the_redis_of_batches_has_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_REDIS_PASSWORD", "a")
    monkeypatch.setenv("KVRELAY_BATCHES_REDIS_URL", "redis://batches")
    monkeypatch.setenv("KVRELAY_BATCHES_REDIS_PASSWORD", "b/")
    cluster = ClusterSection(name="chat", token="x" * 32)
    config = with_url(Config(cluster=cluster, state=StateSection(url="redis://redis")))
    assert (config.state.url, config.state.batches_url) == (
        "redis://:a@redis",
        "redis://:b%2F@batches",
    )
    assert with_cluster_token(config).state == config.state
    with pytest.raises(ConfigError, match=r"cluster\.name is not: files and batches"):
        with_cluster_token(with_url(Config()))
    monkeypatch.setenv("KVRELAY_BATCHES_REDIS_URL", "redis://:hunter#2@batches")
    with pytest.raises(ConfigError, match="as KVRELAY_BATCHES_REDIS_PASSWORD") as wrong:
        with_url(Config())
    assert "hunter" not in str(wrong.value)


@pytest.mark.parametrize("password", ["hunter/2", "12/hunter2", "h#2", "h?2", "h%2", "h[2"])
def test_a_password_that_ends_the_url_is_named_and_not_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="give the password as KVRELAY_REDIS_PASSWORD") as wrong:
        with_url(Config(state=StateSection(url=f"redis://:{password}@redis:6379/1")))
    assert password not in str(wrong.value)
