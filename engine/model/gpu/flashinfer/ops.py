"""The decoder's operations with FlashInfer where it is asked for and fits, else Triton's kernels.

Experts go through its CUTLASS kernels: grouped products, activation and sum. They take the
projection that is not activated first: [up; gate], where ours are [gate; up], so the halves change
places once, when weights are prepared. The sum over a token's experts is not fused into the last
product: fused, it is made of atomic additions, whose order differs from run to run.

FlashInfer compiles or loads a kernel when it is first called, and whether it has one for a model's
shape and this GPU shows only then. So each kind of call is tried at the start, on a few blocks of
random numbers. One that fails, or whose results are not those of Triton's kernels, stays with
Triton, and a notice says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu import experts as mixture
from kvrelay.engine.model.gpu.flashinfer.attention import ExpandedAttention, PagedAttention
from kvrelay.engine.model.gpu.flashinfer.division import DTYPES, Division, capability, divide, load
from kvrelay.engine.model.gpu.ops import TritonOps
from kvrelay.engine.model.gpu.routing import route
from kvrelay.engine.model.stacked import Stacked, widened

TOLERANCE = 0.05  # relative to normally distributed numbers, in 16 bits
LENGTHS = {  # (query_len, context_len) of each sequence, by kind of call
    "decodes": ((1, 1), (1, 19), (1, 70)),
    "prompts": ((37, 37), (5, 70), (1, 20)),
    "latent_prompts": ((40, 40), (1, 20), (30, 31)),
}


def fault(
    ops: TritonOps,
    kind: str,
    layers: Sequence[int],
    config: ModelConfig,
    pool: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    """Why FlashInfer must not be used for `kind`, which it computes in `layers` of `ops`; "": it
    may. `ops` is left with another pool than `pool`, which gives the shape of blocks. Whatever the
    library raises is a reason."""
    num_groups = len(config.kv_groups())
    batch, num_blocks = trial_batch(LENGTHS[kind], pool.shape[4], pool.device, num_groups)
    small = torch.randn((num_blocks, *pool.shape[1:]), device=pool.device).to(dtype)
    ops.use_pool(small)
    triton = TritonOps(config, small, dtype, 1)
    triton.begin(batch)

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        ops.begin(batch)
        return _results(ops, triton, layers, config, small, len(batch.tokens))

    return _fault_of(results)


def experts_fault(
    library: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str:
    """As `fault`, of two experts of the model's sizes."""
    assert config.experts is not None
    hidden, width, num_tokens = config.hidden_size, config.experts.intermediate_size, 9
    like = torch.empty(0, dtype=dtype, device=device)
    gate_ups = _randn(like, 2, 2 * width, hidden) * hidden**-0.5
    downs = _randn(like, 2, hidden, width) * width**-0.5
    x = _randn(like, num_tokens, hidden)
    num_chosen = min(2, config.experts.num_per_token)
    chosen = torch.arange(num_tokens * num_chosen, device=device).view(num_tokens, -1) % 2
    weights = torch.full(chosen.shape, 1 / num_chosen, device=device)
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)

    def results() -> list[tuple[torch.Tensor, torch.Tensor]]:
        fuse(gate_ups, downs).add(library, ours, x, chosen, weights)
        stacked = mixture.ExpertWeights(gate_ups, downs)
        mixture.add_experts(theirs, x, stacked, chosen, weights, config.activation)
        return [(ours, theirs)]

    return _fault_of(results)


def _fault_of(results: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]) -> str:
    try:
        differences = [
            (ours.float() - theirs.float()).abs().max().item() for ours, theirs in results()
        ]
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    if all(each <= TOLERANCE for each in differences):  # not so for NaN
        return ""
    return f"results differ from those of Triton's kernels by {max(differences):.3g}"


