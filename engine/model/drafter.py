"""Draft tokens of a model: a head over the hidden states of the model that is served, Medusa's
heads, or a smaller model. They decide how fast tokens come, never which.

Life of a step: `draft` proposes tokens after those that decodes have; the pass verifies them.
`keep` makes what the drafter keeps of all tokens that were computed, prompts' too, in their blocks,
when `draft_slots` says so. So it needs no memory of its own: a prefix hit, a hand-over or a block
from disk brings what it goes on from. What it made of draft tokens is overwritten then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.engine.model.batch import Batch, Limits, Table
from kvrelay.engine.model.checkpoint.draft_weights import DraftWeights, load_head
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.draft import CpuDraft
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.draft_config import MEDUSA, MODEL, MTP, DraftConfig
from kvrelay.engine.model.draft_slots import Part, Tables
from kvrelay.engine.model.ops import TORCH_DTYPES, Ops, pool_view
from kvrelay.engine.model.sampling.sampler import Draw
from kvrelay.engine.model.weights import Weights
from kvrelay.engine.step import NO_TOKEN, ScheduledSeq, Step

MAX_AT_ONCE = 128  # rows whose keys and values are made in one call
MakeOps = Callable[[ModelConfig, torch.Tensor], Ops]


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is drafted for."""

    path: Path
    config: ModelConfig
    weights: Weights
    ops: Ops
    limits: Limits


