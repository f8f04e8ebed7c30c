"""A picture of a run: workers that were up, and workers that were wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

History = Sequence[tuple[float, int]]
"""(seconds, workers), in ascending order of time."""


def draw(up: History, wanted: History, simulated: History, path: Path) -> None:
    """`simulated`: wanted in the simulator. Write a PNG. Raises ImportError without kvrelay[plot],
    and OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def columns(history: History) -> tuple[list[float], list[int]]:
        return [at_s / 60 for at_s, _ in history], [number for _, number in history]

    axes.fill_between(*columns(up), step="post", color="#7fbf7b", lw=0, label="up")
    axes.step(*columns(wanted), where="post", color="#f1a340", lw=1.2, label="wanted")
    label = "wanted in the simulator"
    axes.step(*columns(simulated), where="post", color="#5b3f8c", lw=0.9, ls=":", label=label)
    axes.set_xlabel("minutes")
    axes.set_ylabel("workers")
    axes.set_ylim(0, 1 + max(number for _, number in (*up, *wanted, *simulated)))
    axes.legend(loc="upper right", ncols=3)
    figure.savefig(path)
