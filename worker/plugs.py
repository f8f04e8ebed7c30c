"""The capabilities of a worker that are plugs: the one list of them."""

from __future__ import annotations

from kvrelay.engine.adapters import LoadedAdapters
from kvrelay.engine.plug import Plug


def plugs() -> list[Plug]:
    """Those of one worker, in the order in which their hooks are called."""
    return [LoadedAdapters()]