def _results(
    ops: TritonOps,
    triton: TritonOps,
    layers: Sequence[int],
    config: ModelConfig,
    like: torch.Tensor,
    num_tokens: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(FlashInfer's, Triton's) of one layer of each window, of numbers like those of `like`."""
    heads, latent = config.num_heads, config.latent
    if latent is not None:
        scale = latent.rank**-0.5
        queries = _randn(like, num_tokens, heads, latent.nope_dim + latent.rope_dim)
        q_rope = queries[:, :, latent.nope_dim :].contiguous()
        key_up = _randn(like, heads, latent.nope_dim, latent.rank) * scale
        value_up = _randn(like, heads, latent.rank, latent.value_dim) * scale
        absorbed = triton.per_head(queries[:, :, : latent.nope_dim], key_up)
        mixed = triton.latent_attention(torch.cat((absorbed, q_rope), dim=-1), 0)
        expanded = ops.expanded_attention(queries, q_rope, key_up, value_up, 0)
        assert expanded is not None
        return [(expanded, triton.per_head(mixed, value_up))]
    qkv = _randn(like, num_tokens, (heads + 2 * config.num_kv_heads) * config.head_dim)
    each = {config.window(layer): layer for layer in layers}.values()
    return [(ops.attention(qkv, layer), triton.attention(qkv, layer)) for layer in each]


def _randn(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Draws numbers with the dtype and on the device of `like`."""
    return torch.randn(shape, device=like.device).to(like.dtype)


def trial_batch(
    lengths: Sequence[tuple[int, int]], block_size: int, device: torch.device, num_groups: int = 1
) -> tuple[Batch, int]:
    """Sequences of these (query_len, context_len) in scattered blocks, and how many blocks there
    are; all groups of layers share them. There are no slots, and no token is sampled."""
    pages = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.zeros((len(lengths), max(pages)), dtype=torch.int32)
    for row, blocks in zip(tables, order.split(pages), strict=True):
        row[: len(blocks)] = blocks
    counts = [count for count, _ in lengths]
    spans = [(sum(counts[:seq]), *each) for seq, each in enumerate(lengths)]
    columns = torch.tensor(spans, dtype=torch.int32).T.contiguous().to(device)
    none = torch.zeros(sum(counts), dtype=torch.int64, device=device)
    batch = Batch(
        tokens=none,
        positions=none,
        slots=none,
        query_start=columns[0],
        query_len=columns[1],
        context_len=columns[2],
        block_tables=tables.to(device),
        sample_rows=none[:0],
        spans=tuple(spans),
        more_tables=tables.to(device).expand(num_groups - 1, -1, -1) if num_groups > 1 else None,
    )
    return batch, sum(pages) + 1


ALIGN = 8  # numbers of 16 bits that their loads take at once


@dataclass(frozen=True, slots=True)
class FusedExperts:
    up_gates: torch.Tensor  # [num_experts, 2 * width, hidden_size]
    downs: torch.Tensor  # [num_experts, hidden_size, width]

    def add(
        self,
        library: Any,
        hidden: torch.Tensor,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        out = torch.empty_like(hidden)
        library.cutlass_fused_moe(
            input=x.contiguous(),
            token_selected_experts=chosen.to(torch.int32),
            token_final_scales=weights.float().contiguous(),
            fc1_expert_weights=self.up_gates,
            fc2_expert_weights=self.downs,
            output_dtype=x.dtype,
            quant_scales=[],
            output=out,
            use_fused_finalize=False,
        )
        hidden += out


def lack_of(config: ModelConfig, dtype: torch.dtype, quantization: str) -> str:
    """Why FlashInfer cannot compute the experts, by what its sources say; "": it can."""
    experts = config.experts
    assert experts is not None
    if dtype not in DTYPES or quantization == "int8":  # in fp8 experts have 16 bits
        return "FlashInfer's take 16-bit weights"
    if config.activation != "silu":
        return f"FlashInfer's have no gate with {config.activation}"
    if config.hidden_size % ALIGN or experts.intermediate_size % ALIGN:
        return f"FlashInfer's take sizes that {ALIGN} divides"
    return ""


def fuse(gate_ups: torch.Tensor, downs: torch.Tensor) -> FusedExperts:
    """gate_ups [E, 2 * width, hidden], downs [E, hidden, width], on the device."""
    return FusedExperts(torch.cat(gate_ups.chunk(2, dim=1)[::-1], dim=1), downs.contiguous())


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
            why = fault(self, kind, layers, self._config, pool, self._dtype)
            if why:
                self._division = self._division.without(kind, why)
        if self._division != asked:
            self._prepare()
        self.use_pool(pool)
        if not self._experts_lack:
            self._experts_lack = experts_fault(
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

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        division = self._division
        if self._is_decode and division.decodes[layer]:
            return self._paged.decodes(qkv, layer)
        if not self._is_decode and division.prompts[layer]:
            return self._paged.prompts(qkv, layer)
        return super().attention(qkv, layer, sinks)

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

    def experts(self, gate_ups: Stacked, downs: Stacked) -> Any:
        if not self._experts_lack:
            return fuse(self.table(widened(gate_ups)), self.table(widened(downs)))
        return super().experts(gate_ups, downs)

    def add_experts(
        self, hidden: torch.Tensor, x: torch.Tensor, layer: Any, routed: torch.Tensor | None = None
    ) -> None:
        if not isinstance(layer.experts, FusedExperts):
            super().add_experts(hidden, x, layer, routed)
        elif len(x):
            logits = F.linear((x if routed is None else routed).float(), layer.router)
            x, chosen, weights = route(x, logits, layer, self._config)
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
