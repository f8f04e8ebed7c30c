"""Over real nodes and a real model, phases sum to what a client measures by its own clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.engine.request import SamplingParams
from kvrelay.router.config import RouterConfig
from kvrelay.router.explain import Explanation
from tests.local.test_local import PROMPTS, REMOTE, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import Completion, LocalCluster

LONG = SamplingParams(max_tokens=80, temperature=0.0)
LATE_S = 0.02  # what the client's own turn of the loop may take


def explanation_of(cluster: LocalCluster, answer: Completion) -> Explanation:
    found = cluster.run(lambda: cluster.router.explanations.get(answer.request_id))
    assert isinstance(found, Explanation)
    return found


@pytest.mark.parametrize("config", [REMOTE, RouterConfig()], ids=["handoff", "cheapest"])
def test_phases_sum_to_the_latency_and_to_the_first_token(
    model_dir: Path, config: RouterConfig
) -> None:
    with LocalCluster(model_dir, router=config, engine=small()) as cluster:
        answers = [*cluster.generate(PROMPTS, LONG), *cluster.generate(PROMPTS, LONG)]
        found = [explanation_of(cluster, answer) for answer in answers]
    for answer, explanation in zip(answers, found, strict=True):
        e2e_s = answer.arrived_at[-1] - answer.submitted_at
        ttft_s = answer.arrived_at[0] - answer.submitted_at
        before_s = sum(p.seconds for p in explanation.phases if p.to_first)
        assert sum(p.seconds for p in explanation.phases) == pytest.approx(
            e2e_s, rel=0.05, abs=LATE_S
        )
        assert before_s == pytest.approx(ttft_s, rel=0.05, abs=LATE_S)
        names = {phase.name for phase in explanation.phases}
        assert names >= {"queue", "route", "prefill", "decode"}
        is_handed_over = explanation.attempts[0].prefill is not None
        assert ({"transfer", "first_decode"} <= names) == is_handed_over
        assert explanation.prediction is not None
    assert any(e.attempts[0].prefill for e in found) or config is not REMOTE
