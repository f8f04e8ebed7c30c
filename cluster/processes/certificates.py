"""Certificates where TLS is turned on and none are given: a CA of one's own, made by `openssl`.

The CA is made once and kept, so that clients need to be told of it once; the certificate is made
at each launch, for the names and addresses that this machine has then.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil
from msgspec.structs import replace

from kvrelay.cluster.config import Config, ConfigError, TlsSection
from kvrelay.engine.wire.context import TlsError, TlsIdentity

CA_DAYS, CERT_DAYS = 3650, 825
CA_FILE = "ca.pem"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_EXTENSIONS = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = {names}
"""


def with_certificates(config: Config) -> Config:
    """`config` with the files that it will use, which are made if they have to be. Blocks for a
    tenth of a second. Raises ConfigError."""
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
        except (OSError, TlsError) as error:
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


def own_names(host: str) -> list[str]:
    """Under which clients may reach an API that listens at `host`, as subjectAltName has them."""
    names = {"localhost", socket.gethostname()}
    addresses = {"127.0.0.1", "::1"}
    for found in psutil.net_if_addrs().values():
        families = (socket.AF_INET, socket.AF_INET6)
        addresses |= {a.address.partition("%")[0] for a in found if a.family in families}
    with contextlib.suppress(ValueError):
        addresses.add(str(ipaddress.ip_address(host)))
        host = ""
    names |= {host} - {""}
    return [*(f"DNS:{name}" for name in sorted(names)), *(f"IP:{a}" for a in sorted(addresses))]


def make_certificate(folder: Path, names: list[str]) -> None:
    """Into `folder`: ca.pem and ca.key unless they are there, cert.pem and key.pem in any case,
    readable by their owner only. Raises TlsError and OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch)
        ca, ca_key = folder / CA_FILE, folder / "ca.key"
        if not (ca.is_file() and ca_key.is_file()):
            subject = ("-subj", f"/CN=KVRelay CA of {socket.gethostname()[:40]}")
            usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
            files = ("-keyout", str(made / "ca.key"), "-out", str(made / CA_FILE))
            _openssl("req", "-x509", *_KEY, *files, "-days", str(CA_DAYS), *subject, *usage)
            _install(made, folder, "ca.key", CA_FILE)
        (made / "extensions").write_text(_EXTENSIONS.format(names=", ".join(names)))
        request = str(made / "request.pem")
        _openssl(
            "req", *_KEY, "-keyout", str(made / "key.pem"), "-out", request, "-subj", "/CN=kvrelay"
        )
        signed = ("-CA", str(ca), "-CAkey", str(ca_key), "-set_serial", f"0x{os.urandom(15).hex()}")
        extensions = ("-extfile", str(made / "extensions"), "-days", str(CERT_DAYS))
        out = ("-out", str(made / "cert.pem"))
        _openssl("x509", "-req", "-in", request, *signed, *extensions, *out)
        _install(made, folder, "key.pem", "cert.pem")


def _install(made: Path, folder: Path, *names: str) -> None:
    for name in names:
        (made / name).chmod(0o600)
        os.replace(made / name, folder / name)


def _openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise TlsError("openssl is not installed: install it, or set tls.cert, tls.key and tls.ca")
    done = subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        umask=0o077,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise TlsError(f"openssl {arguments[0]} failed: {lines[-1] if lines else done.returncode}")
