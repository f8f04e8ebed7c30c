"""Drafters of random weights in the formats that are published, and what each proposes, computed
straight from its definition: whole sequences in float32, without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.engine.model.tiny import VOCAB

WIDTH, HEADS, KV_HEADS, DIM, MLP, EPS, THETA = 96, 6, 2, 16, 160, 1e-6, 1e4
DRAFT_VOCAB = 64
PREFIX = {"own": "layer.", "eagle": "layers.0.", "eagle3": "midlayer."}


def make_head(path: Path, kind: str, seed: int = 0, **changes) -> dict[str, torch.Tensor]:
    """Writes one to `path`; returns its tensors."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(WIDTH, generator=generator)

    if kind == "medusa":
        tensors = {}
        for head in range(4):
            tensors[f"{head}.0.linear.weight"] = matrix(WIDTH, WIDTH)
            tensors[f"{head}.0.linear.bias"] = 0.1 * matrix(1, WIDTH)[0]
            tensors[f"{head}.1.weight"] = matrix(VOCAB, WIDTH)
        config = {"medusa_num_heads": 4, "medusa_num_layers": 1}
    else:
        prefix, depth = PREFIX[kind], WIDTH * (2 if kind == "eagle3" else 1)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        tensors = {
            f"{prefix}self_attn.{name}_proj.weight": matrix(rows, depth)
            for name, rows in sizes.items()
        }
        tensors |= {
            "fc.weight": matrix(WIDTH, WIDTH * (3 if kind == "eagle3" else 2)),
            f"{prefix}self_attn.o_proj.weight": matrix(WIDTH, HEADS * DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(MLP, WIDTH),
            f"{prefix}mlp.up_proj.weight": matrix(MLP, WIDTH),
            f"{prefix}mlp.down_proj.weight": matrix(WIDTH, MLP),
            f"{prefix}post_attention_layernorm.weight": norm(),
        }
        config = {
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
        }
        if kind != "eagle":
            tensors |= {f"{prefix}input_layernorm.weight": norm(), "norm.weight": norm()}
        if kind == "own":
            tensors |= {"embed_norm.weight": norm(), "hidden_norm.weight": norm()}
            config |= {"architecture": "eagle", "norm_inputs": True, "draft_vocab_size": None}
        if kind == "eagle3":
            ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
            tensors |= {
                "midlayer.hidden_norm.weight": norm(),
                "lm_head.weight": matrix(DRAFT_VOCAB, WIDTH),
                "d2t": ids - torch.arange(DRAFT_VOCAB),
                "t2d": torch.isin(torch.arange(VOCAB), ids),
            }
            config |= {"draft_vocab_size": DRAFT_VOCAB}
    path.mkdir(parents=True, exist_ok=True)
    tensors |= changes.pop("tensors", {})
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(config | changes))
    return tensors


class Straight:
    """Greedy drafts by definition, for a model of transformers."""

    def __init__(self, model: Any, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        self.kind, self.t = kind, tensors
        self.adds_normed = False  # EAGLE-3's `norm_before_residual`
        self.model = model
        self.outputs: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))

    def _keep(self, index: int):
        def hook(module, args, output):
            self.outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """After `tokens`, whose last one the model has not computed."""
        self.model(torch.tensor([[*tokens[:-1]]]))
        outputs = [self.outputs[i].view(-1, WIDTH) for i in sorted(self.outputs)]
        last, size = outputs[-1], len(outputs)
        if self.kind == "medusa":
            state = self.model.model.norm(last)[-1]
            return [self._medusa(head, state) for head in range(count)]
        if self.kind == "eagle3":
            three = torch.cat([outputs[i] for i in (1, size // 2 - 1, size - 4)], dim=1)
            states = three @ self.t["fc.weight"].T
        else:
            states = self.model.model.norm(last) if self.kind == "eagle" else last
        found, known = [], [*tokens]
        for _ in range(count):
            made = self._layer(torch.tensor(known[1:]), states)[-1:]
            found.append(self._token(made))
            known.append(found[-1])
            states = torch.cat((states, made))
        return found

    def _medusa(self, head: int, state: torch.Tensor) -> int:
        block = F.linear(state, self.t[f"{head}.0.linear.weight"], self.t[f"{head}.0.linear.bias"])
        return int((self.t[f"{head}.1.weight"] @ (state + F.silu(block))).argmax())

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.t[f"{name}.weight"]

    def _layer(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Slots 1, 2 and so on: each of a token and the state before it."""
        prefix, embedded = PREFIX[self.kind], self.model.model.embed_tokens(tokens)
        if self.kind == "eagle3":
            hidden = states
            embedded = self._norm(embedded, prefix + "input_layernorm")
            normed = self._norm(states, prefix + "hidden_norm")
            hidden = normed if self.adds_normed else states
            x = torch.cat((embedded, normed), dim=1)
        elif self.kind == "own":
            pair = self._norm(embedded, "embed_norm"), self._norm(states, "hidden_norm")
            hidden = torch.cat(pair, dim=1) @ self.t["fc.weight"].T
            x = self._norm(hidden, prefix + "input_layernorm")
        else:
            x = hidden = torch.cat((embedded, states), dim=1) @ self.t["fc.weight"].T
        names = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        parts = [F.linear(x, self.t[f"{n}.weight"], self.t.get(f"{n}.bias")) for n in names]
        q, k, v = (part.unflatten(1, (-1, DIM)).transpose(0, 1) for part in parts)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(0, 1).flatten(1)
        hidden = hidden + attended @ self.t[f"{prefix}self_attn.o_proj.weight"].T
        x = self._norm(hidden, prefix + "post_attention_layernorm")
        gate, up = (x @ self.t[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return hidden + (F.silu(gate) * up) @ self.t[f"{prefix}mlp.down_proj.weight"].T

    @staticmethod
    def _rotated(x: torch.Tensor) -> torch.Tensor:
        half = DIM // 2
        angles = torch.arange(1, x.shape[1] + 1)[:, None] * THETA ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )

    def _token(self, hidden: torch.Tensor) -> int:
        if "norm.weight" in self.t:
            hidden = self._norm(hidden, "norm")
        head = self.t.get("lm_head.weight", self.model.lm_head.weight)
        token = int((hidden @ head.T).argmax())
        return token + int(self.t["d2t"][token]) if "d2t" in self.t else token
