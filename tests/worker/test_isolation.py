"""A step that fails: who made it fail is found, and everybody else goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.node import Unsendable
from kvrelay.engine.request import Refusal
from kvrelay.engine.scheduling.isolation import Isolation
from kvrelay.engine.sequence import SeqState
from kvrelay.engine.step import Step
from tests.engine.sequences import sequence
from tests.worker.test_progress import Watched
from tests.worker.world import World, reference


def failing_with(*bad: str) -> Callable[[Step], str | None]:
    """Steps that sample for one of `bad` fail."""

    def fault(step: Step) -> str | None:
        names = {seq.request_id.partition("#")[0] for seq in step.seqs if seq.sample}
        return "ValueError: wrong shape" if names & set(bad) else None

    return fault


def prompts(names: Iterable[str]) -> dict[str, list[int]]:
    return {name: [number + 1] * 7 for number, name in enumerate(names)}


GOOD = [f"good{number}" for number in range(12)]


@pytest.mark.parametrize("num_bad", [1, 2, 4, 5])
@pytest.mark.parametrize("order", ["first", "last", "between"])
def test_good_streams_go_on_beside_those_that_fail_steps(num_bad: int, order: str) -> None:
    bad = [f"bad{number}" for number in range(num_bad)]
    names = {"first": bad + GOOD, "last": GOOD + bad, "between": GOOD[:5] + bad + GOOD[5:]}[order]
    world = Watched(num_blocks=200, max_num_seqs=32, num_speculative_tokens=0)
    world.fault = failing_with(*bad)
    asked = prompts(names)
    for name, prompt in asked.items():
        world.submit(name, prompt, 20, remote=False)
    world.drain()
    assert {(r.request_id, r.reason) for r in world.refused()} == {
        (name, Refusal.EXECUTION) for name in bad
    }
    assert all("wrong shape" in refused.detail for refused in world.refused())
    for name in GOOD:
        assert world.output(name, asked[name]) == reference(asked[name], 20)
    assert world.exits == []
    world.assert_idle()


def test_a_request_that_fails_late_harms_nobody() -> None:
    world = Watched(num_blocks=200, max_num_seqs=32)
    asked = prompts([*GOOD, "bad"])
    for name, prompt in asked.items():
        world.submit(name, prompt, 30, remote=False)
    for _ in range(40):
        world.step()
    world.fault = failing_with("bad")
    world.drain()
    assert [refused.request_id for refused in world.refused()] == ["bad"]
    for name in GOOD:
        assert world.output(name, asked[name]) == reference(asked[name], 30)
    world.assert_idle()


def test_who_fails_once_and_not_alone_is_served() -> None:
    """A fault of the device that passes is nobody's."""
    world = Watched(num_blocks=200, max_num_seqs=32)
    asked = prompts(GOOD)
    failures = iter(["ECC error"])
    world.fault = lambda _: next(failures, None)
    for name, prompt in asked.items():
        world.submit(name, prompt, 20, remote=False)
    world.drain()
    assert world.refused() == []
    for name in GOOD:
        assert world.output(name, asked[name]) == reference(asked[name], 20)


def test_the_only_request_is_tried_alone_before_it_is_refused() -> None:
    world = Watched()
    failures = iter(["ECC error"])
    world.fault = lambda _: next(failures, None)
    world.submit("a", [5] * 9, 8, remote=False)
    world.assert_finishes("a", [5] * 9, 8)


def test_a_pool_that_is_full_still_finds_who_fails() -> None:
    world = Watched(num_blocks=6, max_num_seqs=2)
    world.fault = failing_with("bad")
    world.submit("bad", [7] * 11, 4, remote=False)
    world.submit("good", [8] * 9, 6, remote=False)
    world.drain()
    assert [(r.request_id, r.reason) for r in world.refused()] == [("bad", Refusal.EXECUTION)]
    assert world.output("good", [8] * 9) == reference([8] * 9, 6)
    world.assert_idle()


