"""The prompts that wait for computation on one worker, as a router that sent them sees it.

Workers compute the shortest first. Between one message and the next a router only knows what it
has sent and how long each should take: the queue runs down by itself, and what is reported corrects
it.
"""

from __future__ import annotations

LEAST_S = 0.002  # a prompt that should be done by now, and is not


class PromptQueue:
    """Owned by an endpoint. Invariant: `_left_s` has every booked prompt that is not known to be
    computed, with the seconds it still needs, as of `_at`."""

    __slots__ = ("_at", "_left_s")

    def __init__(self) -> None:
        self._at = 0.0
        self._left_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._left_s)

    def add(self, now: float, request_id: str, seconds: float) -> None:
        self._run_down(now)
        self._left_s[request_id] = max(seconds, LEAST_S)

    def discard(self, now: float | None, request_id: str) -> None:
        """It is computed (`now`), or not wanted any more (None)."""
        if request_id in self._left_s:
            if now is not None:
                self._run_down(now)
            del self._left_s[request_id]

    def ahead_of(self, now: float, seconds: float) -> tuple[float, int]:
        """How long a prompt that takes `seconds` waits for shorter ones, and how many longer ones
        would wait for it."""
        if not self._left_s:
            return 0.0, 0
        self._run_down(now)
        wait_s, num_behind = 0.0, 0
        for left_s in self._left_s.values():
            if left_s <= seconds:
                wait_s += left_s
            else:
                num_behind += 1
        return wait_s, num_behind

    def busy_until(self, now: float) -> float:
        """When all of it should be computed, on the router's clock."""
        self._run_down(now)
        return now + sum(self._left_s.values())

    def _run_down(self, now: float) -> None:
        elapsed_s = now - self._at
        if elapsed_s <= 0:
            return
        self._at = now
        for request_id, left_s in sorted(self._left_s.items(), key=lambda item: item[1]):
            done_s = min(elapsed_s, left_s - LEAST_S)
            if done_s > 0:
                self._left_s[request_id] = left_s - done_s
                elapsed_s -= done_s
            if elapsed_s <= 0:
                break
