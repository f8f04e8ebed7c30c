"""The workers of one role, least busy first: always in the order of what was last told of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.endpoint import Endpoint
from router.fleet import Fleet
from tests.router.script import worker_info

NAMES = [f"decode-{n}" for n in range(6)]


class FleetMachine(RuleBasedStateMachine):
    """`told` has how busy each worker was at its last update, `busy` how busy it is by now."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: dict[str, float] = {}
        self.told: dict[str, tuple[float, int]] = {}
        self.living: dict[str, Endpoint] = {}
        self.dead: list[Endpoint] = []
        self.fleet = Fleet("router-0", lambda now, endpoint: self.busy[endpoint.worker])

    def note(self, endpoint: Endpoint) -> None:
        self.told[endpoint.worker] = (self.busy[endpoint.worker], endpoint.chosen_at)

    @rule(name=st.sampled_from(NAMES), busy=st.integers(0, 3))
    def come(self, name: str, busy: int) -> None:
        """The first time, or in a new life."""
        old = self.living.get(name)
        if old is not None:
            self.fleet.remove(old)
            self.dead.append(old)
        self.busy[name] = float(busy)
        made = self.living[name] = Endpoint(worker_info(name), heard_at=0.0)
        self.fleet.add(0.0, made)
        self.note(made)

    @rule(name=st.sampled_from(NAMES), busy=st.integers(0, 3), chosen_at=st.integers(0, 3))
    def change(self, name: str, busy: int, chosen_at: int) -> None:
        if name in self.living:
            self.busy[name] = float(busy)
            self.living[name].chosen_at = chosen_at

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
        order = list(self.fleet.least_busy())
        assert len(order) == len(self.fleet) == len(self.living)
        assert {id(endpoint) for endpoint in order} == {id(e) for e in self.living.values()}
        keys = [self.told[endpoint.worker] for endpoint in order]
        assert keys == sorted(keys)
        assert [endpoint.worker for endpoint in self.fleet] == sorted(self.living)
        assert all(self.fleet.get(name) is self.living.get(name) for name in NAMES)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def order_of(salt: str, num_workers: int) -> list[str]:
    fleet = Fleet(salt, lambda now, endpoint: 0.0)
    for number in range(num_workers):
        fleet.add(0.0, Endpoint(worker_info(f"decode-{number}"), heard_at=0.0))
    return [endpoint.worker for endpoint in fleet.least_busy()]


def test_equally_busy_workers_come_in_an_order_of_the_routers_own() -> None:
    orders = {tuple(order_of(f"router-{number}", 16)) for number in range(4)}
    assert len(orders) == 4
    assert order_of("router-0", 16) == order_of("router-0", 16)
