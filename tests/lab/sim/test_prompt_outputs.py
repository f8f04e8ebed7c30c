"""What prompts give in the simulator: in any chunks what the oracle says, and who checks it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import NO_OUTPUTS, Pooling, PromptOutputs, SamplingParams
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.lab.sim import run, scenario
from kvrelay.lab.sim.checkers import check_prompt_outputs
from kvrelay.lab.sim.client import SimClient
from kvrelay.lab.sim.executor import SimExecutor, SimPool
from kvrelay.lab.sim.model import FULL, generate, prompt_outputs
from kvrelay.lab.sim.run import SimCluster, run_seed
from kvrelay.lab.sim.runtime import SimRuntime
from kvrelay.lab.sim.scenario import draw_scenario
from kvrelay.lab.sim.workload import Job
from kvrelay.router.messages import Output

PROMPT = tuple(range(1, 20))
KINDS = [
    SamplingParams(prompt_logprobs=0),
    SamplingParams(prompt_logprobs=3, pooling=Pooling.MEAN),
    SamplingParams(pooling=Pooling.LAST),
    SamplingParams(pooling=Pooling.MEAN),
]


def computed(sampling: SamplingParams, *chunks: tuple[int, int]) -> PromptOutputs:
    """Each chunk gives what those before it have not given. With rubbish in between them."""
    pool = SimPool(8, 4, with_checksums=False)
    wrong: list[str] = []
    executor = SimExecutor({Tier.DEVICE: pool}, lambda kind, text: wrong.append(kind))
    logprobs, pooled, given = [], b"", 0
    for number, (start, end) in enumerate(chunks):
        tokens, is_last = list(PROMPT), end == len(PROMPT)
        seq = ScheduledSeq(
            "r", tokens[start:end], start, [5, 1, 4, 2, 6], is_last, sampling, tokens, len(PROMPT)
        )
        seq.outputs_from, seq.pooled = given, pooled
        for error in ("a fault", None):
            executor.begin(Step(number, [seq]))
            done = executor.finish(0.1, error)
            assert bool(done.prompts) is (error is None)
        logprobs += done.prompts[0].logprobs
        pooled, given = done.prompts[0].embedding, max(given, end)
    assert wrong == []
    return PromptOutputs(tuple(logprobs), pooled)


@pytest.mark.parametrize("sampling", KINDS)
def test_any_chunks_give_what_the_oracle_says(sampling: SamplingParams) -> None:
    expected = prompt_outputs(PROMPT, sampling)
    assert expected != NO_OUTPUTS
    assert len(expected.logprobs) == (0 if sampling.prompt_logprobs is None else len(PROMPT) - 1)
    end = len(PROMPT)
    assert computed(sampling, (0, end)) == expected
    assert computed(sampling, (0, 4), (4, 5), (5, 18), (18, end)) == expected
    assert computed(sampling, (0, 9), (0, 3), (3, 12), (12, end)) == expected  # it was preempted


def test_outputs_tell_prompts_apart() -> None:
    other = (*PROMPT[:-2], 9, PROMPT[-1])
    for sampling in KINDS:
        assert prompt_outputs(other, sampling) != prompt_outputs(PROMPT, sampling)
        assert prompt_outputs(PROMPT[:-1], sampling) != prompt_outputs(PROMPT, sampling)
    assert prompt_outputs(PROMPT, SamplingParams()) == NO_OUTPUTS


def complaints(sampling: SamplingParams, *outputs: PromptOutputs) -> list[str]:
    """What a client says that gets a token with each of `outputs`."""
    runtime = SimRuntime(1)
    sampling = replace(sampling, max_tokens=8, temperature=0.0)
    expected, finish = generate(PROMPT, sampling, 100)
    job = Job("r0", PROMPT, sampling, 0.0, 10.0, tuple(expected), finish)
    client = SimClient("client", ["router-0"], [job], lambda *_: None, runtime.violate)
    client.start(0.0)
    for index, prompt in enumerate(outputs):
        client.receive(1.0, Output("r0", index, (expected[index],), prompt=prompt))
    assert not runtime.violations
    check_prompt_outputs(runtime, client)
    return [violation.kind for violation in runtime.violations]


@pytest.mark.parametrize("sampling", KINDS)
def test_the_client_has_to_get_them_once_whole_and_with_the_first_token(
    sampling: SamplingParams,
) -> None:
    right, wrong = prompt_outputs(PROMPT, sampling), ["wrong prompt outputs"]
    other = prompt_outputs(PROMPT[1:], sampling)
    part = replace(right, logprobs=right.logprobs[:-1], embedding=right.embedding[:-1])
    assert complaints(sampling, right, NO_OUTPUTS) == []
    assert complaints(sampling) == []  # there was no token
    for outputs in (
        *((NO_OUTPUTS,), (NO_OUTPUTS, right), (right, right)),
        *((other,), (part,), (right, part)),
    ):
        assert complaints(sampling, *outputs) == wrong
    assert complaints(SamplingParams(), right) == wrong
    assert complaints(SamplingParams(), NO_OUTPUTS) == []


@pytest.mark.long
def test_runs_have_requests_that_ask_for_them() -> None:
    """Also some that are cancelled before or after, and some whose prompt takes several steps."""
    ends: set[str] = set()
    sizes: set[int] = set()
    for seed in range(8):
        cluster = SimCluster(seed, None)
        cluster.run()
        assert not cluster.runtime.violations
        asked = [o for o in cluster.client.orders.values() if o.job.sampling.reads_prompt]
        ends |= {f"{order.outcome}, {len(order.prompts)}" for order in asked}
        sizes |= {len(order.job.prompt) for order in asked if order.prompts}
    assert ends >= {"finished, 1", "cancelled, 1", "cancelled, 0"}
    assert max(sizes) > 64


class Least(Random):
    """Draws nothing of what seeds did not have at first."""

    def random(self) -> float:
        return 0.99

    def choice(self, options):
        return options[0]


def test_a_prompt_that_loses_its_blocks_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds 691 and 616: computed again in smaller chunks, it gave some of its outputs twice."""
    monkeypatch.setattr(run, "RANKS", (1,))  # as when it was found
    monkeypatch.setattr(run, "STEPS_AHEAD", (0,))
    monkeypatch.setattr(scenario, "_draw_attention", lambda more: FULL)
    monkeypatch.setattr(run, "draw_scenario", lambda rng, *_: draw_scenario(rng, Least()))
    assert run_seed(691).violations == ()

    def forget(seq: Sequence, outputs: PromptOutputs, end: int) -> None:
        seq.num_outputs = min(end, seq.num_prompt_tokens)
        seq.prompt_logprobs += outputs.logprobs
        seq.pooled = outputs.embedding

    monkeypatch.setattr(Sequence, "take_outputs", forget)
    found = {violation.kind for violation in run_seed(616).violations}
    assert found == {"wrong prompt outputs"}
