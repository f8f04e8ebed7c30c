"""A `kvrelay serve` for the time of a profile: reads its configuration from stdin, writes its URL
and the model's name to stdout when it is ready, and ends with stdin."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from kvrelay.cluster.config import Config, ConfigError
from kvrelay.cluster.processes.launch import serve
from kvrelay.cluster.processes.ready import Ready, ServeError


async def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=Config)
    stop = asyncio.Event()

    def on_ready(ready: Ready, config: Config) -> None:
        url = f"http://{config.api.host}:{next(iter(ready.ports.values()))}"
        sys.stdout.write(msgspec.json.encode((url, ready.models.served_names[0])).decode() + "\n")
        sys.stdout.flush()

    async def end_with_stdin() -> None:
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()

    ending = asyncio.create_task(end_with_stdin())
    try:
        await serve(config, lambda *_: None, stop, on_ready)
    except (ConfigError, ServeError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from error
    finally:
        ending.cancel()


if __name__ == "__main__":
    asyncio.run(main())
