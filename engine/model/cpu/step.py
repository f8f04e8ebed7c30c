"""All layers of a step in one call of the CPU kernels; and decodes, with the drawing of their
tokens: as many passes in one call as a step allows, or one in which drafts are verified.

Life: the layers are described once, when the first step comes; each step then only says where its
rows are. For decodes it fills in their tokens and positions, and of block tables and ways to draw
those that are new, so that a pass costs an interpreter next to nothing. Arrays grow to the largest
step seen. Torch draws no tokens here: its threads spin for a while where the kernels' should run.
Rows that the kernels cannot draw keep their logits, and are sampled from them after the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch, Limits, Table
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.attention import CpuAttention
from kvrelay.engine.model.cpu.kernels import constants, structure
from kvrelay.engine.model.cpu.linear import ACTIVATIONS
from kvrelay.engine.model.cpu.recurrent import CpuRecurrent, address, described_matrix
from kvrelay.engine.model.cpu.terms import put_terms
from kvrelay.engine.model.ops import INDEX_EPS
from kvrelay.engine.model.quest import bounded_of, starts_of
from kvrelay.engine.model.sampling.counts import COUNTS, counts_of
from kvrelay.engine.model.sampling.sampler import DRAW, Masks, draw_of, is_drawn, sample
from kvrelay.engine.model.terms import NOTHING_LOADED, RowTerms, term_rows
from kvrelay.engine.model.weights import (
    AttentionWeights,
    ExpertsWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    RecurrentWeights,
    Weights,
)
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import BURST_S, NO_TOKEN, Sampled, ScheduledSeq, Step, verify_drafts

assert np.dtype(structure("Draw")) == DRAW, "sampling/api.h has other columns than DRAW"
assert np.dtype(structure("Counts")) == COUNTS, "sampling/api.h has other columns than COUNTS"
NOT_DRAWN = -1.0  # a temperature


class CpuDraw:
    """Draws tokens as `engine.model.sampling.sampler.draw` does."""

    def __init__(self, library: Any, num_threads: int) -> None:
        self._lib, self._threads = library, num_threads

    def __call__(self, logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[int]:
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        draws = np.array([draw_of(seq) for seq in seqs], DRAW)
        tokens = np.empty(len(seqs), np.int64)
        self._lib.kvr_draw(
            logits.data_ptr(),
            *logits.shape,
            draws.ctypes.data,
            tokens.ctypes.data,
            self._threads,
        )
        drawn: list[int] = tokens.tolist()
        return drawn


_Experts, _Indexer, _Latent = structure("Experts"), structure("Indexer"), structure("Latent")
_Layer, _Step = structure("Layer"), structure("Step")
ROW_BLOCK_STEP: int = constants.ROW_BLOCK_STEP


class CpuStep:
    """The layers of `CpuOps` at once, owned by it. The weights that it describes are kept alive."""

    def __init__(
        self,
        config: ModelConfig,
        library: Any,
        num_threads: int,
        buffer: Callable[[str, int, int], torch.Tensor],
        attention: CpuAttention,
        recurrent: CpuRecurrent | None = None,
    ) -> None:
        self._lib, self._attention, self._buffer = library, attention, buffer
        self._config, self._recurrent = config, recurrent
        self._step = step_of(config, library, num_threads)
        self._widths: dict[str, int] = {}  # width of each buffer
        self._described: Sequence[LayerWeights] | None = None
        self._layers: ctypes.Array[Any] | None = None
        self.captures: tuple[int, ...] = ()  # layers whose outputs are kept

    def run(
        self, hidden: torch.Tensor, layers: Sequence[LayerWeights], batch: Batch
    ) -> torch.Tensor:
        """hidden [N, hidden_size] passes all layers. Returns it where rows are to be sampled, [R,
        hidden_size]."""
        if self._described is not layers:
            self._described = layers
            self._layers = described(self._config, layers, self._attention, self._recurrent)
            mark_captured(self._layers, self.captures)
            self._widths = widths(self._layers, self._config, self._recurrent)
        assert hidden.is_contiguous()
        step, rows, count = self._step, len(hidden), len(layers)
        self._terms = put_terms(step, batch.terms)
        step.hidden, step.rows = hidden.data_ptr(), rows
        buffers = {
            name: self._buffer("step_" + name, rows + step.threads * ROW_BLOCK_STEP, width)
            for name, width in self._widths.items()
        }
        for name, buffer in buffers.items():
            setattr(step, name, buffer.data_ptr())
        if self.captures:
            step.captured = self.captured(rows).data_ptr()
        whole = len(batch.sample_rows) == rows
        assert self._layers is not None
        last = self._config.last_kv_layer
        if whole or self._layers[last].recurrent.project.rows:  # states follow from all rows
            self._run(range(count))
            return hidden if whole else hidden.index_select(0, batch.sample_rows)
        self._run(range(last))
        hidden = self._last(hidden, buffers["qkv"], last, batch)
        if len(hidden):
            self._run(range(last + 1, count))
        return hidden

    def captured(self, rows: int) -> torch.Tensor:
        """[captured layers, rows, hidden_size], valid until the next step."""
        count, width = len(self.captures), self._step.width
        return self._buffer("captured", count * rows, width).view(count, rows, width)

    def _run(self, layers: range) -> None:
        assert self._layers is not None
        if layers:
            at = ctypes.addressof(self._layers[layers.start])
            self._lib.kvr_layers(at, len(layers), ctypes.addressof(self._step))

    def _last(
        self, hidden: torch.Tensor, qkv: torch.Tensor, index: int, batch: Batch
    ) -> torch.Tensor:
        """The last layer that has its own. Tokens that nothing is sampled after leave keys and
        values, no more."""
        assert self._layers is not None
        layer, step = self._layers[index], self._step
        self._lib.kvr_before_attention(ctypes.addressof(layer), ctypes.addressof(step))
        hidden = hidden.index_select(0, batch.sample_rows)
        if not len(hidden):
            return hidden
        width = layer.qkv.rows or qkv.shape[1]  # this layer's; those with latents are all alike
        queries = qkv.view(-1)[: step.rows * width].view(-1, width)
        queries = queries.index_select(0, batch.sample_rows)
        self._attention.keep_selected(batch.sample_rows)
        batch = batch.sampled()
        self._attention.begin(batch)
        self._lib.kvr_attention(layer.attention, queries.data_ptr(), step.attended, layer.pool)
        step.hidden, step.rows = hidden.data_ptr(), len(hidden)
        self._terms = put_terms(step, batch.terms)
        self._lib.kvr_after_attention(ctypes.addressof(layer), ctypes.addressof(step))
        return hidden


def mark_captured(layers: ctypes.Array[Any], captures: Sequence[int]) -> None:
    for at, index in enumerate(captures):
        layers[index].captured = 1 + at


def step_of(config: ModelConfig, library: Any, num_threads: int) -> Any:
    """A step whose rows are not there yet."""
    return _Step(
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        activation=ACTIVATIONS[config.activation],
        threads=num_threads,
    )


def described(
    config: ModelConfig,
    layers: Sequence[LayerWeights],
    attention: CpuAttention,
    recurrent: CpuRecurrent | None,
) -> ctypes.Array[Any]:
    """As long as the weights, `attention` and `recurrent` live."""
    structs = (_Layer * len(layers))()
    for index, (layer, to) in enumerate(zip(layers, structs, strict=True)):
        weights, beside = layer.attention, layer.beside
        assert weights is not None
        matrices = {}
        names = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        norms = {name: getattr(layer, name) for name in names}
        if isinstance(weights, RecurrentWeights):
            beside = weights
        else:
            matrices["out"] = weights.out
            to.rope, to.attention, to.pool = attention.described(index)
        if beside is not None:
            assert recurrent is not None
            to.recurrent = recurrent.described(beside, index)
        if isinstance(weights, AttentionWeights):
            matrices |= {"qkv": weights.qkv, "gate": weights.gate}
            norms |= {"q_norm": weights.q_norm, "k_norm": weights.k_norm}
        elif isinstance(weights, LatentWeights):
            to.latent = _described_latent(weights, config)
            if weights.indexer is not None:
                places = attention.described_index(index)
                to.latent.indexer = _described_indexer(weights.indexer, *places)
        if layer.mlp is not None:
            assert layer.mlp.gate is None or layer.experts is not None
            matrices |= {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
            matrices["mlp_gate"] = layer.mlp.gate
        for name, matrix in matrices.items():
            setattr(to, name, described_matrix(matrix))
        for name, norm in norms.items():
            setattr(to, name, address(norm))
        to.scale = layer.scale
        if layer.experts is not None:
            to.experts = described_experts(layer.experts, config)
    return structs


def _described_latent(weights: LatentWeights, config: ModelConfig) -> Any:
    latent = config.latent
    assert latent is not None
    assert weights.key_up.kind == weights.value_up.kind
    return _Latent(
        compress=described_matrix(weights.compress),
        queries=described_matrix(weights.queries),
        q_norm=address(weights.q_norm),
        kv_norm=weights.kv_norm.data_ptr(),
        key_up=weights.key_up.data.data_ptr(),
        value_up=weights.value_up.data.data_ptr(),
        scale=latent.scale,
        kind=weights.key_up.kind,
        heads=config.num_heads,
        q_rank=latent.q_rank or 0,
        rank=latent.rank,
        nope=latent.nope_dim,
        rope=latent.rope_dim,
        value=latent.value_dim,
    )


def _described_indexer(weights: IndexerWeights, rope: int, pool: int) -> Any:
    return _Indexer(
        queries=described_matrix(weights.queries),
        keys=described_matrix(weights.keys),
        weights=described_matrix(weights.weights),
        norm=weights.norm.data_ptr(),
        norm_bias=weights.norm_bias.data_ptr(),
        rope=rope,
        pool=pool,
        eps=INDEX_EPS,
    )


def described_experts(weights: ExpertsWeights, model: ModelConfig) -> Any:
    """As long as the weights live."""
    experts, config = weights.experts, model.experts
    assert config is not None
    return _Experts(
        router=described_matrix(weights.router),
        bias=address(weights.bias),
        gate_ups=experts.gate_ups.data_ptr(),
        downs=experts.downs.data_ptr(),
        count=experts.count,
        width=experts.width,
        kind=experts.kind,
        per_token=config.num_per_token,
        groups=config.num_groups,
        chosen_groups=config.num_chosen_groups,
        scale=config.scale,
        sigmoid=config.scoring == "sigmoid",
        normalize=config.normalize,
        scales=address(weights.scales),
        scales_inputs=config.scales_inputs,
    )


def widths(
    layers: ctypes.Array[Any], config: ModelConfig, recurrent: CpuRecurrent | None
) -> dict[str, int]:
    """Returns the widths of the buffers that a step's rows pass through, `hidden` aside."""
    latent, heads = config.latent, config.num_heads
    return {
        "qkv": heads * config.head_dim if latent else max(each.qkv.rows for each in layers),
        "attended": heads * latent.rank if latent else max(each.out.depth for each in layers),
        "gated": max(each.down.depth for each in layers),
        "norm": config.hidden_size,
        "added": config.hidden_size,
        **({} if recurrent is None else recurrent.widths),
    }


