"""Tensor parallelism with a GPU's steps: two processes, each launching the same passes behind one
another, give the tokens of plain torch. Interpreted where there is no GPU, and then without graphs.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.model.parallel.runner import ParallelRunner
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from kvrelay.kvtransfer.ranks import add_checksums
from tests.engine.model.gpu.triton_ranks import Checksums, interpret
from tests.engine.model.gpu.triton_world import DEVICE
from tests.engine.model.runners import parallel_runner
from tests.engine.model.talks import TABLES, Launching, after

ON_GPU = DEVICE.type == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
if ON_GPU and torch.cuda.device_count() < 2:
    pytest.skip("two ranks need two GPUs", allow_module_level=True)

OPTIONS = {"num_blocks": 12, "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.5)


class Ranks(Launching):
    """A worker of two ranks as its model thread uses it."""

    def __init__(self, runner: ParallelRunner) -> None:
        own = self.own = Checksums(runner._runner, Shard(0, 2))

        def add(step: Step, sums: list[int]) -> list[int]:
            return add_checksums([sums, *runner.checksums(step)])

        executor = StepExecutor(
            runner.execute,
            own.checksums,
            launch_step=runner.launch,
            begin_checksums=own.begin_checksums,
            add_ranks=add,
        )
        super().__init__(executor)


@pytest.fixture(scope="module")
def ranks(path):
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            interpret(patch)
        runner = parallel_runner(path, 2, device=DEVICE.type, companion=Checksums, **OPTIONS)
        assert runner.launch is not None
        yield Ranks(runner)
        runner.close()


@pytest.mark.slow
def test_passes_behind_one_another_take_the_tokens_that_rank_0_drew(ranks, follow):
    """The followers never learn a sampled token from the host. A block is filled on the way."""
    a, b, _ = ranks.begin()
    runs, got = ranks.launch(a.next(), b.next()), []
    for ahead in range(1, len(follow[0]) - 1):
        shares = [after(b, ahead, follows=ahead % 2), after(a, ahead, follows=1 - ahead % 2)]
        shares = shares if ahead % 2 else shares[::-1]  # rows change places in each pass
        behind = ranks.launch(*shares, checksums=[TABLES[0][0]] if ahead == 3 else [])
        got.append(runs())
        runs = behind
    got.append(runs())
    assert [done.error for done in got] == [None] * len(got)
    rows = [[each.token for each in done.sampled] for done in got]
    rows = [row[::-1] if number % 2 else row for number, row in enumerate(rows)]
    assert [a.output[0], *(row[0] for row in rows)] == follow[0]
    assert [b.output[0], *(row[1] for row in rows)] == follow[1]
    # A block that is complete keeps its checksum, however the step beside it is run.
    again = ranks.launch(b.next(), checksums=[TABLES[0][0]], followed=False)().checksums
    assert [done.checksums for done in got] == [[], [], [], again, []]
    assert again != ranks.own.checksums([TABLES[0][0]]), "all ranks' heads count"


@pytest.mark.slow
def test_steps_that_end_first_and_drafts(ranks, follow):
    """Draft tokens are verified by all ranks, or by none: what rank 0 alone knows decides it."""
    talk, tokens = ranks.begin()[0], follow[0]
    share = talk.next(draft=[tokens[1], tokens[2] ^ 1])
    sampled = ranks.run(share)
    assert (sampled[0].token, sampled[0].more) == (tokens[1], tuple(tokens[2:3]))
    talk.take(share, *sampled)
    share = talk.next(draft=[tokens[4]])
    penalized = replace(share, sampling=PENALIZED)
    assert ranks.run(penalized)[0].more == (), "drafts of tokens that the host draws are dropped"
    talk.take(share, *ranks.run(share))
    assert talk.output == tokens[: len(talk.output)]
    assert len(talk.output) >= 4


def test_a_step_that_is_refused_leaves_the_ranks_in_step(ranks, follow):
    a, b, _ = ranks.begin()
    first = ranks.launch(replace(b.next(), block_ids=[99]), a.next())
    second = ranks.launch(after(b, 1, follows=0), after(a, 1, follows=1))
    done = first()
    assert list(done.failed) == [0]
    assert done.sampled[1].token == follow[0][1]
    done = second()
    assert list(done.failed) == [0]
    assert done.sampled[1].token == follow[0][2]
