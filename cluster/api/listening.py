"""The socket that clients connect to: whoever holds it needs nothing of what serves there."""

from __future__ import annotations

import errno
import socket

BACKLOG = 512


class PortTaken(Exception):
    """Something else listens at the address; the text says what to do."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0: any free one. Raises `PortTaken`, and `OSError` for an address
    that this machine does not have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections inherit it. Else a token waits until the client has acknowledged the last.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # now: two sockets may be bound to one port, but only one listens
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} of {host} is taken: stop what listens there, or choose another port"
            ) from error
        raise
    sock.setblocking(False)
    return sock
