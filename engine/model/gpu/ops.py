"""The decoder's operations on a GPU: Triton kernels, and cuBLAS for matrix products.

The residual stream has the weights' dtype. Products are added to it where they are made (beta = 1),
so no pass over it is spent on the addition. Nothing here waits for the device, and within a decode
step nothing depends on values that the device alone knows: a graph can hold the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from triton import knobs

from kvrelay.engine.kv.spec import KVHeads
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from kvrelay.engine.model.device_memory import most_splits, splits_of
from kvrelay.engine.model.gpu import experts as mixture
from kvrelay.engine.model.gpu.attention_decode import (
    Splits,
    decode_attention,
    decode_tiling,
    list_splits,
)
from kvrelay.engine.model.gpu.attention_prefill import prefill_attention, prefill_tiles
from kvrelay.engine.model.gpu.cache_pool import FP8, Pool
from kvrelay.engine.model.gpu.cache_write import latent_write, rope_write
from kvrelay.engine.model.gpu.index_scores import index_scores
from kvrelay.engine.model.gpu.latent import (
    Selected,
    latent_decode,
    latent_prefill,
    latent_tiles,
    latent_tiling,
)
from kvrelay.engine.model.gpu.linear import fp8, int8
from kvrelay.engine.model.gpu.norm_activation import KINDS, MAX_WIDTH, gated, rms_norm
from kvrelay.engine.model.gpu.recurrent import GpuRecurrent
from kvrelay.engine.model.gpu.recurrent_chunks import Chunks, Where, list_chunks
from kvrelay.engine.model.gpu.routing import route
from kvrelay.engine.model.gpu.staging import to_device
from kvrelay.engine.model.ops import TensorOps, highest, kv_planes
from kvrelay.engine.model.quantize import GROUP, quantize
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.stacked import Fp8Blocks, Mxfp4, Stacked, widened
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.weights import RecurrentWeights

MIN_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16
FP8_CAPABILITY = (8, 9)  # for KV in FP8
SELECTED_BYTES = 256 << 20  # for results of splits of what tokens have selected
SCORED_AT_ONCE = 1 << 22  # scores of positions: some 100 MB with what sorts them
FULL_ROLES = {"logits"}  # their matrices are not quantized

Dense = tuple[torch.Tensor, torch.Tensor | None]  # a weight [out, in] and a bias [out]
Matrix = Dense | int8.Int8Matrix | fp8.Fp8Matrix


class TritonOps(TensorOps):
    """Owned by one runner, used from one thread at a time. Results are fresh tensors, except in a
    captured step, where they live as long as the next replay."""

    def __init__(
        self,
        config: ModelConfig,
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_positions: int,
        quantization: str = "none",
    ) -> None:
        """pool: as ModelRunner.kv_pool. quantization: of the layers' matrices, "none", "int8" or
        "fp8". Raises KernelsUnavailable for what the kernels do not handle."""
        _check(config, pool, dtype, quantization)
        super().__init__(config, dtype, max_positions, pool.device)
        TritonOps.use_pool(self, pool)  # what builds on it is not ready yet
        self._quantization = quantization
        self._kinds = {self._kind(layer): layer for layer in self._places}
        # By the shape of heads and the window: tiles of sequences with more than one token, and
        # splits of decodes; None: there is no such sequence.
        self._work: dict[tuple[KVHeads, int], tuple[torch.Tensor | None, Splits | None]] = {}
        self._sink_queries: torch.Tensor | None = None
        self._recurrent: GpuRecurrent | None = None
        self._chunks: Chunks | None = None

    def use_states(self, pool: StatePool) -> None:
        assert self._config.recurrent is not None
        self._recurrent = GpuRecurrent(self._config.recurrent, pool, self._pool.block_size)
        self._first_states = 1 + max(group for group, _ in self._places.values())
        self._states = pool

    def use_pool(self, pool: torch.Tensor) -> None:
        """In place of the one before: of as many blocks as there are, the rest alike."""
        c = self._config
        self._pool = Pool(pool, c.attention_spec(1, "float32").head_dim)
        self._pools: dict[int, Pool] = {}  # where heads differ: each layer's alone
        self._index_pools: dict[int, Pool] = {}
        for layer, (keys, values) in kv_planes(pool, c).items() if c.layer_heads else ():
            heads, data = c.kv_heads(layer), keys[:, None, None]  # one layer, one plane
            if c.latent is None:
                apart = int(values.storage_offset() - keys.storage_offset())
                self._pools[layer] = Pool(data, heads.key_dim, heads.value_dim, apart)
                continue
            self._pools[layer] = Pool(data, heads.key_dim)
            if heads.value_dim:  # index keys have it
                self._index_pools[layer] = Pool(values[:, None, None], heads.value_dim)

    def _pool_of(self, layer: int) -> tuple[Pool, int]:
        """A layer's pool, and its place in the blocks of that."""
        return (self._pools[layer], 0) if self._pools else (self._pool, self._places[layer][1])

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Matrix:
        own = None if bias is None else self.table(bias)
        kind = "none" if role in FULL_ROLES else self._quantization
        if kind == "int8":
            return int8.int8_matrix(weight.to(self._device), own)
        if kind == "fp8" and fp8.fits(weight):
            return fp8.fp8_matrix(weight.to(self._device), own)
        return self.table(weight).contiguous(), own

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Matrix:
        return self.matrix(weight, None, role)

    def begin(self, batch: Batch) -> None:
        c = self._config
        self._batch = batch
        self._work = {}
        tiles: dict[KVHeads, torch.Tensor | None] = {}
        for (heads, window), layer in self._kinds.items():
            pool = self._pool_of(layer)[0]
            if heads not in tiles:
                tiles[heads] = self._tiles_of(batch, pool)
            self._work[heads, window] = tiles[heads], self._splits_of(batch, pool, window)
        if self._recurrent is not None:
            lists = list_chunks(batch.spans, self._pool.block_size)
            self._chunks = None
            if len(lists[1]):
                self._chunks = Chunks(*(to_device(each, self._device) for each in lists))
        if (indexer := c.indexer) is not None and max(
            end for *_, end in batch.spans
        ) > indexer.topk:
            self._place_tokens(batch, indexer.topk)
        if any(self._has_sinks(layer) for layer in range(c.num_layers)):
            shape = (len(batch.tokens), c.num_heads * c.head_dim)
            self._sink_queries = torch.empty(shape, dtype=self._dtype, device=self._device)

    def _place_tokens(self, batch: Batch, topk: int) -> None:
        """For sparse attention, in which each token is by itself."""
        count, spans = len(batch.tokens), batch.spans
        rows = torch.arange(count, dtype=torch.int32, device=self._device)
        self._sequences = rows
        if count != len(spans):
            of = np.repeat(np.arange(len(spans), dtype=np.int32), [each for _, each, _ in spans])
            self._sequences = to_device(of, self._device)
        contexts = (batch.positions + 1).clamp(max=topk).int()
        self._alone = rows, torch.ones_like(rows), contexts

    def _kind(self, layer: int) -> tuple[KVHeads, int]:
        return self._config.kv_heads(layer), self._config.window_or_chunk(layer)

    def _tiles_of(self, batch: Batch, pool: Pool) -> torch.Tensor | None:
        c, spans = self._config, batch.spans
        if all(count == 1 for _, count, _ in spans):
            return None
        list_work = prefill_tiles if c.latent is None else latent_tiles
        return to_device(list_work(spans, c.num_heads, pool), self._device)

    def _splits_of(self, batch: Batch, pool: Pool, window: int) -> Splits | None:
        contexts = [context if count == 1 else 0 for _, count, context in batch.spans]
        where = batch.query_len, batch.context_len, contexts
        return list_splits(*where, *self._split_shape(pool), window)

    def _split_shape(self, pool: Pool) -> tuple[int, int, int]:
        """Query heads, width of their results, and keys that a program reads at once."""
        c = self._config
        if c.latent is not None:
            return c.num_heads, c.latent.rank, latent_tiling(pool, c.num_heads).block_n
        tiling = decode_tiling(pool, c.num_heads // pool.num_kv_heads)
        return c.num_heads, pool.value_dim, tiling.block_n

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, table)

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if isinstance(matrix, int8.Int8Matrix):
            return int8.linear(x, matrix)
        if isinstance(matrix, fp8.Fp8Matrix):
            return fp8.linear(x, matrix)
        return F.linear(x, *matrix)

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> None:
        if not isinstance(matrix, tuple):
            hidden += self.linear(x, matrix)
            return
        weight, bias = matrix
        hidden.addmm_(x, weight.t())
        if bias is not None:
            hidden += bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps)

    def norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x.contiguous(), weight)

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        c, batch, tables = self._config, self._batch, self._rope_of(layer)
        assert batch is not None
        pool, place = self._pool_of(layer)
        sinks = self._sink_queries if self._has_sinks(layer) and tables is not None else None
        rope_write(
            qkv,
            pool,
            place,
            batch.positions,
            batch.slots_of(self._places[layer][0]),
            tables,
            num_heads=c.num_heads,
            norms=None if q_norm is None else (q_norm, q_norm if k_norm is None else k_norm),
            writes=c.keeps_kv(layer),
            value_norm=c.value_norm,
            eps=c.rms_norm_eps,
            sink_queries=sinks,
            sink_position=c.window(layer) + c.num_sinks - 1,
        )

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        c = self._config
        kv, to_sinks = c.kv_heads(layer), self._sink_queries if self._has_sinks(layer) else None
        shape = (len(qkv), c.num_heads * kv.value_dim)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        if to_sinks is not None and self._rope_of(layer) is None:
            to_sinks = qkv[
                :, : c.num_heads * kv.key_dim
            ].contiguous()  # where nothing rotates, all queries are alike
        self._attend(
            decode_attention,
            prefill_attention,
            out,
            qkv,
            layer,
            num_heads=c.num_heads,
            scale=c.score_scale,
            window=c.window_or_chunk(layer),
            num_sinks=c.num_sinks if c.window(layer) else 0,
            sink_queries=to_sinks,
            head_sinks=sinks,
            softcap=c.attention_softcap,
        )
        return out

    def gated(
        self, x: torch.Tensor, matrix: Matrix, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up = self.linear(x, matrix)
        if added is not None:
            gate_up += added
        return gated(gate_up, self._config.activation)

    def latent_write(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        self._write_latent(q_rope, latent, layer, *self._pool_of(layer))

    def index_write(self, queries: torch.Tensor | None, keys: torch.Tensor, layer: int) -> None:
        latent, dim = self._config.latent, keys.shape[1]
        assert latent is not None
        heads = keys.new_empty(len(keys), 0) if queries is None else queries
        q_rope = heads.view(len(keys), -1, dim)[:, :, dim - latent.rope_dim :]
        self._write_latent(q_rope, keys, layer, self._index_pools[layer], 0)

    def select(self, queries: torch.Tensor, weights: torch.Tensor, layer: int) -> Selected:
        batch, indexer = self._batch, self._config.indexer
        assert batch is not None
        assert indexer is not None
        longest, num_tokens = max(end for *_, end in batch.spans), len(queries)
        tables = batch.tables_of(self._places[layer][0])
        parts = []
        at_once = max(1, SCORED_AT_ONCE // longest)
        for first in range(0, num_tokens, at_once):
            rows = slice(first, min(first + at_once, num_tokens))
            where = batch.positions[rows], self._sequences[rows], tables
            scores = index_scores(
                queries[rows], weights[rows], self._index_pools[layer], *where, longest
            )
            parts.append(highest(scores, indexer.topk).int())
        return Selected(torch.cat(parts), self._sequences, *self._alone)

    def _write_latent(
        self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int, pool: Pool, place: int
    ) -> None:
        batch, tables = self._batch, self._rope_of(layer)
        assert batch is not None
        slots, positions = batch.slots_of(self._places[layer][0]), batch.positions
        if tables is None:  # all are rotated by no angle
            shape = (1, q_rope.shape[2] // 2)
            tables = (q_rope.new_ones(shape).float(), q_rope.new_zeros(shape).float())
            positions = torch.zeros_like(positions)
        latent_write(q_rope, latent, pool, place, positions, slots, tables)

    def latent_attention(
        self, queries: torch.Tensor, layer: int, selected: Selected | None = None
    ) -> torch.Tensor:
        c, batch = self._config, self._batch
        assert batch is not None
        assert c.latent is not None
        shape = (len(queries), c.num_heads, c.latent.rank)
        out = torch.empty(shape, dtype=queries.dtype, device=queries.device)
        if selected is not None:
            self._attend_to(out, queries.contiguous(), layer, selected)
            return out
        self._attend(
            latent_decode,
            latent_prefill,
            out,
            queries.contiguous(),
            layer,
            rank=c.latent.rank,
            scale=c.score_scale,
            softcap=c.attention_softcap,
        )
        return out

    def _attend_to(
        self, out: torch.Tensor, queries: torch.Tensor, layer: int, selected: Selected
    ) -> None:
        """So many tokens at a time as there is memory for results of their splits."""
        c, batch, (pool, place) = self._config, self._batch, self._pool_of(layer)
        assert batch is not None
        assert c.latent is not None
        topk, shape = selected.positions.shape[1], self._split_shape(pool)
        each = splits_of(topk, most_splits(*shape[:2])) * shape[0] * (shape[1] + 1) * 4
        at_once = max(1, SELECTED_BYTES // each)
        for first in range(0, len(queries), at_once):
            part = selected.part(slice(first, first + at_once))
            where = part.query_len, part.context_len, [topk] * len(part.query_len)
            splits = list_splits(*where, *shape)
            assert splits is not None
            latent_decode(
                *(out, queries, pool, place, part.query_start, part.context_len),
                batch.tables_of(self._places[layer][0]),
                rank=c.latent.rank,
                scale=c.score_scale,
                softcap=c.attention_softcap,
                splits=splits,
                selected=part,
            )

    def convolve(
        self, x: torch.Tensor, weights: RecurrentWeights, layer: int, silu: bool
    ) -> torch.Tensor:
        assert self._recurrent is not None
        return self._recurrent.convolve(x, weights, layer, self._where(layer), silu)

    def delta_rule(self, rows: DeltaRows, weights: RecurrentWeights, layer: int) -> torch.Tensor:
        assert self._recurrent is not None
        return self._recurrent.delta_rule(rows, weights, layer, self._where(layer))

    def _where(self, layer: int) -> Where:
        batch, group = self._batch, self._first_states + self._states.group(layer)
        assert batch is not None
        places = (batch.tables_of(group), batch.slots_of(group), batch.positions)
        if batch.passed is not None:
            return Where(*places, batch.query_start, batch.passed, keeps=True)
        return Where(*places, batch.query_start, batch.query_len, self._chunks)

    def replay(self, batch: Batch, counts: torch.Tensor) -> None:
        """Recurrent layers pass again the first `counts` [S] rows of each sequence of the last
        pass, which had `batch` and kept them, and store states. int32, on the device; 0: none."""
        assert self._recurrent is not None
        self._batch = batch
        for layer in self._config.recurrent_layers:
            where = self._where(layer)  # rows with counts have states, so their slots may be any
            where = where._replace(slots=batch.positions, query_len=counts, keeps=False)
            self._recurrent.replay(layer, where)

    def experts(self, gate_ups: Stacked, downs: Stacked) -> mixture.ExpertWeights:
        if isinstance(gate_ups, Mxfp4) and isinstance(downs, Mxfp4):  # less than int8 and FP8
            packed = (gate_ups.pairs, downs.pairs, gate_ups.scales, downs.scales)
            ups, down, *scales = (each.to(self._device) for each in packed)
            return mixture.ExpertWeights(ups, down, scales[0], scales[1])
        if isinstance(gate_ups, Fp8Blocks) and isinstance(downs, Fp8Blocks):
            block = gate_ups.block
            if has_fp8(self._device) and not block[1] % GROUP:
                packed = (gate_ups.numbers, downs.numbers, gate_ups.scales, downs.scales)
                ups, down, *scales = (each.to(self._device) for each in packed)
                return mixture.ExpertWeights(ups, down, scales[0], scales[1], block)
        gate_ups, downs = widened(gate_ups), widened(downs)
        if self._quantization == "int8":  # in fp8 they stay as they are
            pairs = [quantize(each.to(self._device)) for each in (gate_ups, downs)]
            return mixture.ExpertWeights(pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
        return mixture.ExpertWeights(
            self.table(gate_ups).contiguous(), self.table(downs).contiguous()
        )

    def activated(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gated(torch.cat((gate, x), dim=-1), self._config.activation)

    def add_experts(
        self, hidden: torch.Tensor, x: torch.Tensor, layer: Any, routed: torch.Tensor | None = None
    ) -> None:
        routed = x if routed is None else routed
        logits = F.linear(routed.float(), layer.router, layer.router_bias)
        x, chosen, weights = route(x, logits, layer, self._config)
        biases = layer.gate_up_bias, layer.down_bias
        parts = layer.experts, chosen, weights, self._config.activation, biases
        mixture.add_experts(hidden, x, *parts)

    def _attend(
        self,
        decode: Callable[..., None],
        prefill: Callable[..., None],
        out: torch.Tensor,
        queries: torch.Tensor,
        layer: int,
        **settings: Any,
    ) -> None:
        """Sequences of one token and those of more, each by their kernel, into rows of `out`."""
        batch = self._batch
        assert batch is not None
        (pool, place), (tiles, splits) = self._pool_of(layer), self._work[self._kind(layer)]
        tables, start = batch.tables_of(self._places[layer][0]), batch.query_start
        rest = batch.context_len, tables
        if splits is not None:
            decode(out, queries, pool, place, start, *rest, splits=splits, **settings)
        if tiles is not None:
            prefill(out, queries, pool, place, tiles, start, batch.query_len, *rest, **settings)

    def _has_sinks(self, layer: int) -> bool:
        return self._config.num_sinks > 0 and self._config.window(layer) > 0


def has_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _check(config: ModelConfig, pool: torch.Tensor, dtype: torch.dtype, quantization: str) -> None:
    """Raises KernelsUnavailable if no kernel fits."""
    device = pool.device
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise KernelsUnavailable(
                f"{torch.cuda.get_device_name(device)} has compute capability"
                f" {capability[0]}.{capability[1]}; 8.0 is needed"
            )
        if pool.dtype == FP8 and capability < FP8_CAPABILITY:
            raise KernelsUnavailable("KV in FP8 needs a GPU of compute capability 8.9")
        if quantization == "fp8" and capability < FP8_CAPABILITY:
            raise KernelsUnavailable(
                "model.quantization = fp8 needs a GPU of compute capability 8.9; int8 does not"
            )
    elif not knobs.runtime.interpret:
        raise KernelsUnavailable("Triton's kernels need a GPU")
    if quantization == "fp8" and dtype != torch.bfloat16:
        raise KernelsUnavailable("model.quantization = fp8 needs model.dtype = bfloat16")
    if config.activation not in KINDS:
        raise KernelsUnavailable(f"activation {config.activation} is not handled")
    if config.layer_heads and config.num_sinks:
        raise KernelsUnavailable("attention sinks with heads that differ by layer are not handled")
    if config.latent is not None and any(config.windows):
        raise KernelsUnavailable("windows with latent attention are not handled")
    if config.hidden_size > MAX_WIDTH:
        raise KernelsUnavailable(f"hidden_size {config.hidden_size} is above {MAX_WIDTH}")
