"""Certificates: read again when their files change, and made where none are given, signed by a CA
of one's own.

That CA is made once and kept, so that clients need to be given it once; the certificate is made at
each launch, for the names and addresses that this machine has then. Both are made anew before they
end, the CA with the key that it had. Whoever shows a certificate follows its files, whoever writes
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
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
from kvrelay.cluster.processes.reload import POLL_S, stamps_of
from kvrelay.engine.wire.context import TlsEnds, TlsError, TlsIdentity

log = logging.getLogger("kvrelay.certificates")

CA_DAYS, CERT_DAYS = 3650, 825
RENEW_DAYS = 60  # before the end
RENEW_CA_DAYS = CERT_DAYS + RENEW_DAYS  # it outlasts what it signs
LOOK_S = 3600.0  # whether it is time
CA_FILE = "ca.pem"


def with_certificates(config: Config) -> Config:
    """`config` with the files that it will use, which are made if they have to be. Raises
    ConfigError."""
    tls = config.tls
    if not tls.is_on:
        return config
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert and tls.key belong together: set both, or neither")
    if not tls.cert:
        if tls.ca:
            raise ConfigError("tls.ca without tls.cert and tls.key: set all three, or none")
        folder = own_folder(config)
        try:
            make_certificate(folder, own_names(config.api.host))
        except (OSError, ValueError, TlsError) as error:
            raise ConfigError(f"no certificate can be made in {folder}: {error}") from error
        cert, key, ca = (str(folder / name) for name in ("cert.pem", "key.pem", CA_FILE))
        tls = replace(tls, cert=cert, key=key, ca=ca)
    if tls.frames and not tls.ca:
        raise ConfigError("tls.frames needs tls.ca: who signs the certificates of all processes")
    try:
        _checked(tls)
    except TlsError as error:
        raise ConfigError(str(error)) from error
    return replace(config, tls=tls)


def own_folder(config: Config) -> Path:
    """Where certificates are kept that are made here."""
    return config.sessions.state_path / "tls"


def made_here(config: Config) -> bool:
    """Whether these are used, and so have to be kept from ending."""
    return config.tls.is_on and Path(config.tls.cert).parent == own_folder(config)


async def follow_certificates(
    tls: TlsSection, use: Callable[[TlsIdentity], None], poll_s: float = POLL_S
) -> None:
    """Hand what the files hold to `use`, which may raise TlsError, at first and when they have
    changed, until cancelled. What cannot be used is said, and the last one stays."""
    files = [Path(name).expanduser() for name in (tls.cert, tls.key, tls.ca) if name]
    used: TlsIdentity | None = None
    seen = done = None
    while True:
        before, seen = seen, await asyncio.to_thread(stamps_of, files)
        # Files that are being written are read when they have been left alone for a while.
        if seen == before and seen != done:
            done = seen
            try:
                found = await asyncio.to_thread(_checked, tls)
                if found != used:
                    use(found)
                    if used is not None:
                        log.info("certificates were read again: %s", described(tls, found))
                    used = found
            except (ConfigError, TlsError) as error:
                log.error("certificates stay as they are: %s", error)
        await asyncio.sleep(poll_s)


def _checked(tls: TlsSection) -> TlsIdentity:
    """What the files hold, if processes and clients can use it. Raises ConfigError and TlsError."""
    identity = identity_of(tls)
    TlsEnds.of(identity)
    now = datetime.now(UTC).timestamp()
    for name, end_s in ends_of(tls, identity).items():
        if end_s <= now:
            shown = datetime.fromtimestamp(end_s, UTC)
            raise TlsError(f"the {name} certificate has ended at {shown:%Y-%m-%d %H:%M} UTC")
    if tls.frames:
        identity.check()
    return identity


def ends_of(tls: TlsSection, identity: TlsIdentity) -> dict[str, float]:
    """When they end, in seconds since 1970; of several in a file, the first."""
    files = {"server": identity.cert} | ({"ca": identity.ca} if tls.ca else {})
    return {
        name: min(each.not_valid_after_utc for each in found).timestamp()
        for name, pem in files.items()
        if (found := x509.load_pem_x509_certificates(pem))
    }


def described(tls: TlsSection, identity: TlsIdentity) -> str:
    ends = ends_of(tls, identity).items()
    return ", ".join(f"{n} until {datetime.fromtimestamp(end, UTC):%Y-%m-%d}" for n, end in ends)


async def keep_certificates(config: Config, look_s: float = LOOK_S) -> None:
    """Make the certificate and its CA anew before they end, until cancelled. Raises OSError and
    TlsError."""
    folder = own_folder(config)
    while True:
        await asyncio.sleep(look_s)
        names = own_names(config.api.host)
        if await asyncio.to_thread(_ends_soon, folder / "cert.pem", RENEW_DAYS):
            await asyncio.to_thread(make_certificate, folder, names)
            log.info("made a certificate, since the last one ends soon: %s", folder / "cert.pem")


def _ends_soon(file: Path, days: int) -> bool:
    end = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    return end - datetime.now(UTC) < timedelta(days=days)


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
    readable by their owner only. A CA that ends soon is made again with the key that it has.
    Raises TlsError and OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_file, ca_key_file = folder / CA_FILE, folder / "ca.key"
    if not (ca_file.is_file() and ca_key_file.is_file()):
        name = _named(f"KVRelay CA of {socket.gethostname()[:40]}")
        made, key = _signed(name, CA_DAYS, _IS_CA)
        _install(ca_key_file, key)
        _install(ca_file, made)
    try:
        ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
        ca_key: Any = serialization.load_pem_private_key(ca_key_file.read_bytes(), password=None)
        if ca_key.public_key() != ca.public_key():
            raise ValueError("it is the key of another certificate")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{ca_file} with {ca_key_file.name} is not a CA: {error}") from error
    if _ends_soon(ca_file, RENEW_CA_DAYS):
        made, _ = _signed(ca.subject, CA_DAYS, _IS_CA, key=ca_key)
        _install(ca_file, made)
        log.warning("%s was made again, since it ends soon: clients need the new one", ca_file)
        ca = x509.load_pem_x509_certificate(made)
    is_ours = (
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.SubjectAlternativeName(names),
    )
    made, key = _signed(_named("kvrelay"), CERT_DAYS, is_ours, (ca, ca_key))
    _install(folder / "key.pem", key)
    _install(folder / "cert.pem", made)


def _named(subject: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])


def _signed(
    name: x509.Name,
    days: int,
    extensions: Sequence[x509.ExtensionType],
    ca: tuple[x509.Certificate, Any] | None = None,
    key: Any = None,
) -> tuple[bytes, bytes]:
    """A certificate for `key`, or a new one, and that key: PEM. Without a CA it is signed by
    itself."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    issuer, issuer_key = (ca[0].subject, ca[1]) if ca else (name, key)
    begin = datetime.now(UTC) - timedelta(days=1)  # clocks may be behind, or be set back
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
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


_IS_CA = (
    x509.BasicConstraints(ca=True, path_length=None),
    _usage("key_cert_sign", "crl_sign"),
)


def _install(path: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.touch(0o600)
        made.write_bytes(content)
        os.replace(made, path)