class Drafter(Protocol):
    captured: tuple[int, ...]  # layers of the model whose outputs it needs

    def draft(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> list[list[int]]:
        """Up to `num_drafts` tokens for each of `seqs`, decodes. tables: as `Guard.check` gives
        them."""
        ...

    def keep(self, parts: Sequence[Part]) -> None:
        """Make slots of tokens that were computed, and accepted."""
        ...


def open_drafter(
    config: DraftConfig, spec: KVSpec, pool: torch.Tensor, model: Served, draw: Draw, ops: MakeOps
) -> Drafter:
    """pool: uint8 [num_blocks, bytes_per_block]; ops: operations over layers of another shape in a
    pool of their own. Raises ModelError."""
    own, region = config.kv_spec(spec), pool[:, spec.layer_bytes :]
    limits = replace(model.limits, window=0, num_sinks=0, group_windows=(), num_state_groups=0)
    model = replace(model, limits=limits)
    if config.kind == MODEL:
        assert own is not None
        assert config.layers is not None
        made = ops(config.layers, pool_view(region, own))
        weights = load_weights(config.path, config.layers, made, lambda _: None)
        return ModelDrafter(Decoder(config.layers, weights, made), model, draw)
    kind = TORCH_DTYPES[config.tail_dtype(spec.dtype)]
    at = 0 if own is None else own.layer_bytes
    size = config.tail_size * DTYPE_BYTES[config.tail_dtype(spec.dtype)]
    tails = region[:, at : at + size].view(kind)
    made = model.ops
    if own is not None and config.layers is not None:
        made = ops(config.layers, pool_view(region, own))
    weights_of = load_head(config, model.path, model.config, made)
    kept = Tails(tails, spec.block_size)
    if config.kind == MEDUSA:
        return MedusaDrafter(config, weights_of, kept, model, draw)
    made_of = MtpDrafter if config.kind == MTP else HeadDrafter
    return made_of(config, weights_of, made, kept, model, draw)


class Tails:
    """In each block the hidden state, as a drafter reads it, of its last token that is computed.

    Rows are copied by NumPy: torch wakes its threads for some of them, which wait for a core that
    the kernels' own threads have."""

    def __init__(self, tails: torch.Tensor, block_size: int) -> None:
        self.dtype, self._size = tails.dtype, block_size
        self._known: dict[str, tuple[int, np.ndarray]] = {}  # states that are in no block
        self._bytes = tails.view(torch.uint8).numpy()

    def before(self, shares: Sequence[ScheduledSeq], tables: Tables) -> torch.Tensor:
        """[S, size]: the states before the first token of each; zeros before all tokens."""
        return torch.from_numpy(self._before(shares, tables)).view(self.dtype)

    def _before(self, shares: Sequence[ScheduledSeq], tables: Tables) -> np.ndarray:
        at = [
            int(table.blocks[0, (share.start - 1) // self._size]) if share.start else -1
            for share, table in zip(shares, tables, strict=True)
        ]
        found = self._bytes[at]
        if -1 in at:
            found[[place < 0 for place in at]] = 0
        for index, share in enumerate(shares if self._known else ()):
            start, state = self._known.get(share.request_id, (-1, found[index]))
            if start == share.start:
                found[index] = state
        return found

    def split(
        self, parts: Sequence[Part], tables: Tables, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states: of the outputs of `parts`. Returns [N, size] twice, for their tokens: the states
        before each, and their own. A part without tokens says what is before its position."""
        rows = states.view(torch.uint8).numpy()
        before, own, firsts, at = list[int](), list[int](), list[int](), 0
        self._known = {}
        for index, part in enumerate(parts):
            count = len(part.tokens)
            if part.has_before:
                if not count:
                    self._known[part.seq.request_id] = part.start, rows[at].copy()
                before += range(at, at + count)
                at += 1
            elif count:
                firsts.append(index)
                before += [-1, *range(at, at + count - 1)]
            own += range(at, at + count)
            at += count
        if not before:
            return states[:0], states[:0]
        found = rows[before]
        if firsts:
            shares = [asked(parts[i].seq, (), parts[i].start) for i in firsts]
            places = [place for place, row in enumerate(before) if row < 0]
            found[places] = self._before(shares, [tables[i] for i in firsts])
        return torch.from_numpy(found).view(self.dtype), states[own]

    def keep(self, shares: Sequence[ScheduledSeq], tables: Tables, states: torch.Tensor) -> None:
        """states: [N, size], of all their tokens."""
        blocks, rows, first = [], [], 0
        for share, table in zip(shares, tables, strict=True):
            end = share.start + len(share.tokens)
            for row in range(share.start // self._size, -(-end // self._size)):
                blocks.append(int(table.blocks[0, row]))
                rows.append(first + min(end, (row + 1) * self._size) - 1 - share.start)
            first += len(share.tokens)
        self._bytes[blocks] = states.view(torch.uint8).numpy()[rows]


def asked(
    seq: ScheduledSeq, tokens: Sequence[int], start: int, sample: bool = True
) -> ScheduledSeq:
    """`seq` with other tokens, for a pass of the drafter."""
    own = replace(seq, tokens=[*tokens], start=start, sample=sample)
    own.draft_tokens, own.num_drafts, own.outputs_from, own.need = [], 0, None, None
    return own


class _Stepwise:
    """Proposes one token after the other."""

    def __init__(self, model: Served, draw: Draw) -> None:
        self._model, self._draw = model, draw

    def _first_tables(self, tables: Tables) -> list[Table]:
        """Blocks of the first group of layers: they have what the drafter keeps."""
        return [table.first_group() for table in tables]

    def _begin(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> torch.Tensor | None:
        """What the first pass reads beside tokens, a row for each."""
        return None

    def _pass(
        self, batch: Batch, states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What the next pass reads, and logits float32 [S, vocab_size]."""
        raise NotImplementedError

    def draft(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in seqs]
        tables, live = self._first_tables(tables), [*range(len(seqs))]
        states, drawn, batch, held = self._begin(seqs, tables), [0], None, live
        while True:
            going = [at for at, i in enumerate(live) if len(drafts[i]) < seqs[i].num_drafts]
            if len(going) < len(live):
                states = None if states is None else states[going]
                live = [live[at] for at in going]
            if not live:
                return drafts
            ends = any(
                self._at(seqs[i], drafts[i]) % self._model.limits.block_size == 0 for i in live
            )
            if batch is not None and live == held and not ends:
                batch = _advanced(batch, drawn)
            else:  # others, or the next block of one
                shares = [
                    asked(seqs[i], [*seqs[i].tokens, *drafts[i]][-1:], self._at(seqs[i], drafts[i]))
                    for i in live
                ]
                batch, held = self._batch(shares, [tables[i] for i in live]), live
            states, logits = self._pass(batch, states)
            drawn = self._draw(logits, [_after(seqs[i], drafts[i]) for i in live])
            kept = [at for at, token in enumerate(drawn) if token != NO_TOKEN]
            for at in kept:
                drafts[live[at]].append(drawn[at])
            if len(kept) < len(live):
                states = None if states is None else states[kept]
                live = [live[at] for at in kept]

    @staticmethod
    def _at(seq: ScheduledSeq, draft: Sequence[int]) -> int:
        return seq.start + len(seq.tokens) - 1 + len(draft)

    def _batch(self, shares: Sequence[ScheduledSeq], tables: Tables) -> Batch:
        limits = self._model.limits
        return Batch.from_step(Step(0, [*shares]), limits, torch.device("cpu"), tables)


class ModelDrafter(_Stepwise):
    """A smaller model of the same vocabulary, whose KV is in the model's blocks."""

    captured: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder, model: Served, draw: Draw) -> None:
        super().__init__(model, draw)
        self._decoder = decoder

    def _pass(self, batch: Batch, states: torch.Tensor | None) -> tuple[None, torch.Tensor]:
        return None, self._decoder.forward(batch)

    def keep(self, parts: Sequence[Part]) -> None:
        parts = [part for part in parts if part.tokens]
        if parts:
            tables = self._first_tables([part.table for part in parts])
            self._decoder.hidden_states(self._batch(_shares(parts), tables))


class _ByStates(_Stepwise):
    """Reads the model's hidden states."""

    def __init__(
        self, config: DraftConfig, weights: DraftWeights, tails: Tails, model: Served, draw: Draw
    ) -> None:
        super().__init__(model, draw)
        self.captured, self._config = config.captured, config
        self._weights, self._tails = weights, tails

    def _begin(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> torch.Tensor:
        last = [asked(each, each.tokens[-1:], self._at(each, ())) for each in seqs]
        return self._tails.before(last, tables).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return self._model.weights.norm.dtype

    def _states(self, outputs: torch.Tensor) -> torch.Tensor:
        """As they are kept, so that a later step reads what this one does."""
        weights, ops = self._weights, self._model.ops
        if weights.is_fused:
            states = self._linear(outputs.transpose(0, 1).flatten(1), weights.fc)
        else:
            states = outputs[-1]
            if weights.norms_states:
                states = ops.rms_norm(states.contiguous(), self._model.weights.norm)
        return states.to(self._tails.dtype).contiguous()

    def _linear(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        return self._model.ops.linear(x.contiguous(), matrix)

    def _logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        """[S, vocab_size] float32; a token that the drafter does not know has -inf."""
        model, known = self._model, self._weights.tokens
        if head is None:
            logits = self._linear(hidden, model.weights.head).float()
        else:
            logits = self._linear(hidden, head).float()
        if cap := model.config.logits_softcap:
            logits = model.ops.cap(logits, cap)
        if known is None:
            return logits
        whole = torch.full((len(logits), model.config.vocab_size), -torch.inf)
        whole[:, known] = logits
        return whole


class HeadDrafter(_ByStates):
    """Has a layer, over tokens and the hidden states before them (EAGLE: Li et al. 2024, 2025)."""

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        ops: Ops,
        tails: Tails,
        model: Served,
        draw: Draw,
    ) -> None:
        super().__init__(config, weights, tails, model, draw)
        self._ops = ops
        self._whole: CpuDraft | None = None
        if isinstance(ops, CpuOps):
            served = model.weights, model.config
            self._whole = CpuDraft(*ops.parts(model.limits), weights, served, ops.buffer)

    def draft(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> list[list[int]]:
        if self._whole is None:
            return super().draft(seqs, tables)
        tables = self._first_tables(tables)
        shares = [asked(seq, seq.tokens[-1:], self._at(seq, ())) for seq in seqs]
        for share, seq in zip(shares, seqs, strict=True):
            share.num_drafts = seq.num_drafts
        return self._whole.propose(shares, tables, self._begin(seqs, tables))

    def keep(self, parts: Sequence[Part]) -> None:
        tables = self._first_tables([part.table for part in parts])
        shares, states = _shares(parts), self._states(_outputs(parts))
        before, states = self._tails.split(parts, tables, states)
        if any(not share.tokens for share in shares):
            tables = [table for table, each in zip(tables, shares, strict=True) if each.tokens]
            shares = [share for share in shares if share.tokens]
        if not shares:
            return
        if self._whole is not None and len(states) <= MAX_AT_ONCE:
            self._whole.keep(shares, tables, before)
        else:
            self._write(self._batch(shares, tables), before.to(self._dtype))
        self._tails.keep(shares, tables, states)

    def _write(self, batch: Batch, before: torch.Tensor) -> None:
        self._ops.begin(batch)
        _, x = self._inputs(batch.tokens, before)
        self._ops.rope_write(self._ops.linear(x, self._weights.qkv), 0, None, None)

    def _pass(self, batch: Batch, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert states is not None
        ops, weights = self._ops, self._weights
        ops.begin(batch)
        hidden, x = self._inputs(batch.tokens, states)
        qkv = ops.linear(x, weights.qkv)
        ops.rope_write(qkv, 0, None, None)
        ops.add_linear(hidden, ops.attention(qkv, 0), weights.out)
        assert weights.mlp_norm is not None
        gated = ops.gated(ops.rms_norm(hidden, weights.mlp_norm), weights.gate_up)
        ops.add_linear(hidden, gated, weights.down)
        x = hidden if weights.norm is None else ops.rms_norm(hidden, weights.norm)
        return hidden, self._logits(x, weights.heads[0])

    def _inputs(
        self, tokens: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what is projected to queries, keys and values."""
        ops, weights, model = self._ops, self._weights, self._model
        table = model.weights.table if weights.table is None else weights.table
        embedded, states = model.ops.embed(table, tokens), states.contiguous()
        embedded *= model.config.embed_scale
        if weights.embed_norm is not None:
            embedded = ops.rms_norm(embedded, weights.embed_norm).clone()
        if weights.is_fused:
            assert weights.embed_norm is not None
            assert weights.state_norm is not None
            normed = ops.rms_norm(states, weights.state_norm).clone()
            hidden = normed if weights.adds_normed else states
            return hidden.clone(), torch.cat((embedded, normed), dim=1)
        if weights.state_norm is not None:
            states = ops.rms_norm(states, weights.state_norm)
        hidden = ops.linear(torch.cat((embedded, states), dim=1), weights.fc)
        if weights.input_norm is None:
            return hidden, hidden
        return hidden, ops.rms_norm(hidden, weights.input_norm)


class MtpDrafter(HeadDrafter):
    """Has the layer that the model was trained with to predict a token further ahead, of its own
    layers' kind (DeepSeek-AI 2024). It also drafts what comes behind that, from its own output."""

    def __init__(self, config: DraftConfig, weights: DraftWeights, ops: Ops, *more: Any) -> None:
        super().__init__(config, weights, ops, *more)
        assert config.layers is not None
        assert weights.layer is not None
        assert weights.norm is not None
        own = replace(self._model.weights, layers=(weights.layer,), norm=weights.norm)
        self._decoder = Decoder(config.layers, own, ops)

    def _write(self, batch: Batch, before: torch.Tensor) -> None:
        self._decoder.passed(self._inputs(batch.tokens, before)[0], batch)

    def _pass(self, batch: Batch, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert states is not None
        passed = self._decoder.passed(self._inputs(batch.tokens, states)[0], batch).clone()
        return passed, self._logits(passed, None)


class MedusaDrafter(_ByStates):
    """Heads over the same hidden state, each for a token further ahead (Cai et al. 2024)."""

    def keep(self, parts: Sequence[Part]) -> None:
        tables = self._first_tables([part.table for part in parts])
        _, states = self._tails.split(parts, tables, self._states(_outputs(parts)))
        there = [index for index, part in enumerate(parts) if part.tokens]
        if there:
            parts, tables = [parts[i] for i in there], [tables[i] for i in there]
            self._tails.keep(_shares(parts), tables, states)

    def draft(self, seqs: Sequence[ScheduledSeq], tables: Tables) -> list[list[int]]:
        states = self._begin(seqs, self._first_tables(tables))
        drafts: list[list[int]] = [[] for _ in seqs]
        heads = zip(self._weights.blocks, self._weights.heads, strict=True)
        for number, (blocks, head) in enumerate(heads):
            live = [i for i, seq in enumerate(seqs) if seq.num_drafts > len(drafts[i]) == number]
            if not live:
                break
            hidden = states[live]
            for block in blocks:
                hidden = hidden + F.silu(self._linear(hidden, block))
            logits = self._logits(hidden, head)
            drawn = self._draw(logits, [_after(seqs[i], drafts[i]) for i in live])
            for i, token in zip(live, drawn, strict=True):
                drafts[i] += [token] if token != NO_TOKEN else []
        return drafts


def _advanced(batch: Batch, tokens: Sequence[int]) -> Batch:
    """The batch of decodes after `batch`, in which these were drawn. They stay in their blocks."""
    return replace(
        batch,
        tokens=torch.tensor(tokens),
        positions=batch.positions + 1,
        slots=batch.slots + 1,
        context_len=batch.context_len + 1,
        spans=tuple((first, count, end + 1) for first, count, end in batch.spans),
    )


def _after(seq: ScheduledSeq, draft: Sequence[int]) -> ScheduledSeq:
    return replace(seq, context=[*seq.context, *draft]) if draft else seq


def _shares(parts: Sequence[Part]) -> list[ScheduledSeq]:
    return [asked(part.seq, part.tokens, part.start, sample=False) for part in parts]


def _outputs(parts: Sequence[Part]) -> torch.Tensor:
    return torch.cat([part.outputs for part in parts], dim=1)
