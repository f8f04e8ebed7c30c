"""Connections that break: resumed without a gap or a repeat, or the peer is lost to both."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from kvrelay.engine.messages import Abort, Probe
from kvrelay.engine.wire import codec
from kvrelay.engine.wire.context import WireLimits
from tests.engine.wire.network import Network
from tests.engine.wire.wire_peers import LIMITS, LOOPS, TOKEN, Peer, until

ROOMY = replace(LIMITS, max_queued_frames=10_000, give_up_s=10.0, ack_delay_s=0.02)
PATIENT_S = 30.0
pytestmark = pytest.mark.anyio


@pytest.fixture
def limits() -> WireLimits:
    return ROOMY


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_connection_that_is_reset_again_and_again_loses_and_repeats_nothing(
    a: Peer, b: Peer, network: Network
) -> None:
    rng, sent = Random(5), []
    for number in range(3000):
        sent.append(Abort("r" * rng.randrange(3000), number))
        a.wire.send("b", sent[-1])
        if number % 150 == 149:
            await asyncio.sleep(rng.uniform(0, 0.05))
            network.reset()
    await until(lambda: len(b.messages) >= len(sent), "all of them")
    await until(lambda: not a.wire._links["b"]._unacked, "the last acknowledgement")
    assert b.messages == sent
    assert a.lost == b.lost == []
    assert a.wire.counters["reconnected"] > 0
    assert a.wire.counters["resent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_a_cut_that_is_shorter_than_the_grace_period_is_not_seen_by_the_nodes(
    busy: bool, a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("r", 0))
    await until(lambda: len(b.messages) == 1, "the first")
    network.cut()
    for number in range(1, 100):
        if busy:
            a.wire.send("b", Abort("r", number))
        await asyncio.sleep(0.01)
    assert len(b.messages) == 1
    network.restore()
    a.wire.send("b", Abort("r", 100))
    await until(lambda: b.messages[-1] == Abort("r", 100), "the last")
    numbers = range(101) if busy else (0, 100)
    assert b.messages == [Abort("r", number) for number in numbers]
    assert a.lost == b.lost == []


@pytest.mark.parametrize("limits", [replace(ROOMY, give_up_s=0.5, handshake_s=0.2)])
async def test_a_peer_that_stays_away_for_longer_is_lost_to_both(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("before", 1))
    await until(lambda: len(b.messages) == 1, "the first")
    network.cut()
    network.reset()
    await until(lambda: a.wire.counters["broken"] == 1, "the break")
    a.wire.send("b", Abort("lost", 1))
    assert a.lost == []
    await until(lambda: a.lost == [("b", 1)], "the loss")
    assert a.wire.counters["undeliverable"] == 1
    network.restore()
    a.wire.send("b", Abort("after", 1))
    await until(lambda: len(b.messages) == 2, "the message after")
    assert b.messages == [Abort("before", 1), Abort("after", 1)]
    assert b.lost == [("a", 1)]
    assert b.wire.counters["stream_replaced"] == 1


@pytest.mark.parametrize("limits", [replace(ROOMY, give_up_s=PATIENT_S)])
async def test_a_peer_whose_machine_refuses_the_connection_is_lost_at_once(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("r", 1))
    await until(lambda: len(b.messages) == 1, "the first")
    began = asyncio.get_running_loop().time()
    network.refuse()
    await until(lambda: a.lost == [("b", 1)], "the loss")
    assert asyncio.get_running_loop().time() - began < 1.0


@pytest.mark.parametrize("limits", [replace(ROOMY, give_up_s=PATIENT_S)])
async def test_a_refusal_of_another_machine_is_no_proof_of_death(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("r", 1))
    await until(lambda: len(b.messages) == 1, "the first")
    link = a.wire._links["b"]
    link.address = replace(link.address, host="0.0.0.0")  # as if it were another's
    network.refuse()
    await until(lambda: a.wire.counters["connect_failed"] > 3, "attempts")
    assert a.lost == []


CHILD = f"""
import asyncio
from kvrelay.engine.wire.wire import Wire

