"""What a capability has in a worker: an object with the hooks that it needs. The core and the node
call the list of a worker (`Worker.plugs`), and know none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay.engine.messages import WorkRequest
    from kvrelay.engine.node import Effect, NodeId

Handler = Callable[[float, Any], "list[Effect]"]


class Plug:
    """A capability, with hooks that do nothing where it has nothing to do. Owned by one worker."""

    handlers: Mapping[type, Handler] = {}  # for its messages, which nobody else knows

    def advance(self, now: float) -> list[Effect]:
        """A message has been handled, and the next step begun where there is one."""
        return []

    def on_router_up(self, router: NodeId) -> list[Effect]:
        """A router is told what it cannot know."""
        return []

    def on_refused(self, work: WorkRequest) -> list[Effect]:
        """What the router should hear before it hears that a request is not accepted."""
        return []

    def facts(self) -> dict[str, Any]:
        """Fields of the next `WorkerStats` that it fills in."""
        return {}
