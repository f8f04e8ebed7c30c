"""A block table that lies ends the request that it belongs to, with the reason; the others get the
tokens that they would have got, and every block is given back once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.request import Refusal
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Step, StepDone
from tests.worker.world import World, reference

PROMPTS = {"a": [1] * 9, "liar": [2] * 13, "b": [3] * 6}
Lie = Callable[[Sequence, Sequence], None]


def lie_of_entry(index: int, block: int) -> Lie:
    def lie(liar: Sequence, other: Sequence) -> None:
        liar.block_ids[index] = block

    return lie


def takes_anothers(liar: Sequence, other: Sequence) -> None:
    liar.block_ids[-1] = other.block_ids[-1]


def reads_anothers(liar: Sequence, other: Sequence) -> None:
    liar.block_ids[0] = other.block_ids[0]


def has_one_twice(liar: Sequence, other: Sequence) -> None:
    liar.block_ids[1] = liar.block_ids[0]


def has_two_swapped(liar: Sequence, other: Sequence) -> None:
    liar.block_ids[0], liar.block_ids[1] = liar.block_ids[1], liar.block_ids[0]


def lost_one(liar: Sequence, other: Sequence) -> None:
    first, _, *others = liar.block_ids
    liar.block_ids = BlockTable.of([first, *others])


READS = {
    "of another": reads_anothers,
    "twice": has_one_twice,
    "swapped": has_two_swapped,
    "lost": lost_one,
    "given back": lie_of_entry(0, -1),
}
WRITES = {
    "of another": takes_anothers,
    "outside": lie_of_entry(-1, 10**6),
    "negative": lie_of_entry(-1, -7),
}


def submit_all(world: World, *, remote: bool) -> None:
    for name, prompt in PROMPTS.items():
        world.submit(name, prompt, 30, remote=remote)


def begin(world: World) -> tuple[Sequence, Sequence]:
    """All of them decode; returns the liar and one of the others."""
    submit_all(world, remote=False)
    seqs = world.decode.core.seqs
    while len(seqs) < 3 or any(seq.num_output_tokens < 5 for seq in seqs.values()):
        assert world.step()
    return seqs["liar", 0], seqs["a", 0]


def assert_only_the_liar_failed(world: World) -> str:
    world.drain()
    (refused,) = world.refused()
    assert (refused.request_id, refused.reason) == ("liar", Refusal.BLOCK_TABLE)
    for name in ("a", "b"):
        assert world.output(name, PROMPTS[name]) == reference(PROMPTS[name], 30)
    assert world.decode.core.counters["sequences_left_out"] == 1
    world.decode.core.kv.check_integrity()
    world.assert_idle()
    return refused.detail


@pytest.mark.parametrize("lie", [*READS.values(), *WRITES.values()], ids=[*READS, *WRITES])
def test_a_lying_table_ends_its_own_request(lie: Lie) -> None:
    world = World(num_blocks=60)
    lie(*begin(world))
    assert "block table" in assert_only_the_liar_failed(world)


@pytest.mark.parametrize("lie", WRITES.values(), ids=WRITES)
def test_what_would_be_written_is_looked_at_without_the_guard_as_well(lie: Lie) -> None:
    world = World(num_blocks=60, guard=False)
    lie(*begin(world))
    assert "block table" in assert_only_the_liar_failed(world)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_block_that_is_sealed_or_shared_is_not_written(sealed: bool) -> None:
    """The manager itself is wrong about it."""
    world = World(num_blocks=60)
    liar, _ = begin(world)
    pool, block = world.decode.core.kv.pool, liar.block_ids[-1]
    if sealed:
        pool.seal(block, b"of somebody")
    else:
        pool._refs[block] += 1
    world.drain()
    (refused,) = world.refused()
    assert refused.detail == f"block {block}, to be written, is not its own: it is sealed or shared"
    if not sealed:
        pool.release([block])
    assert_only_the_liar_failed(world)


class Refusing(World):
    """Its executor leaves out whom the test names, as the real one does with a faulty table."""

    left_out = ""

    def run(self, node: str, step: Step) -> StepDone:
        failed = {
            index: "it lies"
            for index, seq in enumerate(step.seqs)
            if self.left_out and seq.request_id.startswith(self.left_out)
        }
        done = super().run(node, step)
        sampled = [None if index in failed else s for index, s in enumerate(done.sampled)]
        return replace(done, sampled=sampled, failed=failed)


@pytest.mark.parametrize("remote", [False, True])
def test_who_is_left_out_by_the_executor_fails_and_the_others_go_on(remote: bool) -> None:
    world = Refusing(num_blocks=60, num_decode=1)
    submit_all(world, remote=remote)
    world.left_out = "liar"
    for _ in range(400):
        if world.refused():
            break
        world.step()
    assert {(r.request_id, r.detail) for r in world.refused()} == {("liar", "it lies")}
    if remote:  # as the router would
        world.decode.exchange.connector.arrivals["liar", 0].deadline = 0.0
        world.left_out = ""
        world.tick(0.3)
    world.drain()
    for name in ("a", "b"):
        assert world.output(name, PROMPTS[name]) == reference(PROMPTS[name], 30)
    world.assert_idle()


class Compiling(World):
    """Its executor leaves out whose grammar still compiles, for so many steps."""

    num_steps = 0

    def run(self, node: str, step: Step) -> StepDone:
        waiting: frozenset[int] = frozenset()
        if self.num_steps:
            each = enumerate(step.seqs)
            waiting = frozenset(i for i, s in each if s.sample and s.request_id.startswith("liar"))
            self.num_steps -= bool(waiting)
        done = super().run(node, step)
        sampled = [None if index in waiting else s for index, s in enumerate(done.sampled)]
        return replace(done, sampled=sampled, waiting=waiting)


@pytest.mark.parametrize("remote", [False, True])
def test_whose_grammar_compiles_comes_again_and_the_others_go_on(remote: bool) -> None:
    world = Compiling(num_blocks=60, num_decode=1)
    submit_all(world, remote=remote)
    world.num_steps = 7
    world.drain()
    assert world.num_steps == 0
    assert not world.refused()
    for name, prompt in PROMPTS.items():
        assert world.output(name, prompt) == reference(prompt, 30)
    world.assert_idle()
