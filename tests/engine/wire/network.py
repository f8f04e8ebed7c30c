"""A network between two peers that can be cut: a proxy on loopback."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from tests.engine.wire.wire_peers import Peer

Change = Callable[[bytes], bytes]


class Network:
    """Connections to `to`, as whoever is told `address` sees them.

    While it is cut, what was sent is kept back and nothing answers; once it is restored, the
    connections of before are reset.
    """

    def __init__(self, to: Peer) -> None:
        self.to = to
        self.address: tuple[str, int] = ("", 0)
        self.num_connections = 0
        self.change: Change = lambda data: data  # what goes to the peer is changed by this
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> Network:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()
        return self

    def between(self, sender: Peer, epoch: int = 1) -> None:
        sender.wire.set_address(self.to.wire.node_id, *self.address, epoch)

    def cut(self) -> None:
        self._is_cut = True

    def restore(self) -> None:
        self._is_cut = False
        self.reset()

    def reset(self) -> None:
        """RST on both sides of every connection."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    def refuse(self) -> None:
        """From now on, as a machine where the process is gone."""
        assert self._server is not None
        self._server.close()
        self.reset()

    def close(self) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while self._is_cut:
                await asyncio.sleep(0.01)
            there, back = await asyncio.open_connection(*self.to.address)
            self._writers.add(back)
            forth = self._pump(reader, back, lambda data: self.change(data))
            await asyncio.gather(forth, self._pump(there, writer, lambda data: data))
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change
    ) -> None:
        try:
            while data := await reader.read(1 << 14):
                while self._is_cut:
                    await asyncio.sleep(0.01)
                writer.write(change(data))
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()
