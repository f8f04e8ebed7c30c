"""A model of Llama 3 8B's shape with random weights, made on the device, without a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq

BLOCK_SIZE = 16
SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128_000,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class _Parameters:
    """The parameters of a model in memory, in the place of a checkpoint's files."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = model.state_dict()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors[name]
        assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
        return tensor


def make_model(**changes: int) -> transformers.LlamaForCausalLM:
    """Makes it in bfloat16 on the device."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SHAPE | changes), architectures=["LlamaForCausalLM"])
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_runner(
    model: transformers.LlamaForCausalLM,
    engine: EngineSection,
    quantization: Any = "none",
) -> ModelRunner:
    """A worker's runner with a copy of `model`'s weights."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch(
            "kvrelay.engine.model.checkpoint.load.Checkpoint", return_value=_Parameters(model)
        ),
    ):
        model.config.save_pretrained(folder)
        runner = ModelRunner(
            Path(folder),
            ModelSection(device="cuda", dtype="bfloat16", quantization=quantization),
            engine.sized(gpu=True),
        )
    for notice in runner.notices:
        print(notice)
    return runner


def share(
    tokens: list[int], start: int, blocks: list[int], context: list[int], *, sample: bool = True
) -> ScheduledSeq:
    """A greedy sequence's part of a step, which no token stops."""
    return ScheduledSeq(
        request_id="bench",
        tokens=tokens,
        start=start,
        block_ids=blocks,
        sample=sample,
        sampling=SamplingParams(temperature=0.0),
        context=context,
        num_prompt_tokens=1,
    )
