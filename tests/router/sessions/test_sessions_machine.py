"""Sessions under any order of turns, commands, time and lost workers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.request import FinishReason
from kvrelay.kvtransfer.messages import CacheOrder
from kvrelay.router.messages import SessionOp, SessionReply, SessionState
from kvrelay.router.sessions.sessions import TICK
from tests.router.sessions.session_script import SessionScript, names_of

NAMES = ("a", "b", "c", "d")
MAX_SESSIONS = 3
STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(NAMES), st.integers(1, 30)),
    st.tuples(st.sampled_from(["token", "finish", "cancel"]), st.integers(0, 3), st.just(0)),
    st.tuples(
        st.sampled_from([op for op in SessionOp if op is not SessionOp.LIST]),
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.sampled_from(["obey", "restart", "publish"]), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 12.0, 40.0]), st.just(0)),
)


class Run:
    """One run. `asked` counts commands, `answered` replies, by id."""

    def __init__(self) -> None:
        self.script = SessionScript(
            "decode-0",
            "decode-1",
            max_per_tenant=MAX_SESSIONS,
            park_after_s=5.0,
            order_timeout_s=10.0,
            retention=Retention(60.0),
            durable=True,
        )
        self.live: list[str] = []
        self.asked: list[str] = []
        self.answered: Counter[str] = Counter()
        self.epoch = 1

    def step(self, kind: str, first: object, second: object) -> None:
        script = self.script
        requests = script.router._requests.live
        self.live = [request_id for request_id in self.live if request_id in requests]
        match kind:
            case "begin":
                assert isinstance(first, str)
                assert isinstance(second, int)
                self.live.append(script.begin(first, range(second)))
            case "token" | "finish" | "cancel" if isinstance(first, int) and first < len(self.live):
                request_id = self.live[first]
                if kind == "cancel":
                    script.cancel(request_id)
                elif requests[request_id].current is not None:
                    finish = FinishReason.STOP if kind == "finish" else None
                    script.deliver(request_id, 50, finish=finish)
            case "obey":
                script.obey()
            case "restart":
                script.down("decode-0", self.epoch)
                self.epoch += 1
                script.up("decode-0", self.epoch)
            case "publish":
                held = [
                    n for s in script.router.sessions.table for n in s.block_hashes((b"tiny", 4))
                ]
                script.holds("decode-1", device=held, host=held[::2])
            case "wait":
                assert isinstance(first, float)
                script.pass_time(first)
            case _ if kind in list(SessionOp):
                self.asked.append(script.command(kind, str(first), str(second)))
        self.answered.update(reply.command_id for reply in script.take(SessionReply))

    def check(self) -> None:
        table = self.script.router.sessions.table
        num_active = sum(session.state is SessionState.ACTIVE for session in table)
        assert len(table) <= MAX_SESSIONS + num_active
        assert max(self.answered.values(), default=1) == 1
        saved = {
            session.name: session.tokens for session in table if session.saved and session.tokens
        }
        kept: dict[str, bytes] = {}
        for effect in self.script.stored:
            if hasattr(effect, "record"):
                kept[effect.record.session] = effect.record.tokens
            else:
                del kept[effect.session]
        assert kept == saved


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_commands_are_answered_once_and_limits_hold(
    steps: list[tuple[str, object, object]],
) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
        run.check()
    for request_id in list(run.script.router._requests.live):
        run.script.cancel(request_id)
    for session in list(run.script.router.sessions.table):
        run.script.command("unpin", session.name)
    run.step("wait", 11.0, 0)  # every command is overdue
    assert set(run.answered) >= set(run.asked)
    run.check()
    run.step("wait", 100.0, 0)  # every retention is over
    run.check()
    assert run.script.names() == []
    assert run.script.router.check_idle() == []
    assert [due for due in run.script.wakes if due[1] == TICK] == []


def test_names_that_are_kept_are_those_that_hashing_gives() -> None:
    script = SessionScript("decode-0")
    tokens = script.turn("s", range(30))
    (session,) = script.router.sessions.table
    kept = session.block_hashes((b"tiny", 4))
    session._hashes.clear()
    assert kept == session.block_hashes((b"tiny", 4)) == list(names_of(tokens))
    script.command("park", "s")
    assert script.one(CacheOrder).block_hashes == tuple(kept)
