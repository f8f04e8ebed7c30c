"""Time to first token on an hour of real chat traffic, which the Mooncake project published
(Apache-2.0), on 8 + 8 workers: no change makes it longer without saying so.

`python -m pytest -m long -s tests/lab/replay/test_chat_trace.py` shows the figures of the whole
hour. As in `kvrelay replay`, and unlike on workers of `kvrelay serve` beside prefill workers, no
`itl_target_ms` is set: prompts are computed in passes of up to 8,192 tokens whatever decodes there.
"""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.readers import read_trace
from kvrelay.lab.replay.replay import replay
from kvrelay.lab.replay.report import summary
from kvrelay.lab.replay.trace import Trace
from kvrelay.lab.timing.timing import Polynomial
from kvrelay.router.config import RouterConfig

TRACE = Path(__file__).parent / "mooncake_conversation.jsonl.xz"
# See the table in benchmarks/results/README.md; a pass of prompts and decodes takes the sum.
TIMING = Polynomial((4.209989e-7, 1.518344e-2, 16.50142), (-25.74, 54.01, 5.74))
TOLERANCE = 1.02


class Figures(NamedTuple):
    """Milliseconds: to the first token, and to the last one."""

    mean: float
    p99: float
    e2e: float


PART = Figures(293.0, 1830.0, 6983.0)  # 320, 2139 and 6857 where every pass is of both
HOUR = {  # by how many times as fast as they came
    1.0: Figures(238.0, 1715.0, 4529.0),
    2.0: Figures(246.0, 1717.0, 5555.0),
    2.5: Figures(249.0, 1744.0, 6509.0),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / TRACE.stem
    path.write_bytes(lzma.decompress(TRACE.read_bytes()))
    return read_trace(path)


def figures(trace: Trace, speedup: float) -> Figures:
    router = RouterConfig(silent_after_s=4.0)
    config = ReplayConfig(TIMING, num_prefill=8, num_decode=8, router=router, speedup=speedup)
    found = summary(replay(trace, config))
    assert found["completed"] == found["requests"] == len(trace.requests)
    ttft = found["ttft_ms"]
    return Figures(ttft["mean"], ttft["p99"], found["e2e_ms"]["mean"])


def hold(found: Figures, known: Figures) -> None:
    for name, value, limit in zip(Figures._fields, found, known, strict=True):
        assert value <= TOLERANCE * limit, f"{name}: {value:.1f} ms, was {limit:g}"


@pytest.mark.slow
def test_the_first_minutes_are_served_as_soon_as_they_were(trace: Trace) -> None:
    part = replace(trace, requests=trace.requests[:1000])
    hold(figures(part, 2.5), PART)


@pytest.mark.long
@pytest.mark.parametrize("speedup", [1.0, 2.0, 2.5])
def test_the_hour_is_served_as_soon_as_it_was(trace: Trace, speedup: float) -> None:
    found = figures(trace, speedup)
    print(f"{speedup:g}x: TTFT {found.mean:.1f}, p99 {found.p99:.1f}, e2e {found.e2e:.0f} ms")
    hold(found, HOUR[speedup])
