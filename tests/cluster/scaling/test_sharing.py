"""Models that share machines: who needs them has them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.scaling.sharing import Demand, shares


def test_who_has_nothing_to_do_gives_way() -> None:
    busy, idle = Demand(0, 4, 8), Demand(0, 0, 8)
    assert shares(4, {"a": busy, "b": idle}) == {"a": 4, "b": 0}
    assert shares(4, {"a": idle, "b": busy}) == {"a": 0, "b": 4}


def test_one_that_wakes_gets_a_worker_however_busy_the_other_is() -> None:
    assert shares(4, {"a": Demand(0, 100, 100), "b": Demand(0, 1, 8)}) == {"a": 3, "b": 1}


def test_where_all_need_more_than_there_is_it_is_divided_by_need() -> None:
    assert shares(6, {"a": Demand(0, 8, 8), "b": Demand(0, 4, 8)}) == {"a": 4, "b": 2}
    assert shares(2, {name: Demand(0, 9, 9) for name in "abc"}) == {"a": 1, "b": 1, "c": 0}


def test_what_nobody_needs_is_room_for_each() -> None:
    assert shares(6, {"a": Demand(0, 2, 8), "b": Demand(0, 0, 8)}) == {"a": 3, "b": 3}


def test_each_has_its_least_and_no_more_than_its_most() -> None:
    found = shares(6, {"a": Demand(0, 9, 9), "b": Demand(2, 0, 2), "c": Demand(0, 0, 1)})
    assert found == {"a": 4, "b": 2, "c": 0}
    assert shares(1, {"a": Demand(1, 1, 4), "b": Demand(1, 1, 4)}) == {"a": 1, "b": 1}


DEMANDS = st.builds(
    lambda least, more, needed: Demand(least, needed, least + more),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 9),
)


@given(st.integers(1, 20), st.lists(DEMANDS, min_size=1, max_size=5))
def test_no_more_than_there_is_and_nothing_is_left_that_somebody_needs(
    total: int, given_demands: list[Demand]
) -> None:
    demands = {str(number): demand for number, demand in enumerate(given_demands)}
    found = shares(total, demands)
    least = sum(demand.least for demand in demands.values())
    assert sum(found.values()) <= max(total, least)
    for model, demand in demands.items():
        assert demand.least <= found[model] <= demand.most
    needs_more = [m for m, d in demands.items() if found[m] < min(d.needed, d.most)]
    if needs_more:
        assert sum(found.values()) >= total
        for model, demand in demands.items():
            if model not in needs_more:
                assert found[model] <= max(demand.least, min(demand.needed, demand.most))
