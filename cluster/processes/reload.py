"""Tenants, their keys and their limits, read again while the server serves.

On SIGHUP, and when the configuration's file or the tenants' file has changed. What is wrong with
them is logged, and the tenants stay as they are. Other settings need a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvrelay.cluster.api.tenants import Tenants, load_tenants
from kvrelay.cluster.config import Config, ConfigError, load_config
from kvrelay.cluster.processes.kept_models import with_changes

POLL_S = 2.0

_log = logging.getLogger("kvrelay.tenants")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a server's configuration comes from: a file, and what the command line says."""

    path: Path | None
    overrides: dict[str, Any]
    hangup: asyncio.Event  # set by SIGHUP
    kept: Path | None = None  # read in place of the file: what it was, after `kvrelay rollback`

    def read(self) -> Config:
        """Reads the file again. Raises ConfigError if it is not right."""
        return with_changes(load_config(self.path, self.overrides, self.kept))

    def text(self) -> str | None:
        """What the file has; None: there is none. Raises OSError."""
        file = self.kept or self.path
        return None if file is None else file.read_text(encoding="utf-8")


async def follow(
    config: Config, source: Source, use: Callable[[Tenants], None], poll_s: float = POLL_S
) -> None:
    """Hand changed tenants to `use`, which may raise ConfigError, until cancelled. `config`: what
    the server has started with."""
    settings = source.kept or source.path
    files = [Path(name) for name in (settings, config.tenants.file) if name]
    used = seen = await asyncio.to_thread(stamps_of, files)
    if files:  # a process that is started later was given what the server has started with
        await _reload(config, source, use)
    while True:
        try:
            async with asyncio.timeout(poll_s):
                await source.hangup.wait()
        except TimeoutError:
            pass
        before, seen = seen, await asyncio.to_thread(stamps_of, files)
        # A file that is being written is read when it has been left alone for a while.
        if source.hangup.is_set() or (seen != used and seen == before):
            source.hangup.clear()
            used = seen
            await _reload(config, source, use)


async def _reload(config: Config, source: Source, use: Callable[[Tenants], None]) -> None:
    try:
        found = await asyncio.to_thread(source.read)
        # The secret stays: with another one no tenant would find its KV again.
        kept = replace(found.tenants, salt_secret=config.tenants.salt_secret)
        api = replace(found.api, key=config.api.key)
        found = replace(found, tenants=kept, sessions=config.sessions, api=api)
        tenants = await asyncio.to_thread(load_tenants, found)
        use(tenants)
    except ConfigError as error:
        _log.error("tenants stay as they are: %s", error)
    else:
        _log.info("tenants reloaded: %d", len(tenants.names()))


def stamps_of(files: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """What changes with a file; None: it is not there."""
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return found
