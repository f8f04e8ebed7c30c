"""What the simulator's autoscaler decides about the traffic that a real one has seen.

The same requests arrive at the same times, workers start and compute as fast as the real ones have
measured, and the same settings decide. Each side then goes its own way: a decision that differs
changes what is seen afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from kvrelay.cluster.scaling.decisions import Decision, Line
from kvrelay.cluster.scaling.observations import Costs, Observer, Snapshot
from kvrelay.lab.replay.autoscale import replay_scaled, with_targets
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.timing.timing import Links
from kvrelay.router.scaling_config import ScalingConfig

MAX_BLOCKS = 1 << 16  # in a prompt
LINKS = Links(message_s=0.002)  # between processes, on cores that others use


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as its client has sent it; seconds since 1970, tokens."""

    at_s: float
    prompt: int  # equal for equal prompts
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class AsMeasured:
    """A `Timing`: passes take what workers have measured."""

    costs: Costs
    name: str = "as measured"
    links: Links = LINKS

    def pass_s(
        self,
        prompt_tokens: int,
        prompt_pairs: float,
        num_prompts: int,
        num_decodes: int,
        kv_tokens: int,
        pool_tokens: int,
    ) -> float:
        seconds = self.costs.prompt_s(prompt_tokens) if prompt_tokens else 0.0
        if num_decodes:
            seconds += self.costs.step_s(num_decodes, kv_tokens / num_decodes)
        return seconds


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers were wanted: (seconds since the first decision, workers), by tick."""

    by_tick: tuple[tuple[float, int], ...]

    @property
    def changes(self) -> list[tuple[float, int]]:
        """When it became another number, and which."""
        return [b for a, b in pairwise(self.by_tick) if a[1] != b[1]]

    def has(self, at_s: float, workers: int, within_s: float) -> bool:
        """Whether so many are wanted at some tick as near to `at_s`."""
        first = bisect_left(self.by_tick, (at_s - within_s, -1))
        last = bisect_left(self.by_tick, (at_s + within_s, workers + 1))
        return any(number == workers for _, number in self.by_tick[first:last])


def wanted_of(decisions: Sequence[Decision]) -> Wanted:
    begin_s = decisions[0].at_s
    return Wanted(tuple((each.at_s - begin_s, each.wanted) for each in decisions))


def decisions_of(lines: Sequence[Line]) -> list[Decision]:
    return [line.decision for line in lines if line.decision is not None]


def agreement(real: Wanted, simulated: Wanted, tick_s: float) -> dict[str, float]:
    """Shares of the real one's ticks with the number that the simulator wants within one tick, and
    of its changes that the simulator makes within one and within five; both up to the end of the
    shorter one."""
    end_s = min(real.by_tick[-1][0], simulated.by_tick[-1][0])
    ticks = [each for each in real.by_tick if each[0] <= end_s]
    changes = [each for each in real.changes if each[0] <= end_s]

    def share(of: Sequence[tuple[float, int]], ticks_off: float) -> float:
        # A tick's time is not known better than half a tick.
        within_s = (ticks_off + 0.5) * tick_s
        return sum(simulated.has(*each, within_s) for each in of) / max(1, len(of))

    return {
        "ticks": len(ticks),
        "same_within_a_tick": share(ticks, 1),
        "changes": len(changes),
        "changes_within_a_tick": share(changes, 1),
        "changes_within_five": share(changes, 5),
        "simulated_changes": sum(at_s <= end_s for at_s, _ in simulated.changes),
        "mean_wanted": fmean(number for _, number in ticks),
        "mean_wanted_simulated": fmean(n for at_s, n in simulated.by_tick if at_s <= end_s),
    }


def simulated_wanted(lines: Sequence[Line], sent: Sequence[Sent], block_size: int) -> Wanted:
    """lines: of a real log, from its settings on. sent: the requests, in any order."""
    settings = next(line.settings for line in lines if line.settings is not None)
    snapshots = [line.snapshot for line in lines if line.snapshot is not None]
    costs, start_s = _measured(settings, snapshots)
    begin_s = snapshots[0].wall_s
    requests = sorted((each for each in sent if each.at_s >= begin_s), key=lambda each: each.at_s)
    trace = Trace(
        "as it was",
        tuple(
            TraceRequest(
                each.at_s - begin_s,
                each.num_prompt,
                each.num_output,
                tuple(MAX_BLOCKS * each.prompt + i for i in range(each.num_prompt // block_size)),
            )
            for each in requests
        ),
        block_size,
    )
    return wanted_of(decisions_of(simulate(trace, costs, start_s, settings)))


def simulate(trace: Trace, costs: Costs, start_s: float, settings: ScalingConfig) -> list[Line]:
    """The log of an autoscaler over such workers, one of each role at first."""
    config = ReplayConfig(
        timing=AsMeasured(costs),
        num_blocks=max(1, costs.pool_tokens // trace.block_tokens),
        block_size=trace.block_tokens,
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_num_batched_tokens,
        stats_interval_s=0.25,
    )
    return replay_scaled("", trace, with_targets(config, settings), start_s, settings).log


def _measured(settings: ScalingConfig, snapshots: Sequence[Snapshot]) -> tuple[Costs, float]:
    """What passes cost, in the middle of the run, and how long a start takes."""
    observer = Observer(settings)
    seen = [observer.observe(snapshot) for snapshot in snapshots]
    measured = [each.costs for each in seen if each.costs is not None]
    starts = {
        worker.worker: worker.took_s
        for snapshot in snapshots
        for worker in snapshot.workers
        if worker.took_s > 0
    }
    by_step = sorted(measured, key=lambda costs: costs.decode_step_s)
    return by_step[len(by_step) // 2], median(starts.values()) if starts else settings.start_s
