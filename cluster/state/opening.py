"""Which store a router gets, and what follows from that for what it shares."""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from msgspec.structs import replace

from kvrelay.cluster.config import Config, ConfigError, build_config
from kvrelay.cluster.config_checks import require_extra
from kvrelay.cluster.state.session_store import SessionStore, open_sessions, session_config
from kvrelay.cluster.status import StoreStatus
from kvrelay.engine.node import NodeId
from kvrelay.router.models import ForModel
from kvrelay.router.sessions.session import SessionConfig, SessionRecord
from kvrelay.router.state import StateConfig

if TYPE_CHECKING:
    from kvrelay.cluster.state.redis import RedisState

log = logging.getLogger("kvrelay.state")

# Variables for each URL in [state] begin so; then _URL, _USER or _PASSWORD follows.
VARIABLES = {"url": "KVRELAY_REDIS", "batches_url": "KVRELAY_BATCHES_REDIS"}
TOKEN_VARIABLE = "KVRELAY_CLUSTER_TOKEN"


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


def with_url(config: Config) -> Config:
    """URLs may come from the environment, so that no file has to hold their passwords. Raises
    ConfigError, which does not show them."""
    urls = {name: _given(getattr(config.state, name), name) for name in VARIABLES}
    return replace(config, state=replace(config.state, **urls))


def _given(own: str, name: str) -> str:
    url = own or os.environ.get(f"{VARIABLES[name]}_URL", "")
    where = "configuration" if own else f"{VARIABLES[name]}_URL"
    build_config({"state": {name: url}}, where)
    _check_url(url, name, where)
    if url:
        require_extra("redis", "redis")
        url = _with_password(url, name, where)
    return url


def _check_url(url: str, name: str, where: str) -> None:
    """Raises ConfigError, most often for a password with characters that mean something else."""
    hint = (
        f"{where}: state.{name} = ...: a password in it ends at '/', '?' or '#', and '%' begins a "
        f"code: write those as %2F, %3F, %23 and %25, or give the password as "
        f"{VARIABLES[name]}_PASSWORD, as it is"
    )
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises for what is no number)
    except ValueError as error:
        raise ConfigError(f"{hint}. After the host: expected a port of 0 to 65535") from error
    who, at, _ = parts.netloc.rpartition("@")
    behind = parts.path + parts.query + parts.fragment
    if (not at and "@" in behind) or re.search("%(?![0-9a-fA-F]{2})", who):
        raise ConfigError(hint)


def _with_password(url: str, name: str, where: str) -> str:
    """With user and password from the environment, any characters of which are themselves."""
    variables = [f"{VARIABLES[name]}_{each}" for each in ("USER", "PASSWORD")]
    user, password = (os.environ.get(each, "") for each in variables)
    if not user and not password:
        return url
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"{where}: state.{name} has a user or a password, and {variables[1]} or "
            f"{variables[0]} is set: give them in one of the two"
        )
    who = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{who}@{parts.netloc}").geturl()


def with_cluster_token(config: Config) -> Config:
    """What all servers of a cluster with a name have to share may come from the environment, or
    follows from its token. Raises ConfigError, which does not show it."""
    cluster, tenants = config.cluster, config.tenants
    if not cluster.name:
        if config.state.batches_url:
            raise ConfigError(
                "state.batches_url is set, and cluster.name is not: files and batches of a server "
                "alone are in its state directory. Remove it, or name the cluster"
            )
        return config
    token = cluster.token or os.environ.get(TOKEN_VARIABLE, "")
    build_config({"cluster": {"token": token}}, TOKEN_VARIABLE)
    if not token:
        raise ConfigError(
            f"cluster.name is set, and cluster.token is not: give all servers of {cluster.name} "
            f"one secret of 16 characters or more, here or as {TOKEN_VARIABLE}"
        )
    if not config.state.url:
        raise ConfigError(
            f"cluster.name is set, and state.url is not: the servers of {cluster.name} find each "
            f"other by Redis, here or as {VARIABLES['url']}_URL"
        )
    salt = hmac.digest(token.encode(), b"kvrelay salt", "sha256").hex()
    return replace(
        config,
        cluster=replace(cluster, token=token),
        tenants=replace(tenants, salt_secret=tenants.salt_secret or salt),
    )


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
