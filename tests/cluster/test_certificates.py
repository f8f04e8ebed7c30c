"""Certificates made at launch, the API over HTTPS, and commands that talk to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from cryptography import x509

from kvrelay.cluster.api.server import ServerCertificate, serve_app
from kvrelay.cluster.cli.client import status
from kvrelay.cluster.config import Config, ConfigError, SessionsSection, TlsSection, load_config
from kvrelay.cluster.processes import certificates
from kvrelay.cluster.processes.certificates import (
    follow_certificates,
    identity_of,
    keep_certificates,
    with_certificates,
)
from kvrelay.engine.wire.context import TlsIdentity


def config_in(folder: Path, **tls: Any) -> Config:
    return Config(sessions=SessionsSection(state_dir=str(folder)), tls=TlsSection(**tls))


def test_nothing_is_made_where_tls_is_off(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert with_certificates(config) is config
    assert not list(tmp_path.iterdir())


def test_what_is_made_is_for_its_owner_only_and_the_ca_stays(tmp_path: Path) -> None:
    config = with_certificates(config_in(tmp_path, api=True))
    files = {path.name: path for path in (tmp_path / "tls").iterdir()}
    assert set(files) == {"ca.pem", "ca.key", "cert.pem", "key.pem"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert config.tls.cert == str(files["cert.pem"])
    before = {name: path.read_bytes() for name, path in files.items()}
    assert with_certificates(config_in(tmp_path, frames=True)).tls.ca == config.tls.ca
    same = {name for name, path in files.items() if path.read_bytes() == before[name]}
    assert same == {"ca.pem", "ca.key"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the CA")
def test_a_ca_that_openssl_made_signs_on(tmp_path: Path) -> None:
    """As versions before did, or an operator."""
    folder = tmp_path / "tls"
    folder.mkdir()
    ca, key = str(folder / "ca.pem"), str(folder / "ca.key")
    made = ("-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", ca, "-subj", "/CN=its own")
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    subprocess.run(["openssl", "req", "-x509", *made, *usage], check=True, capture_output=True)
    cert = with_certificates(config_in(tmp_path, frames=True)).tls.cert
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", ca, cert]
    assert "OK" in subprocess.run(verify, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("damage", [b"", None], ids=["empty", "another key"])
def test_a_ca_that_cannot_sign_is_named(tmp_path: Path, damage: bytes | None) -> None:
    with_certificates(config_in(tmp_path, frames=True))
    other = damage if damage is not None else (tmp_path / "tls" / "key.pem").read_bytes()
    (tmp_path / "tls" / "ca.key").write_bytes(other)
    with pytest.raises(ConfigError, match=r"ca\.pem with ca\.key is not a CA") as raised:
        with_certificates(config_in(tmp_path, frames=True))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tls", "complaint"),
    [
        ({"cert": "cert.pem"}, r"tls\.cert and tls\.key"),
        ({"ca": "ca.pem"}, r"tls\.ca without"),
        ({"cert": "cert.pem", "key": "key.pem"}, r"tls\.frames needs tls\.ca"),
        ({"cert": "no", "key": "key.pem", "ca": "ca.pem"}, r"tls\.cert = .*No such file"),
        ({"cert": "cert.pem", "key": "ca.key", "ca": "ca.pem"}, "cannot be used"),
        ({"cert": "key.pem", "key": "key.pem", "ca": "ca.pem"}, "cannot be used"),
    ],
)
def test_files_that_do_not_fit_are_one_line(
    tmp_path: Path, tls: dict[str, str], complaint: str
) -> None:
    with_certificates(config_in(tmp_path, frames=True))
    given = {name: str(tmp_path / "tls" / file) for name, file in tls.items()}
    with pytest.raises(ConfigError, match=complaint) as raised:
        with_certificates(config_in(tmp_path, frames=True, **given))
    assert "\n" not in str(raised.value)


def test_files_are_found_beside_the_file_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.toml"
    path.write_text('[tls]\napi = true\ncert = "c.pem"\nkey = "/etc/k.pem"\n')
    tls = load_config(path, {}).tls
    assert (tls.cert, tls.key, tls.ca) == (str(tmp_path / "c.pem"), "/etc/k.pem", "")
    assert tls.scheme == "https"


STATUS = {"model": "m", "workers": [], "totals": {}}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = STATUS | {"scheme": scope["scheme"]}
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@contextmanager
def serving_with(tls: TlsSection) -> Iterator[str]:
    """The URL of an API over HTTPS, whose certificate is read again when its files change."""
    certificate = ServerCertificate(identity_of(tls))
    stop, ready, ports = asyncio.Event(), threading.Event(), []
    loop = asyncio.new_event_loop()

    def on_ready(port: int) -> None:
        ports.append(port)
        ready.set()

    async def serve() -> None:
        following = asyncio.create_task(follow_certificates(tls, certificate.replace, 0.05))
        await serve_app(app, "127.0.0.1", 0, stop=stop, on_ready=on_ready, certificate=certificate)
        following.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    yield f"https://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of an API over HTTPS, and its CA."""
    tls = with_certificates(config_in(tmp_path, api=True)).tls
    with serving_with(tls) as url:
        yield url, tls.ca


def test_the_api_is_https_for_who_trusts_its_ca(served: tuple[str, str]) -> None:
    url, ca = served
    trusting = ssl.create_default_context(cafile=ca)
    assert httpx.get(url, verify=trusting).json()["scheme"] == "https"
    localhost = url.replace("127.0.0.1", "localhost")
    assert httpx.get(localhost, verify=trusting).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url)


