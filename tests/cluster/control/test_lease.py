"""Who leads, decided by servers of one record: step by step, and under faults that a seed draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from kvrelay.cluster.control.lease import LOOKS, Change, Lease, LeaseRecord, epoch_of
from kvrelay.worker.messages import Peer

LEASE_S = 5.0
LOOK_S = LEASE_S / LOOKS


class Store:
    """What is in it, replaced only by who has seen it."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None

    def replace(self, old: LeaseRecord | None, new: LeaseRecord) -> bool:
        if old != self.record:
            return False
        self.record = new
        return True


@dataclass
class OneServer:
    """Its clock shows `offset` more than the world's."""

    lease: Lease
    offset: float = 0.0
    next_look: float = 0.0
    frozen_until: float = 0.0
    away_until: float = 0.0
    late: tuple[float, float, LeaseRecord | None, LeaseRecord] | None = None
    changes: list[Change] = field(default_factory=list)

    def may_order(self, now: float) -> bool:
        return now + self.offset < self.lease.may_lead_until

    def look(self, now: float, store: Store, delay_s: float = 0.0) -> None:
        seen = store.record
        write, change = self.lease.look(now + self.offset, seen)
        if change is not Change.NONE:
            self.changes.append(change)
        if write is not None:
            self.late = (now + delay_s, now + self.offset, seen, write)

    def write(self, now: float, store: Store) -> None:
        if self.late is not None and now >= self.late[0]:
            _, looked_at, seen, write = self.late
            self.late = None
            if store.replace(seen, write):
                change = self.lease.wrote(looked_at, write)
                if change is not Change.NONE:
                    self.changes.append(change)


