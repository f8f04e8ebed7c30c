"""Which attention FlashInfer computes and which stays with Triton, decided once, from facts alone.

FlashInfer's kernels know 16-bit keys and values in pages. They lack: scales for each token (KV in
FP8), attention to the first positions outside a window (attention sinks of StreamingLLM: what
FlashInfer calls sinks is another term in the softmax), and in decodes soft-capped scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gpu.cache_pool import Pool


def load(setting: str) -> Any:
    """The package. `setting`: what asked for it, for the message. Raises ModelError if it cannot be
    imported."""
    try:
        library = import_module("flashinfer")
        import_module("flashinfer.decode")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: no CUDA that fits it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{setting} is flashinfer, which cannot be imported ({reason}):"
            " pip install 'kvrelay[flashinfer]', or set it to triton"
        ) from error
    return library


def capability(device: torch.device) -> tuple[int, int]:
    """Returns a GPU's (major, minor), and (0, 0) for a CPU."""
    return (0, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # in pages that prompts read
LATENT_DIMS = ((192, 128),)  # keys and values of heads that are expanded from latents
BLOCK_SIZES = (16, 32, 64, 128)  # in pages that decodes read
DECODE_CAPABILITIES = (9, 10, 12)  # major: their kernels need no plan, so a graph holds them


@dataclass(frozen=True, slots=True)
class Division:
    decodes: tuple[bool, ...]  # by layer: FlashInfer computes steps of one token per sequence
    prompts: tuple[bool, ...]  # by layer: it computes steps with longer queries
    latent_prompts: bool = False  # prompts of multi-head latent attention, expanded
    lacks: tuple[str, ...] = ()  # why the rest stays with Triton

    @property
    def kinds(self) -> dict[str, list[int]]:
        """Maps a kind of call to FlashInfer, by its field, to the layers that use it."""
        latent = (self.latent_prompts,) * len(self.decodes)
        kinds = {"decodes": self.decodes, "prompts": self.prompts, "latent_prompts": latent}
        layers = {
            kind: [layer for layer, is_ours in enumerate(ours) if is_ours]
            for kind, ours in kinds.items()
        }
        return {kind: found for kind, found in layers.items() if found}

    def without(self, kind: str, reason: str) -> Division:
        """As it is, but `kind`, one of `kinds`, is left to Triton."""
        lacks = (*self.lacks, f"{kind.replace('_', ' ')}: {reason}")
        if kind == "latent_prompts":
            return replace(self, latent_prompts=False, lacks=lacks)
        none = (False,) * len(self.decodes)
        if kind == "decodes":
            return replace(self, decodes=none, lacks=lacks)
        return replace(self, prompts=none, lacks=lacks)

    def notice(self, version: str) -> str:
        """Returns one line for the operator."""
        parts = [
            f"{name} of {_share(layers)}"
            for name, layers in (("decodes", self.decodes), ("prompts", self.prompts))
            if any(layers)
        ]
        if self.latent_prompts:
            parts.append("prompts with expanded latents")
        done = f"FlashInfer {version} computes attention: {' and '.join(parts)}"
        if not parts:
            done = f"FlashInfer {version} computes no attention of this model"
        if not self.lacks:
            return done
        return f"{done}; Triton's kernels the rest ({'; '.join(self.lacks)})"


def divide(
    config: ModelConfig, pool: Pool, dtype: torch.dtype, capability: tuple[int, int]
) -> Division:
    """`capability` is the device's (major, minor)."""
    lacks = []
    if dtype not in DTYPES:
        lacks.append(f"{str(dtype).removeprefix('torch.')} is not a 16-bit type")
    if pool.is_fp8:
        lacks.append("KV in FP8 has a scale per token")
    none = (False,) * config.num_layers
    if config.recurrent is not None:
        return Division(none, none, False, (*lacks, "blocks with states have KV heads first"))
    latent = config.latent
    if latent is not None:
        dims = (latent.nope_dim + latent.rope_dim, latent.value_dim)
        if dims not in LATENT_DIMS:
            lacks.append(f"heads of {dims[0]} and {dims[1]} dimensions")
        if 2 * latent.rank <= latent.nope_dim + latent.value_dim:
            lacks.append("latents that are not larger than the heads")  # nothing would be saved
        if config.attention_softcap:
            lacks.append("soft-capped scores")
        if latent.indexer is not None:
            lacks.append("sparse attention")
        expands = not lacks
        return Division(none, none, expands, (*lacks, "latent attention that is absorbed"))
    if config.layer_heads or config.kv_owners:
        lacks.append("heads that differ by layer, or keys and values that layers share")
    if config.head_dim not in HEAD_DIMS:
        lacks.append(f"heads of {config.head_dim} dimensions")
    if config.learned_sinks:
        lacks.append("learned sinks")
    if config.attention_chunk:
        lacks.append("chunks of attention")
    if lacks:
        return Division(none, none, False, tuple(lacks))
    plain = tuple(
        not (config.num_sinks and config.window(layer)) for layer in range(config.num_layers)
    )
    if not all(plain):
        lacks.append("attention sinks")
    unable = []
    if config.attention_softcap:
        unable.append("decodes: soft-capped scores")
    if pool.block_size not in BLOCK_SIZES:
        unable.append(f"decodes: blocks of {pool.block_size} tokens")
    if capability[0] not in DECODE_CAPABILITIES:
        unable.append(f"decodes: compute capability {capability[0]}.{capability[1]}")
    return Division(none if unable else plain, plain, False, (*lacks, *unable))


def _share(layers: tuple[bool, ...]) -> str:
    return "all layers" if all(layers) else f"{sum(layers)} of {len(layers)} layers"
