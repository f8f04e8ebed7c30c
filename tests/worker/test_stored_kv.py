"""A bucket that is larger than what a worker remembers of it: sessions are found by their names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Wake, Woken
from kvrelay.kvtransfer.agent import FindStored, StoreListed
from kvrelay.kvtransfer.store.bucket import Bucket
from kvrelay.kvtransfer.store.objects import ObjectStore
from kvrelay.worker import stored_kv
from kvrelay.worker.stored_kv import WAIT_S
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, s3_standin
from tests.worker.world import BLOCK_SIZE, World

PREFIX, LISTED, OTHERS = "kv/f/", 2500, 6000


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3StandIn]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with s3_standin() as server:
        server.objects |= {PREFIX + name_of(number).hex(): b"1" for number in range(OTHERS)}
        yield server


def until_found(store: ObjectStore, found: list[StoreListed], count: int) -> None:
    deadline = time.monotonic() + 30.0
    while len(found) < count:
        assert time.monotonic() < deadline
        time.sleep(store.wait_s)
        found += store.check(False)


@pytest.mark.parametrize("there", [0, 1, 2, 63, 64, 700, 1000])
def test_what_is_beyond_the_list_is_found_by_name(server: S3StandIn, there: int) -> None:
    session = tuple(name_of(OTHERS + number) for number in range(1000))  # the last of all
    server.objects |= {PREFIX + name.hex(): b"1" for name in session[:there]}
    store = ObjectStore(Bucket(server.bucket, server.url), PREFIX, 0)
    store.is_listed = True
    store.update(FindStored(session, Tier.OBJECT))
    found: list[StoreListed] = []
    until_found(store, found, 1)
    assert found == [StoreListed(Tier.OBJECT, session[:there], session[0])]
    assert len(server.requests) <= (1 if not there else 60)
    store.close()


def test_pages_of_the_list_follow_each_other_at_once(server: S3StandIn) -> None:
    store = ObjectStore(Bucket(server.bucket, server.url), PREFIX, LISTED)
    pages: list[StoreListed] = []
    began, waited_s = time.monotonic(), 0.0
    while not store.is_listed:
        assert time.monotonic() < began + 30.0
        waited_s += store.wait_s if store._page is not None and store._page.done() else 0.0
        time.sleep(store.wait_s)
        pages += store.check(False)
    assert [len(page.names) for page in pages] == [1000, 1000, 500]
    assert waited_s < 0.2
    store.close()


def test_a_search_that_fails_is_not_an_answer(server: S3StandIn) -> None:
    server.access_key = "another"
    store = ObjectStore(Bucket(server.bucket, server.url), PREFIX, 0)
    store.is_listed = True
    store.update(FindStored((name_of(1),), Tier.OBJECT))
    deadline = time.monotonic() + 30.0
    while store._asked:
        assert time.monotonic() < deadline
        assert not store.check(False)
        time.sleep(0.005)
    store.close()


# A worker's node

PROMPT = [*range(1, 22)]


@pytest.fixture(autouse=True)
def is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_kv, "WORTH_S", 0.0)


class Machine(World):
    """Its decode worker asks for whatever it lacks."""

    def __init__(self) -> None:
        self.asked: list[FindStored] = []
        super().__init__(num_object_blocks=64, num_host_blocks=40)

    def perform(self, node: str, effects: list[Any]) -> None:
        self.asked += [each for each in effects if isinstance(each, FindStored)]
        rest = [each for each in effects if not isinstance(each, FindStored | Wake)]
        super().perform(node, rest)

    def answer(self, count: int) -> None:
        (asked,) = self.asked
        self.asked.clear()
        listed = StoreListed(asked.tier, asked.names[:count], asked.names[0])
        self.deliver("decode", listed)


def test_a_prompt_waits_for_the_answer_and_goes_on_without_one() -> None:
    machine = Machine()
    names = tuple(BlockChain(b"tiny", UNSALTED, BLOCK_SIZE).extend(PROMPT))
    machine.submit("a", PROMPT, 4, remote=False)
    machine.drain()
    assert machine.asked == [FindStored(names, Tier.OBJECT)]
    assert not machine.decode.core.counters.get("steps")
    machine.answer(0)
    machine.assert_finishes("a", PROMPT, 4)
    machine.submit("b", [50, *PROMPT], 4, remote=False)
    machine.drain()
    assert machine.asked
    machine.now += WAIT_S
    machine.deliver("decode", Woken("stored_kv"))
    machine.assert_finishes("b", [50, *PROMPT], 4)


def test_what_was_found_is_read_and_what_was_not_is_not_asked_for_again() -> None:
    machine = Machine()
    machine.hold_reads = True
    machine.submit("a", PROMPT, 4, remote=False)
    machine.drain()
    names = machine.asked[0].names
    machine.answer(3)
    machine.drain()
    ((_, read),) = machine.reads
    assert (read.src_tier, read.names) == (Tier.OBJECT, names[:3])

    machine = Machine()
    machine.submit("a", PROMPT, 4, remote=False)
    machine.drain()
    machine.answer(0)
    machine.submit("b", PROMPT, 4, remote=False)
    machine.drain()
    assert machine.asked == []
    machine.assert_finishes("b", PROMPT, 4)
