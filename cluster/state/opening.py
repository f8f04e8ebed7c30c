"""Which store a router gets, and what follows from that for what it shares."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.config import Config
from kvrelay.cluster.state.session_store import SessionStore, open_sessions, session_config
from kvrelay.cluster.status import StoreStatus
from kvrelay.engine.node import NodeId
from kvrelay.router.models import ForModel
from kvrelay.router.sessions.session import SessionConfig, SessionRecord
from kvrelay.router.state import StateConfig

if TYPE_CHECKING:
    from kvrelay.cluster.state.redis import RedisState

log = logging.getLogger("kvrelay.state")


@dataclass(frozen=True, slots=True)
class OpenedState:
    """What a router is made with; `executor` performs its effects."""

    executor: SessionStore | RedisState | None
    shared: RedisState | None
    sessions: SessionConfig
    records: list[SessionRecord]
    state: StateConfig

    def start(self, deliver: Callable[[Any], None]) -> None:
        """The router is there: what the store knows goes to `deliver`."""
        if self.shared is not None:
            self.shared.start(deliver)

    def status(self) -> StoreStatus:
        """What `/status` says of it; empty where nothing is shared."""
        return StoreStatus() if self.shared is None else self.shared.status()


@dataclass(frozen=True, slots=True)
class ModelStores:
    """Executor of a router for several models: each has a store of its own, or none."""

    stores: dict[str, SessionStore | RedisState | None]

    def perform(self, effect: ForModel) -> None:
        store = self.stores[effect.model]
        assert store is not None, f"there is no store for {effect.content}"
        store.perform(effect.content)

    def close(self) -> None:
        for store in self.stores.values():
            if store is not None:
                store.close()


def open_state(
    config: Config,
    model: str,
    run: str,
    router: NodeId,
    routers: tuple[NodeId, ...],
    name: str = "",
) -> OpenedState:
    """The store of `router`, one of `routers`, for the sessions of `model`. `run` names this life
    of the cluster; `name`: of the model, where there are several."""
    section = config.state
    if section.url:
        from kvrelay.cluster.state.redis import RedisOptions, RedisState

        shares = len(routers) > 1 or bool(config.cluster.name)
        options = RedisOptions(
            url=section.url,
            prefix=f"{section.key_prefix}:{model}",
            run=run,
            router=router,
            routers=routers,
            shares=shares,
            timeout_s=section.timeout_s,
        )
        sessions = session_config(config, durable=True, shared=True)
        state = StateConfig(shares, shares, index_interval_s=section.index_interval_s)
        store = RedisState(options)
        return OpenedState(store, store, sessions, [], state)
    if router == routers[0]:
        file, sessions, records = open_sessions(config, model, name)
        if len(routers) > 1:
            log.warning(
                "%d routers without state.url: none knows the others' sessions", len(routers)
            )
        return OpenedState(file, None, sessions, records, StateConfig())
    return OpenedState(None, None, session_config(config), [], StateConfig())
