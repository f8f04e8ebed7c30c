"""What is published of blocks, against a listener that believes what it is told and a model that
works all of it out anew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.cluster.events.held import TIERS, Origin, PublishedBlocks
from kvrelay.engine.kv.tier import Tier

SIZE = 2
ORIGIN = Origin("m", SIZE)
WORKERS = ("a", "b", "c")
# A tree: the parent of each block; 0 to 3 are a chain, which parts behind 1 and behind 2.
PARENTS = (None, 0, 1, 2, 1, 4, 2, None, 7)
NAMES = tuple(bytes([n]) * 16 for n in range(1, len(PARENTS) + 1))
Place = tuple[str, Tier]


def chain_to(block: int) -> list[int]:
    """The blocks from the root down to it."""
    parent = PARENTS[block]
    return [*([] if parent is None else chain_to(parent)), block]


class Listener:
    """Invariant: what it holds has its parent there, as far as an index needs that."""

    def __init__(self) -> None:
        self.held: dict[Place, set[bytes]] = {(w, t): set() for w in WORKERS for t in TIERS}

    def take(self, blocks: PublishedBlocks) -> None:
        numbers = blocks.numbers.copy()
        for worker, number, changes in blocks.take_changes():
            assert numbers[worker] == number
            for block, tier, is_stored in changes:
                held = self.held[worker, tier]
                if not is_stored:
                    held.remove(block.name)
                    continue
                assert block.name not in held
                if block.parent is not None:
                    own = (tier,) if tier is Tier.DEVICE else TIERS
                    assert any(block.parent.name in self.held[worker, each] for each in own)
                held.add(block.name)


class HeldMachine(RuleBasedStateMachine):
    """Workers that store and evict in any order, and prompts that name blocks in any order."""

    MAX_BLOCKS = 100

    def __init__(self) -> None:
        super().__init__()
        self.blocks = PublishedBlocks(self.MAX_BLOCKS)
        self.listener = Listener()
        self.held: dict[Place, set[bytes]] = {(w, t): set() for w in WORKERS for t in TIERS}
        self.named: set[int] = set()

    @rule(
        worker=st.sampled_from(WORKERS),
        tier=st.sampled_from(TIERS),
        stored=st.sets(st.sampled_from(NAMES)),
        removed=st.sets(st.sampled_from(NAMES)),
    )
    def change(self, worker: str, tier: Tier, stored: set[bytes], removed: set[bytes]) -> None:
        removed -= stored
        self.held[worker, tier] |= stored
        self.held[worker, tier] -= removed
        self.blocks.changed(worker, tier, b"".join(stored), b"".join(removed))

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        for tier in TIERS:
            self.held[worker, tier].clear()
        self.blocks.forgotten(worker)

    @rule(block=st.sampled_from(range(len(NAMES))))
    def name(self, block: int) -> None:
        chain = chain_to(block)
        self.named |= {*chain}
        tokens = [token for each in chain for token in (each, each)]
        self.blocks.named(ORIGIN, tokens, b"".join(NAMES[each] for each in chain))

    @rule()
    def publish(self) -> None:
        self.listener.take(self.blocks)
        assert self.listener.held == self.expected()
        told: dict[Place, set[bytes]] = {(w, t): set() for w in WORKERS for t in TIERS}
        for worker, _, changes in self.blocks.everything():
            for block, tier, is_stored in changes:
                assert is_stored
                told[worker, tier].add(block.name)
        assert told == self.listener.held

    def expected(self) -> dict[Place, set[bytes]]:
        found: dict[Place, set[bytes]] = {place: set() for place in self.held}
        for worker in WORKERS:
            for at, (name, parent) in enumerate(zip(NAMES, PARENTS, strict=True)):
                for tier in TIERS if at in self.named else ():
                    own = (tier,) if tier is Tier.DEVICE else TIERS
                    above = parent is None or any(NAMES[parent] in found[worker, t] for t in own)
                    if above and name in self.held[worker, tier]:
                        found[worker, tier].add(name)
        return found

    @invariant()
    def is_whole(self) -> None:
        self.blocks.check_integrity()


class ShortOfRoomMachine(HeldMachine):
    """Blocks are forgotten: which, is not worked out anew; the listener has what is published."""

    MAX_BLOCKS = 4

    def expected(self) -> dict[Place, set[bytes]]:
        assert self.blocks.num_blocks <= self.MAX_BLOCKS
        for place, names in self.listener.held.items():
            assert names <= self.held[place], "published, and not held"
        return self.listener.held


HeldMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
ShortOfRoomMachine.TestCase.settings = HeldMachine.TestCase.settings
TestHeld = HeldMachine.TestCase
TestShortOfRoom = ShortOfRoomMachine.TestCase


def named(blocks: PublishedBlocks, chain: Sequence[int]) -> None:
    tokens = [token for each in chain for token in (each, 100 + each)]
    blocks.named(ORIGIN, tokens, b"".join(NAMES[each] for each in chain))


def test_a_worker_that_says_nothing_more_leaves_its_number_to_the_next() -> None:
    blocks = PublishedBlocks(100)
    named(blocks, [0, 1])
    for worker in WORKERS:
        blocks.changed(worker, Tier.DEVICE, NAMES[0], b"")
    blocks.take_changes()
    blocks.forgotten("b")
    [(worker, number, changes)] = blocks.take_changes()
    assert (worker, number, [c.is_stored for c in changes]) == ("b", 1, [False])
    blocks.changed("d", Tier.DEVICE, NAMES[0], b"")
    assert [(worker, number) for worker, number, _ in blocks.take_changes()] == [("d", 1)]


def test_what_is_gone_and_back_before_it_is_published_is_no_change() -> None:
    blocks = PublishedBlocks(100)
    named(blocks, [0, 1, 2])
    blocks.changed("a", Tier.DEVICE, b"".join(NAMES[:3]), b"")
    assert len(blocks.take_changes()[0][2]) == 3
    blocks.forgotten("a")  # as a snapshot does
    blocks.changed("a", Tier.DEVICE, b"".join(NAMES[:3]), b"")
    assert blocks.take_changes() == []


def test_blocks_have_the_tokens_that_they_were_named_with() -> None:
    blocks = PublishedBlocks(100)
    named(blocks, [0, 1])
    blocks.changed("a", Tier.HOST, NAMES[0] + NAMES[1], b"")
    [(_, _, changes)] = blocks.take_changes()
    assert [array("I", c.block.tokens).tolist() for c in changes] == [[0, 100], [1, 101]]


@pytest.mark.parametrize("max_blocks", [8, 64])
def test_names_without_tokens_are_bounded(max_blocks: int) -> None:
    blocks = PublishedBlocks(max_blocks)
    every = [n.to_bytes(16, "big") for n in range(1000)]
    blocks.changed("a", Tier.DEVICE, b"".join(every), b"")
    tokens = [0] * (SIZE * len(every))
    for name in every:
        blocks.named(ORIGIN, tokens, name)
    [(_, _, changes)] = blocks.take_changes()
    stored = {c.block.name for c in changes if c.is_stored}
    assert stored == {*every[-max_blocks:]}, "the last that were said"
