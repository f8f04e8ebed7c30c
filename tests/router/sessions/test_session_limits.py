"""Sessions: what time, limits and a restart of the router do to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.request import FinishReason
from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.router.messages import SessionState
from kvrelay.router.sessions.session import MAX_STALE
from kvrelay.router.sessions.sessions import TICK
from tests.router.sessions.session_script import SessionScript, names_of


def test_idle_sessions_are_parked_and_a_turn_or_a_resume_starts_the_time_anew() -> None:
    script = SessionScript("decode-0", park_after_s=30.0)
    names = names_of(script.turn("s"))
    script.holds("decode-0", device=names)
    script.pass_time(29.0)
    assert script.ask("resume", "s").refusal is None
    script.pass_time(29.0)
    assert script.show("s").state is SessionState.IDLE
    script.pass_time(1.5)
    ((worker, order),) = script.obey()
    assert (worker, order.action, order.block_hashes) == ("decode-0", CacheAction.PARK, names)
    assert order.lazy  # nobody has asked for the memory
    assert script.show("s").state is SessionState.PARKED
    script.pass_time(100.0)
    assert script.obey() == []  # once
    script.turn("s")
    assert script.show("s").state is SessionState.IDLE
    script.pass_time(31.0)
    assert len(script.obey()) == 1


def test_nothing_is_parked_by_itself_where_that_is_off_or_nothing_is_in_device_memory() -> None:
    for config in ({"park_after_s": 0.0}, {"park_after_s": 30.0}):
        script = SessionScript("decode-0", **config)
        script.holds("decode-0", host=names_of(script.turn("s")))
        script.pass_time(100.0)
        assert script.obey() == []


def test_many_idle_sessions_are_parked_a_few_at_a_time() -> None:
    script = SessionScript("decode-0", park_after_s=30.0, max_parks_at_once=4)
    names: list[bytes] = []
    for i in range(20):
        names += names_of(script.turn(f"s{i}", range(100 * i, 100 * i + 10)))
    script.holds("decode-0", device=names)
    script.pass_time(29.9)
    script.num_wakes = 0
    counts = []
    for _ in range(8):
        script.pass_time(0.25)
        counts.append(len(script.obey()))
    assert max(counts) == 4
    assert sum(counts) == 20
    assert script.num_wakes <= 6


@pytest.mark.slow
@pytest.mark.parametrize("park_after_s", [0.0, 30.0])
def test_what_comes_and_goes_leaves_neither_wake_ups_nor_entries_behind(
    park_after_s: float,
) -> None:
    script = SessionScript("decode-0", park_after_s=park_after_s, retention=Retention(1e6))
    for i in range(300):
        script.turn(f"s{i}")
        script.ask("park", f"s{i}")
        script.ask("resume", f"s{i}")
        script.pass_time(1.0)
        if i % 10:
            script.ask("close", f"s{i}")
    assert len(script.names()) == 30
    own = [due for due in script.wakes if due[1] == TICK]
    assert len(own) <= 2
    assert len(script.router.sessions.table._heap) <= 2 * 30 + MAX_STALE + 1


def test_a_session_is_forgotten_when_its_retention_is_over() -> None:
    script = SessionScript("decode-0", park_after_s=5.0, retention=Retention(100.0))
    script.turn("short", retention=Retention(20.0, to_disk=False))
    script.turn("long")
    script.turn("kept", retention=Retention(20.0))
    script.ask("pin", "kept")
    script.pass_time(21.0)
    assert script.names() == ["kept", "long"]
    script.pass_time(80.0)
    assert script.names() == ["kept"]
    script.ask("unpin", "kept")
    script.pass_time(1.0)
    assert script.names() == []
    assert [due for due in script.wakes if due[1] == TICK] == []


def test_an_active_session_is_not_forgotten() -> None:
    script = SessionScript("decode-0", retention=Retention(20.0))
    script.turn("s")
    request_id = script.begin("s", range(20))
    script.deliver(request_id, 50)
    script.pass_time(4.0)
    for _ in range(8):  # the worker keeps on saying that it is alive
        script.deliver(request_id)
        script.pass_time(4.0)
    assert script.names() == ["s"]
    script.deliver(request_id, 51, finish=FinishReason.STOP)
    assert script.show("s").num_tokens == 22


def test_beyond_the_limits_the_least_used_are_forgotten_first() -> None:
    script = SessionScript("decode-0", max_per_tenant=3, max_sessions=5)
    for name in ("a", "b", "c"):
        script.turn(name, tenant="x")
    script.turn("a", range(20), tenant="x")
    script.turn("d", tenant="x")
    assert script.names("x") == ["a", "c", "d"]
    for name in ("a", "b", "c"):
        script.turn(name, tenant="y")
    assert script.names("x") == ["a", "d"]  # the oldest of all tenants made room
    assert script.names("y") == ["a", "b", "c"]


def test_the_active_are_never_forgotten_and_the_pinned_last() -> None:
    script = SessionScript("decode-0", max_per_tenant=2)
    first = script.begin("a")
    script.turn("b")
    script.ask("pin", "b")
    script.turn("c")
    assert script.names() == ["a", "b"]  # the new one is the only one that may go
    second = script.begin("d")
    script.deliver(second, 50)
    assert script.names() == ["a", "b", "d"]
    script.deliver(first, 50, finish=FinishReason.STOP)
    assert script.names() == ["b", "d"]
    script.ask("pin", "d")
    script.deliver(second, 51, finish=FinishReason.STOP)
    script.turn("e")
    assert script.names() == ["b", "d"]


def test_nothing_stays_pinned_for_a_session_that_is_forgotten() -> None:
    script = SessionScript("decode-0", max_per_tenant=1)
    tokens = script.turn("a")
    script.ask("pin", "a")
    request_id = script.begin("b", range(100, 110))
    script.ask("pin", "b")
    script.deliver(request_id, 50, finish=FinishReason.STOP)
    assert script.names() == ["b"]
    unpinned = [
        order.block_hashes for _, order in script.obeyed if order.action is CacheAction.UNPIN
    ]
    assert unpinned == [names_of(tokens)]


def test_the_tokens_of_all_sessions_together_are_bounded() -> None:
    script = SessionScript("decode-0", max_tokens=40)
    for name in "abc":
        script.turn(name)
    assert script.names() == ["a", "b", "c"]
    script.turn("d")
    assert script.names() == ["b", "c", "d"]


def records_of(script: SessionScript) -> list[Any]:
    """What a store would have kept."""
    kept: dict[tuple[str, str], Any] = {}
    for effect in script.stored:
        if hasattr(effect, "record"):
            kept[effect.record.tenant, effect.record.session] = effect.record
        else:
            del kept[effect.tenant, effect.session]
    return list(kept.values())


def test_a_durable_session_outlives_its_router() -> None:
    script = SessionScript("decode-0", durable=True)
    scope = CacheScope(b"salt", 4)
    tokens = script.turn("s", range(20), tenant="a", scope=scope)
    script.ask("pin", "s", tenant="a")
    script.turn("other", tenant="a")
    script.ask("close", "other", tenant="a")
    (record,) = records_of(script)
    assert (record.num_turns, record.pinned, record.idle_s) == (1, True, 0.0)
    later = SessionScript("decode-0", durable=True, records=[replace(record, idle_s=60.0)])
    names = names_of(tokens, scope)
    later.holds("decode-0", disk=names)
    info = later.show("s", tenant="a")
    assert (info.num_tokens, info.last_used_s, info.pinned) == (22, 60.0, True)
    assert info.state is SessionState.PARKED  # no worker has it in device memory any more
    assert info.holders[0].num_blocks == {Tier.DISK: len(names)}
    assert later.stored == []


def test_records_that_are_past_their_retention_are_not_taken_in() -> None:
    script = SessionScript("decode-0", durable=True, retention=Retention(100.0))
    script.turn("s")
    script.turn("pinned")
    script.ask("pin", "pinned")
    records = [replace(record, idle_s=101.0) for record in records_of(script)]
    later = SessionScript("decode-0", durable=True, records=records)
    assert later.names() == ["pinned"]
    assert [effect.session for effect in later.stored] == ["s"]  # type: ignore[union-attr]
    younger = [replace(record, idle_s=60.0, pinned=False) for record in records]
    third = SessionScript("decode-0", records=younger)
    assert third.names() == ["pinned", "s"]
    third.pass_time(41.0)
    assert third.names() == []


def test_what_must_not_be_on_disk_is_not_told_to_the_store() -> None:
    script = SessionScript("decode-0", durable=True)
    script.turn("s", retention=Retention(600.0, to_disk=False))
    script.ask("pin", "s")
    assert script.stored == []
    script.turn("s")
    assert len(records_of(script)) == 1
    script.turn("s", retention=Retention(600.0, to_disk=False))
    assert records_of(script) == []


def test_without_a_store_nothing_is_told_to_one() -> None:
    script = SessionScript("decode-0")
    script.turn("s")
    script.ask("fork", "s", "t")
    script.ask("close", "s")
    assert script.stored == []
