"""What of shared state the environment may set: URLs with their passwords, and the token of a
cluster."""

from __future__ import annotations

import hmac
import os
import re
from urllib.parse import quote, urlsplit

from msgspec.structs import replace

from kvrelay.cluster.config import Config, ConfigError, build_config
from kvrelay.cluster.config_checks import require_extra

# Variables for each URL in [state] begin so; then _URL, _USER or _PASSWORD follows.
VARIABLES = {"url": "KVRELAY_REDIS", "batches_url": "KVRELAY_BATCHES_REDIS"}
TOKEN_VARIABLE = "KVRELAY_CLUSTER_TOKEN"


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
