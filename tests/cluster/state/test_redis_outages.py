"""Redis goes away, hangs, was never there, comes back: nothing waits for it, nothing is lost."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from redis import Redis

from kvrelay.cluster.state import redis
from kvrelay.engine.kv.tier import Retention
from kvrelay.router.sessions.session import SaveSession, SessionsUpdated
from kvrelay.router.state import IndexLoaded, IndexWriter, SaveView, StateUp
from tests.cluster.state.stores import Server, Teller, events, opened, record, until, view, writer


def test_a_server_that_is_killed_under_load_is_missed_once_and_told_again(
    own_server: Server, tellers: list[Teller], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.state")
    teller = writer(tellers, own_server)
    store = teller.store
    for number in range(200):
        store.perform(SaveSession(record(f"s{number}")))
        store.perform(SaveView(view("decode-0", seq=number)))
        if number == 50:
            own_server.kill()
    teller.wait(lambda: not store.status().up)
    assert teller.told[-1] == IndexWriter(False)
    store.perform(SaveView(view("decode-0", seq=300)))  # said too late
    store.perform(SaveSession(record("while away")))
    own_server.start()
    teller.wait(lambda: len(teller.of(StateUp)) == 2)
    teller.wait(lambda: teller.told[-1] == IndexWriter(True))
    # The router now tells all of it again.
    for number in range(200):
        store.perform(SaveSession(record(f"s{number}")))
    store.perform(SaveView(view("decode-0", seq=301)))
    teller.wait(lambda: store.status().unwritten == 0)
    next_one = opened(tellers, own_server, "router-1")
    assert next_one.of(IndexLoaded) == [IndexLoaded((view("decode-0", seq=301),), ())]
    assert sum(len(m.records) for m in next_one.of(SessionsUpdated)) == 201
    status = store.status()
    assert (status.outages, status.dropped, status.last_error) == (1, 0, "")
    assert sum("is away" in line for line in caplog.messages) == 1


def test_a_server_that_hangs_is_away_after_the_deadline(
    own_server: Server, tellers: list[Teller]
) -> None:
    teller = opened(tellers, own_server, timeout_s=0.2)
    pid = Redis.from_url(own_server.url).info("server")["process_id"]
    os.kill(pid, 19)  # stopped
    teller.wait(lambda: not teller.store.status().up)
    os.kill(pid, 18)  # goes on
    teller.wait(lambda: len(teller.of(StateUp)) == 2)


def test_without_a_server_there_is_one_warning_and_it_is_used_when_it_comes(
    tmp_path: Path, tellers: list[Teller], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path)
    teller = Teller(server.url)
    tellers.append(teller)
    teller.store.perform(SaveSession(record()))
    teller.wait(lambda: teller.store.status().last_error)
    assert not teller.store.status().up
    until(lambda: sum("is away" in line for line in caplog.messages) == 1)
    server.start()
    try:
        teller.wait(lambda: teller.of(StateUp))
        teller.wait(lambda: teller.store.status().unwritten == 0)
        assert sum("is away" in line for line in caplog.messages) == 1
    finally:
        server.kill()


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_meanwhile_takes_nothing_from_a_session(
    tmp_path: Path, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    server, now = Server(tmp_path), time.time
    teller = Teller(server.url)
    tellers.append(teller)
    teller.store.perform(SaveSession(record(retention=Retention(120.0), idle_s=20.0)))
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    server.start()
    try:
        teller.wait(lambda: teller.store.status().unwritten == 0)
        assert 80 <= Redis.from_url(server.url).ttl("test:model:session:tenant/s") <= 100
        (found,) = opened(tellers, server, "router-1").of(SessionsUpdated)[0].records
        assert 20 <= found.idle_s < 40
    finally:
        server.kill()


def test_what_finds_no_room_is_counted_and_bounded(
    server: Server, tmp_path: Path, tellers: list[Teller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "MAX_SESSIONS", 2)
    away = Teller(f"unix://{tmp_path}/nobody")
    tellers.append(away)
    for number in range(5):
        away.store.perform(SaveSession(record(f"s{number}")))
    away.store.perform(SaveSession(record("s1", version=2)))  # a session that is in it already
    assert away.store.status().dropped == 3
    assert away.store.status().unwritten == 2
    monkeypatch.setattr(redis, "MAX_EVENTS", 10)
    writing = writer(tellers, server)
    with writing.store._changed:
        for number in range(15):
            writing.store._append(events("decode-0", number))
    assert writing.store.status().dropped == 11
    writing.wait(lambda: writing.of(IndexWriter) == 2 * [IndexWriter(True)])
