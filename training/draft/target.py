"""The model that a head is to draft for, run by this project's own engine: it answers prompts, many
at once, and gives the hidden states of what it has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.device import find_device
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step

BLOCK_SIZE = 16
LEAST_NORM = 1e-3  # weights of a norm below it hide what they multiply
TIMES = 15  # that a step is measured: the shortest counts


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its answer."""

    tokens: list[int]
    num_prompt_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Target:
    """Owns a runner, with room for `num_seqs` sequences of `length` tokens."""

    def __init__(self, path: Path, num_seqs: int, length: int, threads: int = 0) -> None:
        """Loads the model; takes seconds. Raises ModelError."""
        device: Any = find_device("auto").type
        self.config = config = read_config(path)
        self.length = min(length, config.max_position_embeddings)
        dtype = ModelRunner.default_dtype(device)
        spec = config.kv_spec(BLOCK_SIZE, dtype)
        self._per_seq = -(-self.length // BLOCK_SIZE) * spec.num_groups
        model = ModelSection(name=str(path), device=device)
        engine = EngineSection(
            block_size=BLOCK_SIZE,
            num_blocks=num_seqs * self._per_seq,
            max_num_seqs=num_seqs,
            threads=threads,
        )
        self._runner = ModelRunner(path, model, engine.sized(gpu=device == "cuda"))
        self.device = self._runner.device
        shape = spec.num_layers, spec.num_planes, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim
        ops = TorchOps(config, torch.zeros(1, *shape), torch.bfloat16, self.length)
        with torch.inference_mode():
            weights = load_weights(path, config, ops, lambda _: None)
        self.table = weights.table.clone()  # [vocab_size, hidden_size]
        self.head = weights.head[0].clone()
        self.norm = norm = weights.norm.float()
        self._unnorm = torch.where(norm.abs() < LEAST_NORM, 0.0, 1.0 / norm)

    def answers(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Sample]:
        """Answers all prompts at once, up to their ends or lengths."""
        found = [[*prompt] for prompt in prompts]
        for at in range(len(prompts)):
            found[at] += self._next([at], found, params, len(found[at]))
        running = [*range(len(prompts))]
        while running := [
            at for at in running if self._goes_on(found[at], prompts[at], params[at])
        ]:
            for at, token in zip(running, self._next(running, found, params, 1), strict=True):
                found[at].append(token)
        return [
            Sample(tokens, len(prompt), each.temperature, each.seed)
            for tokens, prompt, each in zip(found, prompts, params, strict=True)
        ]

    def hidden_states(self, sample: Sample) -> torch.Tensor:
        """After the model's last norm, bfloat16 [num_tokens, hidden_size]."""
        tokens = sample.tokens
        seq = self._seq(0, tokens, tokens, SamplingParams(), sample=False, outputs_from=0)
        return self._runner.hidden_states(Step(0, [seq])).to("cpu", torch.bfloat16)

    def unnormed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before the norm, but for their lengths."""
        return hidden.float() * self._unnorm

    def step_s(self, num_rows: int, context: int) -> float:
        """What a step of one sequence takes in which `num_rows` - 1 draft tokens are verified."""
        tokens = [1] * (context // BLOCK_SIZE * BLOCK_SIZE)
        drafts, params = [1] * (num_rows - 1), SamplingParams(temperature=0.0)
        seq = self._seq(0, [1], [*tokens, 1], params, draft_tokens=drafts)
        took = []
        for number in range(TIMES):
            began = perf_counter()
            self._runner.execute(Step(number, [seq]))
            took.append(perf_counter() - began)
        return min(took)

    def _goes_on(self, tokens: list[int], prompt: Sequence[int], params: SamplingParams) -> bool:
        is_long = len(tokens) - len(prompt) >= params.max_tokens or len(tokens) >= self.length
        return not is_long and tokens[-1] not in params.stop_token_ids

    def _next(
        self, running: list[int], found: list[list[int]], params: Sequence[SamplingParams], new: int
    ) -> list[int]:
        seqs = [self._seq(at, found[at][-new:], found[at], params[at]) for at in running]
        done = self._runner.execute(Step(0, seqs))
        for index in range(len(seqs)):
            if (fault := done.fault(index)) is not None:
                raise ModelError(f"the model does not answer: {fault[1]}")
        return [each.token for each in done.sampled if each is not None]

    def _seq(
        self,
        place: int,
        tokens: list[int],
        context: list[int],
        params: SamplingParams,
        *,
        sample: bool = True,
        **more: Any,
    ) -> ScheduledSeq:
        return ScheduledSeq(
            request_id=f"answer-{place}",
            tokens=tokens,
            start=len(context) - len(tokens),
            block_ids=[*range(place * self._per_seq, (place + 1) * self._per_seq)],
            sample=sample,
            sampling=params,
            context=context,
            num_prompt_tokens=len(context),
            **more,
        )