class World:
    def __init__(self, num_servers: int = 2, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.store = Store()
        self.servers = [
            OneServer(Lease(f"server-{i}", LEASE_S, "model", "s"), offset=1000.0 * i)
            for i in range(num_servers)
        ]
        self.terms: list[int] = []

    def run(self, seconds: float, step_s: float = 0.05, max_delay_s: float = 0.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            for server in self.servers:
                self._let(server, max_delay_s)
            self.check()

    def _let(self, server: OneServer, max_delay_s: float) -> None:
        if self.now < server.frozen_until:
            return
        if self.now >= server.away_until:
            server.write(self.now, self.store)
        if self.now >= server.next_look and server.late is None:
            server.next_look = self.now + LOOK_S
            if self.now < server.away_until:
                server.lease.store_away()
            else:
                server.look(self.now, self.store, self.random.uniform(0.0, max_delay_s))

    def check(self) -> None:
        leaders = self.leaders()
        assert len(leaders) <= 1, f"at {self.now:.2f} s: {[s.lease.server for s in leaders]}"
        if self.store.record is not None and self.store.record.term not in self.terms[-1:]:
            self.terms.append(self.store.record.term)

    def leaders(self) -> list[OneServer]:
        return [server for server in self.servers if server.may_order(self.now)]


def led(world: World) -> str:
    (leader,) = world.leaders()
    return leader.lease.server


def test_one_of_two_that_start_together_leads_and_goes_on() -> None:
    world = World()
    world.run(LEASE_S + 2 * LOOK_S)
    first = led(world)
    world.run(60.0)
    assert led(world) == first
    assert world.terms == [1]


def test_another_one_leads_a_lease_and_a_look_after_the_leader_fell_silent() -> None:
    world = World()
    world.run(10.0)
    first, second = sorted(world.servers, key=lambda s: s.lease.server != led(world))
    first.frozen_until = world.now + 60.0
    world.run(LEASE_S - LOOK_S)
    assert world.leaders() in ([first], [])
    world.run(2 * LOOK_S + 0.1)
    assert world.leaders() == [second]
    world.run(60.0)  # the first one is back, for a while
    assert first.changes == [Change.LEADS, Change.LOST]
    assert (world.leaders(), world.terms) == ([second], [1, 2])
    assert epoch_of(2, 1) > epoch_of(1, 999_999)


def test_a_server_that_looks_late_takes_over_all_the_same() -> None:
    """On a machine with no time left, each look seemed to end an outage, and nobody took over."""
    world = World()
    world.run(10.0)
    (first,) = world.leaders()
    (second,) = [server for server in world.servers if server is not first]
    first.frozen_until = world.now + 1e9
    for _ in range(3):
        second.frozen_until = world.now + 0.8 * LEASE_S
        world.run(LEASE_S)
    assert world.leaders() == [second]


def test_one_that_gives_up_is_followed_at_the_next_look() -> None:
    world = World()
    world.run(10.0)
    (first,) = world.leaders()
    (second,) = [server for server in world.servers if server is not first]
    given = first.lease.give_up()
    assert given is not None
    assert world.store.replace(world.store.record, given)
    first.frozen_until = 1e9
    world.run(LOOK_S + 0.1)
    assert world.leaders() == [second]


def test_without_the_store_nobody_takes_over_and_the_leader_is_the_same_afterwards() -> None:
    world = World()
    world.run(10.0)
    first = led(world)
    for server in world.servers:
        server.away_until = world.now + 300.0
    world.run(LEASE_S)
    assert world.leaders() == []  # it cannot know that nobody else has taken over
    world.run(300.0)
    assert led(world) == first
    assert world.terms == [1]


def test_a_leader_writes_its_record_again_where_the_store_has_lost_it() -> None:
    world = World(num_servers=3)
    world.run(10.0)
    first = led(world)
    world.store.record = None
    newcomer = OneServer(Lease("server-9", LEASE_S, "model", "s"))
    world.servers.append(newcomer)
    world.run(30.0)
    assert led(world) == first
    assert (world.terms, newcomer.changes) == ([1], [])


def test_a_record_of_an_older_term_is_replaced() -> None:
    """The store came back with what it had a while ago."""
    world = World()
    world.run(10.0)
    old = world.store.record
    (first,) = world.leaders()
    first.frozen_until = world.now + 20.0
    world.run(19.0)
    second = led(world)
    first.frozen_until = 1e9
    world.store.record = old
    world.run(5.0)
    assert led(world) == second
    assert world.terms == [1, 2, 1, 2]


@pytest.mark.parametrize("away_s", [0.0, 12.0])
def test_a_newcomer_does_not_lead_in_an_older_term_once_the_store_is_empty(away_s: float) -> None:
    """Workers and routers refuse who does. The follower may be away until the newcomer leads."""
    world = World()
    world.run(10.0)
    (first,) = world.leaders()
    (follower,) = [server for server in world.servers if server is not first]
    assert world.store.record is not None
    first.lease._term = 7  # as after six takeovers
    world.store.record = msgspec.structs.replace(world.store.record, term=7)
    world.run(2 * LOOK_S)
    first.frozen_until = 1e9
    world.store.record = None
    newcomer = OneServer(Lease("server-9", LEASE_S, "model", "s"))
    world.servers.append(newcomer)
    follower.away_until = world.now + away_s
    world.terms.clear()
    world.run(away_s)
    assert (world.leaders() == [newcomer]) is (away_s > LEASE_S)
    world.run(2 * LEASE_S)
    assert world.terms[-1] == 8
    assert len(world.leaders()) == 1
    assert world.terms == ([1, 7, 8] if away_s else [7, 8])


@pytest.mark.parametrize("seed", range(20))
def test_no_two_lead_where_the_store_loses_what_it_had(seed: int) -> None:
    world = World(num_servers=3, seed=seed)
    draw = world.random
    for number in range(25):
        server = draw.choice(world.servers)
        world.run(draw.uniform(2.0, 4.0) * LEASE_S)  # no two losses within one lease
        if any(each.late for each in world.servers):
            continue  # what is on its way would find the store as empty as before
        server.frozen_until = world.now + draw.choice((0.5, 3.0, 8.0, 20.0))
        world.store.record = None
        if draw.random() < 0.3:
            others = [each for each in world.servers if each is not server]
            name = f"server-{number + 10}"
            world.servers = [*others, OneServer(Lease(name, LEASE_S, "model", "s"))]
    for server in world.servers:
        server.frozen_until = world.now
    world.run(3 * LEASE_S)
    assert len(world.leaders()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_two_lead_at_a_time_whatever_is_stopped_cut_off_or_late(seed: int) -> None:
    world = World(num_servers=3, seed=seed)
    draw = world.random
    for _ in range(25):
        server = draw.choice(world.servers)
        until = world.now + draw.choice((0.5, 3.0, 5.0, 8.0, 20.0))
        if draw.random() < 0.5:
            server.frozen_until = until
        else:
            server.away_until = until
        world.run(draw.uniform(0.5, 8.0), max_delay_s=draw.choice((0.0, 0.3, 2.0)))
    assert world.terms == sorted(world.terms)
    for server in world.servers:
        server.frozen_until = server.away_until = world.now
    world.run(2 * LEASE_S)
    assert len(world.leaders()) == 1


def test_a_server_of_another_model_is_refused_in_words() -> None:
    lease = Lease("server-0", LEASE_S, "qwen", "s")
    other = LeaseRecord(term=1, holder="server-1", model="smollm2-135m", settings="t")
    assert "smollm2-135m and this server qwen" in lease.why_not_join(other)
    assert not lease.why_not_join(None)
    lease.checkpoints = {"": "ab"}
    in_another_folder = msgspec.structs.replace(other, checkpoints={"": "ab"})
    assert not lease.why_not_join(in_another_folder)
    assert lease.why_not_join(msgspec.structs.replace(other, checkpoints={"": "cd"}))
    assert lease.has_other_settings(other)


def test_who_follows_learns_where_the_controller_is() -> None:
    world = World()
    world.run(10.0)
    (first,) = world.leaders()
    (second,) = [server for server in world.servers if server is not first]
    first.lease.controller = peer = Peer("controller", "10.0.0.1", 7000, epoch_of(1, 1))
    world.run(3 * LOOK_S)
    assert second.lease.seen is not None
    assert second.lease.seen.controller == peer
