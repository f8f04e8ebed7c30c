"""What operators may ask of a server, and who does it: the process that hosts the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvrelay.cluster.api.errors import ApiError, controller_away, invalid
from kvrelay.cluster.orders import ControllerAway, Order, OrderRefused, UnknownWorker

if TYPE_CHECKING:
    from kvrelay.cluster.status import ClusterStatus


class Operations(Protocol):
    """One for all models of a router."""

    draining: bool  # no new request is taken

    def status(self) -> ClusterStatus: ...
    def healthy(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served, of `model` or of any: a worker is up, or the autoscaler
        starts one as soon as there is a request."""
        ...

    async def order(self, order: Order) -> dict[str, Any]:
        """Begins it; returns what is known of it already. Raises OrderRefused, ControllerAway."""
        ...

    async def audit(self) -> dict[str, Any]:
        """What workers hold, and what nobody owns: `cluster.control.audits`. Raises
        ControllerAway."""
        ...

    def reserved(self) -> Mapping[str, str]:
        """Names of models, those that are being added too, and who each is (`name_table`)."""
        ...


async def give(operations: Operations, order: Order, param: str | None = None) -> dict[str, Any]:
    """Has the order of an operator begin; returns what is known of it already. `param`: the field
    that is wrong where the order is refused. Raises ApiError."""
    try:
        return await operations.order(order)
    except ControllerAway:
        raise controller_away() from None
    except UnknownWorker as error:
        raise ApiError(404, str(error)) from None
    except OrderRefused as error:
        raise invalid(f"{param!r}: {error}" if param else str(error), param) from None
