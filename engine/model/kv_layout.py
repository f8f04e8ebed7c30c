"""Which layers' keys and values share a block, and where in it each has its own.

Blocks of all groups have the same bytes. Layers of one window and one shape of heads form a class,
each cut into groups of as many as fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, lcm

from kvrelay.engine.kv.spec import KVHeads, KVSpec

GROUP_COST = 0.01  # a block more for each `block_size` tokens, in shares of all KV

Layers = tuple[int, ...]


def kv_groups(classes: Mapping[tuple[int, KVHeads], Layers]) -> tuple[tuple[int, Layers], ...]:
    """Groups of layers with the window that they all have; the last of each class may have fewer
    than fit. First those that attend to most. `classes`: layers by window and heads."""
    each = [(len(layers), heads.numbers("float32")) for (_, heads), layers in classes.items()]
    largest = max(numbers for _, numbers in each)
    sizes = {n * numbers for count, numbers in each for n in range(1, count + 1)}

    def cost(size: int) -> tuple[float, int]:
        """Room that is left empty, where it weighs most, and what a further block costs to handle.
        size: of a block, in numbers for each of its tokens."""
        blocks = [-(-count // (size // numbers)) for count, numbers in each]
        room = max(
            n * size / (count * numbers) for n, (count, numbers) in zip(blocks, each, strict=True)
        )
        return room + GROUP_COST * sum(blocks), size

    size = min((size for size in sizes if size >= largest), key=cost)
    groups = []
    for (window, heads), layers in sorted(
        classes.items(), key=lambda item: (item[0][0] > 0, -item[0][0], item[1])
    ):
        fit = size // heads.numbers("float32")
        groups += [(window, layers[at : at + fit]) for at in range(0, len(layers), fit)]
    return tuple(groups)


def mixed_spec(groups: tuple[tuple[int, KVHeads, int], ...], block_size: int, dtype: str) -> KVSpec:
    """The shape of blocks whose layers differ. `groups`: window, heads and number of layers."""
    counts = [heads.num_heads for _, heads, _ in groups]
    parts = gcd(*counts)
    per_token = max(layers * heads.numbers(dtype) for _, heads, layers in groups)
    each = lcm(*counts)  # parts of a token's numbers that are as large as another
    per_token = -(-per_token // each) * each
    return KVSpec(
        1,
        parts,
        per_token // parts,
        block_size,
        dtype,
        num_planes=1,
        windows=tuple(window for window, _, _ in groups),
        heads=tuple(heads for _, heads, _ in groups),
    )
