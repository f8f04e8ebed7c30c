"""Small made-up traces, a cluster for them, and what must hold of every replay."""

from __future__ import annotations

from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np

from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import Replay, ReplayResult, Sample
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.timing.timing import Links, Polynomial
from kvrelay.router.config import RouterConfig

BLOCK = 64
LINKS = Links(bytes_per_token=1000, peer_bytes_per_s=1e9, host_bytes_per_s=1e9)
# A pass of n tokens: 5 ms + 0.1 ms n; a step: 10 ms, 20 ms with a full pool.
TIMING = Polynomial((0.0, 0.1, 5.0), (5.0, 5.0, 10.0), links=LINKS)
STEP_S = 0.02  # at most


def made_up(num_requests: int = 120, seed: int = 1, rate: float = 6.0) -> Trace:
    """Conversations that grow, a beginning that many share, and prompts of their own."""
    rng = Random(seed)
    requests, at_s, conversations = [], 0.0, {}
    for number in range(num_requests):
        at_s += rng.expovariate(rate)
        own = range(1000 * number, 1000 * number + rng.randint(1, 12))
        if number % 3 == 0:
            talk = rng.randrange(6)
            ids = conversations[talk] = (*conversations.get(talk, ()), *own)[:40]
        else:
            ids = (*range(900_000, 900_000 + rng.choice((0, 0, 4))), *own)
        length = len(ids) * BLOCK - rng.randrange(BLOCK)
        requests.append(TraceRequest(at_s, length, rng.choice((1, 2, 30, 90, 200)), ids))
    return Trace("made up", tuple(requests), block_tokens=BLOCK)


def config(**changes: Any) -> ReplayConfig:
    values: dict[str, Any] = {"num_prefill": 2, "num_decode": 3, "num_blocks": 120}
    policy = changes.pop("policy", "prefix")
    limits = changes.pop("limits", {})
    values |= {"block_size": BLOCK, "max_num_batched_tokens": 1024}
    return ReplayConfig(TIMING, router=RouterConfig(policy=policy, **limits), **values | changes)


def lone(*lengths: tuple[float, int, int], **changes: Any) -> Trace:
    """Requests that share nothing: arrival, prompt and output."""
    requests = tuple(TraceRequest(*length, **changes) for length in lengths)
    return Trace("lone", requests, block_tokens=BLOCK)


def checked(trace: Trace, with_config: ReplayConfig) -> tuple[Replay, ReplayResult]:
    """A replay in which each request ends once, with all its tokens or a reason; nothing is left
    on any worker after it."""
    run = Replay(trace, with_config)
    result = run.run(None)
    assert sorted(int(s.request_id[1:]) for s in result.samples) == list(range(len(trace.requests)))
    for sample in result.samples:
        if sample.refused is None:
            assert sample.num_output == sample.output_length
            assert sample.ttft_s is not None
            assert sample.e2e_s is not None
            assert 0 < sample.ttft_s <= sample.e2e_s
            assert (sample.second_s is None) == (sample.num_output == 1)
        else:
            assert sample.e2e_s is None
            assert sample.refused_s is not None
    assert run.router.check_idle() == []
    return run, result


def comparable(result: ReplayResult) -> dict[str, Any]:
    """All but what the machine that ran it had a part in."""
    values = asdict(result)
    for name in ("wall_s", "peak_rss_bytes"):
        del values[name]
    for name in ("itl_s", "itl_counts"):
        values[name] = values[name].tolist()
    values["load"] = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values["load"].items()
    }
    return values


def by_number(result: ReplayResult) -> dict[str, Sample]:
    return {sample.request_id: sample for sample in result.samples}
