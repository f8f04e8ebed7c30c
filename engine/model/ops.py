"""The operations a decoder is made of, and how they are prepared for one step.

Three sets exist: `TorchOps` (any device, the reference), `CpuOps` (compiled kernels) and
`TritonOps` (kernels for GPUs; `FlashInferOps` has FlashInfer's where it is asked for). A set owns
the KV pool and the rotary tables, which have cos and sin of every position with the scalings of
long contexts; `begin` sets the batch of the following calls.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig, Rope, RopeScaling
from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.recurrence import DeltaRows, convolve, delta_inputs, delta_rule
from kvrelay.engine.model.state_layout import KIMI_DELTA_ATTENTION, MAMBA2
from kvrelay.engine.model.states import StatePool, StateSpans
from kvrelay.engine.model.terms import TensorTerm, Term
from kvrelay.engine.model.weights import ExpertsWeights, RecurrentWeights

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SWISH_ALPHA, SWISH_LIMIT = 1.702, 7.0  # as gpt-oss was trained
INDEX_EPS = 1e-6  # the norm of an indexer's keys has it; no file states it
GROUP_BEST = 2  # experts whose scores, added up, rank a group where choices are corrected


class Ops(Protocol):
    """Results may live in buffers of the set: one is valid until the next call of the same kind."""

    @property
    def num_passed(self) -> int:
        """Layers that `run_layers` has passed, for whoever asks from another thread while it runs;
        0 where that cannot be said."""
        return 0

    def table(self, weight: torch.Tensor) -> Any:
        """Prepare an embedding table [vocab_size, hidden_size]."""
        ...

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Any:
        """Prepare a weight [out, in] for `linear`; `role` names the buffer of its results."""
        ...

    def qkv(self, weight: torch.Tensor, bias: torch.Tensor | None, layer: int) -> Any:
        """Prepare rows of queries and, if the layer has its own, of keys and values."""
        ...

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Any:
        """Prepare [gate; up], each [width, in], or without a gate the latter, for `gated`."""
        ...

    def vector(self, weight: torch.Tensor, role: str = "") -> torch.Tensor:
        """Prepare the weight of a norm, or what a recurrent layer has beside its matrices: `role`
        is "heads" for what its heads have in turn, "channels" for those of its convolution."""
        ...

    def heads(self, weight: torch.Tensor, role: str) -> Any:
        """Prepare per-head matrices [num_heads, in, out] for `per_head`."""
        ...

    def router(self, weight: torch.Tensor) -> Any:
        """Prepare a router [num_experts, hidden_size] for `add_experts`."""
        ...

    def use_states(self, pool: StatePool) -> None:
        """Where recurrent layers keep states; before the first step of a model that has some."""
        ...

    def capture(self, layers: tuple[int, ...]) -> None:
        """From now on `run_layers` keeps what these give for each row."""
        ...

    def captured(self, rows: int) -> list[torch.Tensor]:
        """For each of them [rows, hidden_size], of the last `run_layers`, of all `rows`."""
        ...

    def begin(self, batch: Batch) -> None: ...

    def run_layers(self, hidden: torch.Tensor, layers: Any, batch: Batch) -> torch.Tensor | None:
        """All layers (a tuple of `LayerWeights`) at once, if the set has a faster way than the
        calls below: hidden [N, hidden_size], which is overwritten -> [R, hidden_size] of the rows
        to be sampled. None: nothing was done."""
        ...

    def embed(self, table: Any, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> a fresh [num_tokens, hidden_size]."""
        ...

    def linear(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        ...

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Any) -> None:
        """hidden [n, out] += x [n, in] @ matrix."""
        ...

    def gated(
        self, x: torch.Tensor, matrix: Any, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, in] -> [n, width]: activation(x @ gate) * (x @ up), with the model's activation; one
        that has no gate is activation(x @ up). added: to the products, before the activation, by
        terms that were prepared as gated."""
        ...

    def term(
        self,
        matrix: Any,
        down: torch.Tensor,
        up: torch.Tensor,
        memory: HugePages,
        *,
        is_gated: bool,
    ) -> Term:
        """Prepare what some rows add to the product with `matrix` [out, in]: down [rank, in] and up
        [out, rank]; is_gated: to one for `gated`; memory: whose it is, on a CPU. May be called
        while others compute."""
        ...

    def activated(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[n, width] each: activation(gate) * x, with the model's activation; x is overwritten."""
        ...

    def cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(logits / cap), in place."""
        ...

    def per_head(self, x: torch.Tensor, heads: Any) -> torch.Tensor:
        """[N, num_heads, in] -> [N, num_heads, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of qkv [N, ...]: all heads' queries, and all heads' keys."""
        ...

    def norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over all heads of queries or keys, as `queries_and_keys` gives them."""
        ...

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: norm (where given) and
        rotate queries and keys in place, and write keys and values to the pool. Queries alone in a
        layer that reads another's keys and values."""
        ...

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotated queries in qkv -> [num_tokens, num_heads * head_dim]. sinks [num_heads]: a score
        that each head's softmax has beside those of keys."""
        ...

    def latent_write(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        """Multi-head latent attention. q_rope [N, num_heads, rope_dim], contiguous, is rotated in
        place; latent [N, rank + rope_dim], contiguous and normed in front, is rotated behind and
        written to the pool."""
        ...

    def latent_attention(
        self, queries: torch.Tensor, layer: int, selected: Any = None
    ) -> torch.Tensor:
        """queries [N, num_heads, rank + rope_dim], the first part projected into the latent's space
        -> [N, num_heads, rank]: keys are all cached dimensions, values the first `rank`. selected:
        of `select`, in this step; None: tokens attend to all positions up to their own."""
        ...

    def exact_linear(self, x: torch.Tensor, router: Any) -> torch.Tensor:
        """[n, in] -> float32 [n, out], by what `router` has prepared."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """LayerNorm of rows, with INDEX_EPS."""
        ...

    def index_write(self, queries: torch.Tensor | None, keys: torch.Tensor, layer: int) -> None:
        """Sparse attention. The last `rope_dim` dimensions of each head of queries
        [N, index heads * dim] and of keys [N, dim] are rotated in place, and keys are written to
        the pool."""
        ...

    def select(self, queries: torch.Tensor, weights: torch.Tensor, layer: int) -> Any:
        """For each token the `topk` positions that score highest, for `latent_attention`: queries
        as `index_write` left them, weights [N, index heads]. Of equal scores the earlier position
        counts as higher, so what is chosen does not depend on what else is in the step."""
        ...

    def expanded_attention(
        self, queries: torch.Tensor, q_rope: torch.Tensor, key_up: Any, value_up: Any, layer: int
    ) -> torch.Tensor | None:
        """Attends to keys and values of heads instead of latents, if that is faster for this step:
        queries [N, num_heads, nope_dim + rope_dim], whose last part is overwritten, and q_rope as
        `latent_write` left it -> [N, num_heads, value_dim]. None: nothing was done."""
        ...

    def experts(self, gate_ups: Any, downs: Any) -> Any:
        """Prepare stacked experts: gate_ups [E, 2 * width, hidden], or without a gate half as many
        rows, and downs [E, hidden, width]. Both are tensors or, where `ModelConfig.learned_sinks`
        and biases make them gpt-oss', may be `Mxfp4`."""
        ...

    def expert_part(self, width: int) -> slice:
        """Which of an expert's `width` columns of `downs`, and rows of gate and up, are used here:
        `experts` may be given these alone."""
        ...

    def expert_biases(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare those of stacked experts: [E, 2 * width], and [E, hidden]."""
        ...

    def add_experts(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        layer: Any,
        routed: torch.Tensor | None = None,
    ) -> None:
        """x [N, hidden_size] is sent to the experts of `layer` (`ExpertsWeights`) that its router
        chooses, by float32 logits of `routed`, or of x; their weighted outputs are added to
        hidden."""
        ...

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        """The causal convolution of each channel with the inputs before it, of the state and of
        the step: x [N, channels], which may be columns of wider rows -> [N, channels]."""
        ...

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        """The gated delta rule (Yang et al. 2024) or Mamba 2 (Dao and Gu 2024), token by token
        -> [N, num_heads * value_dim]."""
        ...

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [N, width] times sigmoid(gate), [N, width] or [N, 1], in place."""
        ...

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """What a recurrent layer makes of its outputs x [N, width], which are overwritten: RMSNorm
        of each `norm_width`, if there is a weight, times silu(gate); Mamba 2's gate comes first,
        and that of Kimi delta attention is sigmoid(gate)."""
        ...


class TensorOps:
    """What sets have in common that keep weights as plain tensors of one device."""

    num_passed = 0

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, max_positions: int, device: torch.device
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._ropes = [rope_tables(rope, max_positions, device) for rope in config.ropes]
        self._batch: Batch | None = None
        self._places = config.kv_places()  # where each layer has its KV

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Any:
        raise NotImplementedError

    def table(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self._device, self._dtype, copy=True)  # not a view of the file

    def vector(self, weight: torch.Tensor, role: str = "") -> torch.Tensor:
        return weight.to(self._device, torch.float32, copy=True)

    def heads(self, weight: torch.Tensor, role: str) -> torch.Tensor:
        return self.table(weight).contiguous()

    def expert_part(self, width: int) -> slice:
        return slice(0, width)

    def router(self, weight: torch.Tensor) -> torch.Tensor:
        return self.vector(weight)

    def term(
        self,
        matrix: Any,
        down: torch.Tensor,
        up: torch.Tensor,
        memory: HugePages,
        *,
        is_gated: bool,
    ) -> TensorTerm:
        return TensorTerm(self.table(down), self.table(up))

    def qkv(self, weight: torch.Tensor, bias: torch.Tensor | None, layer: int) -> Any:
        return self.matrix(weight, bias, "qkv")

    def expert_biases(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.vector(gate_up), self.vector(down)

    def capture(self, layers: tuple[int, ...]) -> None:
        pass  # the decoder runs them one by one, and keeps what it wants

    def captured(self, rows: int) -> list[torch.Tensor]:
        raise AssertionError("there is no run of all layers at once")

    def run_layers(self, hidden: torch.Tensor, layers: Any, batch: Batch) -> None:
        return None

    def queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return split_queries_and_keys(qkv, self._config)

    def expanded_attention(
        self, queries: torch.Tensor, q_rope: torch.Tensor, key_up: Any, value_up: Any, layer: int
    ) -> torch.Tensor | None:
        return None

    def cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return logits.div_(cap).tanh_().mul_(cap)

    def per_head(self, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), heads).transpose(0, 1)

    def exact_linear(self, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), router)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), weight.shape, weight, bias, INDEX_EPS).to(x.dtype)

    def use_states(self, pool: StatePool) -> None:
        self._states = pool

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        out = convolve(x.float(), weights, self._states, layer, self._spans(layer))
        return (F.silu(out) if silu else out).to(x.dtype)

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        shape, spans = self._config.recurrent, self._spans(layer)
        assert shape is not None
        inputs = delta_inputs(rows, weights, shape.key_dim, shape.num_key_heads)
        return delta_rule(inputs, self._states, layer, spans).flatten(1).to(rows.qkv.dtype)

    def _spans(self, layer: int) -> StateSpans:
        assert self._batch is not None
        assert self._batch.states, "a step of a model with recurrent layers has states"
        return self._batch.states[self._states.group(layer)]

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x.mul_(gate.float().sigmoid())

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self._config.recurrent
        assert shape is not None
        is_sigmoid = shape.kind == KIMI_DELTA_ATTENTION
        wide, opened = x.float(), gate.float()
        opened = opened.sigmoid() if is_sigmoid else F.silu(opened)
        if shape.kind == MAMBA2:
            wide, opened = wide * opened, torch.ones(())
        if weight is not None:
            heads = wide.unflatten(1, (-1, shape.norm_width))
            normed = F.rms_norm(heads, heads.shape[2:], None, self._config.rms_norm_eps)
            wide = (normed * weight.view(-1, shape.norm_width)).flatten(1)
        return (wide * opened).to(x.dtype)

    def _rope_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin of the layer, [max_positions, dim / 2]; None if it does not rotate."""
        index = self._config.layer_ropes[layer] if self._config.layer_ropes else 0
        return None if index < 0 else self._ropes[index]


def pool_view(blocks: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """The layers of `spec` at the beginning of each of `blocks`, uint8 [num_blocks, bytes], which
    may be parts of wider rows."""
    shape: tuple[int, ...] = (len(blocks), spec.num_layers, spec.num_planes, spec.num_kv_heads)
    if spec.num_state_groups:
        shape = (len(blocks), spec.num_kv_heads, spec.num_layers, spec.num_planes)
    own = blocks[:, : spec.layer_bytes]
    if spec.dtype not in TORCH_DTYPES:  # numbers and their scales
        return own.view(*shape, spec.bytes_per_head)
    return own.view(TORCH_DTYPES[spec.dtype]).view(*shape, spec.block_size, spec.head_dim)


def kv_planes(pool: torch.Tensor, config: ModelConfig) -> dict[int, list[torch.Tensor]]:
    """Views of what each layer reads of the pool: its keys and its values, or its latents, each
    [num_blocks, num_heads, block_size, dim], or [num_blocks, num_heads, bytes] in FP8."""
    places = config.kv_places()
    if not config.layer_heads:
        return {layer: [*pool[:, index].unbind(1)] for layer, (_, index) in places.items()}
    is_fp8 = pool.dtype == torch.uint8
    per_token = config.attention_spec(1, "float8_e4m3" if is_fp8 else "float32").head_dim
    size = pool.shape[4] // per_token if is_fp8 else pool.shape[4]
    planes = {}
    for layer, (_, index) in places.items():
        heads = config.kv_heads(layer)
        widths = [size * (dim + is_fp8) for dim in (heads.key_dim, heads.value_dim)]
        of_heads = pool.flatten(1).unflatten(1, (heads.num_heads, -1))
        both = of_heads.narrow(2, index * sum(widths), sum(widths)).split(widths, dim=2)
        planes[layer] = [each if is_fp8 else each.unflatten(2, (size, -1)) for each in both]
    return planes


def split_queries_and_keys(
    qkv: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return qkv[:, :queries], qkv[:, queries : queries + keys]


def choose_experts(
    x: torch.Tensor, logits: torch.Tensor, layer: ExpertsWeights, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, hidden_size], logits [N, num_experts] float32 -> what goes into experts, chosen
    [N, num_per_token] int64 and weights [N, num_per_token] float32 of what comes out.

    Groups are ranked by their best expert (DeepSeek-V2), or, with a bias, by their two best
    (DeepSeek-V3). The bias counts for the choice only."""
    experts, bias = config.experts, layer.bias
    assert experts is not None
    if experts.scoring == "sigmoid":  # torch's in float32 depends on how many rows there are
        scores = logits.double().sigmoid().float()
    else:
        scores = logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if experts.num_chosen_groups < experts.num_groups:
        groups = ranked.unflatten(-1, (experts.num_groups, -1))  # [N, num_groups, size]
        best = groups.topk(1 if bias is None else GROUP_BEST, dim=-1).values.sum(-1)
        kept = best.topk(experts.num_chosen_groups, dim=-1).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        ranked = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranked.topk(experts.num_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * (experts.scale if layer.scales is None else layer.scales[chosen])
    if experts.scales_inputs:
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    return x, chosen, weights


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` highest of scores [N, K] float32, ascending: [N, count] int64. Of
    equal ones the first are chosen: a key is a score, in the order of integers, and its place."""
    bits = (scores + 0.0).view(torch.int32)  # there is one zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    before = torch.arange(scores.shape[1], 0, -1, device=scores.device)
    return (ordered + before).topk(count, sorted=False).indices.sort().values


def rope_tables(
    rope: Rope, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_positions, rope.dim / 2], float32."""
    half = torch.arange(0, rope.dim, 2, dtype=torch.int64).float()
    freq = 1.0 / (rope.theta ** (half / rope.dim))
    factor = 1.0
    if rope.scaling is not None:
        freq = _scaled(freq, rope, rope.scaling, max_positions)
        factor = rope.scaling.attention_factor
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), freq)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _scaled(
    freq: torch.Tensor, rope: Rope, scaling: RopeScaling, max_positions: int
) -> torch.Tensor:
    """Llama 3: frequencies of long wavelengths are divided by `factor`, those of short ones are
    kept, and between the two bounds they are blended (Llama 3.1 model card). YaRN: the same with
    bounds in rotations over the original length and a blend by index (Peng et al. 2023, sec. 3.2).
    LongRoPE: each has a divisor of its own (Ding et al. 2024)."""
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "proportional":
        return (freq / scaling.factor).where(torch.arange(len(freq)) < scaling.turning, 0.0)
    if scaling.kind == "longrope":
        long = scaling.is_long(max_positions)
        return freq / torch.tensor(scaling.long_factors if long else scaling.short_factors)
    if scaling.kind == "llama3":
        wavelength = 2 * torch.pi / freq
        keep = scaling.original_max_position / wavelength - scaling.low_freq_factor
        keep = (keep / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    else:
        low = _index_of(scaling.beta_fast, rope, scaling)
        high = _index_of(scaling.beta_slow, rope, scaling)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        ramp = (torch.arange(len(freq)) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0.0, 1.0)
    return (1 - keep) * freq / scaling.factor + keep * freq


def _index_of(rotations: float, rope: Rope, scaling: RopeScaling) -> float:
    """Index of the frequency with `rotations` full rotations over the original length."""
    turns = scaling.original_max_position / (rotations * 2 * math.pi)
    return rope.dim * math.log(turns) / (2 * math.log(rope.theta))
