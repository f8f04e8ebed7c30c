"""Adapters that a worker would have to load first count as the seconds that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.adapters import Adapter
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.needs import key_of
from kvrelay.engine.request import SamplingParams, needing
from kvrelay.router.messages import Submit
from kvrelay.router.placement.cost import CostModel
from tests.router.fleet import STATS, Chooser, endpoint, local_cost, names_of, remote_cost, work
from tests.router.script import CLIENT, Script, worker_stats

DIGESTS = [bytes([n]) * 32 for n in range(1, 5)]
ASKED = replace(work(100), need=key_of(DIGESTS[0]))
HERE, AWAY = {"loaded": (DIGESTS[1], DIGESTS[0])}, {"loaded": (DIGESTS[2],)}
LOAD_S = 0.8


def test_the_worker_that_has_the_adapter_is_chosen_unless_waiting_takes_longer() -> None:
    has = endpoint("decode-0", load_s=LOAD_S, **HERE)
    lacks = endpoint("decode-1", load_s=LOAD_S, **AWAY)
    for number in range(3):
        has.book(0.0, f"r{number}", 200, 0, 0.2)
    chooser = Chooser(has, lacks)
    assert names_of(chooser.choose(work(100))) == ("decode-1", None)
    assert names_of(chooser.choose(ASKED)) == ("decode-0", None)
    for number in range(3, 30):
        has.book(0.0, f"r{number}", 200, 0, 0.2)
    assert names_of(chooser.choose(ASKED)) == ("decode-1", None)


def test_loading_takes_what_the_worker_has_measured_or_else_the_fleet() -> None:
    cost = CostModel()
    for adapter_s, told in ((0.0, HERE), (LOAD_S, {**AWAY, "load_s": LOAD_S})):
        worker = endpoint("decode-0", **told)
        plain = local_cost(cost, 0.0, worker, work(100)).seconds
        seconds = local_cost(cost, 0.0, worker, ASKED).seconds
        assert seconds.need - plain.need == adapter_s
        assert seconds.total - plain.total == pytest.approx(adapter_s)
    cost.on_stats(replace(STATS, load_s=2.0))
    assert local_cost(cost, 0.0, endpoint("decode-0"), ASKED).seconds.need == 2.0


def test_of_a_handoff_each_worker_needs_it() -> None:
    cost = CostModel()
    plain, both, one = (
        remote_cost(
            cost,
            endpoint("decode-0", load_s=LOAD_S, **decode),
            endpoint("prefill-0", load_s=2.0, **prefill),
            ASKED,
        ).seconds
        for decode, prefill in ((HERE, HERE), (AWAY, AWAY), (HERE, AWAY))
    )
    assert (plain.need, plain.need_again) == (0.0, 0.0)
    assert (both.need, both.need_again) == (2.0, LOAD_S)
    assert (one.need, one.need_again) == (2.0, 0.0)
    assert both.total - plain.total == pytest.approx(2.0 + LOAD_S)
    assert both.ttft - plain.ttft == pytest.approx(2.0), "the second one is not waited for"


def test_what_was_sent_there_is_loaded_for_it() -> None:
    worker = endpoint("decode-0", load_s=LOAD_S)
    cost, number = CostModel(), key_of(DIGESTS[0])
    assert local_cost(cost, 0.0, worker, ASKED).seconds.need == LOAD_S
    worker.book(0.0, "r", 0, 0, need=number)
    assert local_cost(cost, 0.0, worker, ASKED).seconds.need == 0.0
    worker.release("r")
    worker.on_stats(1.0, replace(STATS, worker="decode-0", load_s=LOAD_S))
    assert local_cost(cost, 1.0, worker, ASKED).seconds.need == LOAD_S


def test_requests_of_an_adapter_stay_where_it_was_loaded() -> None:
    s = Script()
    for number in range(4):
        name = f"decode-{number}"
        s.up(name, loads=True)
        s.tell(worker_stats(name, load_s=LOAD_S))
    chosen: dict[bytes, set[str]] = {}
    for number in range(12):
        digest = DIGESTS[number % 4]
        tokens = tuple(range(100 * number, 100 * number + 10))
        sampling, adapter = SamplingParams(max_tokens=8), Adapter(digest, "x")
        about = needing(adapter, UNSALTED)
        s.tell(Submit(f"r{number}", sampling, CLIENT, tokens, 60.0, **about))
        decision = s.router.explain(f"r{number}")[-1]
        chosen.setdefault(digest, set()).add(decision.options.best.worker)
        loads = sorted(each.seconds.need for each in decision.options.decodes)
        assert loads[0] == (0.0 if number > 3 else LOAD_S)
    assert [len(workers) for workers in chosen.values()] == [1, 1, 1, 1]
    assert len(set.union(*chosen.values())) == 4
