"""The wire between peers: order, bounds, loss and return."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvrelay.engine.messages import Abort
from tests.engine.wire.wire_peers import LIMITS, LOOPS, Peer, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_messages_arrive_in_order_before_and_after_the_connection_is_up(
    a: Peer, b: Peer
) -> None:
    a.knows(b)
    sent = [Abort(f"r{i}", i) for i in range(4)]
    for message in sent:
        a.wire.send("b", message)
    await until(lambda: len(b.messages) == 4, "first four")
    for i in range(4, 2000):
        sent.append(Abort("r" * (i % 700), i))
        a.wire.send("b", sent[-1])
        if i % 50 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(b.messages) == len(sent), "all of them")
    assert b.messages == sent


async def test_an_unknown_peer_and_an_oversized_message_are_dropped_and_counted(
    a: Peer, b: Peer
) -> None:
    a.knows(b)
    assert a.wire.send("nobody", Abort("r", 1)) is None, "it may be known later"
    why = a.wire.send("b", Abort("r" * (1 << 17), 1))
    assert why is not None
    assert why.startswith("Abort has 131")
    why = a.wire.send("b", Abort("\ud800", 1))
    assert why is not None
    assert why.startswith("Abort cannot be encoded")
    assert a.wire.send("b", Abort("last", 1)) is None
    await until(lambda: bool(b.messages), "the last one")
    assert b.messages == [Abort("last", 1)]
    assert a.wire.counters["unknown_peer"] == 1
    assert a.wire.counters["oversized_out"] == 1
    assert a.wire.counters["unencodable"] == 1


async def test_the_queue_for_a_silent_peer_is_bounded_and_given_up(a: Peer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    a.wire.set_address("gone", "127.0.0.1", port, 7)
    for i in range(10):
        a.wire.send("gone", Abort("r", i))
    assert a.wire.counters["queue_full"] == 6
    await until(lambda: a.lost == [("gone", 7)], "giving up")
    assert a.wire.counters["undeliverable"] == 4


async def test_a_peer_that_does_not_read_fills_the_queue_and_nothing_else(a: Peer, b: Peer) -> None:
    a.knows(b)
    a.wire.send("b", Abort("first", 1))
    await until(lambda: bool(b.messages), "the first one")
    (inbound,) = b.wire.inbound
    assert inbound._transport is not None
    inbound._transport.pause_reading()
    for _ in range(1000):
        a.wire.send("b", Abort("x" * 60_000, 1))
    await until(lambda: a.wire.counters["queue_full"] > 0, "the bound")
    kept = a.wire.counters["sent"] + LIMITS.max_queued_frames
    assert kept + a.wire.counters["queue_full"] == 1001
    inbound._transport.resume_reading()
    await until(lambda: len(b.messages) == kept, "what was kept")


async def test_a_restarted_peer_is_reached_at_its_new_address(a: Peer, b: Peer) -> None:
    a.knows(b, epoch=1)
    a.wire.send("b", Abort("one", 1))
    await until(lambda: bool(b.messages), "the first")
    await b.wire.close()
    await until(lambda: a.lost == [("b", 1)], "the loss")
    again = await Peer("b").listen()
    a.knows(again, epoch=2)
    a.knows(b, epoch=1)  # late news of the older epoch
    a.wire.send("b", Abort("two", 1))
    await until(lambda: again.messages == [Abort("two", 1)], "the second")
    await again.wire.close()


async def test_a_peer_that_comes_back_at_the_same_address_is_reached_again(
    a: Peer, b: Peer
) -> None:
    a.knows(b)
    a.wire.send("b", Abort("one", 1))
    await until(lambda: bool(b.messages), "the first")
    await b.wire.close()
    await until(lambda: a.lost == [("b", 1)], "the loss")
    a.wire.send("b", Abort("two", 1))
    again = await Peer("b").listen(b.address[1])
    await until(lambda: again.messages == [Abort("two", 1)], "the second")
    await again.wire.close()


async def test_a_forgotten_peer_is_not_written_to(a: Peer, b: Peer) -> None:
    a.knows(b, epoch=3)
    a.wire.forget("b", 2)
    a.wire.send("b", Abort("still here", 1))
    await until(lambda: bool(b.messages), "the message")
    a.wire.forget("b", 3)
    a.wire.send("b", Abort("dropped", 1))
    assert a.wire.counters["unknown_peer"] == 1
    await until(lambda: not b.wire.inbound, "the connection to close")
    assert a.lost == []
