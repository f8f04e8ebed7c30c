"""Links by which KV does not come: they are learned, avoided, and tried again."""

from __future__ import annotations

from itertools import count, pairwise
from random import Random

import pytest

from kvrelay.engine.request import FinishReason
from kvrelay.router.explain import reason
from kvrelay.router.placement.links import FADES_S, RETRY
from tests.router.script import Script, worker_stats

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
DONE = {"worker_queue": 0.0, "prefill_wait": 0.05, "transfer": 0.01, "first_decode": 0.01}
LOST = {"worker_queue": 0.0, "lost": 5.0, "prefill": 0.06}
LATE = DONE | {"transfer": 20.0}
BROKEN = ("prefill-0", "decode-0")


class Links(Script):
    """Requests of 100 tokens, one after the other, that are best handed over."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.numbers = count()
        self.random = Random(1)

    def serve(self, broken: set[tuple[str | None, str]], phases: dict[str, float] = LOST) -> bool:
        """Whether it went over one of these links, on which this is what is reported."""
        for info, *_ in self.router.worker_stats:
            is_prefill, some = info.worker.startswith("prefill"), self.random.randrange(8)
            load = {"pending_prefill_tokens": some} if is_prefill else {"num_running": 8 + some}
            self.tell(worker_stats(info.worker, num_decoding=load.get("num_running", 0), **load))
        number = next(self.numbers)
        name = f"r{number}"
        self.submit(name, tokens=range(100 * number, 100 * number + 100), max_tokens=2)
        decision = self.router.explain(name)[-1]
        is_lost = (decision.options.best.prefill_from, decision.options.best.worker) in broken
        if decision.options.best.prefill_from is not None:
            self.delta(decision.options.best.prefill_from, 100, 1, request_id=name)
        self.now += 0.1
        told = phases if is_lost else DONE
        last = FinishReason.LENGTH
        self.delta(
            decision.options.best.worker, 100, 1, 2, request_id=name, finish=last, phases=told
        )
        self.now += 0.4
        return is_lost


def ready(*names: str) -> Links:
    s = Links(*names)
    for name in names:
        s.tell(worker_stats(name))
    return s


@pytest.mark.parametrize("phases", [LOST, LATE])
def test_a_link_that_always_fails_is_left_alone_after_three(phases: dict[str, float]) -> None:
    s = ready(*NAMES)
    went = [s.serve({BROKEN}, phases) for _ in range(60)]
    assert sum(went) == 3
    (link,) = s.router.status(s.now).bad_links
    assert (link.source, link.reader, link.lost_share) == (*BROKEN, 1.0)
    most_s = phases.get("transfer") or sum(phases.values()) - phases.get("prefill", 0.0)
    assert 4.0 < link.wait_s < most_s, "what was expected to pass anyway is not counted"
    assert s.router.status(s.now).totals.kv_lost == {"handoff": 3}
    assert [note.counter for note in s.notes] == ["kv_link_bad"]
    explained = [reason(s.router.explain(f"r{n}")[0]) for n in range(30, 60)]
    assert any("from prefill-0 to decode-0 did not come" in text for text in explained)
    s.assert_idle()


def test_what_a_bad_link_loses_is_a_part_of_its_cost() -> None:
    s = ready("prefill-0", "decode-0")
    for _ in range(10):
        s.serve({BROKEN})
    decision = s.router.explain("r9")[0]
    assert (decision.options.best.worker, decision.options.best.prefill_from) != (
        "decode-0",
        "prefill-0",
    )
    lost = {(c.worker, c.prefill_from): c.seconds.lost for c in decision.options.decodes}
    assert lost.pop(("decode-0", "prefill-0")) > 4.0
    assert set(lost.values()) == {0.0}


def test_a_mended_link_is_used_again() -> None:
    s = ready(*NAMES)
    assert sum(s.serve({BROKEN}) for _ in range(40)) == 3
    s.now += RETRY.base_s
    again = [s.serve({BROKEN}, DONE) for _ in range(40)]
    assert sum(again) > 4
    assert s.router.status(s.now).bad_links == ()
    assert s.router.status(s.now).totals.kv_lost == {"handoff": 3}


def test_a_link_that_stays_broken_is_tried_less_and_less_often() -> None:
    s = ready(*NAMES)
    went = []
    for _ in range(2000):  # 1,000 s
        if s.serve({BROKEN}):
            went.append(s.now)
    gaps = [b - a for a, b in pairwise(went[2:])]
    assert gaps == pytest.approx([30, 60, 120, 240, 480], abs=6)


def test_all_that_are_sent_while_a_link_is_tried_take_others() -> None:
    s = ready(*NAMES)
    assert sum(s.serve({BROKEN}) for _ in range(40)) == 3
    s.now += RETRY.base_s
    s.tell(worker_stats("prefill-1", pending_prefill_tokens=150))
    s.tell(worker_stats("decode-1", num_running=20, num_decoding=20))
    s.tell(worker_stats("decode-0", num_running=8, num_decoding=8))
    s.tell(worker_stats("prefill-0"))
    for number in range(8):
        tokens = range(10000 + 100 * number, 10100 + 100 * number)
        s.submit(f"at once {number}", tokens=tokens, max_tokens=1)
    decisions = [s.router.explain(f"at once {number}") for number in range(8)]
    assert (
        sum(
            (d[-1].options.best.prefill_from, d[-1].options.best.worker) == BROKEN
            for d in decisions
            if d
        )
        == 1
    )


def test_a_loss_now_and_then_changes_nothing() -> None:
    s = ready(*NAMES)
    for _ in range(10):
        for _ in range(2):
            s.serve({BROKEN})
        s.now += 2 * FADES_S
    assert s.router.status(s.now).bad_links == ()


def test_a_worker_that_starts_again_has_other_links() -> None:
    s = ready(*NAMES)
    for _ in range(40):
        s.serve({BROKEN})
    assert s.router.status(s.now).bad_links
    s.up("prefill-0", epoch=2)
    assert s.router.status(s.now).bad_links == ()


def test_a_peer_whose_prefix_never_comes_is_fetched_from_no_more() -> None:
    s = ready("decode-0", "decode-1")
    sources = []
    for number in range(20):
        s.tell(worker_stats("decode-0", num_running=9, pending_prefill_tokens=4000))
        s.tell(worker_stats("decode-1"))
        prefix = range(1000 * number, 1000 * number + 200)
        s.holds("decode-0", prefix)
        name = f"r{number}"
        s.submit(name, tokens=(*prefix, 5), max_tokens=1)
        decision = s.router.explain(name)[-1]
        assert decision.options.best.worker == "decode-1"
        sources.append(decision.options.best.fetch_from)
        told = (
            {"fetch": 2.0, "prefill": 0.2} if decision.options.best.fetch_from else {"prefill": 0.2}
        )
        end = FinishReason.LENGTH
        s.delta("decode-1", 201, 5, request_id=name, finish=end, phases=told, num_cached_tokens=0)
        s.now += 0.5
    assert sources == ["decode-0"] * 3 + [None] * 17
    assert s.router.status(s.now).totals.kv_lost == {"fetch": 3}
