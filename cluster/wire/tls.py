"""TLS between processes: each shows a certificate of the cluster's CA, and asks for one.

Nodes are addressed by whatever IP address they have today, so certificates are not compared with
names: the CA is the cluster's own, and the handshake proves who is who. The handshake also covers
the responder's certificate, so it cannot be passed on by somebody with another one of the same CA.
"""

from __future__ import annotations

import hashlib
import ssl
import tempfile
from dataclasses import dataclass, field
from functools import cached_property


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

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Raises TlsError."""
        kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            with tempfile.NamedTemporaryFile() as file:  # only its owner can read it
                file.write(self.cert + b"\n" + self.key)
                file.flush()
                context.load_cert_chain(file.name, password=lambda: b"")
            context.load_verify_locations(cadata=self.ca.decode())
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            raise TlsError(f"the certificate, its key or its CA cannot be used: {error}") from error
        return context


def fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()
