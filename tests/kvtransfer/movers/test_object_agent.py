"""Blocks between memory and an object store, which may do what it wants."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import DAMAGED, MISSING, AgentError
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.codec import ExponentCodec
from kvrelay.kvtransfer.movers import object as objects
from kvrelay.kvtransfer.movers.object import HEADER_BYTES, ObjectMover
from kvrelay.kvtransfer.store.bucket import Bucket, key_prefix
from tests.kvtransfer.movers.agent_kit import DEADLINE_S, begin, read, settle
from tests.kvtransfer.movers.test_coded_agent import numbers
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3StandIn, s3_standin

NUM_BLOCKS = 48
DEVICE, HOST, OBJECT = Tier.DEVICE, Tier.HOST, Tier.OBJECT
PREFIX = key_prefix("kv", b"f" * 16)


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


class World:
    def __init__(self, server: S3StandIn, folder: Path) -> None:
        self.server, self.now = server, 0.0
        self.file = folder / "credentials"
        self.set_credentials(ACCESS_KEY)
        self.device, self.host = numbers(NUM_BLOCKS, 1), numbers(NUM_BLOCKS, 2)
        bucket = Bucket(server.bucket, server.url, credentials_file=str(self.file))
        memory = {DEVICE: self.device, HOST: self.host}
        self.agent = ObjectMover("me", memory, bucket, PREFIX, ExponentCodec(), clock=self.clock)

    def clock(self) -> float:
        return self.now

    def set_credentials(self, access_key: str) -> None:
        self.file.write_text(
            f"[default]\naws_access_key_id={access_key}\naws_secret_access_key={SECRET_KEY}\n"
        )

    def write(self, blocks: list[int], names: list[int], checksums: list[int] | None = None) -> int:
        sums = tuple(checksums or checksum_blocks(self.host, blocks))
        keys = {"names": tuple(map(name_of, names)), "checksums": sums}
        return sum(read(self.agent, "me", blocks, blocks, HOST, OBJECT, **keys).stored_bytes)

    def read(self, names: list[int], blocks: list[int]) -> tuple[int, ...]:
        return settle(self.agent, self.begin(names, blocks)).checksums

    def begin(self, names: list[int], blocks: list[int]) -> Any:
        """A read of these objects into blocks of the device."""
        keys = tuple(map(name_of, names))
        return begin(self.agent, "me", names, blocks, OBJECT, DEVICE, names=keys)

    def key(self, number: int) -> str:
        return PREFIX + name_of(number).hex()

    def polls(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline
            self.agent._forget_settled()
            time.sleep(0.005)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(objects, "CLOSE_S", DEADLINE_S)
    with s3_standin() as server:
        world = World(server, tmp_path)
        yield world
        server.thaw()
        server.refuse_with = None
        world.agent.close()
        assert not objects._abandoned
        free = sorted(world.agent._transport.free)
        assert free == [*range(len(world.agent._transport.staging))], "slots are lost"


def test_what_was_written_is_read(world: World) -> None:
    blocks = [*range(NUM_BLOCKS)]
    written = world.write(blocks, blocks)
    assert written == sum(map(len, world.server.objects.values())) < 0.8 * world.host.nbytes
    assert set(world.server.objects) == {world.key(number) for number in blocks}
    found = world.read(blocks, blocks[::-1])
    assert found == tuple(checksum_blocks(world.host, blocks))
    assert (world.device[::-1] == world.host).all()


def test_more_blocks_than_the_staging_area_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_STAGING", 8)
    world.set_credentials("another")
    world.server.access_key = "another"  # with which the agent begins again
    world.write([*range(NUM_BLOCKS)], [*range(NUM_BLOCKS)])
    assert len(world.agent._transport.staging) == 8
    world.read([*range(NUM_BLOCKS)], [*range(NUM_BLOCKS)])
    assert (world.device == world.host).all()


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 1000, -1])
def test_an_object_that_is_too_short_is_damaged(world: World, length: int) -> None:
    before = world.device.copy()
    world.write([1, 2, 3], [1, 2, 3])
    world.read([1, 2, 3], [11, 12, 13])  # the staging area has all of it
    world.server.objects[world.key(2)] = world.server.objects[world.key(2)][:length]
    first, second, third = world.read([1, 2, 3], [21, 22, 23])
    assert [first, third] == checksum_blocks(world.host, [1, 3])
    assert second == DAMAGED
    assert (world.device[22] == before[22]).all(), "memory was written with what had not arrived"


def test_a_missing_object_is_missing_and_the_others_come(world: World) -> None:
    before = world.device.copy()
    world.write([1, 2, 3], [1, 2, 3])
    del world.server.objects[world.key(2)]
    first, second, third = world.read([1, 2, 3], [1, 2, 3])
    assert [first, third] == checksum_blocks(world.host, [1, 3])
    assert second == MISSING
    assert (world.device[2] == before[2]).all()


def test_an_object_of_another_block_is_damaged(world: World) -> None:
    world.write([1, 2], [1, 2])
    store = world.server.objects
    store[world.key(1)], store[world.key(2)] = store[world.key(2)], store[world.key(1)]
    assert world.read([1, 2], [1, 2]) == (DAMAGED, DAMAGED)


@pytest.mark.parametrize("at", [0, 8, 30, 60, 127, HEADER_BYTES, HEADER_BYTES + 9000])
def test_a_changed_byte_is_found(world: World, at: int) -> None:
    world.write([1], [1])
    body = bytearray(world.server.objects[world.key(1)])
    body[at] ^= 4
    world.server.objects[world.key(1)] = bytes(body)
    (found,) = world.read([1], [1])
    is_padding = at == HEADER_BYTES - 1
    assert found == (checksum_blocks(world.host, [1])[0] if is_padding else DAMAGED)


def test_a_block_that_has_changed_before_it_was_written_is_of_no_use_to_anyone(
    world: World,
) -> None:
    computed = checksum_blocks(world.host, [1])
    world.host[1, 100] ^= 1
    world.write([1], [1], computed)
    assert world.read([1], [1]) == (DAMAGED,)


def stall(world: World, names: list[int]) -> str:
    """Why the copy is given up, in the time that the store may be silent."""
    handle = world.begin(names, names)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while world.agent.poll(handle) is None:
            assert time.monotonic() < deadline
            world.now += 0.01
    except AgentError as error:
        world.agent.cancel(handle)
        assert world.agent.poll(handle) is not None, "it settles at once"
        return str(error)
    raise AssertionError("it was not given up")


def test_a_store_that_does_not_answer_is_given_up_and_left_alone(world: World) -> None:
    before = world.device.copy()
    world.write([1, 2], [1, 2])
    world.server.freeze()
    begun = world.now
    assert "nothing has come for 1 s" in stall(world, [1, 2])
    assert world.now - begun < 1.1
    assert world.agent.num_left == 2
    with pytest.raises(AgentError, match="asked again in 5 s"):
        world.read([1, 2], [1, 2])
    world.server.thaw()
    world.polls(lambda: not world.agent.num_left)
    assert (world.device == before).all(), "what came too late is written to memory"
    world.now += 5.0
    assert world.read([1, 2], [1, 2]) == tuple(checksum_blocks(world.host, [1, 2]))


def test_a_slow_store_serves_all_copies_in_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as slow for one as a silent one is for all."""
    monkeypatch.setattr(objects, "STALL_S", 0.6)
    monkeypatch.setattr(objects, "PROMPT_S", 0.15)
    world.agent._clock = time.monotonic
    first, second = [*range(32)], [*range(32, 40)]
    world.write([*first, *second], [*first, *second])
    size = len(world.server.objects[world.key(1)])
    world.server.bytes_per_s = size / 0.03
    world.agent._most_live = objects.FIRST_LIVE
    handles = [world.begin(each, each) for each in (first, second)]
    done: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(done) < 2:
        assert time.monotonic() < deadline
        done += [i for i in range(2) if i not in done and world.agent.poll(handles[i])]
        time.sleep(0.002)
    assert done == [1, 0], "the short one had its turns"
    assert (world.device[:40] == world.host[:40]).all()


