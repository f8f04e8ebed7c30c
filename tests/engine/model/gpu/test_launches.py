"""Steps launched behind one another on a GPU's kernels: the tokens of plain torch, though the host
gives a step's tokens to the next one only by their rows. Interpreted where there is no GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.model.batch import Guard
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.step import Step, StepDone
from kvrelay.kvtransfer.checksum import begin_checksums, checksum_blocks
from kvrelay.kvtransfer.movers.pool import DeviceBytes, block_bytes
from tests.engine.model.gpu.triton_world import DEVICE, World
from tests.engine.model.talks import GREEDY, TABLES, Launching, Talk, after, alone, step
from tests.engine.model.tiny import tokens_of

from kvrelay.engine.model.gpu import penalties  # isort: skip
from kvrelay.engine.model.gpu.steps import Launches  # isort: skip

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture(scope="module")
def triton(path):
    return World(path, "triton", graphs=True)


class Stream(Launching):
    def __init__(self, world: World) -> None:
        self.world = world
        self.guard = Guard(world.limits)
        assert world.steps is not None
        pool = block_bytes(world.pool)
        executor = StepExecutor(
            self.execute,
            lambda ids: checksum_blocks(pool, ids),
            launch_step=Launches(world.steps, self.guard).launch,
            begin_checksums=lambda ids: begin_checksums(pool, ids),
        )
        super().__init__(executor)

    def execute(self, step: Step) -> StepDone:
        _, _, tables = self.guard.check(step)
        with torch.inference_mode():
            return StepDone(step.step_id, self.world.steps.execute(step, tables)[0])


def test_two_steps_in_flight_give_the_tokens_of_torch(triton, follow):
    """Rows change places, one joins with a token that the host knows, and one leaves. The first
    sequence goes on into its second block, whose checksum is that of the block as it is then."""
    stream = Stream(triton)
    a, b, c = stream.begin()
    first = stream.launch(a.next(), b.next())
    second = stream.launch(c.next(), after(b, 1, follows=1), after(a, 1, follows=0))
    done = first()
    one = [each.token for each in done.sampled]
    third = stream.launch(  # b has left
        after(a, 2, follows=2), after(c, 1, follows=0), checksums=[TABLES[0][0]]
    )
    two = [each.token for each in second().sampled]
    done = third()
    three = [each.token for each in done.sampled]
    assert [a.output[0], one[0], two[2], three[0]] == follow[0][:4]
    assert [b.output[0], one[1], two[1]] == follow[1][:3]
    assert [c.output[0], two[0], three[1]] == follow[2][:3]
    assert done.checksums == checksum_blocks(block_bytes(triton.pool), [TABLES[0][0]])
    assert done.elapsed_s > 0


def test_the_tokens_of_a_step_that_ends_are_not_those_of_a_later_one(triton, follow):
    """Results of a step are read while the next one has been drawn already."""
    stream = Stream(triton)
    talk = stream.begin()[0]
    runs, got = stream.launch(talk.next()), []
    for ahead in range(1, len(follow[0]) - 1):
        behind = stream.launch(after(talk, ahead, follows=0))
        got.append(runs().sampled[0].token)
        runs = behind
    assert [*got, runs().sampled[0].token] == follow[0][1:]


def test_what_is_penalized_is_counted_where_it_is_drawn(triton, path, monkeypatch):
    """The rows of a pass change places, and the host sends no more of their contexts."""
    sampling = replace(
        GREEDY, repetition_penalty=0.3, presence_penalty=-0.5, frequency_penalty=-0.4
    )
    ways = sampling, replace(sampling, temperature=1.0, seed=11)
    prompts = tokens_of(14, seed=1), tokens_of(3, seed=2)
    expected, talks = (
        [Talk(*each) for each in zip(prompts, TABLES, ways, strict=False)] for _ in range(2)
    )
    stream, world = Stream(triton), World(path, "torch")
    for talk in talks:
        step(stream, talk)
    first, second = talks
    shares = [talk.next() for talk in talks]
    runs = stream.launch(*shares)
    monkeypatch.setattr(penalties, "stage_arrays", None)
    while len(first.output) < 6:
        behind = [after(talks[row], 1, follows=row) for row in (1, 0)]
        later = stream.launch(*behind)
        for talk, share, each in zip(talks, shares, runs().sampled, strict=True):
            talk.take(share, each)
        talks, shares, runs = talks[::-1], behind, later
    runs()
    assert [first.output, second.output] == [alone(world, talk, 6) for talk in expected]
    assert len({*first.output, *second.output} - {*prompts[0], *prompts[1]}) < 4, "they come again"


def test_who_was_left_out_of_a_step_is_left_out_of_the_next(triton, follow):
    stream = Stream(triton)
    a, b, _ = stream.begin()
    bad = replace(b.next(), block_ids=[99])
    first = stream.launch(bad, a.next())
    second = stream.launch(after(b, 1, follows=0), after(a, 1, follows=1))
    done = first()
    assert list(done.failed) == [0]
    assert done.sampled[1].token == follow[0][1]
    done = second()
    assert done.failed == {0: "request r: its last step left it out"}
    assert done.sampled[1].token == follow[0][2]
    # No rows are known of a step that was launched long before.
    stream.number += 1
    assert list(stream.launch(after(a, 1, follows=1))().failed) == [0]


def test_a_step_behind_one_that_failed_has_no_tokens(triton):
    stream, failing = Stream(triton), [True]
    talk = stream.begin()[0]
    launch = stream.executor._launch_step

    def broken(step: Step):
        wait = launch(step)

        def fail() -> StepDone:
            done = wait()
            if failing:
                failing.pop()
                raise RuntimeError("CUDA error: an illegal memory access\nmore")
            return done

        return fail

    stream.executor._launch_step = broken
    first, second = stream.launch(talk.next()), stream.launch(after(talk, 1, follows=0))
    assert first().error == "RuntimeError: CUDA error: an illegal memory access"
    behind = second()
    assert behind.error == "StepBeforeFailed: RuntimeError: CUDA error: an illegal memory access"
    assert behind.sampled == [None]
    third = stream.launch(after(talk, 2, follows=0))
    assert third().error is not None
    assert stream.launch(talk.next())().error is None, "it follows no other"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the CPU has one order for all")
def test_checksums_on_a_gpu_wait_for_the_pass_that_fills_the_block(triton):
    stream = Stream(triton)
    talk = stream.begin()[0]
    pool = DeviceBytes(triton.pool)
    waits = [stream.launch(talk.next()), stream.launch(after(talk, 1, follows=0), checksums=[9])]
    got = [wait() for wait in waits][1].checksums
    torch.cuda.synchronize()
    assert got == pool.checksums([9])
