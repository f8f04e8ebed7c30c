"""How tensor parallelism divides a model: which part of it each process of a worker computes.

A rank computes as if its model were smaller: some of the heads, of attention and of recurrent
layers, some of the width of every MLP and expert. What is left whole is small or shared by all
heads: norms, the embedding table, the choice of experts, and the latent of multi-head latent
attention. Neither torch nor processes here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.state_layout import KIMI_DELTA_ATTENTION, MAMBA2, Recurrent, StateLayout

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
        recurrent = model.recurrent
        if recurrent is not None:
            recurrent = replace(
                recurrent,
                conv_channels=sum(map(len, self.channels(recurrent))),
                num_heads=recurrent.num_heads // self.size,
                num_key_heads=len(self.key_heads(recurrent)),
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
            recurrent=recurrent,
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

    def key_heads(self, model: Recurrent) -> range:
        """Its key heads of a recurrent layer. Where ranks divide a group of heads, which shares
        one, all of them have it."""
        return self.kv_heads(model.num_key_heads) if model.num_key_heads else range(0)

    def channels(self, model: Recurrent) -> list[range]:
        """Its channels of the convolution, in each of the parts that are stacked there."""
        if not model.num_heads:
            return [range(model.conv_channels)[self.part(model.conv_channels)]]
        keys, dim, size = self.key_heads(model), model.key_dim, model.num_key_heads * model.key_dim
        both = [range(at + keys.start * dim, at + keys.stop * dim) for at in (0, size)]
        return [*both, range(2 * size, model.conv_channels)[self.part(model.width)]]

    def projected(self, model: Recurrent) -> list[range]:
        """Its rows of the first projection of a recurrent layer, in `RecurrentWeights`' order."""
        rows, found, at = range(model.num_projected), self.channels(model), model.conv_channels
        if not model.num_heads:
            return [rows[first:][self.part(at)] for first in (0, at, 2 * at)]
        if model.kind == KIMI_DELTA_ATTENTION:  # what all heads' decays and gates are made from
            found.append(rows[at:][: 2 * model.value_dim])
        else:
            found.append(rows[at:][self.part(model.width)])
        numbers = range(len(rows) - model.num_numbers * model.num_heads, len(rows), model.num_heads)
        return [*found, *(rows[first:][self.part(model.num_heads)] for first in numbers)]

    def state_layout(self, model: ModelConfig) -> StateLayout:
        """What this rank computes of each recurrent layer's state."""
        own = self.config(model).recurrent
        assert own is not None
        return own.layout(model.num_state_units // self.size)

    def stored_units(self, model: ModelConfig) -> range:
        """The units of a block with states that this rank has room for: those of its KV heads. It
        computes an even share of them, and ranks with the same KV heads the others."""
        heads, each = self.kv_heads(model.num_kv_heads), model.num_state_units
        ends = (end * each // model.num_kv_heads for end in (heads.start, heads.stop))
        return range(*ends)


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
    recurrent = model.recurrent
    if model.single_blocks and size > 1:
        return f"layers of one block ({recurrent.kind if recurrent else 'attention'})"
    counts = {
        "attention heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
    }
    if model.experts is not None:
        counts["intermediate size of an expert"] = model.experts.intermediate_size
        counts["intermediate size of the shared experts"] = model.experts.shared_size
    if recurrent is not None:
        name = "heads" if recurrent.num_heads else "channels"
        counts[f"{name} of recurrent layers"] = recurrent.num_heads or recurrent.conv_channels
    for name, count in counts.items():
        if count % size:
            return f"{name} ({count})"
    if model.num_kv_heads % size and size % model.num_kv_heads:
        return f"KV heads ({model.num_kv_heads})"
    counts_of_heads = sorted({each.num_heads for each in model.layer_heads})
    if len(counts_of_heads) > 1 and model.num_kv_heads % size:  # blocks would differ in bytes
        return f"KV heads, which are {' or '.join(map(str, counts_of_heads))} by layer"
    return "" if recurrent is None else _indivisible_states(model, recurrent, size)


def _indivisible_states(model: ModelConfig, recurrent: Recurrent, size: int) -> str:
    count = recurrent.num_key_heads
    if count and count % size and (recurrent.kind != MAMBA2 or size % count):
        name = "groups" if recurrent.kind == MAMBA2 else "key heads"
        return f"{name} of recurrent layers ({count})"
    if model.num_state_units % size:
        return f"parts of a state that go with whole KV heads ({model.num_state_units})"
    return ""


def extra_weights_bytes(model: ModelConfig, dtype: str, size: int) -> int:
    """What `size` ranks hold of the weights beyond one copy: each has the embedding table."""
    return (size - 1) * model.vocab_size * model.hidden_size * DTYPE_BYTES[dtype]
