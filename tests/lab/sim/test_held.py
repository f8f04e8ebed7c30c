"""Computed prompts of a low class at a prefill worker whose consumer has no room, in the simulator.

Seeds seldom come to it: rows have to be placed before streams take the memory that they need."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from msgspec import structs

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.stats import Role
from kvrelay.lab.sim import run
from kvrelay.lab.sim.breakage import Break
from kvrelay.lab.sim.client import class_of
from kvrelay.lab.sim.faults import FaultPlan
from kvrelay.lab.sim.model import FULL
from kvrelay.lab.sim.run import SimCluster
from kvrelay.lab.sim.scenario import BLOCK_SIZE, Scenario, draw_scenario
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.worker.node import Worker
from tests.lab.sim.toys import Recorder

ROW, CHAT = "r3", "r0"  # a batch row, and one of the default class
SIZES = {ROW: 20, CHAT: 16}  # blocks of their prompts
POOLS = {Role.PREFILL: 32, Role.DECODE: 48}


def two_workers(*args: object) -> Scenario:
    """Without faults. The jobs say which class each is of; nobody submits them."""
    for seed in count():
        drawn = draw_scenario(*(random.Random(f"{seed}{each}") for each in range(3)), 0.0)
        if drawn.attention == FULL:
            break
    base = structs.replace(
        drawn.workers[-1], max_model_len=160, lease_s=30.0, handoff_timeout_s=30.0, cores=""
    )
    workers = tuple(
        structs.replace(base, node_id=str(role), role=role, num_blocks=size)
        for role, size in POOLS.items()
    )
    jobs = tuple(replace(drawn.jobs[0], request_id=name, arrive_s=600.0) for name in SIZES)
    quiet = {"faults": FaultPlan(until_s=0.0), "orders": (), "role_changes": ()}
    return replace(drawn, workers=workers, jobs=jobs, **quiet)


def held_before_a_chat(monkeypatch: pytest.MonkeyPatch, broken: Break | None) -> SimCluster:
    """The row's prompt is computed and held, then the chat comes."""
    monkeypatch.setattr(run, "draw_scenario", two_workers)
    monkeypatch.setattr(run, "draw_updates", lambda *_: ())
    cluster = SimCluster(0, broken)
    runtime, sink = cluster.runtime, Recorder("sink")
    runtime.faults.active = False
    runtime.add("sink", lambda epoch, records: sink)
    runtime.run_until(1.0)
    prefill, decode = (runtime.life(role).node for role in POOLS)  # type: ignore[union-attr]
    assert isinstance(prefill, Worker)
    assert isinstance(decode, Worker)
    assert decode.core.kv.allocate(POOLS[Role.DECODE] - 8), "streams have the rest"

    def hand_over(name: str) -> None:
        tokens = (1 + int(name[1:]),) * (SIZES[name] * BLOCK_SIZE)
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        work = (name, sampling, 0, "sink", tokens, len(tokens), 60.0)
        (job,) = (job for job in cluster.scenario.jobs if job.request_id == name)
        about = {"priority": class_of(job).priority}
        runtime.post("sink", Role.DECODE, Decode(*work, prefill_from=Role.PREFILL, **about))
        runtime.post("sink", Role.PREFILL, Prefill(*work, decode_to=Role.DECODE, **about))

    hand_over(ROW)
    runtime.run_until(2.0)
    (held,) = prefill.core.scheduler.held
    assert held.service_class is ServiceClass.BATCH
    hand_over(CHAT)
    runtime.run_until(4.0)
    return cluster


def test_a_chat_gets_the_memory_of_a_row_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = held_before_a_chat(monkeypatch, None)
    assert cluster.runtime.violations == []
    life = cluster.runtime.life(Role.PREFILL)
    assert life is not None
    assert isinstance(life.node, Worker)
    assert [seq.request_id for seq in life.node.core.scheduler.held] == [CHAT]


def test_the_checker_notices_a_row_that_is_held_before_a_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = held_before_a_chat(monkeypatch, Break.HELD)
    (found,) = cluster.runtime.violations
    assert found.kind == "class inversion"
    assert ROW in found.text
