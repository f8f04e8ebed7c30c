"""What every provider has to keep. A test module of an implementation gives `make`, and gets the
tests by `from tests.cluster.scaling.provider_contract import *` beside a fixture `world`.
"""

from __future__ import annotations

from typing import Protocol

from kvrelay.cluster.scaling.provider import NEXT, ManagedWorker, State, WorkerProvider
from kvrelay.engine.stats import Role


class World(Protocol):
    """A provider, and the means to let time pass."""

    provider: WorkerProvider
    start_s: float  # that a worker takes, about
    pending_timeout_s: float

    def pass_time(self, seconds: float) -> None: ...
    def take_all_places(self) -> None:
        """Nothing that is ordered from now on finds a place."""
        ...


def state_of(world: World, worker: str) -> ManagedWorker:
    return next(each for each in world.provider.workers() if each.worker == worker)


def test_an_order_returns_at_once_and_comes_up_later(world: World) -> None:
    worker = world.provider.start(Role.DECODE)
    known = state_of(world, worker)
    assert known.state in (State.PENDING, State.STARTING)
    assert known.role is Role.DECODE
    assert known.up_at is None
    world.pass_time(2 * world.start_s + 1)
    known = state_of(world, worker)
    assert known.state is State.UP
    assert known.up_at is not None
    assert known.up_at - known.ordered_at >= 0.5 * world.start_s


def test_ids_are_never_used_twice(world: World) -> None:
    first = world.provider.start(Role.PREFILL)
    world.provider.drain(first)
    world.pass_time(1)
    assert world.provider.start(Role.PREFILL) != first


def test_one_that_is_not_up_yet_goes_at_once(world: World) -> None:
    worker = world.provider.start(Role.DECODE)
    world.pass_time(0.2 * world.start_s)
    world.provider.drain(worker)
    world.pass_time(0.1)
    assert state_of(world, worker).state is State.GONE
    world.pass_time(2 * world.start_s + 1)
    assert state_of(world, worker).state is State.GONE


def test_an_idle_worker_drains_and_goes(world: World) -> None:
    worker = world.provider.start(Role.DECODE)
    world.pass_time(2 * world.start_s + 1)
    world.provider.drain(worker)
    assert state_of(world, worker).state in (State.DRAINING, State.GONE)
    world.provider.drain(worker)  # again: nothing
    world.pass_time(10)
    known = state_of(world, worker)
    assert known.state is State.GONE
    assert known.reason


def test_a_role_changes_until_it_drains(world: World) -> None:
    worker = world.provider.start(Role.DECODE)
    world.provider.flip(worker, Role.PREFILL)
    assert state_of(world, worker).role is Role.PREFILL
    world.pass_time(2 * world.start_s + 1)
    assert state_of(world, worker).role is Role.PREFILL
    world.provider.flip(worker, Role.DECODE)
    assert state_of(world, worker).role is Role.DECODE
    world.provider.drain(worker)
    world.provider.flip(worker, Role.PREFILL)
    assert state_of(world, worker).role is Role.DECODE


def test_one_without_a_place_is_given_up_with_its_reason(world: World) -> None:
    world.take_all_places()
    worker = world.provider.start(Role.PREFILL)
    world.pass_time(0.5 * world.pending_timeout_s)
    known = state_of(world, worker)
    assert known.state is State.PENDING
    assert known.reason
    world.pass_time(0.6 * world.pending_timeout_s)
    gone = state_of(world, worker)
    assert gone.state is State.GONE
    assert known.reason in gone.reason


def test_the_unknown_is_nobody(world: World) -> None:
    before = list(world.provider.workers())
    world.provider.drain("no such worker")
    world.provider.flip("no such worker", Role.PREFILL)
    assert list(world.provider.workers()) == before


def test_states_only_follow_their_table(world: World) -> None:
    seen: dict[str, State] = {}
    orders = [world.provider.start(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    for step in range(60):
        world.pass_time(world.start_s / 10)
        if step == 20:
            world.provider.drain(orders[1])
        for each in world.provider.workers():
            before = seen.get(each.worker, each.state)
            assert each.state is before or _reachable(before, each.state)
            seen[each.worker] = each.state
    assert seen[orders[1]] is State.GONE


def _reachable(begin: State, end: State) -> bool:
    """A look may miss states in between."""
    found, edge = {begin}, {begin}
    while edge:
        edge = {after for each in edge for after in NEXT[each]} - found
        found |= edge
    return end in found
