"""Certificates where TLS is turned on and none are given: signed by a CA of one's own.

The CA is made once and kept, so that clients need to be given it once; the certificate is made at
each launch, for the names and addresses that this machine has then.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec.structs import replace

from kvrelay.cluster.config import Config, ConfigError, TlsSection
from kvrelay.engine.wire.context import TlsError, TlsIdentity

CA_DAYS, CERT_DAYS = 3650, 825
CA_FILE = "ca.pem"


def with_certificates(config: Config) -> Config:
    """`config` with the files that it will use, which are made if they have to be. Raises
    ConfigError."""
    tls = config.tls
    if not (tls.api or tls.frames):
        return config
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert and tls.key belong together: set both, or neither")
    if not tls.cert:
        if tls.ca:
            raise ConfigError("tls.ca without tls.cert and tls.key: set all three, or none")
        folder = config.sessions.state_path / "tls"
        try:
            make_certificate(folder, own_names(config.api.host))
        except (OSError, ValueError, TlsError) as error:
            raise ConfigError(f"no certificate can be made in {folder}: {error}") from error
        cert, key, ca = (str(folder / name) for name in ("cert.pem", "key.pem", CA_FILE))
        tls = replace(tls, cert=cert, key=key, ca=ca)
    if tls.frames and not tls.ca:
        raise ConfigError("tls.frames needs tls.ca: who signs the certificates of all processes")
    identity = identity_of(tls)
    try:
        identity.context(is_server=True)
    except TlsError as error:
        raise ConfigError(str(error)) from error
    return replace(config, tls=tls)


def identity_of(tls: TlsSection) -> TlsIdentity:
    """From the files; without a CA, the certificate stands for its own. Raises ConfigError."""
    read = {}
    for name in ("cert", "key", "ca"):
        path = Path(getattr(tls, name) or tls.cert).expanduser()
        try:
            read[name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls.{name} = {str(path)!r}: {error.strerror}") from error
    return TlsIdentity(**read)


def own_names(host: str) -> list[x509.GeneralName]:
    """Under which clients may reach an API that listens at `host`."""
    names = {"localhost", socket.gethostname()}
    addresses = {"127.0.0.1", "::1"}
    for found in psutil.net_if_addrs().values():
        families = (socket.AF_INET, socket.AF_INET6)
        addresses |= {a.address.partition("%")[0] for a in found if a.family in families}
    with contextlib.suppress(ValueError):
        addresses.add(str(ipaddress.ip_address(host)))
        host = ""
    names |= {host} - {""}
    return [
        *map(x509.DNSName, sorted(names)),
        *(x509.IPAddress(ipaddress.ip_address(each)) for each in sorted(addresses)),
    ]


def make_certificate(folder: Path, names: list[x509.GeneralName]) -> None:
    """Into `folder`: ca.pem and ca.key unless they are there, cert.pem and key.pem in any case,
    readable by their owner only. Raises TlsError and OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_file, ca_key_file = folder / CA_FILE, folder / "ca.key"
    if not (ca_file.is_file() and ca_key_file.is_file()):
        is_ca = (
            x509.BasicConstraints(ca=True, path_length=None),
            _usage("key_cert_sign", "crl_sign"),
        )
        made, key = _signed(f"KVRelay CA of {socket.gethostname()[:40]}", CA_DAYS, is_ca)
        _install(ca_key_file, key)
        _install(ca_file, made)
    try:
        ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
        ca_key: Any = serialization.load_pem_private_key(ca_key_file.read_bytes(), password=None)
        if ca_key.public_key() != ca.public_key():
            raise ValueError("it is the key of another certificate")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{ca_file} with {ca_key_file.name} is not a CA: {error}") from error
    is_ours = (
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.SubjectAlternativeName(names),
    )
    made, key = _signed("kvrelay", CERT_DAYS, is_ours, (ca, ca_key))
    _install(folder / "key.pem", key)
    _install(folder / "cert.pem", made)


def _signed(
    subject: str,
    days: int,
    extensions: Sequence[x509.ExtensionType],
    ca: tuple[x509.Certificate, Any] | None = None,
) -> tuple[bytes, bytes]:
    """A certificate for a new key, and that key: PEM. Without a CA it is signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    issuer, issuer_key = (ca[0].subject, ca[1]) if ca else (name, key)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=days))
    )
    for each in (
        *extensions,
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
    ):
        is_critical = isinstance(each, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(each, critical=is_critical)
    written = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    made = builder.sign(issuer_key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), written


def _usage(*allowed: str) -> x509.KeyUsage:
    ends = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
    rest = ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: name in allowed for name in (*ends, *rest)})


def _install(path: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.touch(0o600)
        made.write_bytes(content)
        os.replace(made, path)
