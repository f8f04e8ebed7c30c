"""A request's way when nothing worse happens than repeats, gaps and an impatient client."""

from __future__ import annotations

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.messages import Abort, Probe
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams, TokenLogprobs
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.index.prefix_index import Held
from kvrelay.router.messages import Cancel, Failed, Output, Submit
from tests.router.script import BLOCK, CLIENT, Script, worker_info, worker_stats

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_a_request_is_sent_to_both_workers_and_streamed_to_its_end() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40), scope=CacheScope(b"tenant"))
    decode, prefill, order = s.dispatched()
    assert (decode, prefill) == ("decode-0", "prefill-0")
    assert (order.attempt, order.router, order.scope) == (1, "router-0", CacheScope(b"tenant"))
    assert order.tokens == tuple(range(40))
    assert order.num_prompt_tokens == 40
    assert order.sampling.max_tokens == 8
    assert order.timeout_s == 60.0
    s.now += 0.5
    sources = {"device": 4, "peer": 12}
    s.delta("prefill-0", 40, 7, num_cached_tokens=16, cached_by_source=sources)
    first = s.one(Output, CLIENT)
    assert (first.index, first.tokens, first.finish) == (0, (7,), None)
    assert (first.num_cached_tokens, first.cached_by_source) == (16, sources)
    s.now += 0.25
    s.delta("decode-0", 41, 8, 9)
    assert s.one(Output).index == 1
    s.now += 0.25
    s.delta("decode-0", 43, 999, finish=STOP, num_cached_tokens=4)
    last = s.one(Output)
    assert (last.index, last.tokens, last.finish) == (3, (999,), STOP)
    assert (last.num_cached_tokens, last.cached_by_source) == (16, sources)
    assert s.sent == []
    s.assert_idle()


def test_without_prefill_workers_the_decode_worker_does_it_all() -> None:
    s = Script("decode-0")
    s.submit(tokens=range(200))
    assert s.dispatched()[:2] == ("decode-0", None)


def test_both_may_report_the_first_token_and_it_is_streamed_once() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.delta("decode-0", 40, 7)
    s.delta("prefill-0", 40, 7)
    s.delta("decode-0", 40, 7, 8)
    assert s.streamed() == [7, 8]
    assert s.sent == []


def test_logprobs_follow_their_tokens_through_an_overlap() -> None:
    s = Script("decode-0")
    s.submit()
    probs = tuple(TokenLogprobs(-float(n)) for n in range(3))
    s.delta("decode-0", 10, 7, logprobs=probs[:1])
    s.delta("decode-0", 10, 7, 8, 9, logprobs=probs)
    first, second = s.take(Output)
    assert first.logprobs == probs[:1]
    assert second.logprobs == probs[1:]


def test_weights_are_told_at_the_end_and_before_where_they_changed() -> None:
    s = Script("decode-0")
    s.submit()
    s.delta("decode-0", 10, 7, weights=((0, "one"),))
    s.delta("decode-0", 11, 8, weights=((0, "one"), (11, "two")))
    s.delta("decode-0", 12, 999, finish=STOP)
    told = [output.weights for output in s.take(Output)]
    assert told == [(), ((0, "one"), (1, "two")), ((0, "one"), (1, "two"))]


def test_the_prefill_worker_may_end_it_and_the_decode_worker_is_told() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.delta("prefill-0", 40, 999, finish=STOP)
    assert s.one(Output).finish is STOP
    assert s.sent == [("decode-0", Abort("r", 1))]
    s.assert_idle()


def test_a_prefill_worker_that_was_not_needed_is_told() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.delta("decode-0", 40, 999, finish=STOP)
    s.take(Output)
    assert s.sent == [("prefill-0", Abort("r", 1))]


def test_the_log_ends_a_request_that_its_worker_does_not() -> None:
    s = Script("decode-0")
    s.submit(max_tokens=2)
    s.sent.clear()
    s.delta("decode-0", 10, 5, 6)
    assert s.one(Output).finish is LENGTH
    assert s.sent == [("decode-0", Abort("r", 1))]
    s.assert_idle()


def test_nothing_to_generate_needs_no_worker() -> None:
    s = Script("decode-0")
    s.submit(max_tokens=0)
    assert s.one(Output).finish is LENGTH
    assert s.sent == []
    s.assert_idle()


