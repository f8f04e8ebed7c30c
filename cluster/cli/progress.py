"""What `kvrelay serve` shows while it starts: one line per part, with what it is doing."""

from __future__ import annotations

import threading
import time

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text


class StartProgress:
    """Parts and their latest news. May be told from any thread; draws only inside `with`.

    On a terminal the lines are redrawn in place; elsewhere each change is a line of its own.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[str, bool]] = {}
        self._begun_at = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw no more; may be called again."""
        self._live.stop()

    def tell(self, part: str, news: str, done: bool = False) -> None:
        """`part` is at `news`; `done` marks the end of it."""
        with self._lock:
            if self._parts.get(part) == (news, done):
                return
            self._parts[part] = (news, done)
            if self._console.is_terminal:
                self._live.update(self._drawn())
            else:
                elapsed_s = time.monotonic() - self._begun_at
                self._console.print(
                    f"[{elapsed_s:5.1f} s] {part}: {news}", markup=False, soft_wrap=True
                )

    def _drawn(self) -> Group:
        lines: list[Text | Spinner] = []
        for part, (news, done) in self._parts.items():
            text = Text.assemble((f"{part:<11}", "bold"), news)
            lines.append(Text.assemble(("✓ ", "green"), text) if done else Spinner("dots", text))
        return Group(*lines)
