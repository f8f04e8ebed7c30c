"""The decoder's operations on a CPU: compiled kernels and float32 arithmetic.

The residual stream is float32. Weights are kept as the checkpoint has them: bfloat16 ones stay
bfloat16 in memory and are widened in registers, which gives float32's results at half the traffic.
Where bfloat16 was chosen and the CPU multiplies narrower numbers faster, inputs of products are
rounded to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.attention import CpuAttention
from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from kvrelay.engine.model.cpu.linear import (
    ACTIVATIONS,
    CpuLinear,
    Experts,
    Heads,
    Matrix,
    fastest_kind,
    owned,
)
from kvrelay.engine.model.cpu.recurrent import CpuRecurrent, gate_is_silu, norm_step
from kvrelay.engine.model.cpu.step import CpuDecode, CpuStep, described_experts
from kvrelay.engine.model.cpu.terms import CpuTerm, pack_term
from kvrelay.engine.model.ops import INDEX_EPS, split_queries_and_keys
from kvrelay.engine.model.quest import Quest
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.stacked import Stacked, widened
from kvrelay.engine.model.state_layout import MAMBA2
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights, Weights


class CpuOps:
    """Owned by one runner, used from one thread at a time. Result buffers grow to the largest step
    seen and are reused from layer to layer."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_positions: int,
        library: Any,
        num_threads: int,
        quantization: str = "none",
        low_precision: int | None = None,
        quest: Quest | None = None,
    ) -> None:
        """pool, quest: as `CpuAttention` takes them; quantization: of weights, "none" or "int8";
        low_precision: the kind (cpu.linear) of GEMM with rounded factors, or 0 for none; None: if
        `dtype` is bfloat16, what is fastest on this CPU. Raises KernelsUnavailable for what the
        kernels do not know."""
        if config.cpu_lacks:
            raise KernelsUnavailable(f"{config.cpu_lacks} are not handled")
        self._config, self._lib, self._threads = config, library, num_threads
        self._buffers: dict[str, torch.Tensor] = {}
        if low_precision is None:
            low_precision = fastest_kind(library) if dtype == torch.bfloat16 else 0
        self._attention = CpuAttention(
            config, pool, max_positions, library, num_threads, low_precision, quest
        )
        self._linear = CpuLinear(
            library,
            num_threads,
            dtype,
            self.buffer,
            quantization,
            low_precision,
            ACTIVATIONS[config.activation],
        )
        self._recurrent: CpuRecurrent | None = None
        self._step = CpuStep(config, library, num_threads, self.buffer, self._attention)

    @property
    def num_passed(self) -> int:
        return int(self._lib.kvr_num_passed())

    def abandon(self, is_on: bool) -> None:
        """Whether steps of this process end at their next layer; from any thread."""
        self._lib.kvr_abandon(is_on)

    def use_new_chunks(self) -> None:
        """Weights that are packed from now on share no memory with those before, which is free
        once they are gone."""
        self._linear.use_new_chunks()

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        kind = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        return owned(weight, kind)

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Matrix:
        return self._linear.matrix(weight, bias, role)

    def qkv(self, weight: torch.Tensor, bias: torch.Tensor | None, layer: int) -> Matrix:
        return self.matrix(weight, bias, "qkv")

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Matrix:
        return self._linear.gated_matrix(weight, role)

    def vector(self, weight: torch.Tensor, role: str = "") -> torch.Tensor:
        return owned(weight, torch.float32)

    def heads(self, weight: torch.Tensor, role: str) -> Heads:
        return self._linear.heads(weight, role)

    def router(self, weight: torch.Tensor) -> Matrix:
        return self._linear.exact(weight, "router")

    def use_states(self, pool: StatePool) -> None:
        args = (self._lib, self._threads, self.buffer)
        self._recurrent = CpuRecurrent(self._config, pool, *args)
        self._step = CpuStep(self._config, *args, self._attention, self._recurrent)

    def capture(self, layers: tuple[int, ...]) -> None:
        self._step.captures = layers

    def captured(self, rows: int) -> list[torch.Tensor]:
        return [*self._step.captured(rows)]

    def begin(self, batch: Batch) -> None:
        self._attention.begin(batch)
        if self._recurrent is not None:
            self._recurrent.begin(batch)

    def run_layers(
        self, hidden: torch.Tensor, layers: Sequence[Any], batch: Batch
    ) -> torch.Tensor | None:
        if self._config.is_layerwise:
            return None
        return self._step.run(hidden, layers, batch)

    def decode(self, weights: Weights, limits: Limits) -> CpuDecode | None:
        """What runs decodes without the calls below; None: it does not know this model."""
        if self._config.is_layerwise:
            return None
        attention, recurrent = self._attention.for_decodes(), self._recurrent
        return CpuDecode(
            self._config,
            limits,
            self._lib,
            self._threads,
            attention,
            weights,
            self.buffer,
            None if recurrent is None else recurrent.for_decodes(),
            self._step.captures,
        )

    def parts(self, limits: Limits) -> tuple[ModelConfig, Limits, Any, int, CpuAttention]:
        """What runs layers at once is made of these, weights, and `buffer`."""
        return self._config, limits, self._lib, self._threads, self._attention.for_decodes()

    def buffer(self, role: str, rows: int, width: int) -> torch.Tensor:
        held = self._buffers.get(role)
        if held is None or held.numel() < rows * width:
            held = self._buffers[role] = torch.empty(rows * width)
        return held[: rows * width].view(rows, width)

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(len(tokens), table.shape[1])
        bf16 = table.dtype == torch.bfloat16
        self._lib.kvr_embed(
            table.data_ptr(), bf16, tokens.data_ptr(), *hidden.shape, hidden.data_ptr()
        )
        return hidden

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return self._linear.linear(x, matrix)

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        self._linear.add_linear(hidden, x, matrix)

    def gated(
        self, x: torch.Tensor, matrix: Matrix, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._linear.gated(x, matrix, added)

    def term(
        self,
        matrix: Any,
        down: torch.Tensor,
        up: torch.Tensor,
        memory: HugePages,
        *,
        is_gated: bool,
    ) -> CpuTerm:
        """May be called from any thread, while others compute."""
        in_panels, bf16 = is_gated and self._linear.has_gate, self._linear.bf16
        return pack_term(self._lib, self._threads, down, up, memory, bf16=bf16, in_panels=in_panels)

    def cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        assert logits.is_contiguous()
        self._lib.kvr_cap(logits.data_ptr(), logits.numel(), cap, self._threads)
        return logits

    def per_head(self, x: torch.Tensor, heads: Heads) -> torch.Tensor:
        return self._linear.per_head(x, heads)

    def expert_part(self, width: int) -> slice:
        return slice(0, width)

    def experts(self, gate_ups: Stacked, downs: Stacked) -> Experts:
        return self._linear.experts(widened(gate_ups), widened(downs))

    def expert_biases(self, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        raise AssertionError("as the constructor has said")

    def add_experts(
        self, hidden: torch.Tensor, x: torch.Tensor, layer: Any, routed: torch.Tensor | None = None
    ) -> None:
        assert hidden.is_contiguous()
        assert x.is_contiguous()
        experts = described_experts(layer, self._config)
        self._lib.kvr_add_experts(
            ctypes.addressof(experts),
            x.data_ptr(),
            (x if routed is None else routed).data_ptr(),
            hidden.data_ptr(),
            *hidden.shape,
            ACTIVATIONS[self._config.activation],
            self._threads,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x: [n, width]; may be columns of wider rows."""
        assert x.stride(1) == 1
        out = self.buffer("norm", *x.shape)
        self._lib.kvr_rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            self._config.rms_norm_eps,
            self._threads,
        )
        return out

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        assert self._recurrent is not None
        return self._recurrent.convolve(x, weights, layer, silu)

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        assert self._recurrent is not None
        return self._recurrent.delta_rule(rows, weights, layer)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._gate(x, gate, None, x.shape[1])

    def activated(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x, gate, None, x.shape[1], ACTIVATIONS[self._config.activation])

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self._config.recurrent
        assert shape is not None
        silu, first = gate_is_silu(shape.kind), shape.kind == MAMBA2
        return self._gate(x, gate, weight, shape.norm_width, silu, first)

    def _gate(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        width: int,
        activation: int = 0,
        gate_first: bool = False,
    ) -> torch.Tensor:
        assert x.is_contiguous()
        assert gate.stride(1) == 1
        at, step = None if weight is None else weight.data_ptr(), norm_step(weight, width)
        self._lib.kvr_gate(
            *(x.data_ptr(), gate.data_ptr(), gate.stride(0), gate.shape[1], at, step),
            *(len(x), x.shape[1] // width, width, self._config.rms_norm_eps),
            *(activation, gate_first, self._threads),
        )
        return x

    def queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return split_queries_and_keys(qkv, self._config)

    def norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, weight)

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        self._attention.write(qkv, layer, q_norm, k_norm)

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks is None  # the constructor has refused them
        width = self._config.num_heads * self._config.kv_heads(layer).value_dim
        out = self.buffer("attention", len(qkv), width)
        self._attention.attend(qkv, layer, out)
        return out

    def latent_write(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        self._attention.write_latent(q_rope, latent, layer)

    def expanded_attention(self, *_: Any) -> None:
        return None

    def exact_linear(self, x: torch.Tensor, router: Matrix) -> torch.Tensor:
        return self._linear.linear(x, router)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        at = x.data_ptr(), weight.data_ptr(), bias.data_ptr()
        self._lib.kvr_layer_norm(*at, *x.shape, INDEX_EPS, self._threads)
        return x

    def index_write(self, queries: torch.Tensor | None, keys: torch.Tensor, layer: int) -> None:
        self._attention.write_index(queries, keys, layer)

    def select(self, queries: torch.Tensor, weights: torch.Tensor, layer: int) -> bool:
        """The selection is kept by the attention, for the layers until the next one."""
        self._attention.select(queries, weights, layer)
        return True

    def selected(self, num_tokens: int) -> torch.Tensor:
        """What the last `select` chose: [num_tokens, topk] int32; of tokens before position `topk`
        nothing."""
        return self._attention.selected(num_tokens)

    def latent_attention(
        self, queries: torch.Tensor, layer: int, selected: bool | None = None
    ) -> torch.Tensor:
        assert self._config.latent is not None
        heads, rank = self._config.num_heads, self._config.latent.rank
        out = self.buffer("attention", len(queries), heads * rank)
        self._attention.attend(queries, layer, out)
        return out.view(len(queries), heads, rank)
