"""Tensor parallelism seen from the decoder: the operations of one rank.

Weights arrive whole and are cut where they are prepared, by the role of the matrix. Projections
into heads and MLPs are cut by rows, so each rank has its own results; projections back are cut by
columns, and their results are summed over the ranks: one all-reduce after attention, one after the
MLP. The head is cut by rows of the vocabulary, and rank 0 gathers the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.parallel.link import MakeCompanion
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.stacked import GROUP, Packed, Stacked, of_halves, widened
from kvrelay.engine.model.state_layout import MAMBA2
from kvrelay.engine.model.terms import Term, TermRows

COLLECTIVE_TIMEOUT_S = 60.0
"""A rank that the others wait for this long counts as dead. The death of a process is noticed at
once, by its connections."""
LOAD_TIMEOUT_S = 600.0  # for a rank to read its weights, after the first has


FindModel = Callable[[], Path]
"""Where the checkpoint is on the machine that asks. Can be pickled. Raises ModelError."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks find each other."""

    place: str  # a file, or HOST:PORT
    own_host: str = "127.0.0.1"  # by which a rank is reached by the others
    listener: Any = None  # what listens there, in the leader's process

    @staticmethod
    def over_network(host: str) -> Meeting:
        """At `host`, by which this machine is reached by those of all ranks. Raises ModelError."""
        c10d: Any = dist
        try:
            listener = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ModelError(f"ranks cannot meet at {host}: {why}") from error
        return Meeting(f"{host}:{listener.port}", host, listener)

    def seen_from(self, host: str) -> Meeting:
        """For ranks of the machine that is reached by `host`."""
        return replace(self, own_host=host, listener=None)

    def store(self, size: int) -> Any:
        """Raises RuntimeError if ranks do not meet."""
        c10d: Any = dist  # whose stubs leave these out
        if self.listener is not None:
            return self.listener
        host, _, port = self.place.rpartition(":")
        if not host:
            return c10d.FileStore(self.place, size)
        return c10d.TCPStore(host, int(port), is_master=False)


class Group:
    """The ranks of one worker, from inside one of them. Collectives are called by all ranks, in
    the same order, from the thread that computes."""

    def __init__(self, shard: Shard, meeting: Meeting, device: torch.device) -> None:
        """Waits until all ranks are here."""
        self.shard, self.device = shard, device
        self.was_used = False  # some collective was called, or replayed; reset by the reader
        c10d: Any = dist
        self._store = store = meeting.store(shard.size)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._ranks: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # With the device, it connects now, not within a step.
            dist.init_process_group(
                "nccl",
                timeout=timeout,
                store=store,
                rank=shard.rank,
                world_size=shard.size,
                device_id=device,
            )
            self._ranks = dist.group.WORLD
            return
        # Not the process-wide group: a process may host several workers.
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=meeting.own_host)]
        self._ranks = c10d.ProcessGroupGloo(store, shard.rank, shard.size, options)

    def wait_for_all(self) -> None:
        """Until every rank has called this: after what takes some longer than others, such as the
        reading of weights, for which no collective waits. Raises RuntimeError."""
        self._store.set(f"rank {self.shard.rank}", "here")
        everyone = [f"rank {rank}" for rank in range(self.shard.size)]
        self._store.wait(everyone, timedelta(seconds=LOAD_TIMEOUT_S))

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up what all ranks have in `tensor`, in place. On CPUs in the order of the ranks, for
        each number: a ring's order depends on where in the tensor it is, so that a token's KV would
        depend on what else is in its step."""
        self.was_used = True
        if tensor.is_cuda or self.shard.size == 2 or not tensor.numel():  # a + b is b + a
            _finish(self._ranks.allreduce([tensor], _on_stream(dist.AllreduceOptions())))
            return
        parts = [torch.empty_like(tensor) for _ in range(self.shard.size)]
        self._ranks.allgather([parts], [tensor]).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def least(self, number: int, device: torch.device) -> int:
        """Returns the least number that any rank has."""
        self.was_used = True
        options = _on_stream(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor([number], device=device)
        _finish(self._ranks.allreduce([tensor], options))
        return int(tensor.item())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, width] of each rank -> [n, size * width] on rank 0; elsewhere of that shape only."""
        self.was_used = True
        options = _on_stream(dist.GatherOptions())
        options.rootRank = 0
        if self.shard.rank:
            _finish(self._ranks.gather([], [tensor], options))
            return tensor.repeat(1, self.shard.size)
        parts = [torch.empty_like(tensor) for _ in range(self.shard.size)]
        _finish(self._ranks.gather([parts], [tensor], options))
        return torch.cat(parts, dim=1)

    def share(self, tensor: torch.Tensor) -> None:
        """What rank 0 has in `tensor`, on all ranks."""
        self.was_used = True
        options = _on_stream(dist.BroadcastOptions())
        options.rootRank = 0
        _finish(self._ranks.broadcast([tensor], options))


