"""What the memory of a GPU holds beside KV: measured by a worker at its start, estimated before."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.config import ModelConfig

GIB = float(1 << 30)
RESERVE_BYTES = 512 << 20  # for captured graphs, and for what allocation leaves unused
CUDA_BYTES = 512 << 20  # what CUDA itself takes of a GPU for a process, about


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How many bytes a device has."""

    total: int
    free: int
    reserved: int  # by this process, for tensors
    peak: int  # most that this process has taken for tensors

    def room(self, share: float) -> int:
        """For KV, of `share` of all: beside other processes, what CUDA itself takes, the peak, and
        a reserve. May be negative."""
        others = self.total - self.free - self.reserved
        return int(share * self.total) - others - self.peak - RESERVE_BYTES


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
