"""What roles are to a choice: preferences. Any worker may compute prompts and decode."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from kvrelay.engine.request import FinishReason
from kvrelay.engine.stats import Role
from kvrelay.router.config import POLICIES
from kvrelay.router.index.prefix_index import IndexTable
from kvrelay.router.messages import RoleChanged
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import NUM_HOLDERS, NUM_IDLE
from kvrelay.router.placement.policy import Chooser as NativeChooser
from kvrelay.router.placement.work import Work
from tests.router.fleet import Chooser, Todo, endpoint, names_of, on, work
from tests.router.script import Script, worker_stats

PAIR = ("decode-0", "decode-1")
SMALL: dict[str, object] = {"num_blocks": 64}

# -- a prefill worker that decodes ------------------------------------------------------------


def choice_of(todo: Todo, *workers: Endpoint) -> tuple[str, str | None]:
    """Where a prefill worker that decodes always has prompts to compute."""
    return names_of(Chooser(*workers, cost=CostModel(prefilling_at_least=1.0)).choose(todo))


def test_a_prefill_worker_decodes_itself_when_decode_workers_are_crowded_enough() -> None:
    todo = work(200, output_tokens=100.0)
    picked = [
        choice_of(todo, endpoint("decode-0", num_running=running), endpoint("prefill-0"))
        for running in (0, 5, 20, 200, 500)
    ]
    assert picked[:2] == [("decode-0", "prefill-0")] * 2
    assert picked[-2:] == [("prefill-0", None)] * 2
    turns = [(before, after) for before, after in pairwise(picked) if before != after]
    assert len(turns) == 1, "never back again"


def test_a_prefill_worker_decodes_itself_when_a_decode_worker_has_no_memory_left() -> None:
    todo = work(200, output_tokens=100.0)
    prefill = endpoint("prefill-0")
    roomy, full = (
        endpoint("decode-0", info=SMALL, num_running=40, num_free_blocks=blocks)
        for blocks in (64, 0)
    )
    assert choice_of(todo, roomy, prefill) == ("decode-0", "prefill-0")
    assert choice_of(todo, full, prefill) == ("prefill-0", None)


def test_a_busy_prefill_worker_does_not_decode_for_a_crowded_one() -> None:
    todo = work(200, output_tokens=100.0)
    crowded = endpoint("decode-0", num_running=200)
    late = endpoint("prefill-0", pending_prefill_tokens=50_000)
    assert choice_of(todo, crowded, late) == ("decode-0", None)
    decoding = endpoint("prefill-0", num_running=400)
    assert choice_of(todo, crowded, decoding)[0] == "decode-0"


def test_output_on_a_prefill_worker_counts_as_waiting_for_prompts() -> None:
    decode, prefill = endpoint("decode-0"), endpoint("prefill-0")
    chooser = Chooser(decode, prefill, cost=CostModel(prefilling_at_least=0.8))
    choice = chooser.choose(work(200, output_tokens=100.0))
    seconds = {o.endpoint.worker: o.seconds for o in choice.decodes if o.prefill is None}
    there, here = seconds["prefill-0"], seconds["decode-0"]
    assert there.decode == here.decode
    assert there.stall == pytest.approx(0.8 * there.decode)
    assert there.crowd - here.crowd == pytest.approx(0.8 * there.decode)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", ["none", "backs off", "failed it"])
def test_without_a_usable_decode_worker_a_prefill_worker_does_all(policy: str, state: str) -> None:
    prefills = [endpoint("prefill-0", num_running=9), endpoint("prefill-1")]
    decode = endpoint("decode-0")
    if state == "backs off":
        decode.excluded_until = 5.0
    chooser = Chooser(*prefills, *([] if state == "none" else [decode]), policy=policy)
    asked = chooser.asked(work(200))
    if state == "failed it":
        asked = asked._replace(avoid=[decode])
    choice = chooser.policy.choose(0.0, asked, lambda: b"r")
    assert choice is not None
    assert choice.best.endpoint in prefills
    assert choice.best.prefill is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_worker_too_small_for_the_output_does_not_decode(policy: str) -> None:
    small = endpoint("prefill-0", info={"max_model_len": 300})
    large = endpoint("prefill-1", num_running=9)
    chooser = Chooser(small, large, policy=policy)
    for _ in range(4):
        asked = chooser.asked(work(200))._replace(total_tokens=400)
        choice = chooser.policy.choose(0.0, asked, lambda: b"r")
        assert choice is not None
        assert choice.best.endpoint is large


# -- who is usable ----------------------------------------------------------------------------


class Asked:
    """What native code says of single workers."""

    def __init__(self, max_memory_wait_s: float = inf) -> None:
        cost, index = CostModel(), IndexTable(stride=32, max_expected=1)
        limits = {"max_inflight": 3, "probe_after_s": 5.0, "max_memory_wait_s": max_memory_wait_s}
        self.native = NativeChooser(cost, index, **limits)

    def roles(
        self,
        worker: Endpoint,
        num_tokens: int = 100,
        total: int = 0,
        *,
        now: float = 0.0,
        avoid: tuple[Endpoint, ...] = (),
        trusting: bool = False,
    ) -> tuple[bool, bool]:
        """Whether it could compute the prompt, and whether it could decode."""
        asked = Work(num_tokens, max(total, num_tokens + 1), 100.0, 100.0, [], avoid)
        self.native.ask(now, asked, trusting=trusting)
        decodes = [self.native.is_usable(worker, role) for role in (Role.DECODE, Role.BOTH)]
        assert decodes[0] == decodes[1]
        return self.native.is_usable(worker, Role.PREFILL), decodes[0]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_of_any_role_is_usable_for_either_while_it_takes_requests(name: str) -> None:
    asked, worker, other = Asked(), endpoint(name), endpoint("decode-9")
    yes, no = (True, True), (False, False)
    assert asked.roles(worker) == yes
    assert asked.roles(worker, avoid=(other,)) == yes
    assert asked.roles(worker, avoid=(other, worker)) == no
    assert asked.roles(worker, avoid=(worker,), trusting=True) == yes
    assert asked.roles(worker, now=4.9) == yes
    assert asked.roles(worker, now=5.0) == no, "its last statistics are that old"
    assert asked.roles(worker, now=5.0, trusting=True) == yes
    worker.excluded_until = 3.0
    assert asked.roles(worker, now=2.9, trusting=True) == no
    assert asked.roles(worker, now=3.0) == yes
    for number in range(3):
        assert asked.roles(worker, now=3.0) == yes
        worker.book(0.0, f"r{number}", 0, 0)
    assert asked.roles(worker, now=3.0) == no, "it has as many requests as it may have"
    worker.release("r0")
    worker.alive = False
    assert asked.roles(worker, now=3.0) == no


def test_a_worker_too_small_for_the_whole_output_can_still_compute_the_prompt() -> None:
    asked, small = Asked(), endpoint("decode-0", info={"num_blocks": 50, "max_model_len": 160})
    assert asked.roles(small, 100, 160) == (True, True)
    assert asked.roles(small, 100, 161) == (True, False)
    assert asked.roles(small, 159, 200) == (True, False)
    assert asked.roles(small, 160, 200) == (False, False), "it has to compute one token more"


def test_only_who_decodes_waits_for_memory_and_never_an_empty_worker() -> None:
    asked = Asked(max_memory_wait_s=0.3)
    full = endpoint("prefill-0", info=SMALL, num_free_blocks=0, num_running=8)
    assert asked.roles(full) == (True, True), "what it is full of is not known to this router"
    full.book(0.0, "r", 0, 0)
    assert asked.roles(full) == (True, False)
    assert Asked(max_memory_wait_s=50.0).roles(full) == (True, True)


# -- role both --------------------------------------------------------------------------------


def become_both(chooser: Chooser) -> Chooser:
    """Its decode workers have role both from now on."""
    chooser.fleets[Role.BOTH] = chooser.fleets[Role.DECODE]
    for worker in chooser.fleets[Role.DECODE]:
        worker.set_role(Role.BOTH)
    return chooser


def test_workers_of_role_both_are_options_in_every_way_each_once() -> None:
    """As many as a choice looks at: the idle ones, and busier ones that hold more."""
    names = [f"{role}-{n}" for role in ("decode", "prefill") for n in range(8)]
    workers = {name: endpoint(name) for name in names}
    chooser = become_both(Chooser(*workers.values()))
    holders = {"decode-6", "decode-7", "prefill-6", "prefill-7"}
    for name in names:
        if int(name[-1]) >= NUM_IDLE:
            workers[name].book(0.0, "x", 300, 10, 0.3)
    held = {name: on(395 if name in holders else 390) for name in names}
    options = chooser.choose(Todo(400, 100.0, held))
    firsts = [option.endpoint.worker for option in options.prefills]
    ways = [(o.endpoint.worker, o.prefill and o.prefill.worker) for o in options.decodes]
    assert len(firsts) == len(set(firsts)) == 2 * (NUM_HOLDERS + NUM_IDLE)
    assert len(ways) == len(set(ways)) == 3 * (NUM_HOLDERS + NUM_IDLE)
    looked_at = holders | {f"{role}-{n}" for role in ("decode", "prefill") for n in range(NUM_IDLE)}
    assert set(firsts) == looked_at == {way[0] for way in ways}
    assert {way[0] for way in ways if way[1]} == {n for n in looked_at if n < "prefill"}
    assert all(way[0] != way[1] for way in ways)
    assert all(o.held == held[o.endpoint.worker] for o in options.decodes)
    costs = [round(1000 * o.seconds.total) for o in options.decodes]
    assert costs == sorted(costs)


def test_a_lone_worker_of_role_both_computes_its_own_prompts() -> None:
    assert names_of(become_both(Chooser(endpoint("decode-0"))).choose(work(2000)))[1] is None


def test_a_worker_computes_prompts_for_others_when_its_role_is_both() -> None:
    """One has no memory to decode, the other is too busy to compute."""
    todo = work(2000, output_tokens=1000.0)
    full = endpoint("decode-0", num_running=1, num_free_blocks=0, num_wanted_blocks=4000)
    busy = endpoint("decode-1", num_running=20)
    chooser = Chooser(full, busy)
    assert names_of(chooser.choose(todo))[1] is None
    assert names_of(become_both(chooser).choose(todo)) == ("decode-1", "decode-0")


def test_workers_of_role_both_are_sent_prompts_of_others_and_requests_to_decode() -> None:
    s = Script()
    for name in PAIR:
        s.up(name, role=Role.BOTH)
    s.sent.clear()
    for first_token, (full, busy) in enumerate((PAIR, PAIR[::-1])):
        s.now += 60.0
        for name, stats in (
            (full, {"num_running": 1, "num_free_blocks": 0, "num_wanted_blocks": 64}),
            (busy, {"num_running": 20}),
        ):
            s.tell(worker_stats(name, decode_step_s=0.05, **stats))
        s.submit(busy, tokens=range(first_token, first_token + 200), max_tokens=50)
        assert s.dispatched()[:2] == (busy, full)
        s.delta(full, 200, 5, request_id=busy)
        s.delta(busy, 201, 999, request_id=busy, finish=FinishReason.STOP)
    s.assert_idle()


# -- a role that changes ----------------------------------------------------------------------


def roles(s: Script) -> dict[str, Role]:
    return {w.worker: w.role for w in s.router.status(s.now).workers}


def test_new_prompts_follow_the_role_and_find_what_is_cached() -> None:
    s = Script(*PAIR)
    s.holds("decode-1", range(200))
    s.tell(RoleChanged("decode-1", 1, Role.PREFILL))
    assert roles(s) == {"decode-0": Role.DECODE, "decode-1": Role.PREFILL}
    s.submit("a", tokens=range(240))
    assert s.dispatched()[:2] == ("decode-0", "decode-1")
    assert s.router.explain("a")[0].options.prefills[0].held.device == 200
    s.tell(RoleChanged("decode-1", 1, Role.DECODE))
    s.tell(RoleChanged("decode-0", 1, Role.PREFILL))
    assert roles(s) == {"decode-0": Role.PREFILL, "decode-1": Role.DECODE}
    s.submit("b", tokens=range(1000, 1240))
    assert s.dispatched()[:2] == ("decode-1", "decode-0")


def test_a_holder_is_found_among_the_workers_of_its_new_role() -> None:
    """It is not one of the idle ones."""
    s = Script(*PAIR, *(f"prefill-{n}" for n in range(4)))
    s.holds("decode-1", range(200))
    s.tell(RoleChanged("decode-1", 1, Role.PREFILL))
    s.tell(worker_stats("decode-1", pending_prefill_tokens=20))
    s.submit("a", tokens=range(240))
    (decision,) = s.router.explain("a")
    held = {c.worker: c.held.device for c in decision.options.prefills}
    assert held.pop("decode-1") == 200
    assert list(held.values()) == [0] * NUM_IDLE
    assert {c.worker for c in decision.options.decodes if c.prefill_from} == {"decode-0"}


def test_a_role_of_an_unknown_worker_or_another_epoch_changes_nothing() -> None:
    s = Script(*PAIR)
    s.up("decode-9", epoch=3)
    for name, epoch in [("decode-7", 1), ("decode-9", 2), ("decode-9", 4), ("decode-0", 2)]:
        s.tell(RoleChanged(name, epoch, Role.PREFILL))
    s.down("decode-1")
    s.tell(RoleChanged("decode-1", 1, Role.PREFILL))
    assert roles(s) == dict.fromkeys((*PAIR, "decode-9"), Role.DECODE)
    s.tell(RoleChanged("decode-9", 3, Role.PREFILL))
    assert roles(s)["decode-9"] is Role.PREFILL
