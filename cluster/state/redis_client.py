"""The one way this product connects to Redis or Valkey: `connect`.

A connection that had an error is not used again, nor are those beside it: after a failover the old
primary goes on as a replica that takes no writes, and only a new connection finds the new primary.
Errors say what the server said and nothing of what was sent, which may be prompts and passwords.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.retry import Retry

_OF_COMMANDS = (NoScriptError, OutOfMemoryError, WatchError)  # the connection is as it was
_QUOTED = ", with args beginning with"  # what the server says after it was sent to it


def shown_url(url: str) -> str:
    """Where it leads, without who asks."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def connect(url: str, timeout_s: float) -> Redis:
    """timeout_s: for each command, which is not tried again."""
    return _Client.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


class _Client(Redis):
    _execute: Callable[..., Any] = Redis.execute_command  # which says nothing of types

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return self._execute(*args, **options)
        except RedisError as error:
            _failed(self.connection_pool, error)
            raise

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    _at_once: Callable[..., Any] = Pipeline.immediate_execute_command

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return self._at_once(*args, **options)
        except RedisError as error:
            connection: Any = self.connection
            if _failed(self.connection_pool, error) and connection is not None:
                connection.disconnect()
            raise

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            return super().execute(raise_on_error)
        except RedisError as error:
            _failed(self.connection_pool, error)
            raise

    def annotate_exception(self, exception: Exception, number: int, command: Any) -> None:
        """Leaves the error as it is: redis-py would add the command, with what is in it."""


def _failed(pool: Any, error: RedisError) -> bool:
    """Whether connections were dropped: those that other threads use now have errors of their
    own."""
    if isinstance(error, ResponseError) and error.args:
        error.args = (str(error.args[0]).partition(_QUOTED)[0], *error.args[1:])
    if isinstance(error, _OF_COMMANDS):
        return False
    pool.disconnect(inuse_connections=False)
    return True
