"""What the simulator draws of models, requests and workers; its oracle tells them apart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from kvrelay.lab.sim import scenario
from kvrelay.lab.sim.client import SimClient
from kvrelay.lab.sim.executor import SimExecutor, SimPool
from kvrelay.lab.sim.model import Attention, extend_slots, forced_after, generate, output_logprobs
from kvrelay.lab.sim.runtime import SimRuntime
from kvrelay.lab.sim.scenario import Scenario, draw_scenario
from kvrelay.lab.sim.workload import GENEROUS_S, Job, Poison
from kvrelay.router.messages import Output

PROMPT = tuple(range(1, 20))
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def drawn(num_seeds: int) -> list[Scenario]:
    rngs = ([random.Random(f"{n}{of}") for of in (": more", ": last")] for n in range(num_seeds))
    return [draw_scenario(random.Random(n), *others) for n, others in enumerate(rngs)]


def test_the_first_seeds_draw_every_kind() -> None:
    found = drawn(40)
    workers = [worker for each in found for worker in each.workers]
    jobs = [job for each in found for job in each.jobs]
    assert {len(each.routers) for each in found} == {1, 2}
    assert {bool(worker.window) for worker in workers} == {True, False}
    assert {bool(worker.sinks) for worker in workers} == {True, False}
    assert {len(worker.group_windows) for worker in workers} >= {0, 2, 3}
    assert {worker.has_states for worker in workers} == {True, False}
    assert {bool(worker.cores) for worker in workers} == {True, False}
    assert {bool(each.router.ttft_target_s) for each in found} == {True, False}
    for of in ("max_model_len", "fingerprint", "num_blocks"):
        assert any(len({getattr(w, of) for w in each.workers}) > 1 for each in found), of
    assert any(job.sampling.grammar for job in jobs)
    assert any(job.sampling.logprobs is not None for job in jobs)
    assert any(job.sampling.min_tokens for job in jobs)
    assert any(job.scope.salt and job.scope.num_public_tokens for job in jobs)
    assert {job.poison for job in jobs} == {None, Poison.ROW, Poison.STEP}
    assert any(each.faults.row_error for each in found)


def test_crowds_have_unequal_tenants_and_more_than_the_memory_holds() -> None:
    crowded = [each for each in drawn(40) if any(job.tenant for job in each.jobs)]
    assert len(crowded) >= 8
    for each in crowded:
        crowd = [job for job in each.jobs if job.tenant is not None]
        weights = dict(job.tenant for job in crowd if job.tenant is not None)
        assert 2 <= len(weights) <= 4
        assert len({share.weight for share in weights.values()}) == len(weights)
        rows = [worker.num_blocks // worker.kv_windows.count for worker in each.workers]
        held = sum(rows) * scenario.BLOCK_SIZE
        assert sum(job.num_tokens for job in crowd) > 4 * held
        assert max(job.num_tokens for job in crowd) > held / len(each.workers) / 2
        assert all(job.after_faults and job.timeout_s == GENEROUS_S for job in crowd)


def test_requests_that_fail_whole_steps_are_drawn_where_that_is_on(monkeypatch) -> None:
    monkeypatch.setattr(scenario, "POISON_STEPS", 1.0)
    jobs = [job for each in drawn(5) for job in each.jobs]
    assert Poison.STEP in {job.poison for job in jobs}
    assert Poison.STEP not in {job.poison for job in jobs if job.after_faults}


class Bench:
    """An executor with one block after the other of a prompt, and what it complained about."""

    def __init__(self, attention: Attention = Attention(), **faults: object) -> None:
        self.wrong: list[str] = []
        self.pool = SimPool(16, 4, with_checksums=False, attention=attention)
        pools = {Tier.DEVICE: self.pool}
        self.executor = SimExecutor(
            pools,
            lambda kind, text: self.wrong.append(kind),
            attention,
            **faults,  # type: ignore[arg-type]
        )

    def seq(self, name: str, tokens: list[int], start: int, table: list[int]) -> ScheduledSeq:
        return ScheduledSeq(name, tokens[start:], start, table, True, GREEDY, tokens, len(PROMPT))

    def step(self, *seqs: ScheduledSeq) -> StepDone:
        self.executor.begin(Step(0, list(seqs)))
        return self.executor.finish(0.1, None)


def test_a_request_that_is_left_out_leaves_the_others_of_its_step_alone() -> None:
    bench = Bench(row_fault=lambda attempt: "poison" if attempt == "bad#1" else None)
    done = bench.step(
        bench.seq("bad#1", list(PROMPT), 0, [0, 1, 2, 3, 4]),
        bench.seq("good#1", list(PROMPT), 0, [5, 6, 7, 8, 9]),
    )
    assert done.error is None
    assert done.unsampled == {0: "poison"}
    assert done.sampled[0] is None
    assert done.sampled[1] is not None
    assert done.sampled[1].token == generate(PROMPT, GREEDY, 100)[0][0]


def test_a_request_that_fails_its_step_fails_all_of_it() -> None:
    bench = Bench(step_fault=lambda attempt: "poison" if attempt == "bad#1" else None)
    done = bench.step(
        bench.seq("bad#1", list(PROMPT), 0, [0, 1, 2, 3, 4]),
        bench.seq("good#1", list(PROMPT), 0, [5, 6, 7, 8, 9]),
    )
    assert done.error == "poison"
    assert done.sampled == [None, None]


@pytest.mark.parametrize(("position", "is_read"), [(0, True), (1, True), (5, False), (15, True)])
def test_only_what_a_window_or_the_sinks_read_has_to_be_right(position: int, is_read: bool) -> None:
    attention = Attention(window=8, num_sinks=2)
    bench, tokens, slots = Bench(attention), list(PROMPT), list[int]()
    extend_slots(slots, tokens[:-1])
    for at, slot in enumerate(slots):
        bench.pool.write([0, 1, 2, 3, 4], at, slot)
    bench.pool.write([0, 1, 2, 3, 4], position, 1)
    bench.step(bench.seq("r#1", tokens, len(slots), [0, 1, 2, 3, 4]))
    assert bench.wrong == (["block used with wrong content"] if is_read else [])


def test_blocks_outside_the_windows_are_not_needed() -> None:
    attention = Attention(window=8, num_sinks=2)
    bench, tokens, slots = Bench(attention), list(PROMPT), list[int]()
    extend_slots(slots, tokens[:-1])
    table = [0, -1, 2, 3, 4]
    for at, slot in enumerate(slots):
        if at // 4 != 1:
            bench.pool.write(table, at, slot)
    done = bench.step(bench.seq("r#1", tokens, len(slots), table))
    assert bench.wrong == []
    assert done.sampled[0] is not None
    assert done.sampled[0].token == generate(PROMPT, GREEDY, 100, attention)[0][0]


@pytest.mark.parametrize(("moved", "is_right"), [(-1, False), (0, True), (1, False)])
def test_a_state_has_to_be_that_of_the_token_before(moved: int, is_right: bool) -> None:
    attention = Attention(num_states=1)
    bench, tokens, slots = Bench(attention), list(PROMPT), list[int]()
    extend_slots(slots, tokens)
    for at, slot in enumerate(slots[:-1]):
        bench.pool.write(list(range(10)), at, slot)
    start = len(slots) - 1
    bench.pool.write_states(list(range(10)), start - 1, slots[start - 1 + moved])
    done = bench.step(bench.seq("r#1", tokens, start, list(range(10))))
    assert bench.wrong == ([] if is_right else ["block used with wrong content"])
    assert done.sampled[0] is not None
    assert done.sampled[0].token == generate(PROMPT, GREEDY, 100, attention)[0][0]


def test_a_state_is_that_after_the_accepted_draft_tokens() -> None:
    attention = Attention(num_states=1)
    prompt = PROMPT[:16]
    expected = generate(prompt, replace(GREEDY, max_tokens=4), 100, attention)[0]
    bench, table = Bench(attention), list(range(12))
    (first,) = bench.step(bench.seq("r#1", list(prompt), 0, table)).sampled
    assert first is not None
    tokens = [*prompt, first.token]
    for draft, accepted in (((expected[1] ^ 1, 3), 0), ((expected[2], expected[3] ^ 1), 1)):
        seq = bench.seq("r#1", list(tokens), len(tokens) - 1, table)
        seq.draft_tokens = list(draft)
        (sampled,) = bench.step(seq).sampled
        assert sampled is not None
        assert len(sampled.more) == accepted
        tokens += [sampled.token, *sampled.more]
    assert tokens[len(prompt) :] == expected
    assert bench.wrong == []


def test_a_grammar_forces_tokens_and_its_executor_tells_which_follow() -> None:
    sampling = replace(GREEDY, grammar="5 3", max_tokens=20)
    output, _ = generate(PROMPT, sampling, 100)
    assert output != generate(PROMPT, replace(sampling, grammar=""), 100)[0]
    for at in range(len(output)):
        forced = forced_after("5 3", len(PROMPT) + at)
        assert tuple(output[at + 1 : at + 1 + len(forced)]) == forced[: len(output) - at - 1]
    free = [t for at, t in enumerate(output, start=len(PROMPT)) if at % 5 >= 3]
    assert all(token % 2 or token == 0 for token in free)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"logprobs": ()}, "wrong log-probabilities"),
        ({"poison": Poison.ROW}, "poison was sampled"),
    ],
)
def test_log_probabilities_and_poison_are_judged(change: dict, complaint: str | None) -> None:
    runtime, sampling = SimRuntime(1), replace(GREEDY, logprobs=2)
    output, finish = generate(PROMPT, sampling, 100)
    assert finish is FinishReason.LENGTH
    poison = change.get("poison")
    job = Job("r0", PROMPT, sampling, 0.0, 10.0, tuple(output), finish, poison=poison)
    client = SimClient("client", ["router-0"], [job], lambda *_: None, runtime.violate)
    client.start(0.0)
    logprobs = change.get("logprobs", tuple(output_logprobs(PROMPT, output, 2)))
    client.receive(1.0, Output("r0", 0, tuple(output), logprobs, finish=finish))
    assert [v.kind for v in runtime.violations] == ([] if complaint is None else [complaint])