def test_who_is_aborted_while_others_are_tried_is_forgotten() -> None:
    world = Watched(num_blocks=200, max_num_seqs=32)
    world.fault = failing_with("bad")
    asked = prompts([*GOOD, "bad"])
    for name, prompt in asked.items():
        world.submit(name, prompt, 10, remote=False)
    for _ in range(len(asked) + 3):
        world.step()
    for name in ("bad", GOOD[0], GOOD[11]):
        world.deliver("decode", Abort(name, 0))
    world.drain()
    assert world.refused() == []
    for name in GOOD[1:11]:
        assert world.output(name, asked[name]) == reference(asked[name], 10)
    world.assert_idle()


def test_a_prompt_that_is_computed_for_another_worker_is_found_too() -> None:
    world = World(num_blocks=200, prefill_blocks=200, max_num_seqs=32)
    world.fault = failing_with("bad")
    asked = prompts([*GOOD, "bad"])
    for name, prompt in asked.items():
        world.submit(name, prompt, 10, remote=True)
    world.drain()
    assert {r.request_id for r in world.refused()} == {"bad"}
    for name in GOOD:
        assert world.output(name, asked[name]) == reference(asked[name], 10)


def test_tokens_that_fit_into_no_message_end_their_own_request() -> None:
    world = World(num_blocks=200)
    asked = prompts("ab")
    for name, prompt in asked.items():
        world.submit(name, prompt, 8, remote=False)
    for _ in range(4):
        world.step()
    deltas = tuple(
        delta for m in world.to_router if isinstance(m, TokenDeltas) for delta in m.deltas
    )
    both = TokenDeltas("decode", 1, tuple({d.request_id: d for d in deltas}.values()))
    world.to_router.clear()
    world.deliver("decode", Unsendable("router", both, "TokenDeltas has 10 bytes"))
    again = [m for m in world.to_router if isinstance(m, TokenDeltas)]
    assert [len(m.deltas) for m in again] == [1, 1], "apart"
    world.deliver("decode", Unsendable("router", again[0], "TokenDeltas has 10 bytes"))
    name = again[0].deltas[0].request_id
    assert [(r.request_id, r.reason) for r in world.refused()] == [(name, Refusal.UNENCODABLE)]
    world.drain()
    other = "ba"["ab".index(name)]
    assert not any(seq.request_id == name for seq in world.decode.core.seqs.values())
    assert world.output(other, asked[other])[-1] == reference(asked[other], 8)[-1]


def test_nothing_is_tried_again_of_those_that_have_ended() -> None:
    """New weights wait until nothing is under way: a worker without a running sequence waited for
    ever."""
    seqs = [sequence([1, 2]), sequence([1, 2])]
    for seq in seqs:
        seq.state = SeqState.RUNNING
    isolation = Isolation()
    isolation.on_failed(1, seqs, "out of order")
    assert isolation.is_under_way
    seqs[0].state = SeqState.DEAD
    assert isolation.is_under_way
    seqs[1].state = SeqState.WAITING
    assert not isolation.is_under_way
    others = [sequence([3]), sequence([4])]
    for seq in others:
        seq.state = SeqState.RUNNING
    isolation.on_failed(2, others, "out of order")
    assert isolation.next_group() == others[:1]


def test_a_culprit_that_lost_its_blocks_to_the_health_check_is_judged_all_the_same() -> None:
    """A pool that is full has no other block for the check, and the check takes a while: what was
    asked of the worker meanwhile made it forget for whom it is."""
    seq = sequence([1, 2])
    seq.state = SeqState.RUNNING
    isolation = Isolation()
    isolation.begin(1, [])
    isolation.on_failed(1, [seq], "out of order")
    isolation.is_checking, seq.state = True, SeqState.WAITING
    assert isolation.is_under_way
    assert isolation.on_health_check(None) == (seq, "out of order")
    assert not isolation.is_under_way