_Decode = structure("Decode")


class CpuDecode:
    """Owned by a runner, used from one thread at a time.

    Invariant: `_held` and `_lengths` are what the tables, draws and queries say now."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Limits,
        library: Any,
        num_threads: int,
        attention: CpuAttention,
        weights: Weights,
        buffer: Callable[[str, int, int], torch.Tensor],
        recurrent: CpuRecurrent | None = None,
        captures: tuple[int, ...] = (),
    ) -> None:
        """`attention` and `recurrent` are used for decodes alone. captures: layers whose outputs
        are kept in `captured`."""
        self._limits, self._lib, self._attention = limits, library, attention
        self._recurrent, self._num_recurrent = recurrent, len(config.recurrent_layers)
        layers = described(config, weights.layers, attention, recurrent)
        mark_captured(layers, captures)
        self.captured = torch.empty(0)  # [passes, captured layers, rows, hidden_size], of a step
        self._alive, self._buffer = (weights, layers), buffer
        step = step_of(config, library, num_threads)
        self._widths = {**widths(layers, config, recurrent), "hidden": step.width}
        self._request = _Decode(
            layers=ctypes.addressof(layers),
            table=weights.table.data_ptr(),
            norm=address(weights.norm),
            num_layers=len(layers),
            num_captured=len(captures),
            block_size=limits.block_size,
            num_groups=limits.num_groups,
            head=described_matrix(weights.head),
            step=step,
            burst_s=BURST_S,
            embed_scale=config.embed_scale,
            softcap=config.logits_softcap,
            bf16_table=weights.table.dtype == torch.bfloat16,
        )
        self._capacity = self._splits = 0
        self._rows: dict[str, np.ndarray] = {}
        self._held: list[tuple[Table, int, SamplingParams]] = []  # with how many rows
        self._lengths: list[int] = []  # context of each row, in tokens
        self._undrawn: list[int] = []  # sequences whose rows the kernels do not draw
        self._draw = CpuDraw(library, num_threads)

    def execute(
        self,
        step: Step,
        tables: Sequence[Table],
        masks_of: Masks | None = None,
        loaded: Mapping[bytes, RowTerms] = NOTHING_LOADED,
        shifts: Sequence[int] = (),
    ) -> list[Sampled] | None:
        """Up to `step.repeats` passes; none follows one that drew a stop token. `tables`: of the
        sequences, as `Guard.check` gives them. `masks_of`: as `Grammars.masks`, for one pass.
        `shifts`: how much lower than its index the position is that a token of each sequence is
        turned by; (): it is the index. None: nothing was done, as some are no decodes."""
        seqs, request = step.seqs, self._request
        if not all(
            len(seq.tokens) == 1 and seq.sample and seq.outputs_from is None for seq in seqs
        ):
            return None
        count = self._place(seqs, tables, shifts)
        lengths = [len(seq.input_tokens) for seq in seqs]
        self._terms = put_terms(request.step, term_rows(seqs, lengths, loaded))
        at, masks = self._rows["draws"]["mask"][:count], None
        at[:] = 0
        if masks_of is not None:
            masks = masks_of(seqs)
            at[:] = masks.ctypes.data + np.arange(count) * masks.strides[0]
        is_single = count > len(seqs) or masks is not None or self._undrawn
        request.max_passes = 1 if is_single else self._most(step)
        self._count(seqs)
        logits = self._buffer("logits", count, request.head.rows)
        request.logits = logits.data_ptr()
        if request.num_captured:
            shape = request.max_passes, request.num_captured, count, request.step.width
            self.captured = self._buffer("captured", shape[0] * shape[1] * count, shape[3])
            request.step.captured = self.captured.data_ptr()
            self.captured = self.captured.view(shape)
        sampled = self._verify(seqs, count) if count > len(seqs) else self._pass(count)
        if self._attention.chooses:
            bounded = self._rows["bounded"][: len(seqs)].tolist()
            for table, num_rows in zip(tables, bounded, strict=True):
                table.num_bounded = num_rows
        if self._undrawn:
            rows = self._rows["query_start"][self._undrawn].tolist()
            own = None if masks is None else masks[rows]
            rest = [seqs[index] for index in self._undrawn]
            found = sample(logits[rows], rest, self._limits.window, self._draw, own)
            for index, each in zip(self._undrawn, found, strict=True):
                sampled[index] = each
        return sampled

    def _pass(self, count: int) -> list[Sampled]:
        """As many passes as may be, over `count` sequences."""
        passes = self._lib.kvr_decode(ctypes.addressof(self._request))
        drawn = self._rows["drawn"][: passes * count].tolist()
        columns = [drawn[row::count] for row in range(count)]
        return [
            Sampled(first, more=tuple(more) if NO_TOKEN not in more else tuple(more[:-1]))
            for first, *more in columns
        ]

    def _count(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Says how often tokens have come, where the kernels penalize them."""
        at, room = self._rows["draws"]["counts"], self._request.max_passes
        for index, seq in enumerate(seqs):
            if seq.sampling.is_penalized and index not in self._undrawn:
                row = self._rows["query_start"][index]
                at[row] = counts_of(seq, self._limits.window, room).address

    def _place(
        self, seqs: Sequence[ScheduledSeq], tables: Sequence[Table], shifts: Sequence[int] = ()
    ) -> int:
        """Fills in the rows of `seqs`, and returns how many they are."""
        count = sum(len(seq.input_tokens) for seq in seqs)
        self._make_room(count, sum(len(seq.input_tokens) * seq.end for seq in seqs))
        self._fill(seqs, tables, count)
        turned = self._rows["rope_positions"][:count]
        turned[:] = self._rows["positions"][:count]
        if any(shifts):
            turned -= np.repeat(shifts, [len(seq.input_tokens) for seq in seqs])
        self._request.step.rows = count
        return count

    def _verify(self, seqs: Sequence[ScheduledSeq], count: int) -> list[Sampled]:
        """One pass over `count` rows. What recurrent layers are given is kept, so that the accepted
        rows can pass them again: only then are states stored."""
        at, step = ctypes.addressof(self._request), self._request.step
        if self._recurrent is not None:
            width = self._widths["projected"]
            kept = self._buffer("kept", self._num_recurrent * count, width)
            step.projected, step.kept = kept.data_ptr(), count * width
        self._lib.kvr_decode(at)
        verified = verify_drafts(seqs, self._rows["drawn"][:count].tolist())
        if self._recurrent is not None:
            counts = np.array([1 + len(each.more) for each in verified], np.int64)
            self._lib.kvr_replay(at, counts.ctypes.data)
            step.projected, step.kept = self._buffers["projected"].data_ptr(), 0
        return verified

    def outputs(self, seqs: Sequence[ScheduledSeq], drawn: Sequence[Sampled]) -> torch.Tensor:
        """[captured layers, N, hidden_size] of the rows that were computed in the last step, and
        not rejected."""
        if not self._request.num_captured:
            return self.captured
        parts, first = list[torch.Tensor](), 0
        for seq, each in zip(seqs, drawn, strict=True):
            count = 1 + len(each.more)
            if seq.draft_tokens:
                parts.append(self.captured[0, :, first : first + count])
            else:
                parts.append(self.captured[:count, :, first].transpose(0, 1))
            first += len(seq.input_tokens)
        return torch.cat(parts, dim=1)

    def _most(self, step: Step) -> int:
        """Passes, whatever the step says, of which none leaves a block that was looked at."""
        most, size, longest = step.repeats, self._limits.block_size, self._limits.max_model_len
        if most > 1:
            most = min(most, *(min(size - s.start % size, longest - s.start) for s in step.seqs))
        return most

    def _fill(self, seqs: Sequence[ScheduledSeq], tables: Sequence[Table], count: int) -> None:
        """Fills in `count` rows for the kernel."""
        rows, held, request = self._rows, self._held, self._request
        request.num_seqs = len(seqs)
        rows["tokens"][:count] = [token for seq in seqs for token in seq.input_tokens]
        rows["positions"][:count] = [at for seq in seqs for at in range(seq.start, seq.end)]
        lengths = [len(seq.input_tokens) for seq in seqs]
        if self._attention.chooses:
            rows["starts"][: len(seqs)] = starts_of(seqs)
            rows["bounded"][: len(seqs)] = bounded_of(seqs, tables, self._limits.block_size)
        is_new = lengths != self._lengths  # rows are others'
        if is_new:
            self._lengths = lengths
            rows["query_len"][: len(seqs)] = lengths
            rows["query_start"][: len(seqs)] = np.cumsum(lengths) - lengths
        both = zip(seqs, tables, strict=True)
        self._held = [(table, table.num_rows, seq.sampling) for seq, table in both]
        for index, (table, num_rows, sampling) in enumerate(self._held):
            old = held[index] if index < len(held) else (None, 0, None)
            first = old[1] if old[0] is table else 0
            if first < num_rows:
                table.write(rows["block_tables"][:, index], first, num_rows)
            is_new = is_new or old[2] is not sampling
        undrawn = [index for index, seq in enumerate(seqs) if not is_drawn(seq)]
        if is_new or undrawn != self._undrawn:
            self._undrawn = undrawn
            rows["draws"][:count] = [draw_of(seq) for seq in seqs for _ in seq.input_tokens]
            rows["draws"]["temperature"][rows["query_start"][undrawn]] = NOT_DRAWN
            stops = [seq.sampling.stop_token_ids for seq in seqs]
            self._stops = np.array([token for each in stops for token in each], np.int64)
            rows["stop_ends"][: len(seqs)] = np.cumsum([len(each) for each in stops])
            request.stops = self._stops.ctypes.data

    def _make_room(self, count: int, positions: int) -> None:
        """For `count` rows that meet so many positions before their own altogether."""
        splits = positions // self._attention.split_keys + 3 * count  # sinks, and two begun
        if count <= self._capacity and splits <= self._splits:
            return
        if count > self._capacity:
            self._capacity = max(2 * self._capacity, count)
        if splits > self._splits:
            self._splits = max(2 * self._splits, splits)
        count = self._capacity
        limits, request = self._limits, self._request
        request.capacity = count
        request.table_stride = -(-limits.max_model_len // limits.block_size)
        self._rows = {
            "tokens": np.zeros(count, np.int64),
            "positions": np.zeros(count, np.int64),
            "rope_positions": np.zeros(count, np.int64),
            "slots": np.zeros((request.num_groups, count), np.int64),
            "context_len": np.zeros(count, np.int32),
            "query_start": np.zeros(count, np.int32),
            "query_len": np.zeros(count, np.int32),
            "block_tables": np.zeros((request.num_groups, count, request.table_stride), np.int32),
            "draws": np.zeros(count, DRAW),
            "drawn": np.zeros(limits.block_size * count, np.int64),
            "stop_ends": np.zeros(count, np.int64),
            "starts": np.zeros(count, np.int32),
            "bounded": np.zeros(count, np.int32),
        }
        at = self._attention.hold(self._rows, count, self._splits)
        self._attentions, request.num_attentions = (ctypes.c_void_p * len(at))(*at), len(at)
        request.attentions = ctypes.addressof(self._attentions)
        if self._recurrent is not None:
            request.states, request.num_state_groups = self._recurrent.hold(count)
        for name, array in self._rows.items():
            if name not in ("query_start", "starts", "bounded"):
                setattr(request, name, array.ctypes.data)
        rows = count + request.step.threads * ROW_BLOCK_STEP
        self._buffers = {name: torch.empty(rows * each) for name, each in self._widths.items()}
        for name, buffer in self._buffers.items():
            setattr(request.step, name, buffer.data_ptr())
        self._held, self._lengths = [], []
