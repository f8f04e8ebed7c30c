"""The lease in a real Redis: two servers, a store that goes away, and writes that come too late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvrelay.cluster.control.lease import Change, Lease, LeaseKey
from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.cluster.processes.life import Deadline
from kvrelay.cluster.state.lease import KeptInRedis, LeaseKeeper, LeaseView, NotLeader
from kvrelay.worker.messages import Peer
from tests.cluster.state.stores import Server, until

LEASE_S = 1.0


class Member:
    """A server, as its supervisor would hear of its lease."""

    def __init__(self, url: str, name: str) -> None:
        self.deadline = Deadline()
        self.views: list[LeaseView] = []
        lease = Lease(name, LEASE_S, "model", "settings")
        self.key = LeaseKey(url, "test:cluster:c", 1.0)
        self.keeper = LeaseKeeper(self.key, lease, self.deadline, self.views.append)
        self.keeper.start()

    @property
    def may_order(self) -> bool:
        return not self.deadline.is_over()

    @property
    def last(self) -> LeaseView:
        return self.views[-1]


@pytest.fixture
def members(own_server: Server) -> Iterator[list[Member]]:
    first = Member(own_server.url, "a")
    until(lambda: first.may_order)
    second = Member(own_server.url, "b")
    until(lambda: second.views)
    yield [first, second]
    for member in (first, second):
        member.keeper.close()


def test_the_second_follows_and_leads_once_the_first_has_gone(members: list[Member]) -> None:
    first, second = members
    assert (first.last.term, second.last.term, second.last.leader.holder) == (1, 0, "a")
    peer = Peer("controller", "127.0.0.1", 7000, 1_000_001)
    first.keeper.listens(peer)
    until(lambda: second.last.leader.controller == peer)
    first.keeper.close()
    until(lambda: second.may_order)
    assert second.last.term == 2
    assert second.last.leader.controller is None


@pytest.mark.slow
def test_a_silent_leader_is_replaced_and_hears_of_it(members: list[Member]) -> None:
    first, second = members
    with first.keeper._changed:  # its thread does not get on
        until(lambda: second.may_order)
        assert not first.may_order
    until(lambda: any(view.change is Change.LOST for view in first.views))
    assert not first.may_order
    assert first.last.leader.holder == "b"


@pytest.mark.slow
def test_a_store_that_is_away_changes_no_leader_and_is_written_anew(
    members: list[Member], own_server: Server
) -> None:
    first, second = members
    KeptInRedis(first.key, 1).write(Checkpoint(num_named=3))
    until(lambda: first.last.is_kept)
    own_server.kill()
    until(lambda: not first.may_order)
    own_server.start()  # empty
    until(lambda: first.may_order)
    until(lambda: not first.last.is_kept)  # its controller writes it again
    assert (first.last.term, second.last.term) == (1, 0)


def test_what_a_later_term_has_kept_is_not_overwritten(server: Server) -> None:
    key = LeaseKey(server.url, "test:cluster:k", 1.0)
    old, new = KeptInRedis(key, 1), KeptInRedis(key, 2)
    kept = Checkpoint(num_named=1)
    assert old.read() is None
    old.write(kept)
    assert new.read() == kept
    later = Member(server.url, "z")
    later.key = replace(later.key, key="unused")
    until(lambda: later.may_order)
    later.keeper.close()
    fenced = LeaseKey(server.url, "test:cluster:c", 1.0)  # `later` has written term 1 there
    KeptInRedis(fenced, 1).write(kept)
    with pytest.raises(NotLeader):
        KeptInRedis(fenced, 0).write(Checkpoint(num_named=2))
    assert KeptInRedis(fenced, 2).read() == kept