def _on_stream(options: Any) -> Any:
    """Prepares a collective on a GPU: it runs in the stream of the model's kernels, so no event is
    needed on either side of it, and a graph can hold it."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """NCCL gives nothing to wait for where the stream orders it; Gloo computes here."""
    if work is not None:
        work.wait()


class Member:
    """A process as one rank of a worker: what its runner does differently from a single one."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def config(self, model: ModelConfig) -> ModelConfig:
        """Describes what this rank computes, and whose heads it holds KV of."""
        return self.group.shard.config(model)

    def ops(self, inner: Ops, model: ModelConfig) -> Ops:
        ops: Any = ParallelOps(inner, self.group, model)
        return ops

    def total(self, numbers: list[float]) -> list[float]:
        """Adds each of them up over the ranks."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        self.group.sum(tensor)
        return tensor.tolist()


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a process needs to become rank `shard.rank` of a worker."""

    shard: Shard
    meeting: Meeting
    device: str
    find_model: FindModel
    model: ModelSection
    engine: EngineSection
    companion: MakeCompanion | None = None
    read: Callable[[Any], Any] | None = None  # ModelRunner has it; can be pickled

    def join(self) -> Member:
        """Wait until all ranks are here."""
        return Member(Group(self.shard, self.meeting, torch.device(self.device)))


@dataclass(frozen=True, slots=True)
class _Matrix:
    inner: Any  # as the rank's own operations made it
    is_sum: bool = False  # the result is the sum over all ranks
    is_gathered: bool = False  # the result is that of all ranks, side by side, on rank 0


