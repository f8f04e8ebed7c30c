"""What operators may ask of a server, and who does it: the process that hosts the router."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvrelay.cluster.config import ModelEntry
    from kvrelay.cluster.status import ClusterStatus
    from kvrelay.engine.stats import Role


class ControllerAway(Exception):
    """What only the controller knows or does cannot be had now."""


class Service(StrEnum):
    """What an operator may ask of the whole server."""

    DRAIN = "drain"  # finish what is there, and end
    RESTART = "restart"  # every process, one after the other
    ROLLBACK = "rollback"  # a restart with the version and settings of before


class Operations(Protocol):
    """One for all models of a router. A call that is new is added here, where it is done, and as a
    route. Those that are about workers may raise ControllerAway; all but `audit` only begin what
    they are about. `model`: by its name in [[models]], "" where there is one."""

    draining: bool  # no new request is taken

    def status(self) -> ClusterStatus: ...
    def healthy(self) -> tuple[bool, dict[str, Any]]: ...
    def order(self, service: Service) -> None: ...
    async def audit(self) -> dict[str, Any]:
        """What workers hold, and what nobody owns: `cluster.control.audits`."""
        ...

    def set_role(self, worker: str, role: Role) -> Role:
        """Prefer a worker for a role; returns the one before. Raises KeyError, with all workers."""
        ...

    async def change_weights(
        self, model: str, path: str | None, name: str, mode: str
    ) -> Mapping[str, str]:
        """To those in a folder, under a name, or (no folder) back. Returns what is known of them.
        Raises ModelError."""
        ...

    def pause(self, model: str, mode: str | None) -> None:
        """Generate nothing, or (None) go on."""
        ...

    def change_models(self, name: str, entry: ModelEntry | None, drain_s: float | None) -> None:
        """Add a model, or (None) remove one, whose requests have so many seconds to end. Raises
        ConfigError."""
        ...

    def reserved(self) -> Mapping[str, str]:
        """Names of models, those that are being added too, and who each is (`name_table`)."""
        ...
