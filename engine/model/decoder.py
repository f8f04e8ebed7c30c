"""One decoder for all families. They differ in their config and weights only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import SHORT_CONVOLUTION
from kvrelay.engine.model.terms import TermRows, add_terms, added_to_gated
from kvrelay.engine.model.weights import (
    AttentionWeights,
    ExpertsNorms,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    RecurrentWeights,
    Weights,
)

Kept = tuple[torch.Tensor, tuple[torch.Tensor, ...], RecurrentWeights, int]
"""What `Decoder._mix` was given."""


class Decoder:
    """Stateless but for the KV pool that `ops` writes. Owned by one runner."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._growth: torch.Tensor | None = None  # what this step's queries grow by, [N, 1]
        self._inputs: torch.Tensor | None = None  # [num_layers, N, layer_inputs]
        self._terms: tuple[TermRows, ...] = ()  # in this step
        self._selects = False  # some context of this step is longer than what tokens attend to
        self._selected: Any = None  # positions that the last layer with an indexer chose
        self._captures: tuple[int, ...] = ()  # layers
        # Their outputs for all rows of the last batch, each [N, hidden_size].
        self.captured: list[torch.Tensor] = []
        self.num_passed = 0  # layers, one by one
        self._kept: list[Kept] | None = None  # what the last batch gave; None: it is not kept

    def capture(self, layers: tuple[int, ...]) -> None:
        """From now on keep what these give for every row of a batch, in `captured`."""
        self._captures = layers
        self._ops.capture(layers)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of `batch.sample_rows`, float32 [R, vocab_size], valid until the next call."""
        return self.logits(self.hidden_states(batch))

    def hidden_states(self, batch: Batch, *, keeps: bool = False) -> torch.Tensor:
        """Returns those of `batch.sample_rows` after the last norm, [R, hidden_size], valid until
        the next call. keeps: what recurrent layers are given, for `replay`."""
        ops, weights = self._ops, self._weights
        self._kept = [] if keeps else None
        hidden = ops.embed(weights.table, batch.tokens)  # [N, hidden_size]
        if self._config.embed_scale != 1.0:
            # Rounded as the residual stream is: models in bfloat16 were trained with that.
            hidden *= torch.tensor(self._config.embed_scale, dtype=hidden.dtype).item()
        self._inputs = self._inputs_of(hidden, batch)
        if batch.images is not None:
            batch.images.put(hidden)
        return self.passed(hidden, batch)

    def passed(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """As `hidden_states`, of rows [N, hidden_size] in place of tokens; they are overwritten."""
        ops, weights = self._ops, self._weights
        ops.begin(batch)
        self._terms, self._growth = batch.terms, self._growth_of(batch)
        indexer, self._selected = self._config.indexer, None
        self._selects = indexer is not None and any(end > indexer.topk for *_, end in batch.spans)
        if self._captures:
            hidden = self._pass_all(hidden, batch)
            return ops.rms_norm(hidden.index_select(0, batch.sample_rows), weights.norm)
        sampled = None
        if batch.images is None or not batch.images.has_embeddings:
            sampled = ops.run_layers(hidden, weights.layers, batch)
        if sampled is None:
            sampled = self._run_layers(hidden, batch)
        return ops.rms_norm(sampled, weights.norm)

    def replay(self, batch: Batch, rows: torch.Tensor) -> None:
        """Recurrent layers pass `rows` of the last batch again, which are all rows of `batch`, and
        store the states that it says."""
        kept, self._kept = self._kept, None
        assert kept is not None
        self._ops.begin(batch)
        for x, numbers, layer, index in kept:
            self._mix(x[rows], tuple(each[rows] for each in numbers), layer, index)

    def _pass_all(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """All rows to the end, with what is to be captured on the way."""
        rows = torch.arange(len(hidden), device=hidden.device)
        whole, self.captured = replace(batch, sample_rows=rows), []
        passed = self._ops.run_layers(hidden, self._weights.layers, whole)
        if passed is None:
            return self._run_layers(hidden, whole)
        self.captured = self._ops.captured(len(hidden))
        return passed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size], valid until the next call. hidden: as of `hidden_states`."""
        ops, cap = self._ops, self._config.logits_softcap
        logits = ops.linear(hidden, self._weights.head).float()
        return ops.cap(logits, cap) if cap else logits

    def _run_layers(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        c, rows = self._config, batch.sample_rows
        is_whole = len(rows) == len(hidden)  # all of them, in order
        # Behind the last layer with keys and values of its own, other rows leave nothing.
        selects = not is_whole and not c.changes_queries and rows.device.type == "cpu"
        for index, layer in enumerate(self._weights.layers):
            if layer.attention is not None:
                self._attend(hidden, layer, layer.attention, index)
            if layer.mlp is not None or layer.experts is not None:
                self._feed_forward(hidden, layer)
            self._end(hidden, layer, index)
            if batch.images is not None:
                batch.images.add_behind(index, hidden)
            self.num_passed += 1
            if index in self._captures:
                self.captured.append(hidden.clone())
            if selects and index == c.last_kv_layer < c.num_layers - 1:
                if not len(rows):
                    break
                hidden, is_whole = hidden.index_select(0, rows), True
                if self._inputs is not None:
                    self._inputs = self._inputs.index_select(1, rows)
                batch = batch.sampled()
                self._ops.begin(batch)
                self._terms = batch.terms
        return hidden if is_whole else hidden.index_select(0, rows)

    def _attend(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        attention: AttentionWeights | LatentWeights | RecurrentWeights,
        index: int,
    ) -> None:
        ops = self._ops
        x = ops.rms_norm(hidden, layer.input_norm)
        if isinstance(attention, AttentionWeights):
            qkv = self._linear(x, attention.qkv)  # [N, (num_heads + 2 * num_kv_heads) * head_dim]
            q_norm, k_norm = attention.q_norm, attention.k_norm
            if self._config.changes_queries:
                q_norm, k_norm = self._change_queries(qkv, q_norm, k_norm, index)
            ops.rope_write(qkv, index, q_norm, k_norm)
            attended = ops.attention(qkv, index, attention.sinks)  # [N, num_heads * head_dim]
            if attention.gate is not None:
                attended = ops.gate(attended, self._linear(x, attention.gate))
        elif isinstance(attention, LatentWeights):
            attended = self._attend_latents(x, attention, index)
        else:
            attended = self._recur(x, attention, index)
        self._add(hidden, attended, attention.out, layer.attention_out_norm)
        if layer.beside is not None:
            self._add(hidden, self._recur(x, layer.beside, index), layer.beside.out, None)

    def _inputs_of(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """What each layer has of each token beside the hidden rows, [num_layers, N, layer_inputs]:
        half of it from a table, half from the token's embedding."""
        ops, weights, each = self._ops, self._weights.inputs, self._config.layer_inputs
        if weights is None:
            return None
        found = ops.embed(weights.table, batch.tokens)
        found *= torch.tensor(each**0.5, dtype=found.dtype).item()
        made = ops.linear(hidden, weights.project) * self._config.hidden_size**-0.5
        found += ops.rms_norm(made.view(-1, each), weights.norm).view_as(found)
        return found.mul_(0.5**0.5).view(len(hidden), -1, each).transpose(0, 1).contiguous()

    def _end(self, hidden: torch.Tensor, layer: LayerWeights, index: int) -> None:
        if layer.inputs is not None:
            assert self._inputs is not None
            gate = self._linear(hidden, layer.inputs.gate)
            x = self._ops.activated(gate, self._inputs[index])
            self._add(hidden, x, layer.inputs.project, layer.inputs.norm)
        if layer.scale != 1.0:
            hidden *= layer.scale

    def _growth_of(self, batch: Batch) -> torch.Tensor | None:
        c = self._config
        if not c.query_growth:
            return None
        turns = ((batch.positions + c.growth_unrotated) // c.query_growth_length).float()
        return (1.0 + c.query_growth * torch.log1p(turns)).unsqueeze(1)

    def _change_queries(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        index: int,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """In place, and keys where the norm is over all heads. Returns the norms of each head that
        are still to be done."""
        queries, keys = self._ops.queries_and_keys(qkv)
        if self._config.norms_all_heads:
            assert q_norm is not None
            assert k_norm is not None
            queries.copy_(self._ops.norm_all_heads(queries, q_norm))
            keys.copy_(self._ops.norm_all_heads(keys, k_norm))
            q_norm = k_norm = None
        grows = not self._config.growth_unrotated or self._config.rope(index) is None
        if self._growth is not None and grows:
            queries *= self._growth.to(queries.dtype)
        return q_norm, k_norm

    def _attend_latents(self, x: torch.Tensor, layer: LatentWeights, index: int) -> torch.Tensor:
        """Scores are taken in the latents' space, unless the set expands this step's latents: of
        each head, `key_up` is applied to the query and `value_up` to the result, so keys and values
        are not expanded."""
        ops, latent = self._ops, self._config.latent
        assert latent is not None
        compressed = self._linear(x, layer.compress)  # [N, (q_rank) + rank + rope_dim]
        indexer, index_keys, weights = layer.indexer, None, None
        if indexer is not None:
            index_keys = ops.linear(x, indexer.keys)
            weights = ops.exact_linear(x, indexer.weights) if self._selects else None
        if latent.scale != 1.0:
            compressed[:, : (latent.q_rank or 0) + latent.rank] *= latent.scale
        kv = compressed[:, latent.q_rank or 0 :].contiguous()
        if layer.q_norm is not None:
            x = ops.rms_norm(compressed[:, : latent.q_rank].contiguous(), layer.q_norm)
        queries = self._linear(x, layer.queries)  # [N, num_heads * (nope_dim + rope_dim)]
        if indexer is not None and index_keys is not None:
            index_queries = ops.linear(x, indexer.queries) if self._selects else None
            index_keys = ops.layer_norm(index_keys, indexer.norm, indexer.norm_bias)
            ops.index_write(index_queries, index_keys, index)
            if index_queries is not None and weights is not None:
                self._selected = ops.select(index_queries, weights, index)
        if self._growth is not None:
            queries = queries * self._growth.to(queries.dtype)
        queries = queries.view(len(x), -1, latent.nope_dim + latent.rope_dim)
        kv[:, : latent.rank] = ops.rms_norm(kv[:, : latent.rank].contiguous(), layer.kv_norm)
        q_rope = queries[:, :, latent.nope_dim :].contiguous()
        ops.latent_write(q_rope, kv, index)
        if self._selected is None:
            expanded = ops.expanded_attention(queries, q_rope, layer.key_up, layer.value_up, index)
            if expanded is not None:
                return expanded.flatten(1)
        absorbed = ops.per_head(queries[:, :, : latent.nope_dim], layer.key_up)
        both = torch.cat((absorbed, q_rope), dim=-1)
        attended = ops.latent_attention(both, index, self._selected)
        return ops.per_head(attended, layer.value_up).flatten(1)  # [N, num_heads * value_dim]

    def _recur(self, x: torch.Tensor, layer: RecurrentWeights, index: int) -> torch.Tensor:
        """What a recurrent layer has in place of attention: [N, in] of its output projection."""
        ops, shape = self._ops, self._config.recurrent
        assert shape is not None
        rows = self._linear(x, layer.project)
        if shape.kind == SHORT_CONVOLUTION:
            before, after, x = rows.chunk(3, dim=1)
            return self._mix(before * x, (), layer, index).mul_(after)
        channels, numbers = shape.conv_channels, rows.shape[1] - shape.num_heads
        qkv, decay = rows[:, :channels], rows[:, numbers:]
        if layer.decay_up is None:
            gate = rows[:, channels : channels + shape.width]
            beta = rows[:, channels + shape.width :][:, : shape.num_heads]
        else:
            beta, (low_decay, low_gate) = decay, rows[:, channels:numbers].chunk(2, dim=1)
            decay = self._linear(low_decay, layer.decay_up)
            gate = self._linear(low_gate, layer.gate_up)
        said = self._mix(qkv, (decay, beta), layer, index)
        return ops.gated_norm(said, gate, layer.norm)

    def _mix(
        self,
        x: torch.Tensor,
        numbers: tuple[torch.Tensor, ...],
        layer: RecurrentWeights,
        index: int,
    ) -> torch.Tensor:
        """What states are passed by: the convolution of x and, with a decay and a beta of each row,
        the recurrence behind it."""
        ops = self._ops
        if self._kept is not None:
            self._kept.append((x.clone(), tuple(each.clone() for each in numbers), layer, index))
        qkv = ops.convolve(x, layer, index, silu=bool(numbers))
        return ops.delta_rule(DeltaRows(qkv, *numbers), layer, index) if numbers else qkv

    def _feed_forward(self, hidden: torch.Tensor, layer: LayerWeights) -> None:
        if layer.experts is not None and layer.experts.norms is not None:
            self._feed_forward_beside(hidden, layer, layer.experts, layer.experts.norms)
            return
        x = self._ops.rms_norm(hidden, layer.mlp_norm)
        if layer.experts is not None:
            self._ops.add_experts(hidden, x, layer.experts)
        if layer.mlp is not None:
            gated = self._gated(x, layer.mlp.gate_up)
            if layer.mlp.gate is not None:
                gated = self._ops.gate(gated, self._linear(x, layer.mlp.gate))
            self._add(hidden, gated, layer.mlp.down, layer.mlp_out_norm)

    def _feed_forward_beside(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        experts: ExpertsWeights,
        norms: ExpertsNorms,
    ) -> None:
        """An MLP and experts, each with norms of its own."""
        ops, mlp = self._ops, layer.mlp
        assert mlp is not None
        assert layer.mlp_out_norm is not None
        gated = self._gated(ops.rms_norm(hidden, layer.mlp_norm), mlp.gate_up)
        out = ops.rms_norm(self._linear(gated, mlp.down), norms.mlp_output).clone()
        routed, made = ops.rms_norm(hidden, norms.router).clone(), torch.zeros_like(hidden)
        ops.add_experts(made, ops.rms_norm(hidden, norms.input), experts, routed)
        out += ops.rms_norm(made, norms.output)
        hidden += ops.rms_norm(out, layer.mlp_out_norm)

    def _add(
        self, hidden: torch.Tensor, x: torch.Tensor, matrix: object, norm: torch.Tensor | None
    ) -> None:
        if norm is None:
            self._ops.add_linear(hidden, x, matrix)
            add_terms(self._terms, hidden, x, matrix)
        else:
            hidden += self._ops.rms_norm(self._linear(x, matrix), norm)

    def _linear(self, x: torch.Tensor, matrix: object) -> torch.Tensor:
        out = self._ops.linear(x, matrix)
        add_terms(self._terms, out, x, matrix)
        return out

    def _gated(self, x: torch.Tensor, matrix: object) -> torch.Tensor:
        return self._ops.gated(x, matrix, added_to_gated(self._terms, x, matrix))