@dataclass(frozen=True, slots=True)
class _PartTerm:
    """A rank's part of a term of a matrix whose results ranks add up. `ParallelOps` adds it to the
    rank's part of the product, so that one sum over the ranks is for both."""

    inner: Term

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def width(self) -> int:
        return self.inner.width

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Does nothing: it is in the product already."""


class ParallelOps:
    """Implements Ops by those of one rank, which know the rank's smaller model only. What is not
    here needs no other rank. Owned by one runner."""

    def __init__(self, inner: Ops, group: Group, model: ModelConfig) -> None:
        """`model` is the whole one."""
        self._inner = inner
        self._group = group
        self._shard = group.shard
        self._model = model
        self._terms: Sequence[TermRows] = ()  # that rows of the step have

    def begin(self, batch: Any) -> None:
        self._terms = batch.terms
        self._inner.begin(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run_layers(self, hidden: torch.Tensor, layers: Any, batch: Any) -> None:
        return None  # ranks add up their results within each layer

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> _Matrix:
        """The rank's part of a whole weight [out, in]."""
        inner, part = self._inner, self._shard.part
        if role in SUMMED:
            own = weight[:, part(weight.shape[1])]
            once = bias if self._shard.rank == 0 else None
            return _Matrix(inner.matrix(own.contiguous(), once, role), is_sum=True)
        if role == "logits":
            rows = -(-len(weight) // self._shard.size)
            own = weight[self._shard.rank * rows :][:rows]
            own = torch.cat([own, own.new_zeros(rows - len(own), weight.shape[1])])
            return _Matrix(inner.matrix(own, None, role), is_gathered=True)
        if role in ROWS:
            weight = self._rows(weight, role)
            bias = None if bias is None else self._rows(bias, role)
        return _Matrix(inner.matrix(weight, bias, role))

    def recording(self, recorder: Any) -> ParallelOps:
        """Operations that give `recorder` the rank's rows of what is to become terms; all of them
        where the matrix is cut by columns, as `down` is then (`term`)."""
        return _Recording(recorder, self._group, self._model)

    def term(
        self, matrix: Any, down: torch.Tensor, up: torch.Tensor, memory: Any, *, is_gated: bool
    ) -> Term:
        """As `Ops.term`; of a matrix that is cut by columns, so is `down`."""
        is_sum = getattr(matrix, "is_sum", False)
        if is_sum:
            down = down[:, self._shard.part(down.shape[1])].contiguous()
        own = self._inner.term(matrix, down, up, memory, is_gated=is_gated)
        return _PartTerm(own) if is_sum else own

    def _rows(self, whole: torch.Tensor, role: str) -> torch.Tensor:
        """Takes the rank's rows from each of the projections that are stacked in `whole`."""
        model, part = self._model, self._shard.part
        if role == "recurrent":
            assert model.recurrent is not None
            own = self._shard.projected(model.recurrent)
            return torch.cat([whole[rows.start : rows.stop] for rows in own])
        has_gate = model.is_gated or not role.endswith("gate_up")
        stacked = whole.chunk(ROWS[role] if has_gate else 1)
        return torch.cat([each[part(len(each))] for each in stacked])

    def vector(self, weight: torch.Tensor, role: str = "") -> torch.Tensor:
        if role == "heads":
            weight = weight[self._shard.part(len(weight))]
        elif role == "channels":
            assert self._model.recurrent is not None
            own = self._shard.channels(self._model.recurrent)
            weight = torch.cat([weight[..., each.start : each.stop] for each in own], dim=-1)
        return self._inner.vector(weight, role)

    def qkv(self, weight: torch.Tensor, bias: torch.Tensor | None, layer: int) -> _Matrix:
        own = None if bias is None else self._of_heads(bias, layer)
        return _Matrix(self._inner.qkv(self._of_heads(weight, layer), own, layer))

    def _of_heads(self, whole: torch.Tensor, layer: int) -> torch.Tensor:
        """Takes the rank's heads from rows of queries and, if there are some, keys and values."""
        model, kv = self._model, self._model.kv_heads(layer)
        own, rows = self._shard.kv_heads(kv.num_heads), model.num_heads * kv.key_dim
        queries, at = whole[:rows][self._shard.part(rows)], rows
        parts = [queries]
        for dim in (kv.key_dim, kv.value_dim) if model.keeps_kv(layer) else ():
            parts.append(whole[at + own.start * dim : at + own.stop * dim])
            at += kv.num_heads * dim
        return torch.cat(parts)

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Any:
        return self._inner.gated_matrix(self._rows(weight, role), role)

    def heads(self, weight: torch.Tensor, role: str) -> Any:
        """[num_heads, in, out] -> those of the rank's heads."""
        return self._inner.heads(weight[self._shard.part(len(weight))], role)

    def linear(self, x: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        out = self._inner.linear(x, matrix.inner)
        if matrix.is_sum:
            self._sum(out, x, matrix)
        elif matrix.is_gathered and len(out):
            out = self._group.gather(out)[:, : self._model.vocab_size].contiguous()
        return out

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: _Matrix) -> None:
        if not matrix.is_sum:
            self._inner.add_linear(hidden, x, matrix.inner)
            return
        if hidden.dtype == x.dtype:  # two launches less than adding to zeros
            hidden += self.linear(x, matrix)
            return
        own = torch.zeros_like(hidden)
        self._inner.add_linear(own, x, matrix.inner)
        self._sum(own, x, matrix)
        hidden += own

    def _sum(self, own: torch.Tensor, x: torch.Tensor, matrix: _Matrix) -> None:
        """Adds up what the ranks have of the product of x with `matrix`, and of its terms."""
        for rows in self._terms:
            term = rows.terms.by_matrix.get(id(matrix))
            if term is not None:
                part: Any = term
                part.inner.add(own[rows.rows], x[rows.rows])
        self._group.sum(own)

    def norm_all_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Squares are added up over the ranks. Where several have the same head, each adds its
        share of them."""
        model, shard = self._model, self._shard
        part, copies = shard.part(len(weight)), 1
        if len(weight) != model.num_heads * model.head_dim:
            heads = shard.kv_heads(model.num_kv_heads)
            part = slice(heads.start * model.head_dim, heads.stop * model.head_dim)
            copies = len(heads) * shard.size // model.num_kv_heads
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True) / copies
        self._group.sum(squares)
        scale = torch.rsqrt(squares / len(weight) + model.rms_norm_eps)
        return (weight[part] * (wide * scale).to(x.dtype)).to(x.dtype)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Where ranks divide what Mamba 2 norms together, squares are added up over them."""
        shape = self._model.recurrent
        assert shape is not None
        groups = shape.num_key_heads
        if shape.kind != MAMBA2 or weight is None or groups % self._shard.size == 0:
            return self._inner.gated_norm(x, gate, weight)
        wide = self._inner.gated_norm(x, gate, None).float()
        (own,) = self._shard.key_heads(shape)
        squares = wide.new_zeros(len(wide), groups)
        squares[:, own] = wide.square().sum(-1)
        self._group.sum(squares)
        scale = torch.rsqrt(squares[:, own] / shape.norm_width + self._model.rms_norm_eps)
        return (wide * scale.unsqueeze(1) * weight).to(x.dtype)

    def attention(
        self, qkv: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        own = None if sinks is None else sinks[self._shard.part(len(sinks))]
        return self._inner.attention(qkv, layer, own)

    def expert_biases(
        self, gate_up: torch.Tensor, down: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks add up what comes out, so one of them has the second bias."""
        own = of_halves(gate_up, self.expert_part(gate_up.shape[1] // 2))
        return self._inner.expert_biases(own, torch.zeros_like(down) if self._shard.rank else down)

    def expert_part(self, width: int) -> slice:
        """A rank's columns of `downs`. Where experts have biases they may be in MXFP4, and these
        are whole groups of that: those beyond `width` are zeros."""
        experts = self._model.experts
        assert experts is not None
        more = -width % (GROUP * self._shard.size) if experts.has_biases else 0
        return self._shard.part(width + more)

    def experts(self, gate_ups: Stacked, downs: Stacked) -> Any:
        if self._model.experts and downs.shape[2] < self._model.experts.intermediate_size:
            return self._inner.experts(gate_ups, downs)  # the rank's own alone were read
        part = self.expert_part(downs.shape[2])
        if (
            isinstance(gate_ups, Packed)
            and isinstance(downs, Packed)
            and self._model.is_gated
            and downs.cuts_at(part.start)
            and downs.cuts_at(part.stop)
        ):
            return self._inner.experts(gate_ups.of_halves(part), downs.columns(part))
        gate_ups, downs = widened(gate_ups), widened(downs)
        own = F.pad(downs[:, :, part], (0, max(part.stop - downs.shape[2], 0)))
        rows = of_halves(gate_ups, part) if self._model.is_gated else gate_ups[:, part]
        return self._inner.experts(rows.contiguous(), own.contiguous())

    def add_experts(
        self, hidden: torch.Tensor, x: torch.Tensor, layer: Any, routed: torch.Tensor | None = None
    ) -> None:
        own = torch.zeros_like(hidden)
        self._inner.add_experts(own, x, layer, routed)
        self._group.sum(own)
        hidden += own


class _Recording(ParallelOps):
    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> _Matrix:
        if role in SUMMED:
            return _Matrix(self._inner.matrix(weight, bias, role), is_sum=True)
        return super().matrix(weight, bias, role)


SUMMED = ("out", "down", "shared_down")
"""Roles of matrices that are cut by columns."""
ROWS = {
    "queries": 1,
    "gate_up": 2,
    "shared_gate_up": 2,
    "open": 1,
    "decay": 1,
    "recurrent": 0,  # as `Shard.projected` says
}
"""Roles of matrices that are cut by rows, and how many projections are stacked in each."""
