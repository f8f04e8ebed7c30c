"""The decoder's operations with FlashInfer where it fits, and Triton's kernels everywhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu.flashinfer import trial
from kvrelay.engine.model.gpu.flashinfer.attention import PagedAttention
from kvrelay.engine.model.gpu.flashinfer.division import Division, divide
from kvrelay.engine.model.gpu.flashinfer.experts import FusedExperts, fuse, lack_of
from kvrelay.engine.model.gpu.flashinfer.latent import ExpandedAttention
from kvrelay.engine.model.gpu.flashinfer.library import capability, load
from kvrelay.engine.model.gpu.ops import TritonOps
from kvrelay.engine.model.ops import choose_experts
from kvrelay.engine.model.weights import ExpertsWeights


class FlashInferOps(TritonOps):
    """As TritonOps. What FlashInfer computes is decided when this is made, and `notices` say it.
    Within a step all layers that it computes take the same calls: those for decodes, if every
    sequence has one token, or those for prompts."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_positions: int,
        quantization: str = "none",
        *,
        attention: bool = True,
        moe: bool = False,
    ) -> None:
        """attention, moe: what is asked of FlashInfer. Raises KernelsUnavailable as TritonOps does,
        and ModelError if FlashInfer cannot be imported."""
        super().__init__(config, pool, dtype, max_positions, quantization)
        self._library = load("engine.attention_backend" if attention else "engine.moe_backend")
        self._max_positions = max_positions
        # Why Triton computes the experts; "": it does not.
        self._experts_lack = lack_of(config, dtype, quantization) if moe else "not asked for"
        none = (False,) * config.num_layers
        self._division = Division(none, none)
        if attention:
            self._division = divide(config, self._pool, dtype, capability(self._device))
        self._is_decode = False
        self._prepare()
        if self._device.type == "cuda":
            self.try_out()
        version = str(self._library.__version__)
        self.notices = [self._division.notice(version)] if attention else []
        if moe:
            whose = f"Triton's kernels compute the experts ({self._experts_lack})"
            fused = f"FlashInfer {version} computes the experts"
            self.notices.append(whose if self._experts_lack else fused)

    def use_pool(self, pool: torch.Tensor) -> None:
        super().use_pool(pool)
        self._paged.use_pool(self._pool)

    def try_out(self) -> None:
        """Leave to Triton what fails on random numbers, or has other results than its kernels."""
        pool, asked = self._pool.data, self._division
        for kind, layers in asked.kinds.items():
            why = trial.fault(self, kind, layers, self._config, pool, self._dtype)
            if why:
                self._division = self._division.without(kind, why)
        if self._division != asked:
            self._prepare()
        self.use_pool(pool)
        if not self._experts_lack:
            self._experts_lack = trial.experts_fault(
                self._library, self._config, self._dtype, self._device
            )

    def begin(self, batch: Batch) -> None:
        spans, division = batch.spans, self._division
        self._is_decode = all(count == 1 for _, count, _ in spans)
        ours = division.decodes if self._is_decode else division.prompts
        if spans and any(ours):
            if self._is_decode:
                self._paged.begin_decodes(batch)
            else:
                self._paged.begin_prompts(batch)
        if self._expanded is not None:
            chosen = self._expanded.begin(batch, self._pool)
            spans = tuple(
                (first, 0 if seq in chosen else count, context)
                for seq, (first, count, context) in enumerate(spans)
            )
        # Triton's kernels prepare for what is left to them.
        super().begin(replace(batch, spans=() if all(ours) else spans))

    def attention(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        division = self._division
        if self._is_decode and division.decodes[layer]:
            return self._paged.decodes(qkv, layer)
        if not self._is_decode and division.prompts[layer]:
            return self._paged.prompts(qkv, layer)
        return super().attention(qkv, layer)

    def expanded_attention(
        self,
        queries: torch.Tensor,
        q_rope: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        layer: int,
    ) -> torch.Tensor | None:
        if self._expanded is None or not self._expanded.is_used:
            return None
        ours, rows = self._expanded.attention(queries, q_rope, key_up, value_up, self._pool, layer)
        if rows is None:
            return ours
        nope = queries.shape[2] - q_rope.shape[2]
        absorbed = self.per_head(queries[:, :, :nope], key_up)
        others = self.latent_attention(torch.cat((absorbed, q_rope), dim=-1), layer)
        return self.per_head(others, value_up).index_copy(0, rows, ours)

    def experts(self, gate_ups: torch.Tensor, downs: torch.Tensor) -> Any:
        if not self._experts_lack:
            return fuse(self.table(gate_ups), self.table(downs))
        return super().experts(gate_ups, downs)

    def add_experts(self, hidden: torch.Tensor, x: torch.Tensor, layer: ExpertsWeights) -> None:
        if not isinstance(layer.experts, FusedExperts):
            super().add_experts(hidden, x, layer)
        elif len(x):
            chosen, weights = choose_experts(F.linear(x.float(), layer.router), layer, self._config)
            layer.experts.add(self._library, hidden, x, chosen, weights)

    def _prepare(self) -> None:
        """Workspaces and wrappers for what is FlashInfer's."""
        library, config, division = self._library, self._config, self._division
        self._paged = PagedAttention(library, config, division, self._dtype, self._device)
        self._paged.use_pool(self._pool)
        self._expanded: ExpandedAttention | None = None
        if division.latent_prompts:
            self._expanded = ExpandedAttention(
                library, config, self._dtype, self._device, self._max_positions
            )
