"""A picture of a run: workers that were up, and workers that were wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

History = Sequence[tuple[float, int, int]]
"""(seconds, workers up, workers wanted), in ascending order of time."""


def draw(history: History, path: Path) -> None:
    """Write a PNG. Raises ImportError without kvrelay[plot], and OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    minutes = [at_s / 60 for at_s, _, _ in history]
    axes.step(minutes, [want for _, _, want in history], where="post", color="#f1a340", lw=1.0)
    axes.fill_between(minutes, [up for _, up, _ in history], step="post", color="#7fbf7b", lw=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("workers")
    axes.set_ylim(0, 1 + max(max(up, want) for _, up, want in history))
    axes.legend(["wanted", "up"], loc="upper right", ncols=2)
    figure.savefig(path)