def test_a_copy_that_fails_as_it_is_posted_leaves_no_slots_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write([1, 2], [1, 2])
    start, begun = objects.ObjectTransport.start, []

    def fails_the_second_time(*given: object) -> object:
        begun.append(given)
        if len(begun) % 2 == 0:
            raise AgentError("no")
        return start(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(objects.ObjectTransport, "start", fails_the_second_time)
    for _ in range(3):
        with pytest.raises(AgentError, match="does not serve: no"):
            world.read([1, 2], [1, 2])
        world.now += 100.0
    monkeypatch.setattr(objects.ObjectTransport, "start", start)
    world.polls(lambda: not world.agent.num_left)  # the fixture looks whether all slots are free


def test_slots_that_a_silent_store_holds_are_not_used_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write([*range(NUM_BLOCKS)], [*range(NUM_BLOCKS)])
    monkeypatch.setattr(objects, "MAX_STAGING", 8)
    world.set_credentials("another")
    world.server.access_key = "another"
    world.read([1], [1])
    world.server.freeze()
    stall(world, [*range(NUM_BLOCKS)])
    assert world.agent.num_left == 8
    world.now += 100.0
    with pytest.raises(AgentError, match="8 transfers that were given up have not ended"):
        world.read([1], [1])
    world.server.thaw()
    world.polls(lambda: not world.agent.num_left)
    world.read([*range(NUM_BLOCKS)], [*range(NUM_BLOCKS)])
    assert (world.device == world.host).all()


def test_a_store_that_refuses_for_want_of_time_is_given_up(world: World) -> None:
    world.write([1], [1])
    world.server.refuse_with = HTTPStatus.SERVICE_UNAVAILABLE
    assert "does not serve" in stall(world, [1])
    world.server.refuse_with = None
    world.polls(lambda: not world.agent.num_left)


def test_credentials_that_were_revoked_and_replaced(world: World) -> None:
    world.write([1], [1])
    world.server.access_key = "the-new-one"
    with pytest.raises(AgentError, match="InvalidAccessKeyId"):
        world.read([1], [1])
    world.now += 5.0
    with pytest.raises(AgentError, match="does not serve"):
        world.write([2], [2])
    world.set_credentials("the-new-one")
    world.now += 60.0
    world.write([2], [2])
    assert world.read([1, 2], [1, 2]) == tuple(checksum_blocks(world.host, [1, 2]))


def test_a_copy_that_is_not_for_the_store_is_refused(world: World) -> None:
    with pytest.raises(AgentError, match="no object memory is reached"):
        begin(world.agent, "me", [1], [1], OBJECT, OBJECT, names=(name_of(1),))
    with pytest.raises(AgentError, match="they have 0 names"):
        begin(world.agent, "me", [1], [1], OBJECT, DEVICE)
    with pytest.raises(AgentError, match="destination block 99"):
        world.read([0], [99])


READ_AND_END = """
import sys
from pathlib import Path
from kvrelay.kvtransfer.movers import object as objects
from tests.kvtransfer.movers.test_object_agent import World

class Server:
    bucket, url = "kv", sys.argv[1]

objects.CLOSE_S = 0.1
world = World(Server(), Path(sys.argv[2]))
world.agent.cancel(world.begin([1], [1]))
world.agent.close()
"""
ATTEMPTS = 11  # by NIXL, before it gives up by itself


@pytest.mark.slow
def test_a_process_ends_although_the_store_does_not_answer(tmp_path: Path) -> None:
    with s3_standin() as server:
        server.freeze()
        command = [sys.executable, "-c", READ_AND_END, server.url, str(tmp_path)]
        subprocess.run(command, check=True, timeout=4 * DEADLINE_S)
        assert 0 < len(server.requests) < ATTEMPTS, "it has waited for the store"
