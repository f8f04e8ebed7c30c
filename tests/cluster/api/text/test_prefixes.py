"""Which earlier prompt one begins as, and how far."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.api.calls import MAX_TOKENS, PromptHistory, num_common

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(TOKENS, TOKENS)
def test_what_two_prompts_have_in_common(a: list[int], b: list[int]) -> None:
    expected = next((i for i, pair in enumerate(zip(a, b, strict=False)) if len({*pair}) > 1), None)
    assert num_common(array("I", a), array("I", b)) == (
        min(len(a), len(b)) if expected is None else expected
    )


def test_the_closest_of_the_same_tenant_before_it() -> None:
    history = PromptHistory()
    history.add("short", "a", 1.0, [1, 2, 9])
    history.add("long", "a", 2.0, [1, 2, 3, 4])
    history.add("other's", "b", 3.0, [1, 2, 3, 4, 5])
    history.add("mine", "a", 4.0, [1, 2, 3, 7])
    history.add("after", "a", 5.0, [1, 2, 3, 7])
    found = history.closest("mine")
    assert found is not None
    assert (found.call, found.num_common) == ("long", 3)
    assert history.closest("short") is None
    assert history.closest("other's") is None
    assert history.closest("unknown") is None


def test_it_does_not_grow_without_bound() -> None:
    history = PromptHistory()
    for number in range(9):
        history.add(str(number), "", 0.0, [number] * (MAX_TOKENS // 4))
    assert not history.tokens("4")
    assert history.tokens("5")
