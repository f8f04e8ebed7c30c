"""A draft head: one decoder layer over (a token, the model's hidden state before it).

Slot j >= 1 of a sequence has token j and the hidden state h[j - 1] of the model's last layer; what
the head makes of it predicts token j + 1, and stands in for h[j] when it drafts further. The
model's states are those before its last norm, but for their length (`Target.unnormed`), which the
head's own norm takes out.

Training unrolls the drafts of a round (EAGLE-3, arXiv 2503.01840, section 3): in pass s every slot
has the head's own output of pass s - 1 one slot before in place of the model's hidden state. It
attends to slots of pass 1 up to s - 1 before it, and to one slot of each later pass, which is what
a server's draft KV looks like at the s-th draft of a round.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ARCHITECTURE = "eagle"
LEAST_SURE = 0.6  # a new head's last norm, as a part of the model's: its states are but estimates


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes and names as config.json has them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    draft_vocab_size: int | None  # None: all words of the model
    model_digest: str = ""  # names the weights that it was trained for


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        s, hidden = shape, shape.hidden_size
        queries, keys = (n * s.head_dim for n in (s.num_attention_heads, s.num_key_value_heads))
        self.self_attn, self.mlp = nn.ModuleDict(), nn.ModuleDict()
        sizes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
        for name, (width, out) in (sizes | {"o_proj": (queries, hidden)}).items():
            self.self_attn[name] = nn.Linear(width, out, bias=False)
        for name in ("gate_proj", "up_proj"):
            self.mlp[name] = nn.Linear(hidden, s.intermediate_size, bias=False)
        self.mlp["down_proj"] = nn.Linear(s.intermediate_size, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, s.rms_norm_eps)


@dataclass(slots=True)
class Pass:
    """What one pass gives of all slots."""

    hidden: torch.Tensor  # [B, L, hidden], before `norm`
    keys: torch.Tensor  # [B, heads, L, head_dim]
    values: torch.Tensor


class Head(nn.Module):
    """Its parameters have the names of the file."""

    def __init__(
        self, shape: HeadShape, d2t: torch.Tensor | None, norm: torch.Tensor, head: torch.Tensor
    ) -> None:
        """d2t: the model's id of each draft id. norm: the weights of the model's last norm; head:
        its rows of the draft ids, [draft_vocab, hidden]. What is trained begins with these, and
        with a layer that adds nothing."""
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.embed_norm, self.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.layer = _Layer(shape)
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(head), bias=False)
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", d2t)
        for name, each in self.named_parameters():
            if each.dim() > 1:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(each, std=0.0 if adds else hidden**-0.5)
        with torch.no_grad():
            self.norm.weight.copy_(norm * LEAST_SURE)
            self.lm_head.weight.copy_(head)

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)

    def unroll(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        count: int,
        draft: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The outputs of `count` passes, each [B, L, hidden]; in pass s, the first s - 1 slots have
        none that means something.

        embedded: tokens 1 to L, [B, L, hidden]. hidden: the model's states of tokens 0 to L - 1.
        draft: gives the embeddings of what a pass drafts after each slot, from its number and its
        output; None: drafts are taken to be the tokens that came."""
        made: list[Pass] = []
        angles = self._angles(embedded)
        for index in range(count):
            made.append(self._pass(embedded, hidden, made, angles))
            hidden = _later(made[-1].hidden)
            if draft is not None and index + 1 < count:
                embedded = _later(draft(index, made[-1].hidden))
        return [each.hidden for each in made]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gives those of the draft vocabulary."""
        found: torch.Tensor = self.lm_head(self.norm(hidden))
        return found

    def _pass(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        before: list[Pass],
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> Pass:
        s, layer = self.shape, self.layer
        x = self.fc(self.inputs(embedded, hidden))
        normed, own = layer.input_layernorm(x), layer.self_attn
        queries, keys, values = (
            each(normed).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for each in (own["q_proj"], own["k_proj"], own["v_proj"])
        )
        times = s.num_attention_heads // s.num_key_value_heads
        queries, keys = _rotated(queries, angles), _rotated(keys, angles)
        keys, values = (each.repeat_interleave(times, dim=1) for each in (keys, values))
        attended = self._attended(queries, keys, values, before)
        x = x + own["o_proj"](attended.transpose(1, 2).flatten(2))
        normed, mlp = layer.post_attention_layernorm(x), layer.mlp
        x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return Pass(x, keys, values)

    def _attended(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        before: list[Pass],
    ) -> torch.Tensor:
        if not before:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        scale, length, number = self.shape.head_dim**-0.5, queries.shape[2], len(before)
        first, *later = before
        visible = torch.ones(length, length, dtype=torch.bool, device=queries.device)
        scores = queries @ first.keys.transpose(2, 3) * scale
        scores = scores.masked_fill(~visible.tril(-number), -torch.inf)
        # One slot each of the later passes, the newest being this one.
        recent = [
            (_later(each.keys, at), _later(each.values, at))
            for at, each in zip(range(number - 1, 0, -1), later, strict=True)
        ]
        recent.append((keys, values))
        single = [(queries * each).sum(-1, keepdim=True) * scale for each, _ in recent]
        weights = torch.cat((scores, *single), dim=-1).float().softmax(-1).to(values.dtype)
        attended = weights[..., :length] @ first.values
        for at, (_, each) in enumerate(recent):
            attended = attended + weights[..., length + at, None] * each
        return attended

    def _angles(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of slots 1 to L, [L, head_dim]."""
        s = self.shape
        ids = torch.arange(0, s.head_dim, 2, device=like.device, dtype=torch.float32)
        places = torch.arange(1, like.shape[1] + 1, device=like.device, dtype=torch.float32)
        turned = torch.outer(places, s.rope_theta ** (-ids / s.head_dim)).repeat(1, 2)
        return turned.cos(), turned.sin()

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: (each if name == "d2t" else each.to(dtype)).contiguous().cpu()
            for name, each in self.state_dict().items()
        }
        said = {"architecture": ARCHITECTURE, **asdict(self.shape), "norm_inputs": True}
        save_file(tensors, folder / WEIGHTS_FILE)
        (folder / WEIGHTS_FILE).chmod(0o644)  # others may serve it
        (folder / CONFIG_FILE).write_text(json.dumps(said, indent=2) + "\n")

    @staticmethod
    def load(folder: Path) -> Head:
        """Reads what `save` wrote. Raises ValueError, OSError."""
        said: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        kind = said.pop("architecture", None), said.pop("norm_inputs", None)
        if kind != (ARCHITECTURE, True):
            raise ValueError(f"{folder} has no head of architecture {ARCHITECTURE!r}: {kind[0]!r}")
        tensors = load_file(folder / WEIGHTS_FILE)
        last = tensors["norm.weight"], tensors["lm_head.weight"]
        head = Head(HeadShape(**said), tensors.get("d2t"), *last)
        head.load_state_dict(tensors)
        return head


def _later(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """What slots (the last dimension but one) have, `by` slots later."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def _rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (each.to(x.dtype) for each in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
