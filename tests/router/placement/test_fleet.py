"""The workers of one role, least busy first: always in the order of what was last told of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import Fleet
from tests.router.script import worker_info

NAMES = [f"decode-{n}" for n in range(6)]


class FleetMachine(RuleBasedStateMachine):
    """`told` has how busy each worker was at its last update: by the requests that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, tuple[int, int]] = {}
        self.living: dict[str, Endpoint] = {}
        self.dead: list[Endpoint] = []
        self.fleet = Fleet("router-0", CostModel())

    def note(self, endpoint: Endpoint) -> None:
        self.told[endpoint.worker] = (len(endpoint.bookings), endpoint.chosen_at)

    @rule(name=st.sampled_from(NAMES))
    def come(self, name: str) -> None:
        """Comes for the first time, or as a new incarnation."""
        old = self.living.get(name)
        if old is not None:
            self.fleet.remove(old)
            self.dead.append(old)
        made = self.living[name] = Endpoint(worker_info(name), last_seen_at=0.0)
        self.fleet.add(0.0, made)
        self.note(made)

    @rule(name=st.sampled_from(NAMES), busy=st.integers(0, 3), chosen_at=st.integers(0, 3))
    def change(self, name: str, busy: int, chosen_at: int) -> None:
        if name in self.living:
            endpoint = self.living[name]
            for request_id in list(endpoint.bookings):
                endpoint.release(request_id)
            for number in range(busy):
                endpoint.book(0.0, f"r{number}", 0, 0)
            endpoint.chosen_at = chosen_at

    @rule(name=st.sampled_from(NAMES))
    def update(self, name: str) -> None:
        if name in self.living:
            self.fleet.update(0.0, self.living[name])
            self.note(self.living[name])

    @rule(name=st.sampled_from(NAMES))
    def go(self, name: str) -> None:
        if name in self.living:
            self.dead.append(self.living.pop(name))
            del self.told[name]
            self.fleet.remove(self.dead[-1])

    @rule(data=st.data())
    def hear_of_the_dead(self, data: st.DataObject) -> None:
        """What is said of an earlier life changes nothing, even where there is a new one."""
        if self.dead:
            endpoint = data.draw(st.sampled_from(self.dead))
            self.fleet.update(0.0, endpoint)
            self.fleet.remove(endpoint)

    @invariant()
    def in_order(self) -> None:
        order = self.fleet.least_busy()
        assert len(order) == len(self.fleet) == len(self.living)
        assert {id(endpoint) for endpoint in order} == {id(e) for e in self.living.values()}
        keys = [self.told[endpoint.worker] for endpoint in order]
        assert keys == sorted(keys)
        assert [endpoint.worker for endpoint in self.fleet] == sorted(self.living)
        assert all(self.fleet.get(name) is self.living.get(name) for name in NAMES)

    @invariant()
    def room(self) -> None:
        has_room = any(len(e.bookings) < 3 and e.alive for e in self.living.values())
        assert self.fleet.has_room(0.0, 3) == has_room


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def order_of(salt: str, num_workers: int) -> list[str]:
    fleet = Fleet(salt, CostModel())
    for number in range(num_workers):
        fleet.add(0.0, Endpoint(worker_info(f"decode-{number}"), last_seen_at=0.0))
    return [endpoint.worker for endpoint in fleet.least_busy()]


def test_equally_busy_workers_come_in_an_order_of_the_routers_own() -> None:
    orders = {tuple(order_of(f"router-{number}", 16)) for number in range(4)}
    assert len(orders) == 4
    assert order_of("router-0", 16) == order_of("router-0", 16)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_is_as_busy_as_its_pool_is_full_or_its_prompts_are_late(role: str) -> None:
    fleet, workers = Fleet("", CostModel()), []
    for number in range(3):
        workers.append(Endpoint(worker_info(f"{role}-{number}"), last_seen_at=0.0))
        fleet.add(0.0, workers[-1])
    workers[0].book(0.0, "long", 900, 40, 9.0)
    for number in range(2):
        workers[1].book(0.0, f"short {number}", 300, 10, 3.0)
    for worker in workers:
        fleet.update(0.0, worker)
    assert fleet.least_busy() == [workers[2], workers[1], workers[0]]