def test_a_gap_is_asked_for_once_and_filled() -> None:
    s = Script("decode-0", probe_after_s=5.0)
    s.submit()
    s.sent.clear()
    s.delta("decode-0", 10, 5)
    s.delta("decode-0", 12, 7)
    assert s.take(Probe, "decode-0") == [Probe("r", 1, "router-0", 11)]
    s.delta("decode-0", 13, 8)
    assert s.take(Probe) == []
    s.delta("decode-0", 11, 6, 7, 8)
    assert s.streamed() == [5, 6, 7, 8]
    s.delta("decode-0", 15, 1)
    assert len(s.take(Probe)) == 1, "an answered probe does not hold the next one back"


def test_a_gap_that_stays_is_asked_for_again_after_a_while() -> None:
    s = Script("decode-0", probe_after_s=1.0)
    s.submit()
    for step in range(7):
        s.delta("decode-0", 11 + step, 1)
        s.pass_time(0.25)
    assert len(s.take(Probe)) == 2


def test_deltas_nobody_waits_for_are_answered_with_abort_unless_they_end() -> None:
    s = Script("prefill-0", "decode-0", "decode-1")
    s.submit(tokens=range(40))
    decode, prefill, _ = s.dispatched()
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[decode]
    assert prefill is not None
    s.delta(other, 40, 3)
    s.delta(decode, 40, 3, attempt=7)
    s.delta(prefill, 10, 3, request_id="never heard of", attempt=2)
    s.delta(other, 41, 3, finish=STOP)
    assert s.sent == [
        (other, Abort("r", 1)),
        (decode, Abort("r", 7)),
        (prefill, Abort("never heard of", 2)),
    ]


def test_messages_of_another_epoch_or_an_unknown_worker_are_ignored() -> None:
    s = Script("decode-0")
    s.submit()
    s.sent.clear()
    s.delta("decode-0", 10, 5, epoch=2)
    s.delta("decode-9", 10, 5)
    s.refuse("decode-0", Refusal.WORKER_FAILED, epoch=0)
    s.refuse("decode-9", Refusal.WORKER_FAILED)
    s.refuse("decode-0", Refusal.WORKER_FAILED, attempt=2)
    s.tell(worker_stats("decode-9"))
    assert s.sent == []


def test_cancel_tells_both_workers_and_nobody_else() -> None:
    s = Script("prefill-0", "decode-0")
    s.submit(tokens=range(40))
    s.sent.clear()
    s.tell(Cancel("r"))
    s.tell(Cancel("r"))
    assert s.sent == [("decode-0", Abort("r", 1)), ("prefill-0", Abort("r", 1))]
    s.assert_idle()
    s.delta("decode-0", 40, 5)
    assert s.take(Output) == []
    assert s.router.status(s.now).totals.requests == {"cancelled": 1}


def test_cancel_in_the_queue_leaves_nothing() -> None:
    s = Script()
    s.submit()
    s.tell(Cancel("r"))
    s.up("decode-0")
    assert s.take(Decode) == []
    s.assert_idle()


def test_a_repeated_submit_runs_once() -> None:
    s = Script("decode-0")
    s.submit()
    s.submit()
    assert len(s.take(Decode)) == 1
    s.delta("decode-0", 10, 999, finish=STOP)
    s.sent.clear()
    s.submit()
    assert s.sent == []


def test_another_request_under_a_live_id_is_refused() -> None:
    s = Script("decode-0")
    s.submit()
    s.sent.clear()
    s.tell(Submit("r", SamplingParams(), "another-api", (1, 2), 60.0))
    assert s.one(Failed, "another-api").reason is Refusal.DUPLICATE
    s.delta("decode-0", 10, 5)
    assert s.streamed() == [5]


def test_ended_ids_are_remembered_up_to_a_bound() -> None:
    s = Script("decode-0", max_ended=2)
    for name in "abc":
        s.submit(name)
        s.delta("decode-0", 10, 999, request_id=name, finish=STOP)
    s.sent.clear()
    s.submit("c")
    assert s.sent == []
    s.submit("a")
    assert s.one(Decode).request_id == "a"


