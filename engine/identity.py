"""What computes, named by its content: one function for every engine, tier, process and restart.

A path, a time, a machine or the way in which a setting is spelled is never a part of it. Two
identities that are made of it:

* of a *checkpoint*: every byte of its weights, of what says how they are read, and of the engine's
  arguments. The server, the workers that it starts or adopts, a restart and the weights of an
  update are compared by it.
* of *KV*: a checkpoint's, with the shape that is computed, quantization, engine and its version,
  and the form of a block. It is the root of fingerprints (`kvtransfer.layout`), by which tiers and
  peers go.

Names of files in a cache of the Hugging Face hub are SHA-256 of what was downloaded, and are not
used: they do not tell what a file has come to hold since, and a copy elsewhere has other names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrelay.engine.cache_dir import file_digest

OWN, VLLM = "kvrelay", "vllm"  # engines, as engine.runs names them
SHOWN_DIGITS = 12  # that people see

WEIGHTS = "*.safetensors"
# What else vLLM may take numbers from: other formats, and code that comes with a model.
FURTHER_OF_VLLM = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.py")
# Beside the weights: how they are stored, and which text each token id stands for.
QUANTIZATION_FILES = ("config.json", "params.json", "hf_quant_config.json")
QUANTIZATION_OF_VLLM = ("quantize_config.json", "quant_config.json")
VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model"),
    "tekken.json",
)

# Arguments of vLLM that change neither what is computed nor the form of its KV. All others count:
# one that is not known here costs KV that might have been found, and never a wrong token.
_ONLY_SPEED = """
async_scheduling cudagraph_capture_sizes cuda_graph_sizes disable_cascade_attn
disable_custom_all_reduce disable_log_stats distributed_executor_backend download_dir
enable_chunked_prefill enable_expert_parallel enable_log_requests enable_prefix_caching
enforce_eager gpu_memory_utilization kv_cache_memory_bytes long_prefill_token_threshold
max_cudagraph_capture_size max_long_partial_prefills max_num_batched_tokens
max_num_partial_prefills max_num_seqs max_parallel_loading_workers num_gpu_blocks_override
optimization_level pipeline_parallel_size prefix_caching_hash_algo safetensors_load_strategy
scheduling_policy seed served_model_name stream_interval structured_outputs_config swap_space
tensor_parallel_size use_tqdm_on_load
"""
ONLY_SPEED = frozenset(_ONLY_SPEED.split())


def weight_files(runs: str = OWN) -> tuple[str, ...]:
    """Patterns of files that the engine that `runs` takes numbers from."""
    return (WEIGHTS, *(each for each in FURTHER_OF_VLLM if runs == VLLM and each != "*.py"))


def files_of(path: Path, runs: str = OWN) -> list[Path]:
    """Those of a checkpoint that count, for the engine that `runs`."""
    further = FURTHER_OF_VLLM if runs == VLLM else ()
    names: tuple[str, ...] = QUANTIZATION_FILES + VOCABULARY_FILES
    names += QUANTIZATION_OF_VLLM if runs == VLLM else ()
    weights = (file for pattern in (WEIGHTS, *further) for file in sorted(path.glob(pattern)))
    return [file for file in (*weights, *(path / name for name in names)) if file.is_file()]


def identity_of(
    files: Iterable[Path], about: Mapping[str, Any] | None, person: bytes = b"kvrelay-model"
) -> bytes:
    """32 bytes: every byte of `files` and their names, without those of folders, and `about`, which
    has to be JSON. `person`: what it is the identity of. Raises OSError."""
    digest = blake2b(digest_size=32, person=person)
    digest.update(b"" if about is None else json.dumps(about).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file_digest(file))
    return digest.digest()


def checkpoint_identity(
    path: Path, runs: str = OWN, arguments: Mapping[str, Any] | None = None
) -> bytes:
    """32 bytes of what is served. `arguments`: of vLLM. Raises OSError."""
    about: dict[str, Any] = {}
    if runs == VLLM:
        about = {"engine": runs, "arguments": telling_arguments(arguments or {})}
    return identity_of(files_of(path, runs), about, b"kvrelay-content")


def telling_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of vLLM that change numbers or the form of KV, by name; a file or folder that one names
    counts by its bytes. Raises OSError."""
    return {
        name: _by_content(arguments[name]) for name in sorted(arguments) if name not in ONLY_SPEED
    }


def _by_content(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _by_content(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_by_content(each) for each in value]
    if isinstance(value, str) and "/" in value:
        path = Path(value).expanduser()
        if path.is_dir():
            return identity_of(files_of(path, VLLM), None).hex()
        if path.is_file():
            return file_digest(path).hex()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def shown(identity: bytes) -> str:
    return identity.hex()[:SHOWN_DIGITS]
