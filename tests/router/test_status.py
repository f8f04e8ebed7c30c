"""What operators are told: totals of the router, and each worker as it was last heard of."""

from __future__ import annotations

from kvrelay.engine.request import FinishReason
from tests.router.script import Script, worker_stats

STOP = FinishReason.STOP


def test_status_tells_of_workers_and_totals() -> None:
    s = Script("prefill-0", "decode-0")
    s.tell(worker_stats("decode-0", num_free_blocks=50, num_cached_blocks=20, num_running=3))
    s.submit(tokens=range(40))
    s.delta("prefill-0", 40, 7, num_cached_tokens=10)
    s.delta("decode-0", 41, 999, finish=STOP)
    s.submit("lost", tokens=range(40))
    s.down("decode-0")
    status = s.router.status(s.now)
    assert status.totals.requests == {"stop": 1}
    assert (status.totals.prompt_tokens, status.totals.cached_tokens) == (40, 10)
    assert status.totals.output_tokens == 2
    assert status.totals.retries == {"worker_down": 1}
    assert status.cache_hit_rate == 0.25
    assert (status.num_live, status.num_queued) == (1, 0)  # the prefill worker has it now
    by_name = {w.worker: w for w in status.workers}
    assert by_name["decode-0"].state == "down"
    assert by_name["prefill-0"].state == "up"
    assert by_name["prefill-0"].cache_hit_rate == 0.25
    assert "request lost is live" in s.router.check_idle()


def test_cached_tokens_are_counted_by_where_they_came_from() -> None:
    s = Script("decode-0", "decode-1")
    for n, sources in enumerate(({"device": 8, "host": 16}, {"host": 4, "disk": 8, "peer": 12})):
        request_id = f"r{n}"
        s.submit(request_id, tokens=range(100 * n, 100 * n + 40))
        decode, _, _ = s.dispatched()
        cached = sum(sources.values())
        more = {"num_cached_tokens": cached, "cached_by_source": sources}
        s.delta(decode, 40, 7, request_id=request_id, **more)
        s.delta(decode, 41, 999, request_id=request_id, finish=STOP, **more)
    status = s.router.status(s.now)
    everything = {"device": 8, "host": 20, "disk": 8, "peer": 12}
    assert status.totals.cached_tokens_by_source == everything
    assert status.totals.cached_tokens == sum(everything.values())
    by_worker = {w.worker: w.cached_tokens_by_source for w in status.workers}
    assert by_worker == {
        "decode-0": {"device": 8, "host": 16},
        "decode-1": {"host": 4, "disk": 8, "peer": 12},
    }


def test_status_tells_what_the_tiers_of_a_worker_hold_and_how_fast_they_are() -> None:
    s = Script("decode-0")
    (worker,) = s.router.status(s.now).workers
    assert worker.fact("num_host_blocks") == 0  # it has said nothing yet
    said = {
        "num_host_blocks": 70,
        "num_disk_blocks": 900,
        "disk_used_bytes": 600 * 4096,
        "host_read_bytes_per_s": 8e9,
        "disk_read_bytes_per_s": 1e9,
    }
    s.tell(worker_stats("decode-0", **said))
    (worker,) = s.router.status(s.now).workers
    facts = worker.facts()
    assert facts | said | {"disk_ratio": 1.5} == facts
