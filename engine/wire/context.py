"""What every connection of one process shares: who it is, its limits, and how its sockets are set.

Limits are of one peer unless they say otherwise.

With TLS, each process shows a certificate of the cluster's CA, and asks for one. Nodes are
addressed by whatever IP address they have today, so certificates are not compared with names: the
CA is the cluster's own, and the handshake proves who is who. The handshake also covers the
responder's certificate, so it cannot be passed on by somebody with another one of the same CA.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import NodeId

OnPeerLost = Callable[[NodeId, int], None]  # (peer, epoch)

INCARNATION_BYTES = 16
RECONNECT = Backoff(0.02, 1.0)


@dataclass(frozen=True, slots=True)
class WireLimits:
    max_frame_bytes: int = 64 << 20
    max_queued_bytes: int = 64 << 20  # not written yet
    max_queued_frames: int = 8192
    max_unacked_bytes: int = 64 << 20  # written, and kept until they are acknowledged
    max_unacked_frames: int = 8192
    # Connections of the process that have not proved themselves yet: in all, and from one address.
    max_unauthenticated: int = 128
    max_unauthenticated_of_address: int = 64
    connect_s: float = 2.0  # a SYN that was lost is repeated after 1 s
    handshake_s: float = 5.0
    give_up_s: float = 10.0  # a peer that cannot be reached for so long is lost
    reconnect: Backoff = RECONNECT
    ack_delay_s: float = 0.1  # acknowledged after so long,
    ack_frames: int = 512  # or so many messages,
    ack_bytes: int = 1 << 20  # or bytes


@dataclass(frozen=True, slots=True)
class Address:
    """`protocol`: of `codec`, that who listens there speaks; `package`: its version of kvrelay."""

    host: str
    port: int
    epoch: int
    protocol: int = field(default=1, compare=False)
    package: str = field(default="unknown", compare=False)


class TlsError(Exception):
    """These certificates cannot be used; one line."""


@dataclass(frozen=True)
class TlsIdentity:
    """A certificate with its key, and the CA that others' have to be of: PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @cached_property
    def fingerprint(self) -> bytes:
        """What the initiator sees of our certificate."""
        end = self.cert.index(b"-----END CERTIFICATE-----")
        first = self.cert[: end + len(b"-----END CERTIFICATE-----")]
        return fingerprint(ssl.PEM_cert_to_DER_cert(first[first.index(b"-----BEGIN") :].decode()))

    def check(self) -> None:
        """Raises TlsError unless two processes that have it accept each other."""
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.context(is_server=False).wrap_bio(here, there)
        server = self.context(is_server=True).wrap_bio(there, here, server_side=True)
        try:
            for side in (client, server) * 2:
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            raise TlsError(f"processes with this certificate refuse each other: {why}") from error

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Makes the context of one side. Raises TlsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        self.show_in(context)
        return context

    def show_in(self, context: ssl.SSLContext) -> None:
        """Have `context` show this certificate, and know its CA. Raises TlsError."""
        try:
            with tempfile.NamedTemporaryFile() as file:  # only its owner can read it
                file.write(self.cert + b"\n" + self.key)
                file.flush()
                context.load_cert_chain(file.name, password=lambda: b"")
            context.load_verify_locations(cadata=self.ca.decode())
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            raise TlsError(f"the certificate, its key or its CA cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class TlsEnds:
    """An identity, and what it is used by on either side of a connection."""

    identity: TlsIdentity
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, identity: TlsIdentity) -> TlsEnds:
        """Makes the context of each side. Raises TlsError."""
        server, client = (identity.context(is_server=side) for side in (True, False))
        return cls(identity, server, client)


def fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


@dataclass(slots=True)
class WireContext:
    """`incarnation` is of this process: what it has received and sent is forgotten with it."""

    node_id: NodeId
    epoch: int
    token: bytes
    limits: WireLimits
    on_peer_lost: OnPeerLost
    tls: TlsEnds | None = None  # for new connections; None: in clear text
    host: str = ""  # where it listens
    counters: Counter[str] = field(default_factory=Counter)
    incarnation: bytes = field(default_factory=lambda: os.urandom(INCARNATION_BYTES))
    streams: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def is_here(self, host: str) -> bool:
        """Whether `host` is this machine: what it refuses, no process listens for any more."""
        return host.startswith("127.") or host in ("::1", "localhost", self.host)


def tune_socket(transport: asyncio.Transport) -> None:
    """Small frames leave at once, and a connection that was cut is noticed within 5 seconds, by
    probes where it is idle. Probes are answered by the kernel: a process that is busy is not cut
    off."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 5000),  # milliseconds
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
