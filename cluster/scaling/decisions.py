"""What was decided and why: one line of JSON each, from which every decision can be made again.

A log begins with the settings; then a line for each tick has the snapshot and the decision. The
scaler is pure, so `replay_log` feeds the snapshots to a new one, to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec
from msgspec import Struct

from kvrelay.cluster.scaling.observations import Snapshot
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.scaling_config import ScalingConfig


class Reason(StrEnum):
    """Why a decision is as it is; also the metric label."""

    ENOUGH = "enough"  # as many as are needed
    NOT_MEASURED = "not_measured"  # no worker has told yet what prompts cost
    STALE = "stale"  # measurements are too old
    HOLDING = "holding"  # fewer would do, but not for long enough yet
    REVERSALS = "reversals"  # fewer would do, but the direction has changed too often
    BUDGET = "budget"  # more are needed, and the budget is spent
    AT_MOST = "at_most"  # more are needed than may be
    COMING = "coming"  # more are needed, and they are starting
    LEAST = "least"  # started: there are fewer than there have to be
    WAKE = "wake"  # started: there were none, and a request came
    GROW = "grow"  # started, for the targets
    SHRINK = "shrink"  # drained: the targets are met with fewer
    IDLE = "idle"  # drained: there were no requests for long
    LIMIT = "limit"  # drained: there are more than may be
    FLIP = "flip"  # roles changed: that costs nothing


class Alternative(Struct, frozen=True):
    """So many workers, and what they would have done with the traffic in memory."""

    workers: int
    on_time: float  # share of requests
    gpu_s_per_s: float  # what they cost


class Inputs(Struct, frozen=True):
    """The figures that a decision was made from."""

    prefill: int  # workers that are up or coming, by role
    decode: int
    coming: int  # pending or starting ones among them
    draining: int
    least: int
    most: int
    prefill_demand: float  # GPU-seconds per second: recent
    decode_demand: float
    forecast: float  # prompts, when a worker that is ordered now is up
    hit_rate: float
    mean_output: float
    start_s: float
    pending_prefill_s: float
    gap: float  # share of requests that the real fleet misses, and its shadow would not
    reversals: int  # in the last hour
    worker_hours: float  # within the last hour


class Decision(Struct, frozen=True):
    """For one tick. Without removals, flips, drains and starts it is one not to act; they are to be
    carried out in this order."""

    at_s: float
    reason: Reason
    text: str  # for people
    wanted: int  # workers
    wanted_decode: int  # that decode, among them
    inputs: Inputs
    alternatives: tuple[Alternative, ...] = ()
    starts: tuple[Role, ...] = ()
    drains: tuple[NodeId, ...] = ()
    flips: tuple[tuple[NodeId, Role], ...] = ()
    machines: int | None = None  # to ask for; None: they are as they are
    removals: tuple[tuple[NodeId, str], ...] = ()  # of which nothing comes, and why

    @property
    def acts(self) -> bool:
        return bool(self.starts or self.drains or self.flips or self.removals)


class Line(Struct, frozen=True, omit_defaults=True):
    """A log's line is either settings, where a planner begins, or a tick."""

    settings: ScalingConfig | None = None
    snapshot: Snapshot | None = None
    decision: Decision | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """Returns JSON without a newline."""
    return _encoder.encode(line)


def read_log(lines: Iterable[bytes | str]) -> Iterator[Line]:
    """Raises msgspec.DecodeError for what is no line of a log."""
    return (_decoder.decode(line) for line in lines if line.strip())
