"""TLS between processes: what crosses the network cannot be read, and strangers cannot join."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from kvrelay.cluster.config import TlsSection
from kvrelay.cluster.processes.certificates import identity_of, make_certificate, own_names
from kvrelay.engine.messages import Abort
from kvrelay.engine.wire.context import TlsError, TlsIdentity
from tests.engine.wire.network import Network
from tests.engine.wire.wire_peers import LIMITS, Peer, until

PATIENT = replace(LIMITS, max_queued_frames=1000, give_up_s=10.0, handshake_s=5.0)
IMPATIENT = replace(PATIENT, give_up_s=0.5)
SECRET = "a prompt that is nobody's business"


def identity_in(folder: Path) -> TlsIdentity:
    make_certificate(folder, own_names("localhost"))
    files = (str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    return identity_of(TlsSection(False, True, *files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def identity(folder: Path) -> TlsIdentity:
    return identity_in(folder)


def run(
    scenario: Callable[[Peer, Peer], Awaitable[None]],
    ours: TlsIdentity | None,
    theirs: TlsIdentity | None,
    run_loop: Callable[..., None] = asyncio.run,
) -> None:
    """`scenario(a, b)`, where each is what it is told to be."""

    async def main() -> None:
        a = await Peer("a", limits=IMPATIENT, tls=ours).listen()
        b = await Peer("b", limits=PATIENT, tls=theirs).listen()
        try:
            async with asyncio.timeout(60):
                await scenario(a, b)
        finally:
            await a.wire.close()
            await b.wire.close()

    run_loop(main())


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_the_network_sees_no_message(
    identity: TlsIdentity, is_encrypted: bool, run_loop: Callable[..., None]
) -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        network = await Network(b).open()
        seen = bytearray()

        def look(data: bytes) -> bytes:
            seen.extend(data)
            return data

        network.change = look
        network.between(a)
        for number in range(100):
            a.wire.send("b", Abort(SECRET, number))
            if number == 50:
                await until(lambda: len(b.messages) > 10, "some")
                network.reset()
        await until(lambda: len(b.messages) == 100, "all")
        network.close()
        assert b.messages == [Abort(SECRET, number) for number in range(100)]
        assert a.wire.counters["reconnected"] == 1
        assert (SECRET.encode() in seen) is not is_encrypted

    tls = identity if is_encrypted else None
    run(scenario, tls, tls, run_loop)


def test_a_certificate_of_another_ca_opens_nothing(identity: TlsIdentity, tmp_path: Path) -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        a.knows(b)
        a.wire.send("b", Abort(SECRET, 1))
        await until(lambda: a.lost == [("b", 1)], "giving up")
        assert b.wire.counters["accepted"] == 0
        assert b.messages == []

    other = identity_in(tmp_path / "other")
    run(scenario, other, identity)
    run(scenario, replace(other, ca=identity.ca), identity)  # which believes the other end
    run(scenario, replace(identity, ca=other.ca), identity)  # which does not


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["to clear text", "to TLS"])
def test_one_end_with_tls_and_one_without_do_not_talk(
    identity: TlsIdentity, is_encrypted: bool
) -> None:
    async def scenario(a: Peer, b: Peer) -> None:
        a.knows(b)
        a.wire.send("b", Abort(SECRET, 1))
        await until(lambda: a.lost == [("b", 1)], "giving up")
        assert b.messages == []

    run(scenario, identity if is_encrypted else None, None if is_encrypted else identity)


def test_one_who_passes_the_handshake_on_with_another_certificate_is_noticed(
    identity: TlsIdentity, folder: Path
) -> None:
    """Both are of one CA, but it is not the responder's certificate: as where a company's CA signs
    for all."""

    async def scenario(a: Peer, b: Peer) -> None:
        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(1 << 14):
                    writer.write(data)
            except OSError:
                pass
            writer.close()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = middle.context(is_server=False)
            back, forth = await asyncio.open_connection(*b.address, ssl=there)
            await asyncio.gather(pump(reader, forth), pump(back, writer))

        here = middle.context(is_server=True)
        server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=here)
        a.wire.set_address("b", *server.sockets[0].getsockname(), 1)
        a.wire.send("b", Abort(SECRET, 1))
        await until(lambda: a.lost == [("b", 1)], "giving up")
        assert a.wire.counters["auth_failed"] > 0
        assert b.messages == []
        server.close()

    middle = identity_in(folder)
    assert middle.ca == identity.ca
    assert middle.cert != identity.cert
    run(scenario, identity, identity)


def test_a_new_certificate_is_for_new_connections(identity: TlsIdentity, folder: Path) -> None:
    """Those that are there go on, also where one end has it and the other does not yet."""

    async def scenario(a: Peer, b: Peer) -> None:
        a.knows(b)
        number = 0

        async def arrives() -> None:
            nonlocal number
            number += 1
            a.wire.send("b", Abort(SECRET, number))
            await until(lambda: b.messages[-1:] == [Abort(SECRET, number)], f"number {number}")

        await arrives()
        for peer in (b, a):
            peer.wire.replace_identity(identity_in(folder))
            await arrives()
            assert a.wire.counters["broken"] == b.wire.counters["auth_failed"] == 0
            for connection in list(b.wire.inbound):
                connection.abort()
            await until(lambda: a.wire.counters["broken"] == 1, "a new connection")
            await arrives()
            a.wire.counters["broken"] = 0
        with pytest.raises(TlsError, match="cannot be used"):
            b.wire.replace_identity(replace(identity, key=b"half a k"))
        for connection in list(b.wire.inbound):
            connection.abort()
        await until(lambda: a.wire.counters["broken"] == 1, "a new connection")
        await arrives()
        assert not a.lost

    run(scenario, identity, identity)
