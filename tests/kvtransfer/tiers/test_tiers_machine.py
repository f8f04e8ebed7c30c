"""Requests, moves that fail, pins, orders and time in any order: nothing is lost track of.

The model is what a listener may believe: which names each tier has been given with the right bytes,
which slots are pinned, which orders are open. `TierWorld` checks each move against it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.kvtransfer.messages import CacheAction
from kvrelay.kvtransfer.tiers.manager import ORDER_TIMEOUT_S
from tests.kvtransfer.tiers.tier_world import TierWorld, content, names, stored

SESSIONS = st.integers(0, 3)
LENGTHS = st.integers(1, 7)
SIZES = st.sampled_from([(3, 5), (9, 16), (6, 0), (0, 6), (20, 8)])
ROOMS = st.sampled_from([0, 0, 20, 31, 70])  # bytes of the disk; 0: for as many as it has slots


def chain(session: int, length: int) -> list[bytes]:
    """All sessions begin with the same two blocks."""
    return names(0, 1, *range(10 * session + 10, 10 * session + 18))[:length]


class TiersMachine(RuleBasedStateMachine):
    @initialize(sizes=SIZES, room=ROOMS, found=st.sets(st.integers(0, 4)))
    def begin(self, sizes: tuple[int, int], room: int, found: set[int]) -> None:
        (host, disk), left = sizes, room
        slots = dict(zip(chain(0, 5), range(disk), strict=False))
        records = []
        for index, (name, slot) in enumerate(slots.items()):
            if index in found and (not room or left >= stored(name)):
                records.append(DiskRecord(slot, name, content(name), 20.0, stored(name)))
                left -= stored(name)
        self.world = TierWorld(
            *(16, host, disk, records),
            disk_after_s=1.0,
            disk_bytes=room,
            disk_slot_bytes=10 if room else 0,
        )
        self.running: list[tuple[list[bytes], list[int], Retention]] = []
        self.orders = 0
        self.given: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.given[Tier.DISK] = {record.block_hash for record in records}

    def names_of(self, read: Any) -> list[bytes]:
        source = self.world.memory[read.src_tier]
        return [bytes([source[slot] - 1000]) for slot in read.src]

    @rule(
        session=SESSIONS,
        length=LENGTHS,
        keep_s=st.sampled_from([0.0, 3.0, 40.0]),
        to_disk=st.booleans(),
    )
    def request_begins(self, session: int, length: int, keep_s: float, to_disk: bool) -> None:
        world, labels = self.world, chain(session, length)
        hits = world.kv.pool.lookup(labels)
        world.kv.pool.acquire(hits)
        if world.kv.pool.num_free < len(labels) - len(hits):
            world.kv.pool.release(hits)
            return
        retention = Retention(keep_s, to_disk)
        world.tiers.use(world.now, labels, retention)
        blocks = hits + world.seal(labels[len(hits) :], retention)
        self.running.append((labels, blocks, retention))
        world.advance()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        labels, blocks, retention = self.running.pop(index)
        self.world.tiers.use(self.world.now, labels, retention)
        self.world.kv.pool.release(blocks)
        self.world.advance()

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data(), error=st.sampled_from([None] * 6 + ["broken", "refused"]))
    def move_ends(self, data: st.DataObject, error: str | None) -> None:
        read = data.draw(st.sampled_from(self.world.reads))
        damage = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        moved = self.names_of(read)
        self.world.finish(read, error, damage=damage)
        if error is None:
            self.given[read.dst_tier].update(moved[damage:])
        self.world.advance()

    @rule(session=SESSIONS, skip=st.integers(0, 3))
    def pin(self, session: int, skip: int) -> None:
        wanted = chain(session, 8)[skip:]
        found = self.world.tiers.find(wanted)
        assert [source.block_hash for source in found] == wanted[: len(found)]
        below = [set(self.world.readable(tier)) for tier in (Tier.HOST, Tier.DISK)]
        run = next((i for i, n in enumerate(wanted) if not any(n in b for b in below)), 8 - skip)
        assert len(found) == run
        assert all(s.tier is Tier.HOST for s in found if s.block_hash in below[0])
        if len(self.world.pinned) < 12:
            self.world.tiers.pin(found)
            self.world.pinned += found

    @precondition(lambda self: self.world.pinned)
    @rule(data=st.data(), discard=st.booleans())
    def unpin(self, data: st.DataObject, discard: bool) -> None:
        source = data.draw(st.sampled_from(self.world.pinned))
        assert self.world.memory[source.tier][source.slot] == content(source.block_hash)
        if discard:
            self.world.tiers.discard(source)
        self.world.pinned.remove(source)
        self.world.tiers.unpin([source])
        self.world.advance()

    @rule(session=SESSIONS)
    def promote(self, session: int) -> None:
        self.world.tiers.promote(chain(session, 8))
        self.world.advance()

    @rule(action=st.sampled_from(CacheAction), session=SESSIONS, length=LENGTHS, lazy=st.booleans())
    def order(self, action: CacheAction, session: int, length: int, lazy: bool) -> None:
        self.orders += 1
        numbers = [name[0] for name in chain(session, length)]
        self.world.order(action, *numbers, order_id=str(self.orders), lazy=lazy)
        self.world.advance()

    @rule(after_s=st.sampled_from([0.1, 1.0, 5.0, 31.0]))
    def time_passes(self, after_s: float) -> None:
        self.world.tick(after_s)

    @rule()
    def store_fails(self) -> None:
        self.world.store_failed()

    @invariant()
    def is_consistent(self) -> None:
        world = self.world
        world.listen()
        world.tiers.check_integrity()
        world.kv.pool.check_integrity()
        for tier in (Tier.HOST, Tier.DISK):
            readable = world.readable(tier)
            assert set(readable) <= self.given[tier]
            assert len({source.slot for source in readable.values()}) == len(readable)
            assert len(readable) <= world.tiers.num_blocks(tier)
        if room := world.config.disk_bytes:
            assert sum(map(stored, world.readable(Tier.DISK))) <= room
        for block in world.kv.pool.lookup(names(0, 1)):
            assert world.memory[Tier.DEVICE][block] == world.kv.checksums[block]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for labels, blocks, retention in self.running:
            world.tiers.use(world.now, labels, retention)
            world.kv.pool.release(blocks)
        world.tiers.unpin(world.pinned)
        world.pinned.clear()
        world.settle()
        world.tick(ORDER_TIMEOUT_S)
        world.settle()
        ids = sorted(int(done.order_id) for done in world.answers)
        assert ids == list(range(1, self.orders + 1))
        world.rest(400.0)  # longer than the disk is left alone after a failure
        world.rest(2.0)
        world.assert_idle()


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
