"""The capabilities of a worker that are plugs: the one list of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.engine.adapters import LoadedAdapters
from kvrelay.engine.core import EngineCore
from kvrelay.engine.plug import Plug
from kvrelay.worker.weights import WeightUpdates

if TYPE_CHECKING:
    from kvrelay.worker.node import KVExchange


def plugs(core: EngineCore, exchange: KVExchange) -> list[Plug]:
    """Those of one worker, in the order in which their hooks are called."""
    return [LoadedAdapters(), WeightUpdates(core, exchange.connector.arrivals, exchange.end)]
