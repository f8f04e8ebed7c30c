"""How tensor parallelism divides a model: which part of it each process of a worker computes.

A rank computes as if its model were smaller: some of the heads, some of the width of every MLP and
expert. What is left whole is small or shared by all heads: norms, the embedding table, the choice
of experts, and the latent of multi-head latent attention. Neither torch nor processes here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`. Only for a model that `check_divides` accepts."""

    rank: int
    size: int

    def config(self, model: ModelConfig) -> ModelConfig:
        """The smaller model that this rank computes; its vocabulary is the whole one."""
        experts = model.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // self.size,
                shared_size=experts.shared_size // self.size,
            )
        return replace(
            model,
            num_heads=model.num_heads // self.size,
            num_kv_heads=len(self.kv_heads(model.num_kv_heads)),
            layer_heads=tuple(
                replace(each, num_heads=len(self.kv_heads(each.num_heads)))
                for each in model.layer_heads
            ),
            intermediate_size=model.intermediate_size // self.size,
            experts=experts,
        )

    def part(self, count: int) -> slice:
        """This rank's run of `count` things; `size` divides them."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, count: int) -> range:
        """Its KV heads of `count`. Where there are fewer than ranks, several have the same one."""
        if count < self.size:
            head = self.rank * count // self.size
            return range(head, head + 1)
        return range(count)[self.part(count)]


def num_machines(num_ranks: int, ranks_per_machine: int) -> int:
    """Among how many the ranks of a worker are divided; `ranks_per_machine`: 0: it is on one."""
    return -(-num_ranks // ranks_per_machine) if ranks_per_machine else 1


def check_divides(
    model: ModelConfig, size: int, setting: str = "engine.tensor_parallel_size"
) -> None:
    """Raises ModelError unless the model can be divided among `size` processes. `setting`: that
    asks for so many."""
    wrong = _indivisible(model, size)
    if wrong:
        most = min(model.num_heads, MAX_RANKS)
        fitting = [str(n) for n in range(1, most + 1) if not _indivisible(model, n)]
        raise ModelError(
            f"{setting} = {size} does not divide the model's {wrong};"
            f" possible: {', '.join(fitting)}"
        )


def _indivisible(model: ModelConfig, size: int) -> str:
    """What `size` does not divide; "" if there is nothing."""
    if model.recurrent is not None and size > 1:
        return f"recurrent layers ({model.recurrent.kind})"
    counts = {
        "attention heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
    }
    if model.experts is not None:
        counts["intermediate size of an expert"] = model.experts.intermediate_size
        counts["intermediate size of the shared experts"] = model.experts.shared_size
    for name, count in counts.items():
        if count % size:
            return f"{name} ({count})"
    if model.num_kv_heads % size and size % model.num_kv_heads:
        return f"KV heads ({model.num_kv_heads})"
    counts_of_heads = sorted({each.num_heads for each in model.layer_heads})
    if len(counts_of_heads) > 1 and model.num_kv_heads % size:  # blocks would differ in bytes
        return f"KV heads, which are {' or '.join(map(str, counts_of_heads))} by layer"
    return ""


def extra_weights_bytes(model: ModelConfig, dtype: str, size: int) -> int:
    """What `size` ranks hold of the weights beyond one copy: each has the embedding table."""
    return (size - 1) * model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]
