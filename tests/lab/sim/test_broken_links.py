"""A link on which every read times out, in the simulator: production nodes learn to avoid it, and
use it again when it is mended."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.stats import Role
from kvrelay.lab.sim import client, inversion, run
from kvrelay.lab.sim.faults import BrokenLink, FaultPlan
from kvrelay.lab.sim.model import VOCAB_SIZE, Attention, generate
from kvrelay.lab.sim.scenario import Scenario, draw_scenario
from kvrelay.lab.sim.workload import GENEROUS_S, Job
from kvrelay.router.config import RouterConfig

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BROKEN = ("prefill-0", "decode-0")
MENDED_AT, UNTIL_S = 20.0, 47.0
SAMPLING = SamplingParams(max_tokens=80, temperature=0.0)  # long enough to be worth a handoff


def job(number: int, rng: random.Random) -> Job:
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(300))
    answer, why = generate(prompt, SAMPLING, 400)
    at_s = 0.5 + 0.8 * (number // 8)
    return Job(f"r{number}", prompt, SAMPLING, at_s, GENEROUS_S, tuple(answer), why)


def scenario() -> Scenario:
    """Two workers of each role, bursts of requests, and nothing else that goes wrong."""
    rng = random.Random(1)
    base = draw_scenario(random.Random(1), random.Random(1))
    workers = tuple(
        structs.replace(
            base.workers[0], node_id=name, role=Role(name.partition("-")[0]), num_blocks=2000,
            max_model_len=400, max_num_batched_tokens=256, max_num_seqs=64, max_waiting=64,
            num_host_blocks=0, num_disk_blocks=0, num_speculative_tokens=0, read_timeout_s=1.0,
            read_floor_s=0.5, handoff_timeout_s=2.0, cores="", window=0, sinks=0,
            itl_target_ms=20.0, itl_most_ms=200.0, step_timeout_s=30.0, stats_interval_s=0.25,
        )
        for name in NAMES
    )  # fmt: skip
    plan = FaultPlan(until_s=UNTIL_S, broken_links=(BrokenLink(*BROKEN, 0.0, MENDED_AT),))
    jobs = tuple(job(number, rng) for number in range(int(10 * (UNTIL_S - 5))))
    config = RouterConfig(max_decisions=len(jobs))
    return replace(
        base, workers=workers, router=config, jobs=jobs, faults=plan, orders=(), role_changes=(),
        routers=("router-0",), attention=Attention(), checksums=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_link_is_avoided_while_it_is_broken_and_used_when_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "draw_scenario", lambda *_: scenario())
    for module in (client, inversion):
        monkeypatch.setattr(module, "class_of", lambda _: ServiceClass.DEFAULT)
    cluster = run.SimCluster(2, None)
    cluster.run()
    assert cluster.runtime.violations == []
    router: Any = getattr(cluster.runtime.life("router-0"), "node", None)
    attempts = [a for each in router.explanations.recent() for a in each.attempts]
    handed = sorted((a for a in attempts if a.prefill), key=lambda a: a.sent_at)
    over = [a.sent_at for a in handed if (a.prefill.worker, a.decode.worker) == BROKEN]
    assert sum(at < MENDED_AT for at in over) <= 8
    assert not [at for at in over if 4.0 < at < MENDED_AT], "it is learned"
    assert len([a for a in handed if 4.0 < a.sent_at < MENDED_AT]) > 50, "others go on"
    assert sum(at > 33.0 for at in over) > 10, "it is mended"
