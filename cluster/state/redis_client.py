"""The one way this product connects to Redis or Valkey: `connect`.

A connection that had an error is not used again, nor are those beside it: after a failover the old
primary goes on as a replica that takes no writes, and only a new connection finds the new primary.
Errors say what the server said and nothing of what was sent, which may be prompts and passwords.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
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
OWN_PART = 2  # in a Redis for batches alone: one that ends takes as much again for a moment
PART = 4  # and half is for all others, where there are some
ASK_S = 60.0  # between two questions for what Redis may have
_log = logging.getLogger("kvrelay.state")
_QUOTED = ", with args beginning with"  # what the server says after it was sent to it


def shown_url(url: str) -> str:
    """Where it leads, without who asks."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def is_one_server(url: str, other: str) -> bool:
    """Whether both lead to one Redis, perhaps to two of its databases."""
    first, second = map(urlsplit, (url, other))
    if "unix" in (first.scheme, second.scheme):
        return (first.scheme, first.path) == (second.scheme, second.path)
    return (first.hostname, first.port or 6379) == (second.hostname, second.port or 6379)


def connect(url: str, timeout_s: float) -> Redis:
    """timeout_s: for each command, which is not tried again."""
    return _Client.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


class Room:
    """How many bytes something may take of a Redis that others must not run short of."""

    def __init__(
        self, redis: Redis, most: int, part: int = PART, clock: Callable[[], float] = monotonic
    ) -> None:
        """most: if that is no more than one in `part` of what Redis has."""
        self._redis, self._most, self._part, self._clock = redis, most, part, clock
        self._room, self._asked_at = 0, float("-inf")

    def __call__(self) -> int:
        """A part of what Redis may have, by `maxmemory` or its machine. Raises RedisError while it
        has never said."""
        if self._clock() - self._asked_at >= ASK_S:
            try:
                memory: Any = self._redis.info("memory")
            except RedisError:
                if not self._room:
                    raise
            else:
                limit = int(memory["maxmemory"]) or int(memory.get("total_system_memory", 0))
                room = min(self._most, limit // self._part) if limit else self._most
                if room not in (self._most, self._room):
                    text = "batches may have %d bytes, one in %d of what Redis has, and not %d"
                    _log.warning(text, room, self._part, self._most)
                self._room, self._asked_at = room, self._clock()
        return self._room


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
