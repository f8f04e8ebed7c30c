"""Sessions of several routers: what each learns of the others', and what is never lost."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.request import FinishReason
from kvrelay.router.messages import SessionState
from kvrelay.router.sessions.session import DeleteSession, SaveSession, SessionsUpdated
from kvrelay.router.state import StateUp
from tests.router.sessions.session_script import SessionScript, names_of


def sharing(**config: object) -> SessionScript:
    return SessionScript("decode-0", durable=True, shared=True, park_after_s=30.0, **config)


def share(source: SessionScript, *others: SessionScript) -> SessionsUpdated:
    """All that `source` has stored is learned by the others."""
    records = tuple(e.record for e in source.stored if isinstance(e, SaveSession))
    closed = tuple(
        (e.tenant, e.session, e.version) for e in source.stored if isinstance(e, DeleteSession)
    )
    source.stored.clear()
    learned = SessionsUpdated(records, closed)
    for other in others:
        other.tell(learned)
    return learned


def test_a_session_of_one_router_is_known_to_the_other() -> None:
    first, second = sharing(), sharing()
    tokens = first.turn("s", tenant="t")
    share(first, second)
    info = second.show("s", tenant="t")
    assert (info.num_tokens, info.num_turns, info.state) == (12, 1, SessionState.IDLE)
    assert second.names("t") == ["s"]
    assert second.stored == []  # what was learned is not told again
    second.turn("s", [*tokens, 7, 8], tenant="t")
    share(second, first)
    assert first.show("s", tenant="t").num_turns == 2
    assert first.show("s", tenant="t").num_tokens == 16
    # Its blocks are found by the names that follow from its tokens.
    first.holds("decode-0", device=names_of([*tokens, 7, 8, 50, 51]))
    assert first.show("s", tenant="t").holders[0].num_blocks == {Tier.DEVICE: 3}


def test_parking_pinning_and_closing_are_known_to_the_other() -> None:
    first, second = sharing(), sharing()
    first.turn("s")
    for op, state, pinned in (
        ("park", SessionState.PARKED, False),
        ("resume", SessionState.IDLE, False),
        ("pin", SessionState.IDLE, True),
        ("unpin", SessionState.IDLE, False),
    ):
        first.ask(op, "s")
        share(first, second)
        info = second.show("s")
        assert (info.state, info.pinned) == (state, pinned), op
    first.ask("close", "s")
    share(first, second)
    assert second.names() == []


def test_of_two_states_the_higher_version_counts_and_then_the_later_use() -> None:
    script = sharing()
    script.turn("s")
    (saved,) = share(script).records
    assert saved.version == 1
    older = replace(saved, version=0, num_turns=70, idle_s=0.0)
    equal_but_earlier = replace(saved, num_turns=80, idle_s=5.0)
    script.tell(SessionsUpdated((older, equal_but_earlier, saved), (("", "s", 1),)))
    assert script.show("s").num_turns == 1
    script.pass_time(3.0)
    script.tell(SessionsUpdated((replace(saved, num_turns=90, idle_s=1.0),)))
    assert script.show("s").num_turns == 90
    script.tell(SessionsUpdated((replace(saved, num_turns=100, version=2, idle_s=50.0),)))
    assert script.show("s").num_turns == 100


def test_a_turn_that_runs_is_not_lost_to_what_others_do_meanwhile() -> None:
    first, second = sharing(), sharing()
    first.turn("s")
    share(first, second)
    running = second.begin("s", range(20))
    first.turn("s", range(5))
    share(first, second)
    assert second.show("s").state is SessionState.ACTIVE
    first.ask("close", "s")
    share(first, second)
    assert second.show("s").state is SessionState.ACTIVE
    second.deliver(running, 50, finish=FinishReason.STOP)
    (record,) = share(second, first).records
    assert record.version == 4  # after the turn, and the closing, of the other
    assert first.show("s").num_tokens == 21


def test_who_saw_the_last_turn_parks_it_and_the_other_only_much_later() -> None:
    first, second = sharing(), sharing()
    for script in (first, second):
        script.holds("decode-0", device=names_of([*range(10), 50, 51]))
    first.turn("s")
    share(first, second)
    for script in (first, second):
        script.pass_time(31.0)
    assert [order.action for _, order in first.obey()] == ["park"]
    assert second.obey() == []
    share(first, second)
    assert second.show("s").state is SessionState.PARKED
    first.turn("s")
    share(first, second)
    second.pass_time(89.0)  # the other is gone, it seems
    assert second.obey() == []
    second.pass_time(2.0)
    assert [order.action for _, order in second.obey()] == ["park"]


def test_what_expires_here_is_not_closed_for_the_others() -> None:
    first = sharing(retention=Retention(100.0))
    first.turn("s")
    first.stored.clear()
    first.pass_time(101.0)
    assert first.names() == []
    assert not any(isinstance(effect, DeleteSession) for effect in first.stored)


def test_what_has_expired_is_not_learned() -> None:
    first, second = sharing(retention=Retention(100.0)), sharing()
    first.turn("s")
    (record,) = share(first).records
    second.tell(SessionsUpdated((replace(record, idle_s=100.0),)))
    assert second.names() == []


def test_limits_hold_for_what_is_learned() -> None:
    first, second = sharing(), sharing(max_per_tenant=2)
    for name in ("a", "b", "c"):
        first.turn(name)
        first.pass_time(1.0)
    share(first, second)
    assert len(second.names()) == 2


def test_a_store_that_was_away_is_told_everything_again() -> None:
    script = sharing()
    for name in ("a", "b"):
        script.turn(name)
    script.turn("secret", retention=Retention(60.0, to_disk=False))
    kept = {e.record.session: e.record for e in script.stored if isinstance(e, SaveSession)}
    script.stored.clear()
    script.tell(StateUp())
    again = {e.record.session: e.record for e in script.stored if isinstance(e, SaveSession)}
    assert again == kept
    assert set(again) == {"a", "b"}
