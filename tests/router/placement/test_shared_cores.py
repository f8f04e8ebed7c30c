"""Workers that share the cores of a machine: what one computes is taken from the others."""

from __future__ import annotations

import pytest

from kvrelay.router.placement.endpoint import Endpoint
from tests.router.fleet import choose, endpoint, names_of, work

LONG = work(2000, output_tokens=50.0)


def sharing(name: str, **stats: object) -> Endpoint:
    return endpoint(name, info={"cores": "machine"}, **stats)


def test_prompts_are_not_handed_over_to_take_time_from_the_same_streams() -> None:
    apart = choose(LONG, endpoint("decode-0", num_decoding=5), endpoint("prefill-0"))
    assert names_of(apart) == ("decode-0", "prefill-0")
    together = choose(LONG, sharing("decode-0", num_decoding=5), sharing("prefill-0"))
    assert names_of(together) == ("decode-0", None)


def test_a_queue_where_it_would_be_computed_is_avoided_on_shared_cores_too() -> None:
    busy = sharing("decode-0", num_decoding=1, pending_prefill_tokens=20_000)
    assert "prefill-0" in names_of(choose(LONG, busy, sharing("prefill-0")))


def test_a_crowded_worker_is_not_relieved_by_one_on_the_same_cores() -> None:
    """Elsewhere half as many in each step would be quicker; here both take from each other."""
    crowd = {"num_decoding": 40, "num_running": 40}
    todo = work(20, output_tokens=200.0)
    apart = choose(todo, endpoint("decode-0", **crowd), endpoint("prefill-0"))
    assert names_of(apart) == ("prefill-0", None)
    together = choose(todo, sharing("decode-0", **crowd), sharing("prefill-0"))
    assert names_of(together) == ("decode-0", None)


def test_machines_do_not_disturb_each_other() -> None:
    decode = endpoint("decode-0", info={"cores": "one"}, num_decoding=5)
    prefill = endpoint("prefill-0", info={"cores": "other"})
    choice = choose(LONG, decode, prefill)
    assert names_of(choice) == ("decode-0", "prefill-0")
    assert choice.best.seconds.stall == 0.0


def test_a_prompt_that_gives_way_takes_longer_while_others_decode() -> None:
    def prefill_s(num_decoding: int) -> float:
        workers = sharing("decode-0", num_decoding=num_decoding), sharing("prefill-0")
        first = choose(LONG, *workers).prefills[0]
        return first.seconds.prefill

    assert prefill_s(5) == pytest.approx(4.0 * 2.0)
    assert prefill_s(0) == pytest.approx(2.5 * 2.0), "half a sequence is expected to come"
