"""The vision tower of Qwen3-VL and Qwen3.5: a transformer over the patches of one image.

Weights stay as the checkpoint has them, as views of its files, and are widened as they are used: a
worker that sees no image reads none of them. Computes in float32, in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.engine.model.vision.config import THETA, Vision

Get = Callable[..., torch.Tensor]
"""A tensor by its name and shape; raises ModelError."""
TOWERS = ("model.visual.", "visual.")  # how names of its tensors begin
EPS = 1e-6


class _Affine(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.float(), self.bias.float(), EPS)


class _Block(NamedTuple):
    norm1: _Affine
    qkv: _Affine
    proj: _Affine
    norm2: _Affine
    up: _Affine
    down: _Affine


class _Merger(NamedTuple):
    """Patches of a token to one row. `is_late`: they are normalized together."""

    norm: _Affine
    up: _Affine
    down: _Affine
    is_late: bool

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        width = self.up.weight.shape[1]
        x = self.norm.norm(x.view(-1, width)) if self.is_late else self.norm.norm(x).view(-1, width)
        return self.down.apply(F.gelu(self.up.apply(x)))


class Tower:
    """Stateless. `encode` may be called from any thread."""

    def __init__(self, vision: Vision, get: Get) -> None:
        """get: by names within the tower. Raises ModelError."""
        v, width = vision, vision.hidden_size
        self._vision = vision
        self._patches = get("patch_embed.proj.weight", width, 3, v.frames, *2 * (v.patch_size,))
        self._patches_bias = get("patch_embed.proj.bias", width)
        self._positions = get("pos_embed.weight", v.side**2, width)

        def affine(name: str, *shape: int) -> _Affine:
            return _Affine(get(f"{name}.weight", *shape), get(f"{name}.bias", shape[0]))

        def block(at: str) -> _Block:
            return _Block(
                affine(f"{at}.norm1", width),
                affine(f"{at}.attn.qkv", 3 * width, width),
                affine(f"{at}.attn.proj", width, width),
                affine(f"{at}.norm2", width),
                affine(f"{at}.mlp.linear_fc1", v.intermediate_size, width),
                affine(f"{at}.mlp.linear_fc2", width, v.intermediate_size),
            )

        def merger(at: str, is_late: bool) -> _Merger:
            merged = width * v.merge_size**2
            return _Merger(
                affine(f"{at}.norm", merged if is_late else width),
                affine(f"{at}.linear_fc1", merged, merged),
                affine(f"{at}.linear_fc2", v.out_size, merged),
                is_late,
            )

        self._blocks = [block(f"blocks.{index}") for index in range(v.depth)]
        self._merger = merger("merger", is_late=False)
        self._taps = {
            layer: merger(f"deepstack_merger_list.{index}", is_late=True)
            for index, layer in enumerate(v.taps)
        }

    def encode(self, patches: np.ndarray, grid: tuple[int, int]) -> torch.Tensor:
        """patches: [n, patch_numbers] of a picture with `grid` of them in height and width ->
        float32 [1 + taps, tokens, out_size]: what stands for its tokens, and what is added to them
        behind each of the first layers."""
        with torch.inference_mode():
            x = F.linear(
                torch.from_numpy(patches),
                self._patches.flatten(1).float(),
                self._patches_bias.float(),
            )
            rows, columns = self._places(*grid)
            x = x + self._learned(rows, columns, *grid)
            cos, sin = self._angles(rows, columns)
            tapped = []
            for index, block in enumerate(self._blocks):
                x = x + self._attend(block, block.norm1.norm(x), cos, sin)
                wide = F.gelu(block.up.apply(block.norm2.norm(x)), approximate="tanh")
                x = x + block.down.apply(wide)
                if index in self._taps:
                    tapped.append(self._taps[index].apply(x))
            return torch.stack([self._merger.apply(x), *tapped])

    def _places(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each patch, token by token, each [n]."""
        merge = self._vision.merge_size

        def ordered(each: torch.Tensor) -> torch.Tensor:
            cut = each.view(height // merge, merge, width // merge, merge)
            return cut.transpose(1, 2).flatten()

        rows = torch.arange(height).unsqueeze(1).repeat(1, width)
        columns = torch.arange(width).repeat(height, 1)
        return ordered(rows), ordered(columns)

    def _learned(
        self, rows: torch.Tensor, columns: torch.Tensor, height: int, width: int
    ) -> torch.Tensor:
        """The square of learned positions, stretched over the image: of the four that are nearest
        to each patch, as far as they are near."""
        side, parts = self._vision.side, []
        for at, size in ((rows, height), (columns, width)):
            exact = at.float() * (side - 1) / max(size - 1, 1)
            low = exact.floor()
            parts.append((low.long(), (low.long() + 1).clamp(max=side - 1), exact - low))
        (top, bottom, down), (left, right, over) = parts
        table = self._positions
        total = torch.zeros(len(rows), table.shape[1])
        for row, of_row in ((top, 1 - down), (bottom, down)):
            for column, of_column in ((left, 1 - over), (right, over)):
                total += table[row * side + column].float() * (of_row * of_column).unsqueeze(1)
        return total

    def _angles(
        self, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [n, head_dim / 2]: the first half of it turns by rows."""
        half = self._vision.hidden_size // self._vision.num_heads // 2
        frequencies = 1.0 / THETA ** (torch.arange(0, half, 2).float() / half)
        angles = torch.cat([at.float().outer(frequencies) for at in (rows, columns)], dim=1)
        return angles.cos(), angles.sin()

    def _attend(
        self, block: _Block, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Each patch attends to all of the image."""
        heads = block.qkv.apply(x).view(len(x), 3, self._vision.num_heads, -1)
        queries, keys, values = (
            heads.permute(1, 2, 0, 3).unsqueeze(1).unbind()
        )  # [1, heads, n, dim]
        queries, keys = _turned(queries, cos, sin), _turned(keys, cos, sin)
        out = F.scaled_dot_product_attention(queries, keys, values)[0]
        return block.proj.apply(out.transpose(0, 1).flatten(1))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