async def main():
    wire = Wire("b", {TOKEN!r}, lambda to, message: None)
    print(*await wire.listen("127.0.0.1"), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("limits", [replace(ROOMY, give_up_s=PATIENT_S)])
async def test_the_death_of_a_process_is_noticed_at_once(number: int, a: Peer, b: Peer) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert child.stdout is not None
        host, port = (await asyncio.to_thread(child.stdout.readline)).split()
        a.wire.set_address("b", host, int(port), 1)
        a.wire.send("b", Abort("r", 1))
        await until(lambda: a.wire.counters["connected"] == 1, "the connection")
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        child.send_signal(number)
        await until(lambda: a.lost == [("b", 1)], "the loss")
        assert asyncio.get_running_loop().time() - began < 1.0
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()


@pytest.mark.parametrize("limits", [replace(ROOMY, max_queued_frames=8, give_up_s=PATIENT_S)])
async def test_messages_that_do_not_fit_during_an_outage_lose_the_peer(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("r", 0))
    await until(lambda: len(b.messages) == 1, "the first")
    network.cut()
    network.reset()
    await until(lambda: a.wire.counters["broken"] == 1, "the break")
    for number in range(8):
        a.wire.send("b", Abort("r", number))
    assert a.lost == []
    a.wire.send("b", Abort("one too many", 9))
    await until(lambda: a.lost == [("b", 1)], "the loss")
    assert a.wire.counters["undeliverable"] == 8


async def test_another_process_at_the_same_address_is_not_taken_for_the_one_before(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("r", 0))
    await until(lambda: len(b.messages) == 1, "the first")
    again = await Peer("b").listen()
    network.to = again
    network.reset()
    await until(lambda: a.lost == [("b", 1)], "the loss")
    a.wire.send("b", Abort("r", 1))
    await until(lambda: again.messages == [Abort("r", 1)], "the next stream")
    await again.wire.close()


@pytest.mark.parametrize("limits", [LIMITS])
async def test_what_an_older_epoch_still_sends_is_not_taken(a: Peer, b: Peer) -> None:
    newer = await Peer("a", limits=ROOMY, epoch=2).listen()
    newer.knows(b)
    newer.wire.send("b", Abort("new", 1))
    await until(lambda: len(b.messages) == 1, "the newer one's")
    a.knows(b)
    a.wire.send("b", Abort("old", 1))
    await until(lambda: a.lost == [("b", 1)], "giving up")
    assert b.wire.counters["stale_epoch"] > 0
    assert b.messages == [Abort("new", 1)]
    await newer.wire.close()


async def test_a_message_that_is_none_is_not_sent_again_for_ever(a: Peer, b: Peer) -> None:
    a.knows(b)
    a.wire.send("b", Abort("good", 1))
    a.wire._links["b"].send(b"no message")
    await until(lambda: a.lost == [("b", 1)], "the loss")
    assert b.wire.counters["bad_frame"] == 1
    a.wire.send("b", Abort("next", 1))
    await until(lambda: b.messages == [Abort("good", 1), Abort("next", 1)], "the next")
    assert b.lost == [("a", 1)]


@pytest.mark.parametrize("limits", [replace(ROOMY, give_up_s=0.5)])
async def test_a_peer_of_another_version_is_named_with_both_versions(
    a: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"KVR\x03")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        a.wire.set_address("c", *server.sockets[0].getsockname(), 1, 3, "9.9.9")
        a.wire.send("c", Abort("r", 1))
        await until(lambda: a.lost == [("c", 1)], "the loss")
    (line,) = caplog.messages
    assert "(kvrelay 9.9.9) speaks version 3 of the handshake, and this process (kvrelay" in line
    assert "version 2: install versions that go together" in line


async def test_a_peer_gets_no_message_that_its_protocol_does_not_have(
    a: Peer, b: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(codec._since, Abort, 2)
    a.knows(b)
    a.wire.send("b", Abort("too new", 1))
    a.wire.send("b", Probe("r", 1, "a", 0))
    await until(lambda: len(b.messages) == 1, "the other")
    a.wire.set_address("b", *b.address, 1, protocol=2)  # known later: the stream goes on
    a.wire.send("b", Abort("known", 1))
    await until(lambda: len(b.messages) == 2, "the one that it has")
    assert b.messages == [Probe("r", 1, "a", 0), Abort("known", 1)]
    assert a.wire.counters["too_new_for_peer"] == 1
    assert a.lost == b.lost == []


async def test_a_frame_that_was_changed_on_the_way_is_sent_again(
    a: Peer, b: Peer, network: Network
) -> None:
    a.wire.send("b", Abort("first", 0))
    await until(lambda: len(b.messages) == 1, "the first")

    def flip(data: bytes) -> bytes:
        network.change = lambda data: data
        return data[:9] + bytes([data[9] ^ 4]) + data[10:]

    network.change = flip
    a.wire.send("b", Abort("second", 1))
    await until(lambda: len(b.messages) == 2, "the second")
    assert b.messages == [Abort("first", 0), Abort("second", 1)]
    assert b.wire.counters["bad_mac"] == 1
    assert a.lost == b.lost == []


@pytest.mark.parametrize("limits", [replace(ROOMY, max_unacked_frames=8, ack_frames=4)])
async def test_what_is_not_acknowledged_is_bounded_and_moves_on_with_acknowledgements(
    a: Peer, b: Peer
) -> None:
    a.knows(b)
    sent = [Abort("r", number) for number in range(500)]
    most = 0
    for message in sent:
        a.wire.send("b", message)
    while len(b.messages) < len(sent):
        most = max(most, len(a.wire._links["b"]._unacked))
        await asyncio.sleep(0)
    assert b.messages == sent
    assert 0 < most <= 8
