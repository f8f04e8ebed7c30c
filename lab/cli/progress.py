"""The bar that shows how far a replay is, and how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, transient=True)


def teller(progress: Progress, name: str) -> Callable[[float, float], None]:
    task = progress.add_task(name, total=1.0, status="")
    begun_at = time.monotonic()

    def tell(share: float, virtual_s: float) -> None:
        speed = virtual_s / max(time.monotonic() - begun_at, 1e-3)
        status = f"{virtual_s:,.0f} s, {speed:,.0f} x real time"
        progress.update(task, completed=share, status=status)

    return tell
