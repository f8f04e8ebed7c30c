"""The set of operations for a GPU that a worker's settings ask for."""

from __future__ import annotations

import torch

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu.ops import TritonOps


def gpu_ops(
    config: ModelConfig,
    pool: torch.Tensor,
    dtype: torch.dtype,
    max_positions: int,
    quantization: str,
    engine: EngineSection,
    notices: list[str],
) -> TritonOps:
    """Adds to `notices` what FlashInfer computes, if it is asked for. Raises KernelsUnavailable as
    TritonOps does, and ModelError if FlashInfer is asked for and cannot be imported."""
    asked = engine.attention_backend, engine.moe_backend
    attention, moe = (each == "flashinfer" for each in asked)
    if moe and config.experts is None:
        notices.append("engine.moe_backend has no effect: this model has no experts")
        moe = False
    if not attention and not moe:
        return TritonOps(config, pool, dtype, max_positions, quantization)
    from kvrelay.engine.model.gpu.flashinfer.ops import FlashInferOps

    ops = FlashInferOps(
        config, pool, dtype, max_positions, quantization, attention=attention, moe=moe
    )
    notices += ops.notices
    return ops
