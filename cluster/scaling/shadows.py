"""Shadow fleets: which share of the traffic would have been on time with so many workers?

For each size a queue is kept in which the real arrivals of prompts are served, in seconds by what
workers measure, as the router would serve them: in order of arrival, and where that is too late for
one, the longest gives way (`router.ttft_target_s`). No assumption about the traffic is made; bursts
count as they were. A request costs a few operations for each size, so the last quarter of an hour
of thousands of requests is known at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

SIZES = 12  # exact up to here; beyond, steps of about a twelfth
MAX_PARTS = 64  # a crowd of equal prompts in one look counts as so many, each of several


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Returns sizes in ascending order, the last of which is `most`."""
    found, size = [], 1
    while size < most:
        found.append(size)
        size += max(1, size // SIZES)
    return (*found, max(1, most))


class Shadow:
    """`size` workers that share one queue. Invariant: `_backlog_s` is the work in `_queue`, and
    what of it has been served leaves it in order of arrival."""

    def __init__(self, size: int, target_s: float) -> None:
        self.size = size
        self._target_s = target_s
        self._queue: deque[list[float]] = deque()  # [seconds left, seconds, requests, number]
        self._by_length: list[tuple[float, int, list[float]]] = []
        self._backlog_s = 0.0
        self._number = 0
        self.missed = 0.0  # since the last look

    def serve(self, seconds: float) -> None:
        left_s = seconds * self.size
        self._backlog_s = max(0.0, self._backlog_s - left_s)
        while self._queue and left_s > 0:
            first = self._queue[0]
            served_s = min(left_s, first[0])
            first[0] -= served_s
            left_s -= served_s
            if first[0] > 0:
                return
            self._queue.popleft()
            first[3] = -1.0  # not to be found by length any more

    def add(self, seconds: float, count: float) -> None:
        """`count` prompts that take `seconds` each come at once."""
        work_s = seconds * count
        item = [work_s, seconds, count, float(self._number)]
        self._queue.append(item)
        heappush(self._by_length, (-seconds, self._number, item))
        self._number += 1
        self._backlog_s += work_s
        while self._backlog_s > 0 and self._is_late(seconds, work_s):
            if not self._give_way():
                break
            if item[3] < 0:
                return

    def _is_late(self, seconds: float, work_s: float) -> bool:
        """Would the newest, which come last, end after the target?"""
        before_s = max(0.0, self._backlog_s - min(work_s, seconds))
        return before_s / self.size + seconds > self._target_s

    def _give_way(self) -> bool:
        while self._by_length:
            item = heappop(self._by_length)[2]
            if item[3] >= 0:
                self.missed += item[2]
                self._backlog_s -= item[0]
                item[0], item[3] = 0.0, -1.0
                return True
        return False

    def take_missed(self) -> float:
        missed, self.missed = self.missed, 0.0
        if len(self._by_length) > 4 * len(self._queue) + 64:
            self._by_length = [each for each in self._by_length if each[2][3] >= 0]
            self._by_length.sort()
        return missed


class Shadows:
    """Owned by a planner. Knows the last `memory_s`, look by look."""

    def __init__(self, most: int, target_s: float, memory_s: float) -> None:
        self._target_s = target_s
        self._memory_s = memory_s
        self.sizes = sizes_up_to(most)
        self._shadows = [Shadow(size, target_s) for size in self.sizes]
        self._looks: deque[tuple[float, float, float, float, tuple[float, ...]]] = deque()
        self.num_requests = 0.0  # in memory
        self.num_long = 0.0  # that no fleet could serve on time, among those
        self.work_s = 0.0  # summed over all
        self._missed = [0.0] * len(self.sizes)

    def add(self, now: float, elapsed_s: float, prompts: Iterable[tuple[float, int]]) -> None:
        """`(seconds, count)` of the prompts that have come in the last `elapsed_s`, spread over
        it."""
        parts = list(_spread(prompts))
        step_s = elapsed_s / max(1, len(parts))
        num = long = 0.0
        work_s = sum(seconds * count for seconds, count in parts)
        for seconds, count in parts:
            can_be_on_time = seconds <= self._target_s
            num += count
            long += 0 if can_be_on_time else count
            for shadow in self._shadows:
                shadow.serve(step_s)
                if can_be_on_time:
                    shadow.add(seconds, count)
        if not parts:
            for shadow in self._shadows:
                shadow.serve(elapsed_s)
        missed = tuple(shadow.take_missed() for shadow in self._shadows)
        self._looks.append((now, num, long, work_s, missed))
        self._count(num, long, work_s, missed, 1.0)
        while self._looks and now - self._looks[0][0] > self._memory_s:
            self._count(*self._looks.popleft()[1:], -1.0)
        if not self._looks:
            self.num_requests = self.num_long = self.work_s = 0.0
            self._missed = [0.0] * len(self.sizes)

    def on_time(self, workers: float) -> float:
        """Share of the traffic in memory that would have been on time; 1 without any."""
        if self.num_requests < 0.5:
            return 1.0
        return self._share(workers, self._missed, self.num_requests, self.num_long)

    def last_missed(self, workers: float) -> float:
        """Requests of the last look that so many workers would not have served on time."""
        if not self._looks or self._looks[-1][1] < 0.5:
            return 0.0
        _, num, long, _, missed = self._looks[-1]
        return num * (1.0 - self._share(workers, missed, num, long))

    @property
    def ceiling(self) -> float:
        """Share that could be on time at all."""
        return 1.0 - self.num_long / self.num_requests if self.num_requests >= 0.5 else 1.0

    def _share(self, workers: float, all_missed: Sequence[float], num: float, long: float) -> float:
        """Between two sizes it is in between."""
        below = 0.0, 0.0
        for size, missed in zip(self.sizes, all_missed, strict=True):
            share = min(1.0, max(0.0, 1.0 - (missed + long) / num))
            if workers <= size:
                least, low = below
                return low + (share - low) * (max(0.0, workers) - least) / (size - least)
            below = float(size), share
        return below[1]

    def demand(self, now: float, seconds: float) -> float:
        """GPU-seconds of prompts per second, in the mean over the last `seconds`."""
        work_s = 0.0
        for at_s, _, _, work, _ in reversed(self._looks):
            if at_s <= now - seconds:
                break
            work_s += work
        return work_s / seconds

    def _count(
        self, num: float, long: float, work_s: float, missed: tuple[float, ...], sign: float
    ) -> None:
        self.num_requests += sign * num
        self.num_long += sign * long
        self.work_s += sign * work_s
        self._missed = [a + sign * b for a, b in zip(self._missed, missed, strict=True)]


def _spread(prompts: Iterable[tuple[float, int]]) -> list[tuple[float, float]]:
    """One by one, the lengths mixed as evenly as they are in the whole."""
    placed = []
    for seconds, count in prompts:
        parts = min(count, MAX_PARTS)
        placed += [((part + 0.5) / parts, seconds, count / parts) for part in range(parts)]
    placed.sort()
    return [(seconds, count) for _, seconds, count in placed]