def test_commands_talk_to_it_with_its_ca(
    served: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, ca = served
    monkeypatch.setenv("SSL_CERT_FILE", "")  # and what the command sets is undone
    asked = CliRunner().invoke(status, ["--url", url, "--json", "--ca", ca])
    assert asked.exit_code == 0, asked.output
    assert json.loads(asked.output)["model"] == "m"

    os.environ["SSL_CERT_FILE"] = ""
    asked = CliRunner().invoke(status, ["--url", url, "--json"], env={"KVRELAY_CA": ca})
    assert asked.exit_code == 0, asked.output

    os.environ["SSL_CERT_FILE"] = ""
    asked = CliRunner().invoke(status, ["--url", url])
    assert asked.exit_code == 1
    assert "--ca or KVRELAY_CA" in asked.output

    asked = CliRunner().invoke(status, ["--url", url.replace("https", "http")])
    assert asked.exit_code == 1
    assert "HTTPS" in asked.output


class Mounted:
    """A Secret as Kubernetes mounts it: files are links into ..data, which is replaced whole."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._num = folder, 0
        self.tls = TlsSection(
            True, True, *(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
        )

    def put(self, made: Path, **instead: bytes) -> None:
        self._num += 1
        data = self.folder / f"..{self._num}"
        data.mkdir(parents=True)
        for name in ("cert", "key", "ca"):
            content = instead.get(name) or (made / f"{name}.pem").read_bytes()
            (data / f"{name}.pem").write_bytes(content)
            if self._num == 1:
                (self.folder / f"{name}.pem").symlink_to(f"..data/{name}.pem")
        (self.folder / "..new").symlink_to(data.name)
        (self.folder / "..new").replace(self.folder / "..data")


def shown_by(url: str) -> str:
    """The certificate that a new connection gets."""
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def wait_for(url: str, cert: bytes) -> None:
    deadline = time.monotonic() + 10
    while shown_by(url).split() != cert.decode().split():
        assert time.monotonic() < deadline, "the certificate is still the last one"
        time.sleep(0.02)


def test_a_new_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, mounted = tmp_path / "made", Mounted(tmp_path / "mounted")
    certificates.make_certificate(made, certificates.own_names(""))
    first = (made / "cert.pem").read_bytes()
    mounted.put(made)
    trusting = ssl.create_default_context(cafile=str(made / "ca.pem"))
    with serving_with(mounted.tls) as url, httpx.Client(verify=trusting) as old:
        assert old.get(url).status_code == 200
        wait_for(url, first)
        certificates.make_certificate(made, certificates.own_names(""))
        second = (made / "cert.pem").read_bytes()

        mounted.put(made, cert=first)  # the key of another one: as if half was written
        deadline = time.monotonic() + 10
        while "certificates stay as they are: " not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        wait_for(url, first)
        mounted.put(made, cert=second[:100])
        time.sleep(0.3)
        wait_for(url, first)

        mounted.put(made)
        wait_for(url, second)
        assert httpx.get(url, verify=trusting).status_code == 200
        assert old.get(url).status_code == 200  # on the connection that it has


def test_a_new_certificate_is_valid_where_clocks_are_behind(tmp_path: Path) -> None:
    """Or where this one is set back after it was made."""
    certificates.make_certificate(tmp_path, certificates.own_names(""))
    for name in ("ca.pem", "cert.pem"):
        made = x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        assert time.time() - made.not_valid_before_utc.timestamp() > 23 * 3600
    assert (made.not_valid_after_utc - made.not_valid_before_utc).days == certificates.CERT_DAYS


def test_an_ended_or_foreign_certificate_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(tls: TlsSection) -> str:
        with pytest.raises(ConfigError) as raised:
            with_certificates(Config(tls=tls))
        return str(raised.value)

    made = tmp_path / "made"
    certificates.make_certificate(made, certificates.own_names(""))
    own = Mounted(tmp_path / "own")
    own.put(made)
    assert with_certificates(Config(tls=own.tls)).tls == own.tls
    other = Mounted(tmp_path / "other")
    certificates.make_certificate(tmp_path / "stranger", certificates.own_names(""))
    other.put(made, ca=(tmp_path / "stranger" / "ca.pem").read_bytes())
    assert "processes with this certificate refuse each other" in refusal(other.tls)
    monkeypatch.setattr(certificates, "CERT_DAYS", 0)
    certificates.make_certificate(made, certificates.own_names(""))
    own.put(made)
    assert "the server certificate has ended at 20" in refusal(own.tls)


def test_what_was_made_here_is_made_again_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_certificates(config_in(tmp_path, frames=True))
    before = identity_of(config.tls)

    async def keep_for(seconds: float) -> None:
        keeping = asyncio.create_task(keep_certificates(config, 0.01))
        await asyncio.sleep(seconds)
        keeping.cancel()

    asyncio.run(keep_for(0.2))  # which waits for the thread that may be writing
    assert identity_of(config.tls) == before
    monkeypatch.setattr(certificates, "CA_DAYS", 5000)
    monkeypatch.setattr(certificates, "RENEW_CA_DAYS", 4000)
    monkeypatch.setattr(certificates, "RENEW_DAYS", certificates.CERT_DAYS + 1)
    asyncio.run(keep_for(0.5))
    after = identity_of(config.tls)
    assert (after.cert != before.cert, after.ca != before.ca) == (True, True)
    # Who has the old CA trusts the new certificate, and the other way round: the key is the same.
    for cert, ca in ((after, before), (before, after), (after, after)):
        TlsIdentity(cert.cert, cert.key, ca.ca).check()
    ends = certificates.ends_of(config.tls, after)
    assert ends["ca"] > ends["server"] > time.time()
