"""What processes hold while they live: memory, open files and threads; what they write: shared
memory, logs, databases, disks. And how these grow.

Life of a watch: from `start` to `stop` every process of the system, and what it writes, is looked
at every few seconds. Of one that lived for long enough, the second half counts: what it holds in
the last third of that, against the first third. What grows there would grow on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import linear_regression, median

import psutil

from tests.chaos.kvrelay import System

EVERY_S = 10.0
LEAST_LIFE_S = 600.0
MAX_GROWTH = 0.05  # share of memory
MAX_MORE = 6  # open files, or threads: connections to others come and go
MIB = float(1 << 20)
MAY_GROW = ("logs", "databases", "all state", "KV on disk")  # up to bounds of their own


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # by time.monotonic
    mib: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How one process grew, or what all write of one kind (`pid` is 0): medians of the first and of
    the last third of the second half of its life; `mib_an_hour` is the slope of that half."""

    kind: str
    pid: int
    life_s: float
    mib: tuple[float, float]
    files: tuple[float, float]
    threads: tuple[float, float]
    mib_an_hour: float

    @property
    def of_memory(self) -> float:
        return self.mib[1] / self.mib[0] - 1 if self.mib[0] else 0.0

    @property
    def leaks(self) -> str:
        """Says what grew and should not; "" if nothing did."""
        if self.kind in MAY_GROW:
            return ""
        found = [f"{self.of_memory:+.1%} of memory"] if self.of_memory > MAX_GROWTH else []
        for what, (before, after) in (("files", self.files), ("threads", self.threads)):
            if after > before + MAX_MORE:
                found.append(f"{what} {before:g} to {after:g}")
        return ", ".join(found)


@dataclass(slots=True)
class Watch:
    """Watches memory while a run lasts."""

    system: System
    _samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def growths(self) -> list[Growth]:
        """Lists those that lived for long enough."""
        found = [growth(kind, pid, samples) for (kind, pid), samples in self._samples.items()]
        return sorted((each for each in found if each), key=lambda each: each.kind)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            for kind, process in self._processes():
                with contextlib.suppress(psutil.Error):
                    with process.oneshot():
                        sample = Sample(
                            time.monotonic(),
                            process.memory_info().rss / MIB,
                            process.num_fds(),
                            process.num_threads(),
                        )
                    self._samples.setdefault((kind, process.pid), []).append(sample)
            for kind, paths in self.system.folders().items():
                self._samples.setdefault((kind, 0), []).append(written(paths))

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for number, pid in enumerate(self.system.roots()):
            with contextlib.suppress(psutil.Error):
                yield f"root {number}", psutil.Process(pid)
        for kind in self.system.kinds:
            for process in self.system.processes(kind):
                yield kind, process


def growth(kind: str, pid: int, samples: list[Sample]) -> Growth | None:
    """None: it did not live for long enough."""
    life_s = samples[-1].at - samples[0].at
    if life_s < LEAST_LIFE_S:
        return None
    late = samples[len(samples) // 2 :]
    third = len(late) // 3
    first, last = late[:third], late[-third:]
    return Growth(
        kind=kind,
        pid=pid,
        life_s=round(life_s),
        mib=(median(s.mib for s in first), median(s.mib for s in last)),
        files=(median(s.files for s in first), median(s.files for s in last)),
        threads=(median(s.threads for s in first), median(s.threads for s in last)),
        mib_an_hour=3600 * linear_regression([s.at for s in late], [s.mib for s in late]).slope,
    )


def written(paths: Iterable[Path]) -> Sample:
    """What files take on their disks; of folders, all that is in them."""
    sizes = []
    for path in chain.from_iterable((path, *path.rglob("*")) for path in paths):
        with contextlib.suppress(OSError):  # it has gone
            state = os.stat(path, follow_symlinks=False)
            sizes.append(state.st_blocks * 512)
    return Sample(time.monotonic(), sum(sizes) / MIB, len(sizes), 0)
