"""Which sequence makes steps fail: after a failed step its sequences run again apart.

Life: a step fails -> its sequences are run again in halves, those of a half that fails in parts of
it, until one fails alone -> a step over one made-up token (`Step.is_health_check`) tells whether
the worker fails or the sequence does -> the sequence is at fault, and everybody else goes on. n
sequences, of which k are at fault, take about 2 k log2(n) steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from kvrelay.engine.sequence import SeqState, Sequence

RUNNING = SeqState.RUNNING


class Isolation:
    """Owned by the scheduler. Invariant: while it is under way, a step has sequences of one group
    only, and nothing is computed ahead; a culprit has failed alone, and waits for the verdict."""

    def __init__(self) -> None:
        self._groups: deque[list[Sequence]] = deque()  # the next one first
        self._step_id = -1  # the step that runs one of them
        self.culprit: tuple[Sequence, str] | None = None  # and how its step failed
        self.is_checking = False  # a health check is in flight, for which it may lose its blocks

    @property
    def is_under_way(self) -> bool:
        """Not for those that have ended meanwhile, or have lost their blocks."""
        if self.is_checking or any(seq.state is RUNNING for group in self._groups for seq in group):
            return True
        return self.culprit is not None and self.culprit[0].state is RUNNING

    def next_group(self) -> list[Sequence]:
        """Those of the next group that still run; empty if there is none."""
        while self._groups:
            group = [seq for seq in self._groups.popleft() if seq.state is RUNNING]
            if group:
                return group
        return []

    def begin(self, step_id: int, left: Seq[Sequence]) -> None:
        """`step_id` runs the group that came last, but for those of it that are `left`."""
        self._step_id = step_id
        if left:
            self._groups.appendleft([*left])

    def on_failed(self, step_id: int, seqs: Seq[Sequence], error: str) -> None:
        """`seqs`: those of the failed step that live."""
        if not seqs:
            return
        if len(seqs) == 1 and step_id == self._step_id:
            self.culprit = seqs[0], error
            return
        if self.is_under_way and step_id != self._step_id:
            return  # it followed the step that failed, which was enough for it to fail
        middle = (len(seqs) + 1) // 2
        parts = [list(seqs[:middle]), list(seqs[middle:])]
        self._groups.extendleft(half for half in reversed(parts) if half)

    def on_health_check(self, error: str | None) -> tuple[Sequence, str] | None:
        """The culprit, if the worker is well. If it is not, it is checked again."""
        self.is_checking = False
        if error is not None:
            return None
        culprit, self.culprit = self.culprit, None
        return culprit
