"""What one tenant keeps and pins is at its own cost, not at the others'."""

from __future__ import annotations

from typing import Any

from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.router.messages import SessionLimits, SessionRefusal, TenantShare
from tests.router.sessions.session_script import SessionScript, names_of


def turn(script: SessionScript, tenant: str, name: str, num_tokens: int = 10, **limits: int) -> Any:
    """A turn that leaves a session of `num_tokens`."""
    share = TenantShare(sessions=SessionLimits(**limits))
    return script.turn(name, range(num_tokens - 2), tenant=tenant, share=share)


def test_a_tenant_that_pins_all_that_fits_does_not_drive_out_the_others() -> None:
    script = SessionScript("decode-0", max_tokens=100)
    for name in "abcd":
        turn(script, "small", name)
    for i in range(20):
        turn(script, "greedy", f"g{i}")
        script.ask("pin", f"g{i}", tenant="greedy")
    assert script.names("small") == ["a", "b", "c", "d"]
    assert len(script.names("greedy")) == 6


def test_the_same_by_the_number_of_sessions() -> None:
    script = SessionScript("decode-0", max_sessions=10)
    turn(script, "small", "a", 40)
    for i in range(20):
        turn(script, "greedy", f"g{i:02}")
        script.ask("pin", f"g{i:02}", tenant="greedy")
    assert script.names("small") == ["a"]
    assert script.names("greedy")[:8] == [f"g{i:02}" for i in range(8)]


def test_where_the_largest_is_all_active_the_next_one_makes_room() -> None:
    script = SessionScript("decode-0", max_sessions=3)
    live = [script.begin(f"g{i}", tenant="greedy") for i in range(3)]
    turn(script, "small", "a")
    assert script.names("small") == []
    for request_id in live:
        script.cancel(request_id)
    turn(script, "small", "a")
    assert script.names("small") == ["a"]


def test_the_limits_of_a_tenant_are_its_own() -> None:
    script = SessionScript("decode-0", max_per_tenant=5)
    for name in "abcdefgh":
        turn(script, "two", name, max_sessions=2)
        turn(script, "seven", name, max_sessions=7)
        turn(script, "none", name)
        turn(script, "tokens", name, max_tokens=35)
    assert script.names("two") == ["g", "h"]
    assert script.names("seven") == list("bcdefgh")
    assert script.names("none") == list("defgh")
    assert script.names("tokens") == list("fgh")


def test_more_than_may_be_pinned_is_refused_by_name() -> None:
    script = SessionScript("decode-0")
    limits = SessionLimits(max_pinned_tokens=25)
    for name in "abc":
        turn(script, "t", name, max_pinned_tokens=25)
    for name in "ab":
        assert script.ask("pin", name, tenant="t", limits=limits).refusal is None
    assert script.ask("pin", "a", tenant="t", limits=limits).refusal is None  # it is already
    refused = script.ask("pin", "c", tenant="t", limits=limits)
    assert refused.refusal is SessionRefusal.LIMIT
    assert "'c' has 10 tokens, 20 are pinned" in refused.detail
    assert "may pin 25 (max_pinned_tokens)" in refused.detail
    assert not script.show("c", tenant="t").pinned
    script.ask("unpin", "a", tenant="t")
    assert script.ask("pin", "c", tenant="t", limits=limits).refusal is None
    turn(script, "other", "c", max_pinned_tokens=25)
    assert script.ask("pin", "c", tenant="other", limits=limits).refusal is None


def test_a_pinned_session_that_grows_beyond_the_limit_is_unpinned() -> None:
    script = SessionScript("decode-0")
    tokens = turn(script, "t", "a", 20, max_pinned_tokens=25)
    script.holds("decode-0", device=names_of(tokens))
    script.ask("pin", "a", tenant="t", limits=SessionLimits(max_pinned_tokens=25))
    tokens = turn(script, "t", "a", 25, max_pinned_tokens=25)
    assert script.show("a", tenant="t").pinned
    tokens = turn(script, "t", "a", 26, max_pinned_tokens=25)
    assert not script.show("a", tenant="t").pinned
    assert script.obeyed[-1][1].action is CacheAction.UNPIN
