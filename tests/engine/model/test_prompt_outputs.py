"""Log-probabilities and embeddings of prompts, against transformers, however they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import Pooling, PromptOutputs, SamplingParams, TokenLogprobs
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from tests.engine.model.runners import model_runner

BLOCK = 16
TEXT = (
    "A river is a natural stream of fresh water that flows on land or inside caves towards another "
    "body of water at a lower elevation, such as an ocean, lake, or another river. " * 3
)


@pytest.fixture(scope="module", params=["default", 31])
def model_dir(
    request: pytest.FixtureRequest, smollm2_dir: Path, make_padded_model: Callable[[int], Path]
) -> Path:
    """The default model, and one whose embedding has more rows than the tokenizer."""
    return smollm2_dir if request.param == "default" else make_padded_model(request.param)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return model_runner(model_dir, dtype="float32", num_blocks=64, threads=2)


@pytest.fixture(scope="module")
def prompt(smollm2_dir: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(smollm2_dir).encode(TEXT)
    return ids


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities after each token, and the hidden states after the last norm."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        return torch.log_softmax(model.lm_head(states), dim=-1), states


def computed(
    runner: ModelRunner,
    prompt: list[int],
    chunks: Sequence[int],
    sampling: SamplingParams,
    beside: bool = False,
    outputs_from: int = 0,
) -> tuple[PromptOutputs, StepDone]:
    """`beside`: another sequence is decoded in each step."""
    logprobs: list[TokenLogprobs] = []
    pooled, start = b"", 0
    done = StepDone(0, [])
    for number, count in enumerate(chunks):
        end = start + count
        seq = ScheduledSeq(
            request_id="scored",
            tokens=prompt[start:end],
            start=start,
            block_ids=list(range(32)),
            sample=end == len(prompt),
            sampling=sampling,
            context=prompt,
            num_prompt_tokens=len(prompt),
            outputs_from=max(outputs_from, start),
            pooled=pooled,
        )
        seqs = [seq]
        if beside:
            params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=2)
            other = ScheduledSeq("other", prompt[number : number + 1], number, [40], True, params,
                                 prompt[: number + 1], 1)  # fmt: skip
            seqs = [other, seq]
        done = runner.execute(Step(number, seqs))
        assert not done.failed
        outputs = done.prompts[len(seqs) - 1]
        logprobs += outputs.logprobs
        pooled, start = outputs.embedding, end
    return PromptOutputs(tuple(logprobs), pooled), done


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("size", [16, 100, 1000])
def test_log_probabilities_are_those_of_transformers(
    runner: ModelRunner,
    prompt: list[int],
    expected: tuple[torch.Tensor, torch.Tensor],
    size: int,
    beside: bool,
) -> None:
    chunks = [len(prompt[at : at + size]) for at in range(0, len(prompt), size)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    outputs, done = computed(runner, prompt, chunks, params, beside)
    assert len(outputs.logprobs) == len(prompt) - 1
    after = expected[0]
    best = after.topk(5, dim=-1)
    for at, (token, given) in enumerate(zip(prompt[1:], outputs.logprobs, strict=True)):
        assert given.logprob == pytest.approx(after[at, token].item(), abs=1e-3)
        assert [value for _, value in given.top] == pytest.approx(
            best.values[at].tolist(), abs=1e-3
        )
    sampled = done.sampled[-1]
    assert sampled is not None
    assert sampled.token == after[-1].argmax().item()


@pytest.mark.slow
@pytest.mark.parametrize("pooling", [*Pooling])
@pytest.mark.parametrize("size", [16, 100, 1000])
def test_embeddings_are_those_of_transformers(
    runner: ModelRunner,
    prompt: list[int],
    expected: tuple[torch.Tensor, torch.Tensor],
    size: int,
    pooling: Pooling,
) -> None:
    chunks = [len(prompt[at : at + size]) for at in range(0, len(prompt), size)]
    params = SamplingParams(max_tokens=1, pooling=pooling)
    outputs, _ = computed(runner, prompt, chunks, params)
    states = expected[1]
    ways = {Pooling.MEAN: states.mean(dim=0), Pooling.LAST: states[-1], Pooling.CLS: states[0]}
    assert outputs.logprobs == ()
    np.testing.assert_allclose(
        np.frombuffer(outputs.embedding, np.float32), ways[pooling].numpy(), atol=2e-3, rtol=1e-3
    )


def test_tokens_that_gave_their_outputs_before_give_none_again(
    runner: ModelRunner, prompt: list[int]
) -> None:
    """As after a preemption: their KV is computed again."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    whole, _ = computed(runner, prompt, [len(prompt)], params)
    rest, _ = computed(runner, prompt, [len(prompt)], params, outputs_from=50)
    assert rest.logprobs == pytest.approx(whole.logprobs[50:])


def test_a_prompt_of_one_token(runner: ModelRunner, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=3, pooling=Pooling.LAST)
    outputs, done = computed(runner, prompt[:1], [1], params)
    assert outputs.logprobs == ()
    assert np.isfinite(np.frombuffer(outputs.embedding, np.float32)).all()
    assert done.sampled[0] is not None
