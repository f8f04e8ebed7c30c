"""What the memory of a GPU holds beside KV: measured by a worker at its start, estimated before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.config import ModelConfig

GIB = float(1 << 30)
GRAPH_BYTES = 256 << 20  # for captured graphs, where they are not measured
UNUSED_BYTES = 256 << 20  # for what allocation leaves unused
RESERVE_BYTES = GRAPH_BYTES + UNUSED_BYTES
CUDA_BYTES = 512 << 20  # what CUDA itself takes of a GPU for a process, about
MIN_KEYS = 256  # a split has: below, starting it costs more than it reads
MAX_SPLITS = 64  # a context has
SPLIT_BYTES = 2 << 20  # what the results of a sequence's splits may take


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How many bytes a device has."""

    total: int
    free: int
    reserved: int  # by this process, for tensors
    peak: int  # most that this process has taken for tensors
    graphs: int = GRAPH_BYTES  # that captured graphs will take

    def room(self, share: float) -> int:
        """For KV, of `share` of all: beside other processes, what CUDA itself takes, the peak, the
        graphs, and a reserve. May be negative."""
        others = self.total - self.free - self.reserved
        return int(share * self.total) - others - self.peak - self.graphs - UNUSED_BYTES


def all_graphs_bytes(first: Sequence[int], count: int) -> int:
    """What `count` graphs take, of which the `first`, the largest, were measured. They share the
    memory of their tensors, so each of the rest takes what a later one of these did."""
    return sum(first) + (count - len(first)) * max(first[1:], default=0)


def most_splits(num_heads: int, width: int) -> int:
    """In how many splits decode attention reads a context at most, and merges their results of
    `width` numbers a head. By the model alone: a context is split alike in any batch."""
    return max(1, min(MAX_SPLITS, SPLIT_BYTES // (4 * num_heads * (width + 1))))


def splits_of(context: int, most: int, window: int = 0) -> int:
    """Returns a bound for the splits of a context of so many tokens. A window, or a chunk, may
    begin within what is read at once."""
    seen = min(context, abs(window) + MIN_KEYS) if window else context
    return min(most, -(-seen // MIN_KEYS))


def split_bytes(config: ModelConfig, num_seqs: int, longest: int) -> int:
    """What results of splits take in a step of so many sequences. `config`: of a rank."""
    heads, latent = config.num_heads, config.latent
    kinds = set()
    for layer in range(config.num_layers):
        if config.attends(layer):
            width = latent.rank if latent is not None else config.kv_heads(layer).value_dim
            kinds.add((width, config.window_or_chunk(layer)))
    counts = [(width, splits_of(longest, most_splits(heads, width), w)) for width, w in kinds]
    return sum(4 * num_seqs * count * heads * (width + 1) for width, count in counts if count > 1)


def spread(num_tokens: int, num_seqs: int, longest: int) -> tuple[int, ...]:
    """Lengths of `num_seqs` prompts, or fewer, which have `num_tokens` together, or less."""
    num_seqs = min(num_seqs, num_tokens)
    each, more = divmod(num_tokens, num_seqs)
    return tuple(min(longest, each + (index < more)) for index in range(num_seqs))


def step_bytes(config: ModelConfig, num_tokens: int, num_seqs: int, dtype: str, ranks: int) -> int:
    """Estimates what a step of so many tokens, of which `num_seqs` are sampled, takes on a rank
    while it runs: the widest layer's inputs, projections and outputs, and the logits."""
    widths = [0.0]
    for layer in range(config.num_layers):
        if config.attends(layer):
            kv, heads = config.kv_heads(layer), config.num_heads
            keys = (heads + 2 * kv.num_heads) * max(kv.key_dim, kv.value_dim)
            values = kv.value_dim if config.latent is None else config.latent.rank
            widths.append((keys + heads * values) / ranks)
            if (indexer := config.indexer) is not None:  # in every rank
                widths[-1] += indexer.num_heads * indexer.head_dim
        if config.has_mlp(layer):
            widths.append((2 + config.is_gated) * config.mlp_width(layer) / ranks)
        if config.has_experts(layer) and (experts := config.experts) is not None:
            width = experts.num_per_token * experts.intermediate_size + experts.shared_size
            outputs = experts.num_per_token * config.hidden_size
            widths.append((2 + config.is_gated) * width / ranks + outputs)
    if (recurrent := config.recurrent) is not None:
        widths.append(2 * (recurrent.num_projected + recurrent.width) / ranks)
    size = DTYPE_BYTES[dtype]
    rows = min(num_seqs, num_tokens) * config.vocab_size * (size + 4)  # in float32 too
    return int(num_tokens * (3 * config.hidden_size + max(widths)) * size) + rows
