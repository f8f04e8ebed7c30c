"""The shape of the KV cache, and the bytes that a block of it takes."""

from __future__ import annotations

from dataclasses import dataclass

STATE_WINDOW = 2  # a step reads what the token before its first one left, and changes it
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
SCALE_BYTES = {"float8_e4m3": 1}  # for each token of each head of each plane; others have none


@dataclass(frozen=True, slots=True)
class KVHeads:
    """What a layer keeps of a token: a key and a value for each head."""

    num_heads: int
    key_dim: int
    value_dim: int

    def numbers(self, dtype: str) -> int:
        """With scales, which are numbers where there are some."""
        return self.num_heads * (self.key_dim + self.value_dim + 2 * SCALE_BYTES.get(dtype, 0))


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the KV cache: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size,
    head_dim]`. With several groups of layers, a block holds the layers of one of them. Where some
    hold states, `num_kv_heads` comes before `num_layers`, so that a rank's share of a block is one
    run of bytes.

    Where layers keep heads of different shapes, a block is divided among its own heads, whatever
    their number, and each part has the head's keys and values of one layer after the other. Then
    `[num_kv_heads, block_size, head_dim]` tells of all blocks into what parts ranks may cut them
    and how large these are, there is one layer and one plane, and scales count as numbers.

    In float8_e4m3 what a head holds of a block, `[block_size, head_dim]` numbers, is followed by
    its scales, `[block_size]` bytes: a number's value is `number * 2**(scale - 127)` (E8M0, as in
    the OCP microscaling formats). So scales are transferred and stored with their block."""

    num_layers: int  # in a block
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES
    num_planes: int = 2  # keys and values; 1: one latent for both
    windows: tuple[int, ...] = (0,)  # positions that each group's layers attend to; 0: all
    num_state_groups: int = 0  # the last ones: their blocks hold states of recurrent layers
    num_units: int = 1  # parts of a block that ranks divide among them where there are states
    heads: tuple[KVHeads, ...] = ()  # for each group with keys, if they differ
    # Behind the layers in each block: what a drafter keeps of the block's tokens. No ranks then.
    draft_bytes: int = 0
    drafter: str = ""  # a digest of it

    @property
    def num_groups(self) -> int:
        """Blocks that `block_size` tokens have, all of the same bytes."""
        return len(self.windows)

    @property
    def bytes_per_head(self) -> int:
        """What one head of one plane of one layer takes in a block."""
        scale = 0 if self.heads else SCALE_BYTES.get(self.dtype, 0)
        return self.block_size * (self.head_dim * DTYPE_BYTES[self.dtype] + scale)

    @property
    def layer_bytes(self) -> int:
        """What the model's own layers take in a block."""
        return self.num_layers * self.num_planes * self.num_kv_heads * self.bytes_per_head

    @property
    def bytes_per_block(self) -> int:
        return self.layer_bytes + self.draft_bytes

    @property
    def bytes_per_token(self) -> int:
        num_groups = self.num_groups - self.num_state_groups
        return self.bytes_per_block * num_groups // self.block_size
