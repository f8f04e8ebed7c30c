"""The step that runs, which another thread may have end at its next layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol


class Abandoned(Exception):
    """The step has ended early, and what it gave is void."""


class Abandons(Protocol):
    def abandon(self, is_on: bool) -> None:
        """Whether steps end at their next layer."""
        ...


class Running:
    """Invariant: `ops` abandons only while the step runs that was to be abandoned."""

    def __init__(self, ops: Abandons | None) -> None:
        """None: steps that have begun are ended by nobody."""
        self._ops = ops
        self._lock = Lock()  # guards what follows
        self._step_id: int | None = None
        self._is_abandoned = False

    @contextmanager
    def step(self, step_id: int) -> Iterator[None]:
        with self._lock:
            self._step_id, self._is_abandoned = step_id, False
        try:
            yield
        except Exception as error:
            self.check(error)  # what fails on half a result is no fault
            raise
        finally:
            with self._lock:
                self._step_id = None
                if self._is_abandoned and self._ops is not None:
                    self._ops.abandon(False)

    def abandon(self, step_id: int) -> None:
        with self._lock:
            if self._ops is not None and self._step_id == step_id:
                self._is_abandoned = True
                self._ops.abandon(True)

    def check(self, error: Exception | None = None) -> None:
        """Raises Abandoned, because of `error`."""
        with self._lock:
            if self._is_abandoned:
                raise Abandoned from error
