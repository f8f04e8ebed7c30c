"""Sessions: what a turn leaves behind, what commands do, and what time does."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import FinishReason
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.router.messages import (
    SessionCommand,
    SessionOp,
    SessionRefusal,
    SessionReply,
    SessionState,
)
from tests.router.script import BLOCK
from tests.router.sessions.session_script import API, SessionScript, names_of


def test_a_session_is_what_its_last_turn_ended_with() -> None:
    script = SessionScript("decode-0")
    request_id = script.begin("s", range(10))
    info = script.show("s")
    assert (info.state, info.num_tokens, info.num_turns) == (SessionState.ACTIVE, 0, 0)
    script.deliver(request_id, 50)
    script.deliver(request_id, 51, finish=FinishReason.STOP)
    script.pass_time(3.0)
    info = script.show("s")
    assert (info.state, info.num_tokens, info.num_turns) == (SessionState.IDLE, 12, 1)
    assert info.num_blocks == 11 // BLOCK  # the KV of the last token was not computed
    assert (info.worker, info.last_used_s, info.pinned) == ("decode-0", 3.0, False)
    script.turn("s", [*range(10), 50, 51, 7, 8, 9])
    info = script.show("s")
    assert (info.num_tokens, info.num_turns) == (17, 2)
    assert (info.age_s, info.last_used_s) == (3.0, 0.0)


def test_a_request_without_a_session_leaves_none() -> None:
    script = SessionScript("decode-0")
    script.deliver(script.begin(None), 50, finish=FinishReason.STOP)
    assert script.names() == []
    assert script.wakes == [(script.now + 0.25, "tick")]  # the router's own, for the request


def test_a_turn_that_brought_no_token_changes_nothing() -> None:
    script = SessionScript("decode-0")
    script.cancel(script.begin("new"))
    assert script.names() == []
    script.turn("s")
    request_id = script.begin("s", range(30))
    assert script.show("s").state is SessionState.ACTIVE
    script.cancel(request_id)
    info = script.show("s")
    assert (info.state, info.num_tokens, info.num_turns) == (SessionState.IDLE, 12, 1)


def test_a_turn_that_was_stopped_halfway_counts_as_far_as_it_came() -> None:
    script = SessionScript("decode-0")
    request_id = script.begin("s", range(10))
    script.deliver(request_id, 50, 51, 52)
    script.cancel(request_id)
    info = script.show("s")
    assert (info.state, info.num_tokens, info.num_turns) == (SessionState.IDLE, 13, 1)


def test_a_session_is_active_while_any_of_its_turns_runs() -> None:
    script = SessionScript("decode-0")
    first, second = script.begin("s", range(10)), script.begin("s", range(20))
    script.deliver(second, 50, finish=FinishReason.STOP)
    assert script.show("s").state is SessionState.ACTIVE
    assert script.show("s").num_tokens == 21
    script.deliver(first, 50, finish=FinishReason.STOP)
    assert script.show("s").state is SessionState.IDLE
    assert script.show("s").num_tokens == 11


def test_a_turn_that_goes_on_elsewhere_ends_there() -> None:
    script = SessionScript("decode-0", "decode-1")
    request_id = script.begin("s")
    script.deliver(request_id, 50)
    first = script.router._requests.live[request_id].current
    assert first is not None
    script.down(first.decode.worker)
    script.deliver(request_id, 51, finish=FinishReason.STOP)
    info = script.show("s")
    assert {first.decode.worker, info.worker} == {"decode-0", "decode-1"}
    assert info.num_tokens == 12


def test_a_tenant_sees_its_own_sessions_only() -> None:
    script = SessionScript("decode-0")
    script.turn("s", range(10), tenant="a")
    script.turn("s", range(20), tenant="b")
    assert script.show("s", tenant="a").num_tokens == 12
    assert script.show("s", tenant="b").num_tokens == 22
    assert script.names("c") == []
    for op in set(SessionOp) - {SessionOp.LIST}:
        reply = script.ask(op, "s", "t", tenant="c")
        assert (reply.refusal, reply.sessions) == (SessionRefusal.UNKNOWN, ())
        assert reply.detail == "there is no session 's'"
    assert script.names("a") == ["s"]


def test_a_list_comes_in_pages() -> None:
    script = SessionScript("decode-0")
    for name in ("e", "a", "d", "b", "c"):
        script.turn(name)
    pages = []
    after = ""
    for _ in range(3):
        reply = script.ask("list", after, limit=2)
        pages.append(([info.session for info in reply.sessions], reply.has_more))
        after = reply.sessions[-1].session
    assert pages == [(["a", "b"], True), (["c", "d"], True), (["e"], False)]


def test_a_page_ends_early_rather_than_look_at_too_many_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.router.sessions.sessions.MAX_LISTED_BLOCKS", 5)
    script = SessionScript("decode-0")
    for name in "abc":
        script.turn(name)  # has 2 blocks
    reply = script.ask("list")
    assert ([info.session for info in reply.sessions], reply.has_more) == (["a", "b"], True)


def test_info_says_where_the_blocks_are() -> None:
    script = SessionScript("decode-0", "decode-1", "prefill-0")
    names = names_of(script.turn("s", range(30)))
    assert len(names) == 7
    script.holds("prefill-0", device=names)
    script.holds("decode-0", device=names[:2], host=names[:3])
    script.holds("decode-1", device=names[:1], host=names, disk=names[:4])
    info = script.show("s")
    assert info.num_blocks == 7
    assert [(holder.worker, holder.num_blocks) for holder in info.holders] == [
        ("decode-1", {Tier.DEVICE: 1, Tier.HOST: 7, Tier.DISK: 4}),
        ("prefill-0", {Tier.DEVICE: 7}),
        ("decode-0", {Tier.DEVICE: 2, Tier.HOST: 3}),
    ]


def test_park_asks_all_that_hold_blocks_and_waits_for_all() -> None:
    script = SessionScript("decode-0", "decode-1", "prefill-0")
    names = names_of(script.turn("s", range(30)))
    worker = script.show("s").worker
    assert worker is not None
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[worker]
    script.holds(worker, device=names)
    script.holds("prefill-0", device=names[:3])
    script.command("park", "s")
    orders = {to: m for to, m in script.sent if isinstance(m, CacheOrder)}
    assert set(orders) == {worker, "prefill-0"}
    for order in orders.values():
        assert (order.action, order.block_hashes, order.router) == (
            CacheAction.PARK,
            names,
            "router-0",
        )
    script.tell(CacheOrderDone(other, orders[worker].order_id, 7))  # nobody has asked it
    script.tell(CacheOrderDone("prefill-0", orders["prefill-0"].order_id, 3))
    assert script.take(SessionReply) == []
    script.tell(CacheOrderDone(worker, orders[worker].order_id, 7))
    reply = script.one(SessionReply, API)
    assert (reply.refusal, reply.done) == (None, {worker: 7, "prefill-0": 3})
    assert reply.sessions[0].state is SessionState.PARKED
    assert script.router.check_idle() == []


def test_the_worker_of_the_last_turn_is_asked_though_the_index_knows_nothing() -> None:
    script = SessionScript("decode-0", "decode-1")
    names = names_of(script.turn("s"))
    worker = script.show("s").worker
    script.command("pin", "s")
    assert [(to, m.block_hashes) for to, m in script.sent if isinstance(m, CacheOrder)] == [
        (worker, names)
    ]


@pytest.mark.parametrize("op", ["park", "close"])
def test_what_is_in_use_is_neither_parked_nor_closed(op: str) -> None:
    script = SessionScript("decode-0")
    script.turn("s")
    script.begin("s", range(20))
    reply = script.ask(op, "s")
    assert reply.refusal is SessionRefusal.CONFLICT
    assert reply.detail == "session 's' is active: a turn is running"
    assert script.show("s").state is SessionState.ACTIVE


def test_without_an_answer_a_command_ends_at_its_deadline() -> None:
    script = SessionScript("decode-0", order_timeout_s=10.0, park_after_s=0)
    script.turn("s")
    script.command("park", "s")
    order = script.one(CacheOrder)
    script.pass_time(9.9)
    assert script.take(SessionReply) == []
    script.pass_time(0.5)
    reply = script.one(SessionReply)
    assert reply.refusal is SessionRefusal.DEADLINE
    assert reply.detail == "no answer within 10 s from decode-0"
    assert reply.sessions[0].session == "s"
    script.tell(CacheOrderDone("decode-0", order.order_id, 2))  # too late
    assert script.take(SessionReply) == []
    assert script.router.check_idle() == []


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    script = SessionScript("decode-0")
    script.turn("s")
    script.command("park", "s")
    script.down("decode-0")
    reply = script.one(SessionReply)
    assert (reply.refusal, reply.done) == (None, {})
    assert reply.sessions[0].num_blocks == 0  # nobody is up who could say
    assert script.ask("park", "s").refusal is None


def test_a_repeated_command_is_answered_once_and_too_many_are_refused() -> None:
    script = SessionScript("decode-0", max_commands=1)
    script.turn("s")
    command = SessionCommand("c", API, "", SessionOp.PARK, "s")
    script.tell(command)
    script.tell(command)
    assert len(script.take(CacheOrder)) == 1
    script.command("resume", "s")
    reply = script.one(SessionReply)
    assert (reply.refusal, reply.command_id) == (SessionRefusal.BUSY, reply.command_id)
    assert "1 commands wait" in reply.detail


def test_resume_asks_the_worker_that_would_go_on() -> None:
    script = SessionScript("decode-0", "decode-1", "prefill-0")
    names = names_of(script.turn("s", range(30)))
    script.holds("decode-0", disk=names[:2])
    script.holds("decode-1", host=names)
    script.holds("prefill-0", host=names)
    assert script.ask("park", "s").sessions[0].state is SessionState.PARKED
    script.command("resume", "s")
    assert [(to, order.action) for to, order in script.obey()] == [("decode-1", CacheAction.RESUME)]
    assert script.one(SessionReply).sessions[0].state is SessionState.IDLE


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        ({"decode-0": 0, "prefill-0": 7}, "prefill-0"),  # it decoded, and holds nothing now
        ({"decode-0": 3, "prefill-0": 7}, "prefill-0"),
        ({"decode-0": 4, "prefill-0": 7}, "decode-0"),
        ({"decode-0": 2, "decode-1": 7, "prefill-0": 7}, "decode-1"),
        ({"decode-0": 0}, "decode-0"),  # its events may not have come yet
    ],
)
def test_resume_asks_who_holds_the_session(held: dict[str, int], asked: str) -> None:
    script = SessionScript("decode-0")
    names = names_of(script.turn("s", range(30)))
    for worker, num_blocks in held.items():
        if worker != "decode-0":
            script.up(worker)
        script.holds(worker, host=names[:num_blocks])
    script.sent.clear()
    script.command("resume", "s")
    assert [to for to, _ in script.obey()] == [asked]


def test_a_fork_has_the_same_tokens_and_a_life_of_its_own() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s", range(10))
    script.pass_time(5.0)
    script.ask("pin", "s")
    (info,) = script.ask("fork", "s", "t").sessions
    assert (info.session, info.num_tokens, info.state) == ("t", 12, SessionState.IDLE)
    assert not info.pinned
    assert (info.last_used_s, info.age_s) == (5.0, 0.0)
    script.turn("t", [*tokens, 1, 2, 3])
    assert (script.show("s").num_tokens, script.show("t").num_tokens) == (12, 17)
    again = script.ask("fork", "s", "t")
    assert again.refusal is SessionRefusal.CONFLICT
    assert again.detail == "session 't' exists: close it first, or choose another name"
    script.begin("u")
    assert script.ask("fork", "u", "v").refusal is SessionRefusal.CONFLICT


def test_close_drops_what_no_other_session_stands_for() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s", range(20))
    script.ask("fork", "s", "t")
    longer = script.turn("t", [*tokens, *range(100, 120)])
    shared = len(tokens) // BLOCK
    script.command("close", "t")
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.DROP, names_of(longer)[shared:])
    reply = script.one(SessionReply)
    assert (reply.refusal, reply.sessions) == (None, ())
    assert script.names() == ["s"]
    script.command("close", "s")
    ((_, order),) = script.obey()
    assert order.block_hashes == names_of(tokens)
    assert script.names() == []


def test_closing_one_of_two_equal_sessions_drops_nothing() -> None:
    script = SessionScript("decode-0")
    script.turn("s")
    script.ask("fork", "s", "t")
    script.command("close", "s")
    assert script.obey() == []
    assert script.one(SessionReply).refusal is None


def test_close_does_not_drop_a_public_region() -> None:
    script = SessionScript("decode-0")
    scope = CacheScope(b"salt", num_public_tokens=2 * BLOCK + 1)
    tokens = script.turn("s", range(20), scope=scope)
    script.command("close", "s")
    ((_, order),) = script.obey()
    assert order.block_hashes == names_of(tokens, scope)[2:]


def test_pins_follow_the_session_as_it_grows() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s")
    script.command("pin", "s")
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.PIN, names_of(tokens))
    assert script.one(SessionReply).sessions[0].pinned
    longer = script.turn("s", [*tokens, *range(20)])
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.PIN, names_of(longer))
    script.command("unpin", "s")
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.UNPIN, names_of(longer))
    assert not script.one(SessionReply).sessions[0].pinned
    script.turn("s", [*longer, 1])
    assert script.obey() == []


def test_what_another_pinned_session_shares_stays_pinned() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s", range(20))
    script.ask("fork", "s", "t")
    longer = script.turn("t", [*tokens, *range(100, 120)])
    for name in ("s", "t"):
        script.ask("pin", name)
    script.command("close", "t")
    actions = [(order.action, order.block_hashes) for _, order in script.obey()]
    own = names_of(longer)[len(tokens) // BLOCK :]
    assert actions == [(CacheAction.UNPIN, own), (CacheAction.DROP, own)]


def test_what_another_tenants_pinned_session_shares_stays_pinned() -> None:
    """Only the public part of their prompts can be the same block; the rest has other salts."""
    script = SessionScript("decode-0")
    scopes = {name: CacheScope(name.encode(), num_public_tokens=2 * BLOCK) for name in "ab"}
    for tenant, scope in scopes.items():
        tokens = script.turn("s", range(20), tenant=tenant, scope=scope)
        script.ask("pin", "s", tenant=tenant)
    script.command("unpin", "s", tenant="a")
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (
        CacheAction.UNPIN,
        names_of(tokens, scopes["a"])[2:],
    )
    script.command("unpin", "s", tenant="b")
    ((_, order),) = script.obey()
    assert order.block_hashes == names_of(tokens, scopes["b"])


def test_what_only_an_unpinned_session_shares_is_unpinned() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s", range(20))
    script.ask("fork", "s", "t")
    script.ask("pin", "s")
    script.command("unpin", "s")
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.UNPIN, names_of(tokens))


def test_pins_are_told_again_to_a_worker_that_has_restarted() -> None:
    script = SessionScript("decode-0", park_after_s=0)
    names = names_of(script.turn("s"))
    script.ask("pin", "s")
    script.down("decode-0")
    script.up("decode-0", epoch=2)
    script.holds("decode-0", epoch=2, disk=names)
    script.pass_time(2.0)
    ((_, order),) = script.obey()
    assert (order.action, order.block_hashes) == (CacheAction.PIN, names)
