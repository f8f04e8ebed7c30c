"""A worker's ranks as processes: steps reach all of them, and none outlives or outwaits another."""

import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from transformers import AutoTokenizer

from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.model.parallel.runner import RanksLost
from kvrelay.engine.request import Pooling, SamplingParams
from kvrelay.engine.step import Step, StepDone
from tests.engine.model.runners import model_runner, parallel_runner
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import make_checkpoint, scheduled, tokens_of
from tests.support.adapters import write_adapter

OPTIONS = {"num_blocks": 24, "dtype": "float32", "device": "cpu", "threads": 2}
DEADLINE_S = 30.0  # far below the timeout of a collective
PROMPT, BLOCKS = tokens_of(40, seed=1), [5, 3, 1, 7]


def children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended, another test's
            if "kvrelay.engine.model.parallel.follower" in process.cmdline():
                found.append(process)
    return found


def settled(runner, step: Step) -> StepDone:
    """Its step, as soon as no grammar compiles and no adapter is loaded any more."""
    while (done := runner.execute(step)).waiting:
        pass
    return done


def test_the_life_of_a_worker_with_two_ranks(tmp_path):
    """One start for all, because it takes seconds."""
    make_checkpoint("qwen2", tmp_path)
    runner = parallel_runner(tmp_path, 2, **OPTIONS)
    (follower,) = children()
    alone = model_runner(tmp_path, **OPTIONS)
    drawn = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3}
    assert generate(runner, PROMPT, BLOCKS, 8, **drawn) == generate(
        alone, PROMPT, BLOCKS, 8, **drawn
    )

    bad, good = scheduled([9999], 0, [9]), scheduled(PROMPT, 0, BLOCKS)
    assert "outside the vocabulary" in runner.execute(Step(1, [bad])).invalid[0]
    done, expected = (each.execute(Step(2, [bad, good])) for each in (runner, alone))
    assert list(done.invalid) == [0]
    assert done.sampled == expected.sampled == [None, expected.sampled[1]]

    folder = write_adapter(tmp_path / "adapter", tmp_path)
    adapter = Adapter(read_adapter(folder).digest, str(folder))
    adapted = [scheduled(PROMPT, 0, BLOCKS, need=adapter), scheduled(PROMPT[:9], 0, [9])]
    done, expected = (settled(each, Step(2, adapted)) for each in (runner, alone))
    assert done.sampled == expected.sampled
    assert done.sampled[0] is not None
    assert done.loaded.digests == (adapter.digest,)

    asked = SamplingParams(temperature=0.0, prompt_logprobs=2, pooling=Pooling.MEAN)
    reads = scheduled(PROMPT, 0, BLOCKS, sampling=asked, outputs_from=0)
    masked = SamplingParams(temperature=0.0, grammar="start: nothing_like_it")
    stopped = scheduled(PROMPT[:9], 0, [9], sampling=masked, request_id="stopped")
    for other in (reads, stopped, good):  # the last one: they are in step still
        done, expected = (settled(each, Step(3, [other, good])) for each in (runner, alone))
        assert done.sampled == expected.sampled
        assert done.ungrammatical == expected.ungrammatical
        assert set(done.prompts) == set(expected.prompts)
        for index, outputs in done.prompts.items():
            wanted = expected.prompts[index]
            pairs = zip(outputs.logprobs, wanted.logprobs, strict=True)
            assert all(abs(ours.logprob - theirs.logprob) < 1e-4 for ours, theirs in pairs)

    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    runner.when_lost(told.put)
    step = Step(2, [scheduled(PROMPT, 0, BLOCKS)])
    follower.suspend()  # so that the step cannot end before it dies
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(runner.execute, step)
        follower.kill()
        with pytest.raises((RanksLost, RuntimeError, OSError)):
            running.result(DEADLINE_S)
    assert isinstance(told.get(timeout=DEADLINE_S), RanksLost)
    assert told.empty(), "it is told once"
    with pytest.raises(RanksLost):
        runner.execute(step)
    runner.close()
    assert not children()


@pytest.mark.e2e
def test_the_default_model_has_the_same_tokens_over_three_ranks(smollm2_dir):
    """It has 9 heads and 3 KV heads."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    question = tokenizer.encode("The capital of France is Paris. The capital of Italy is")
    options = {"num_blocks": 16, "dtype": "float32", "device": "cpu", "threads": 2}
    expected = generate(model_runner(smollm2_dir, **options), question, BLOCKS, 8, temperature=0.0)
    runner = parallel_runner(smollm2_dir, 3, **options)
    assert generate(runner, question, BLOCKS, 8, temperature=0.0) == expected
    assert "Rome" in tokenizer.decode(expected)
    runner.close()