def test_one_tick_runs_while_there_is_something_to_watch() -> None:
    s = Script()
    assert s.wakes == []
    s.up("decode-0")
    s.tell(KVSnapshot("decode-0", 1, 0, ()))
    s.pass_time(1.0)
    assert len(s.wakes) == 1, "the worker may fall silent"
    s.submit()
    s.submit("other")
    s.down("decode-0")
    s.pass_time(1.0)
    assert len(s.wakes) == 1
    s.tell(Cancel("r"))
    s.tell(Cancel("other"))
    s.pass_time(1.0)
    assert s.wakes == []


def test_a_new_worker_is_asked_for_a_snapshot_until_it_comes() -> None:
    s = Script(snapshot_retry_s=1.0)
    s.up("decode-0")
    assert s.one(KVSnapshotRequest, "decode-0").router == "router-0"
    s.pass_time(2.6)
    assert len(s.take(KVSnapshotRequest, "decode-0")) == 2
    s.tell(KVSnapshot("decode-0", 1, 3, (b"x" * 16,)))
    s.pass_time(5.0)
    assert s.take(KVSnapshotRequest) == []
    s.tell(KVEvents("decode-0", 1, 5, (), ()))
    assert len(s.take(KVSnapshotRequest)) == 1


def test_statistics_show_that_the_last_event_was_lost() -> None:
    s = Script("decode-0")
    s.tell(KVSnapshot("decode-0", 1, 3, ()))
    s.tell(worker_stats("decode-0", event_seq=3))
    assert s.take(KVSnapshotRequest) == []
    s.now += 2.0
    s.tell(worker_stats("decode-0", event_seq=4))
    assert len(s.take(KVSnapshotRequest, "decode-0")) == 1


def test_a_message_it_does_not_know_is_noted() -> None:
    s = Script()
    s.tell("nonsense")
    assert [note.counter for note in s.notes] == ["unexpected_message"]


def test_the_next_turn_goes_to_the_decode_worker_that_has_the_prefix() -> None:
    s = Script("prefill-0", "decode-0", "decode-1")
    s.submit("first", tokens=range(40))
    decode, _, _ = s.dispatched()
    names = hash_blocks(worker_info(decode).fingerprint, CacheScope(), range(40), BLOCK)
    s.delta(decode, 40, 999, request_id="first", finish=STOP)
    s.take(Abort)
    for worker in ("decode-0", "decode-1"):
        held = tuple(names) if worker == decode else ()
        s.tell(KVSnapshot(worker, 1, 1, held))
    s.pass_time(20.0)
    for turn in range(3):
        s.submit(f"turn {turn}", tokens=range(44))
        assert s.dispatched()[:2] == (decode, None)
        (decision,) = s.router.explain(f"turn {turn}")
        assert decision.options.best.worker == decode
        best = decision.options.decodes[0]
        assert best.held == Held(device=40, said=40)
        assert best.seconds == decision.options.best.seconds
        totals = [round(c.seconds.total, 3) for c in decision.options.decodes]
        assert totals == sorted(totals)
        s.tell(Cancel(f"turn {turn}"))


def test_a_prefill_worker_without_room_for_the_prompt_is_not_asked() -> None:
    s = Script("decode-0")
    s.up("prefill-0", num_blocks=9)
    s.take(KVSnapshotRequest)
    s.submit("long", tokens=range(40))
    assert s.take(Prefill) == []
    s.submit("short", tokens=range(100, 130))
    assert len(s.take(Prefill)) == 1


def test_another_model_on_the_prefill_worker_is_not_asked() -> None:
    s = Script("decode-0")
    s.up("prefill-0", fingerprint=b"another")
    s.submit(tokens=range(40))
    assert s.dispatched()[:2] == ("decode-0", None)


def test_attempts_that_bring_tokens_do_not_count() -> None:
    """A long stream may outlive many workers; what workers fail at goes nowhere."""
    s = Script("prefill-0", "prefill-1", "decode-0", "decode-1", max_attempts=2, backoff_s=0.01)
    s.submit(tokens=range(40), max_tokens=200)
    for attempt in range(1, 6):
        decode, _, _ = s.dispatched()
        s.delta(decode, 24 + 16 * attempt, *range(5, 21), attempt=attempt)
        s.refuse(decode, Refusal.WORKER_FAILED, attempt=attempt)
        s.pass_time(1.0)
        assert s.take(Failed) == []
    decode, _, order = s.dispatched()
    s.refuse(decode, Refusal.WORKER_FAILED, attempt=order.attempt)
    s.pass_time(1.0)
    assert s.failure().reason is Refusal.ATTEMPTS
