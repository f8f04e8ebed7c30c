"""Tiny random checkpoints of every family, and a decoder over them driven block by block."""

from pathlib import Path

import torch
import transformers

from engine.model import kernels
from engine.model.batch import Batch, Limits
from engine.model.cache import default_cache_dir
from engine.model.config import ModelConfig
from engine.model.cpu_ops import CpuOps
from engine.model.decoder import Decoder
from engine.model.torch_ops import TorchOps
from engine.model.weights import load_weights
from engine.request import SamplingParams
from engine.step import ScheduledSeq, Step

VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 131, 16, 64, 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear": (transformers.LlamaConfig, {"rope_parameters": LINEAR, "attention_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def make_checkpoint(family: str, path: Path, **saving) -> torch.nn.Module:
    """Write a random checkpoint of `family` to `path`; returns transformers' model of it."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(7)
    config = kind(**(SHAPE | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # not all zeros or ones
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path, **saving)
    return model


def make_pool(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Not zeroed: what a sequence has not written must not matter."""
    layers = (NUM_BLOCKS, config.num_layers, 2)
    shape = (*layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.randn(shape).to(dtype)


def make_ops(
    kind: str, config: ModelConfig, dtype: torch.dtype = torch.float32, native: bool = False
):
    pool = make_pool(config, dtype)
    if kind == "torch":
        return TorchOps(config, pool, dtype, MAX_LEN)
    library = kernels.load(default_cache_dir())
    return CpuOps(config, pool, dtype, MAX_LEN, library, 2, native_bf16=native)


class Driver:
    """Feeds sequences to a decoder; each has its own scattered blocks."""

    def __init__(self, path: Path, kind: str, **ops) -> None:
        self.config = ModelConfig.from_dir(path)
        made = make_ops(kind, self.config, **ops)
        with torch.inference_mode():
            weights = load_weights(path, self.config, made, lambda _: None)
        self._decoder = Decoder(weights, made)
        order = torch.Generator().manual_seed(3)
        self._free = torch.randperm(NUM_BLOCKS, generator=order).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._start: dict[str, int] = {}

    def feed(self, *parts: tuple[str, list[int]]) -> torch.Tensor:
        """One step over (name, next tokens) pairs: logits after each, [len(parts), VOCAB]."""
        seqs = []
        for name, tokens in parts:
            blocks = self._blocks.setdefault(name, [])
            start = self._start.get(name, 0)
            while len(blocks) * BLOCK_SIZE < start + len(tokens):
                blocks.append(self._free.pop())
            self._start[name] = start + len(tokens)
            seqs.append(scheduled(tokens, start, blocks))
        limits = Limits(NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, self.config.vocab_size)
        batch = Batch.from_step(Step(0, seqs), limits, torch.device("cpu"))
        with torch.inference_mode():
            return self._decoder.forward(batch).clone()


def scheduled(tokens: list[int], start: int, blocks: list[int], **changes) -> ScheduledSeq:
    fields = {
        "request_id": "r",
        "tokens": tokens,
        "start": start,
        "block_ids": blocks,
        "sample": True,
        "sampling": SamplingParams(temperature=0.0),
        "context": tokens,
        "num_prompt_tokens": len(tokens),
    }
    return ScheduledSeq(**(fields | changes))


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()
