"""When a place is free again: told by how long places were kept."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvrelay.cluster.api.limiter import (
    CALLER,
    UNKNOWN_RETRY_AFTER_S,
    Caller,
    ConcurrencyLimiter,
    LimitReached,
    Shares,
    Turns,
    network_of,
)


class Scene:
    def __init__(self, limit: int) -> None:
        self.now = 1000.0
        self.places = ConcurrencyLimiter(limit, lambda: self.now)

    def stay(self, seconds: float) -> None:
        with self.places.take():
            self.now += seconds

    @contextmanager
    def full(self) -> Iterator[None]:
        """Each place is taken, by a caller of its own."""
        token = CALLER.set(("",))
        with ExitStack() as taken:
            for number in range(self.places.limit):
                CALLER.set((str(number),))
                taken.enter_context(self.places.take())
            CALLER.reset(token)
            yield

    def refused(self) -> float:
        with pytest.raises(LimitReached) as caught, self.places.take():
            pass
        return caught.value.retry_after_s


def test_nothing_is_known_before_a_place_was_kept_for_any_time() -> None:
    scene = Scene(1)
    with scene.places.take():
        assert scene.refused() == UNKNOWN_RETRY_AFTER_S


def test_each_is_told_the_next_place_until_all_have_changed_hands() -> None:
    scene = Scene(4)
    scene.stay(20.0)
    with scene.full():
        assert [scene.refused() for _ in range(6)] == [5.0, 10.0, 15.0, 20.0, 20.0, 20.0]
        scene.now += 8.0
        assert scene.refused() == 17.0  # after those who were told; of the last, two are over
        scene.now += 12.0
        assert scene.refused() == 10.0
    assert scene.places.num_taken == 0
    scene.stay(0.0)  # there is room


def test_calls_that_hang_count_by_how_long_they_have_been_there() -> None:
    scene = Scene(2)
    for _ in range(3):
        scene.stay(0.5)
    with scene.full():
        assert scene.refused() == 0.25
        scene.now += 40.0
        assert scene.refused() == 20.0


def test_the_last_calls_count_for_more() -> None:
    scene = Scene(1)
    for seconds in [1.0] * 20 + [10.0] * 200:
        scene.stay(seconds)
    with scene.places.take():
        assert 9.9 < scene.refused() < 10.0


def test_a_place_is_free_again_however_a_call_ends() -> None:
    scene = Scene(1)
    with pytest.raises(ValueError, match="broken"), scene.places.take():
        raise ValueError("broken")
    assert scene.places.num_taken == 0


def test_somebody_alone_has_nearly_all_and_who_comes_finds_a_place() -> None:
    places = ConcurrencyLimiter(64, what="calls run")

    def fill(caller: Caller) -> tuple[int, str]:
        """How many it gets, and why no more."""
        CALLER.set(caller)
        for number in range(65):
            try:
                taken.enter_context(places.take())
            except LimitReached as reached:
                return number, str(reached)
        raise AssertionError

    def found(*callers: Caller) -> list[int]:
        return [contextvars.copy_context().run(fill, caller)[0] for caller in callers]

    with ExitStack() as taken:
        message = "56 calls run for this caller, its share of 64"
        assert contextvars.copy_context().run(fill, ("a",)) == (56, message)
        assert found(("b",), ("c",), ("d",), ("e",)) == [4, 2, 1, 1]
        assert contextvars.copy_context().run(fill, ("f",)) == (
            0,
            "64 calls run, which is the limit",
        )
    with ExitStack() as taken:  # however many addresses a tenant calls from
        assert found(("a", "1"), ("a", "2"), ("a", "3"), ("b", "1")) == [49, 4, 2, 5]
        assert found(*(("a", str(number)) for number in range(4, 20))) == [0] * 16
        assert found(("c", "1")) == [2]
    assert places.num_taken == 0
    assert not places._shares._taken


def test_shares_are_kept_whatever_comes_and_goes() -> None:
    rng, shares = random.Random(5), Shares(100)
    held: list[tuple[Caller, int]] = []
    for _ in range(3000):
        caller, amount = (rng.choice("abc"), rng.choice("12")), rng.randint(1, 9)
        had_none = shares.of(caller[:1]) == 0
        free = shares.limit - shares.num_taken
        if shares.take(caller, amount):
            held.append((caller, amount))
        else:
            assert not (had_none and amount <= free), "who has nothing finds what is there"
        if len(held) > 12 or rng.random() < 0.4:
            shares.give_back(*held.pop(rng.randrange(len(held)))) if held else None
        assert shares.num_taken == sum(amount for _, amount in held) <= shares.limit
    for each in held:
        shares.give_back(*each)
    assert not shares._taken


def test_who_has_nothing_gets_a_place_of_who_has_most() -> None:
    shares = Shares(12)
    for caller, num in {("a", "1"): 3, ("a", "2"): 4, ("b", "1"): 5}.items():
        for _ in range(num):
            shares.hold(caller)
    yields = {("c", "1"): ("a", "2"), ("b", "2"): ("b", "1"), ("a", "1"): None, ("c",): ("a",)}
    assert {caller: shares.who_yields(caller) for caller in yields} == yields
    shares.hand_over(("a", "2"), ("c", "1"))
    assert (shares.num_taken, shares.of(("a",)), shares.of(("c", "1"))) == (12, 6, 1)
    assert shares.who_yields(("c", "2")) is None, "its tenant has one, which another address has"
    few = Shares(2)
    for caller in (("a",), ("b",)):
        few.hold(caller)
    assert few.who_yields(("c",)) is None


@pytest.mark.parametrize(
    ("host", "network"),
    {
        "10.0.0.7": "10.0.0.7",
        "::ffff:10.0.0.7": "10.0.0.7",
        "2001:db8:1:2:3::4": "2001:db8:1:2::/64",
        "fe80::1%eth0": "fe80::/64",
        "": "",
    }.items(),
    ids=["v4", "mapped", "v6", "zone", "none"],
)
def test_an_address_is_that_of_a_network_of_one_client(host: str, network: str) -> None:
    assert network_of(host) == network


def in_turns(turns: Turns, jobs: list[tuple[str, str]], cancel: str = "") -> list[str]:
    """Which of `jobs` (caller, name) begin, in their order. All are asked for before one ends."""
    begun: list[str] = []

    async def job(caller: str, name: str, all_asked: asyncio.Event) -> None:
        CALLER.set(tuple(caller))
        try:
            async with turns.turn():
                begun.append(name)
                await all_asked.wait()
                await asyncio.sleep(0)
        except LimitReached:
            begun.append(f"{name} refused")

    async def run() -> None:
        all_asked = asyncio.Event()
        tasks = {name: asyncio.create_task(job(t, name, all_asked)) for t, name in jobs}
        for _ in range(3):
            await asyncio.sleep(0)
        if cancel:
            tasks.pop(cancel).cancel()
        all_asked.set()
        await asyncio.gather(*tasks.values())

    asyncio.run(asyncio.wait_for(run(), 10))
    return begun


def test_callers_take_turns() -> None:
    jobs = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
    turns = Turns(2, 10)
    assert in_turns(turns, jobs) == ["a1", "b1", "a2", "b2", "c1", "a3"]
    assert in_turns(turns, jobs, cancel="a2") == ["a1", "b1", "a3", "b2", "c1"]
    assert in_turns(turns, jobs, cancel="a1")[:2] == ["a1", "b1"]
    assert not turns._running.total()


def test_addresses_of_a_tenant_share_its_turns() -> None:
    jobs = [("a1", "x"), ("a2", "y"), ("a2", "z"), ("a1", "u"), ("b1", "v"), ("b1", "w")]
    assert in_turns(Turns(2, 10), jobs) == ["x", "v", "y", "w", "u", "z"]
    assert in_turns(Turns(1, 10), jobs) == ["x", "y", "v", "u", "w", "z"]


# How many of so few places an address has at most, and one of a tenant's.
FEW = {1: (1, 1), 2: (1, 1), 3: (2, 1), 4: (3, 2), 5: (4, 3), 6: (5, 4), 7: (6, 5), 8: (7, 6)}


@pytest.mark.parametrize("limit", FEW)
def test_nobody_has_all_of_a_few_places(limit: int) -> None:
    alone, tenants = Shares(limit), Shares(limit)
    for shares, first, most in ((alone, ("1",), FEW[limit][0]), (tenants, ("red", "1"), 0)):
        while shares.take(first):
            pass
        assert shares.num_taken == (most or FEW[limit][1])
        assert shares.take(("2",) if first == ("1",) else ("blue", "1")) == (limit > 1)
    tenant = Shares(limit)
    while tenant.take(("red", "1")) or tenant.take(("red", "2")):
        pass
    assert tenant.num_taken == FEW[limit][0], "however many addresses it calls from"


def test_those_that_wait_are_bounded_by_caller() -> None:
    jobs = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")]
    begun = in_turns(Turns(1, 1), jobs)
    assert begun == ["a1", "a3 refused", "b2 refused", "a2", "b1"]


def test_a_turn_that_does_not_come_is_refused() -> None:
    turns = Turns(1, 10)

    async def run() -> None:
        async with turns.turn():
            with pytest.raises(LimitReached):
                async with turns.turn(0.01):
                    raise AssertionError
        async with turns.turn(0.01):
            assert turns._running.total() == 1

    asyncio.run(run())
