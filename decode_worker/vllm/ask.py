"""Asks vLLM for the form of a model's KV, in a process of the environment that has it.

The model is made without memory (on the meta device), so that a question costs vLLM's imports and
no more; what its layers say that they keep goes through vLLM's own planning. Written for 0.32: what
another version has not is named. `form` starts this, and keeps the answer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.decode_worker.vllm.groups import BLOCKS_OF_TOKENS, ONLY_AS_FULL, WINDOWS, windows_of

NEEDED = {
    "xxhash": ("xxhash",),
    "nixl": ("nixl_cu13", "nixl_cu12"),
}  # by modules, any of which will do
ROOM = 1 << 50  # bytes: any number of blocks fits


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Form`, or `error`, why vLLM does not take these of its EngineArgs."""
    import vllm
    from vllm import EngineArgs

    about: dict[str, Any] = {"version": str(vllm.__version__)}
    if missing := [name for name in NEEDED if not any(map(find_spec, NEEDED[name]))]:
        needs = f"{' and '.join(missing)}, which check and move KV"
        how = f"{sys.executable} -m pip install {' '.join(missing)}"
        return about | {"error": f"its environment lacks {needs}: {how}"}
    try:
        config = EngineArgs(**arguments, skip_tokenizer_init=True).create_engine_config()
    except (TypeError, ValueError, NotImplementedError, OSError) as error:
        return about | {"error": _line(error)}
    model = config.model_config
    about |= {
        "architecture": str(model.architecture),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "block_size": config.cache_config.block_size,
        # Keys and values of latent attention have no heads: each rank has all of them.
        "num_kv_heads": 1 if model.use_mla else model.get_total_num_kv_heads(),
    }
    try:
        return about | _layers(config)
    except (
        AttributeError,
        ImportError,
    ) as error:  # not as in the version that this was written for
        lacks = f"vLLM {vllm.__version__} lacks what tells it before the model is loaded"
        return about | {"why_not": f"{lacks}: {_line(error)}"}
    except Exception as error:  # what the code of a model raises
        why = f"{type(error).__name__}: {_line(error)}"
        return about | {"why_not": f"vLLM says it of no model without weights: {why}"}


def _layers(config: Any) -> dict[str, Any]:
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    num_bytes = _made_without_memory(config)
    with set_current_vllm_config(config):
        specs = get_kv_cache_spec(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
        backends = [each.get_attn_backend() for each in layers]
        layouts = [each.name for each in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        groups, per_block, why_not, why_all = _copied(config, specs)
        if why_not:  # then vLLM divides the layers as is best for it
            config.scheduler_config.disable_hybrid_kv_cache_manager = False
            groups, per_block = _described(_config(config, specs))
    return {
        "weights_bytes": num_bytes,
        "bytes_per_block": per_block,
        "groups": groups,
        "why_not": why_not,
        "why_all": why_all,
    }


def _made_without_memory(config: Any) -> int:
    """Makes the model, whose layers are in `config` then. Returns the bytes of its weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            model = initialize_model(config)
    return sum(each.numel() * each.element_size() for each in model.parameters())


def _copied(config: Any, specs: dict[str, Any]) -> tuple[list[dict[str, Any]], int, str, str]:
    """As with a KV connector, whose blocks we copy: groups of layers, each with its window; bytes
    of a block; why blocks of it cannot be copied, and why layers with windows keep all tokens
    nevertheless. "": they can, and do not."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kinds = {get_kv_cache_spec_kind(each).value for each in specs.values()}
    if "mamba" in kinds:
        return [], 0, "states", ""
    if other := kinds - BLOCKS_OF_TOKENS - WINDOWS - ONLY_AS_FULL:
        return [], 0, f"layers keep {', '.join(sorted(other)) or 'nothing'}", ""
    if not config.cache_config.enable_prefix_caching:  # then backends need read no earlier KV
        return [], 0, "vLLM's prefix caching is off, by the settings or for this model", ""
    if any(getattr(each, "non_causal", False) for each in specs.values()):
        return [], 0, "attention is not causal", ""
    has_windows = bool(kinds - BLOCKS_OF_TOKENS)
    is_one = config.scheduler_config.disable_hybrid_kv_cache_manager
    why_all = "vLLM's hybrid KV cache manager is off" if is_one and has_windows else ""
    for disabled in (True,) if is_one or not has_windows else (False, True):
        config.scheduler_config.disable_hybrid_kv_cache_manager = disabled
        try:
            found = _config(config, deepcopy(specs))
        except (ValueError, NotImplementedError) as error:
            why = _line(error)
        else:
            groups, per_block = _described(found)
            if windows_of(found.kv_cache_groups, config.cache_config.block_size) is not None:
                return groups, per_block, "", why_all
            why = f"layers are in {len(groups)} groups whose blocks are not alike"
        why_all = why
    return [], 0, why, ""


def _config(config: Any, specs: dict[str, Any]) -> Any:
    """What vLLM would serve with."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    [found] = get_kv_cache_configs(config, [specs], [ROOM])
    return found


def _described(found: Any) -> tuple[list[dict[str, Any]], int]:
    """Its groups of layers, and the bytes of a block of its memory."""
    from vllm.v1.kv_cache_interface import (
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
    )

    groups = []
    for group in found.kv_cache_groups:
        spec = group.kv_cache_spec
        name = get_kv_cache_spec_kind(spec).value
        has_window = name in WINDOWS | ONLY_AS_FULL
        kind = "full" if name in BLOCKS_OF_TOKENS else "window" if has_window else "state"
        window = get_kv_cache_spec_sliding_window(spec) or 0
        groups.append(
            {
                "kind": kind,
                "num_layers": len(group.layer_names),
                "window": window if kind == "window" else 0,
                "block_size": spec.block_size,
                "dtype": str(getattr(spec, "dtype", "")).removeprefix("torch."),
            }
        )
    return groups, max(each.size for each in found.kv_cache_tensors) // found.num_blocks


def _line(error: BaseException) -> str:
    lines = [each.strip() for each in str(error).splitlines() if each.strip()]
    # Those that pydantic writes begin with how many there are, and where.
    kept = [each for each in lines if not each.startswith("For further information")]
    return " ".join(kept[:3]) or type(error).__name__


def main(question: str, target: str) -> None:
    """Both are files: what vLLM writes to the standard output is for people."""
    # In this process, which is alone.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    arguments = json.loads(Path(question).read_text(encoding="utf-8"))
    Path(target).write_text(json.dumps(answer(arguments)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
