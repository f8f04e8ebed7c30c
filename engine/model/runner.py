"""Runs steps: the executor behind `engine.step.Execute`.

Life: config and weights are loaded, the KV pool is mapped (pages are committed as blocks are first
written), then `execute` is called once per step, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from engine.model import kernels
from engine.model.batch import Batch, Limits
from engine.model.cache import default_cache_dir
from engine.model.config import ModelConfig
from engine.model.cpu_ops import CpuOps
from engine.model.decoder import Decoder
from engine.model.errors import ModelError
from engine.model.ops import TORCH_DTYPES, Ops
from engine.model.sampler import sample
from engine.model.torch_ops import TorchOps
from engine.model.weights import load_weights
from engine.step import Sampled, Step, StepDone

DTYPES = ("float32", "bfloat16")


class ModelRunner:
    """Owns the weights and the KV pool of one worker. `kv_pool` is one contiguous tensor,
    `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; others may read blocks that
    no step writes."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_blocks: int,
        block_size: int = 16,
        num_threads: int | None = None,
        max_model_len: int | None = None,
        kv_pool: torch.Tensor | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """dtype: "auto", "float32" or "bfloat16"; device: "auto", "cpu" or "cuda[:n]".
        kv_pool: memory to use instead of allocating it; zeroed, of the shape above or flat bytes.
        Raises ModelError."""
        self.notices: list[str] = []
        self.device = _device(device)
        self.dtype = self.default_dtype(self.device.type) if dtype == "auto" else dtype
        if self.dtype not in DTYPES:
            raise ModelError(
                f"dtype {dtype} is not supported; supported: auto, {', '.join(DTYPES)}"
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.config = ModelConfig.from_dir(model_dir)
        self.kv_spec = self.config.kv_spec(block_size, self.dtype)
        longest = self.config.max_position_embeddings
        self.max_model_len = min(max_model_len or longest, longest)
        self.kv_pool = self._pool(num_blocks, kv_pool)
        self._limits = Limits(num_blocks, block_size, self.max_model_len, self.config.vocab_size)
        with torch.inference_mode():
            ops = self._ops(num_threads or torch.get_num_threads())
            weights = load_weights(model_dir, self.config, ops, progress or (lambda _: None))
        self._decoder = Decoder(weights, ops)

    @staticmethod
    def default_dtype(device_type: str = "cpu") -> str:
        """bfloat16 where the hardware multiplies it, float32 elsewhere."""
        return "bfloat16" if device_type == "cuda" or _cpu_has_bf16() else "float32"

    def execute(self, step: Step) -> StepDone:
        """Run `step`: KV of its tokens is written, tokens are sampled where asked. Checksums are
        left to the caller. Raises ValueError for a step outside the pool, the model's length or
        the vocabulary."""
        began = perf_counter()
        sampled: list[Sampled | None] = [None] * len(step.seqs)
        with torch.inference_mode():
            if step.seqs:
                batch = Batch.from_step(step, self._limits, self.device)
                logits = self._decoder.forward(batch)
                asked = [index for index, seq in enumerate(step.seqs) if seq.sample]
                tokens = sample(logits, [step.seqs[index] for index in asked])
                for index, token in zip(asked, tokens, strict=True):
                    sampled[index] = token
        return StepDone(step.step_id, sampled, elapsed_s=perf_counter() - began)

    def _pool(self, num_blocks: int, given: torch.Tensor | None) -> torch.Tensor:
        spec = self.kv_spec
        shape = (
            *(num_blocks, spec.num_layers, 2),
            *(spec.num_kv_heads, spec.block_size, spec.head_dim),
        )
        kind = TORCH_DTYPES[spec.dtype]
        if given is not None:
            assert given.is_contiguous()
            assert given.device.type == self.device.type
            assert given.nbytes == num_blocks * spec.bytes_per_block, "kv_pool has another size"
            return given.view(-1).view(kind).view(shape)
        try:
            return torch.zeros(shape, dtype=kind, device=self.device)
        except RuntimeError as error:
            raise ModelError(
                f"no memory for a KV cache of {num_blocks} blocks of "
                f"{spec.bytes_per_block} bytes: {str(error).splitlines()[0]}"
            ) from error

    def _ops(self, num_threads: int) -> Ops:
        kind = TORCH_DTYPES[self.dtype]
        if self.device.type == "cpu":
            try:
                library = kernels.load(default_cache_dir())
                return CpuOps(
                    self.config,
                    self.kv_pool,
                    kind,
                    self.max_model_len,
                    library,
                    num_threads,
                    native_bf16=_cpu_has_bf16(),
                )
            except kernels.KernelsUnavailable as error:
                self.notices.append(f"CPU kernels are not used, torch is (slower): {error}")
        return TorchOps(self.config, self.kv_pool, kind, self.max_model_len)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name} is not supported; supported: auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for, but torch sees no CUDA device")
    return device


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
