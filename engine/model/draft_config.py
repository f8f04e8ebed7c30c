"""What a drafter is made of, and what it keeps in KV blocks: plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.engine.model.config import ModelConfig, weights_bytes

OWN, EAGLE, EAGLE3, MEDUSA = "own", "eagle", "eagle3", "medusa"  # kinds
MODEL, MTP = "model", "mtp"
PREFIXES = {
    OWN: "layer.",
    EAGLE: "layers.0.",
    EAGLE3: "midlayer.",
}  # names of a head's layer begin so
ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A drafter, checked against the model that it drafts for. What it keeps of a block's tokens,
    in each block behind the model's layers: keys and values of its own, where slot j is made of
    token j and of the model's hidden state before it, so that it depends on no later token; and
    that state at the block's last computed token, from which the next block goes on."""

    kind: str
    path: Path
    layers: ModelConfig | None  # that have keys and values; None: there are none
    captured: tuple[int, ...] = ()  # layers of the model whose outputs it reads
    tail_size: int = 0  # numbers of a hidden state, as it is kept
    draft_vocab: int = 0  # tokens that it knows; 0: all of the model's
    norm_inputs: bool = False
    adds_normed: bool = False  # EAGLE-3's layer adds to the normed state (`norm_before_residual`)
    num_heads: int = 0  # Medusa's, one for each token ahead
    num_blocks: int = 1  # Medusa's residual blocks in each
    digest: str = ""
    file_bytes: int = 0

    def tail_dtype(self, kv_dtype: str) -> str:
        return "float32" if kv_dtype == "float32" else "bfloat16"

    def kv_spec(self, spec: KVSpec) -> KVSpec | None:
        """The shape of its own keys and values in blocks of `spec`."""
        return None if self.layers is None else self.layers.kv_spec(spec.block_size, spec.dtype)

    def added_to(self, spec: KVSpec) -> KVSpec:
        """`spec` with room for what it keeps."""
        own = self.kv_spec(spec)
        size = self.tail_size * DTYPE_BYTES[self.tail_dtype(spec.dtype)]
        size += 0 if own is None else own.layer_bytes
        size = -(-(spec.layer_bytes + size) // ALIGNMENT) * ALIGNMENT - spec.layer_bytes
        return replace(spec, draft_bytes=size, drafter=self.digest)

    def memory_bytes(self, dtype: str) -> int:
        if self.layers is None or self.kind not in (MODEL, MTP):
            return self.file_bytes
        fc = 2 * self.layers.hidden_size**2 * DTYPE_BYTES[dtype] if self.kind == MTP else 0
        return weights_bytes(self.layers, dtype) + fc
