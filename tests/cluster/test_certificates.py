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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.server import serve_app
from kvrelay.cluster.cli.client import status
from kvrelay.cluster.config import Config, ConfigError, SessionsSection, TlsSection, load_config
from kvrelay.cluster.processes.certificates import with_certificates


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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of an API over HTTPS, and its CA."""
    tls = with_certificates(config_in(tmp_path, api=True)).tls
    stop, ready, ports = asyncio.Event(), threading.Event(), []
    loop = asyncio.new_event_loop()

    def on_ready(port: int) -> None:
        ports.append(port)
        ready.set()

    serving = serve_app(
        app, "127.0.0.1", 0, stop=stop, on_ready=on_ready, certificate=(tls.cert, tls.key)
    )
    thread = threading.Thread(target=lambda: loop.run_until_complete(serving))
    thread.start()
    assert ready.wait(30)
    yield f"https://127.0.0.1:{ports[0]}", tls.ca
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


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
