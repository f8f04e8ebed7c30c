"""Tiny random checkpoints of every family, and a decoder over them driven block by block."""

import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.checkpoint.adapter import load_adapter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.linear import AMX, BF16_PAIRS, FP16, INT16
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.states import NO_STATE, StatePool, StateSpans
from kvrelay.engine.model.terms import RowTerms
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step

torch.set_num_threads(1)  # threads cost more than they bring at these sizes
VOCAB, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 131, 16, 64, 512
NUM_SLOTS = 8  # states
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    **ENDS,
}
WINDOW = 24  # not a whole number of blocks, and less than what the tests feed


def rope(kind: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
YARN = rope("yarn", factor=8.0, **ORIGINAL)
MSCALE = rope("yarn", factor=8.0, mscale=0.707, mscale_all_dim=0.9, **ORIGINAL)
LONGROPE = {
    **rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[1.0, 2.0, 4.0, 8.0]),
    "partial_rotary_factor": 0.5,
}
MROPE = rope("default", mrope_section=[4, 2, 2])
PHI3 = {"pad_token_id": 0}
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    **EXPERTS,
}
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 48}
INDEXER = {"index_topk": 24, "index_n_heads": 8, "index_head_dim": 32}
GEMMA3 = {
    "head_dim": 32,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 6,
    "layer_types": 3 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "output_hidden_states": True,  # else transformers takes rows of inputs that are not there
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
}
GEMMA4_INPUTS = {
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
}
GEMMA4_SPARSE = {
    "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
EXPERT_GROUPS = {"n_group": 4, "topk_group": 2}
GLM4 = {
    "head_dim": 32,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    **EXPERTS,
}
GROWTH = rope(
    "yarn",
    factor=8.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
    original_max_position_embeddings=16,
)
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,  # not a whole number of vectors
    "linear_value_head_dim": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA = {
    "mamba_d_ssm": 160,
    "mamba_n_heads": 4,
    "mamba_d_head": 40,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_norm_before_gate": False,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 1.3, 0.7, 0.8],
    "mlp_multipliers": [1.2, 0.6],
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.9,
}
HYBRID = {  # families with recurrent layers
    "falcon-h1": (transformers.FalconH1Config, MAMBA),
    "falcon-h1-norm": (
        transformers.FalconH1Config,
        {**MAMBA, "mamba_rms_norm": True, "mamba_n_groups": 1},
    ),
    "kimi-linear": (
        transformers.KimiLinearConfig,
        {
            **{key: value for key, value in LATENT.items() if "experts" not in key},
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_expert_group": 4,
            "topk_group": 2,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-2,  # not that of the latents' norms
            "linear_head_dim": 40,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "lfm2-bias": (
        transformers.Lfm2Config,
        {"block_multiple_of": 32, "full_attn_idxs": [2], "conv_bias": True, "conv_L_cache": 4},
    ),
    "lfm2-moe": (
        transformers.Lfm2MoeConfig,
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron-h": (
        transformers.NemotronHConfig,
        {
            "head_dim": 32,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 40,
            "n_groups": 2,
            "ssm_state_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
            "time_step_min": 1e-30,  # transformers cuts steps at it; the makers' code does not
            **EXPERT_GROUPS,
        },
    ),
    "qwen3-next": (transformers.Qwen3NextConfig, {**DELTA, **SPARSE}),
    "qwen3.5": (transformers.Qwen3_5TextConfig, DELTA),
    "qwen3.5-part": (transformers.Qwen3_5Config, DELTA),
    "qwen3.5-moe": (transformers.Qwen3_5MoeTextConfig, {**DELTA, **SPARSE}),
}
LLAMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 192,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "pad_token_id": 0,
}
FAMILIES = {
    **HYBRID,
    "llama": (transformers.LlamaConfig, {}),
    "llama3": (transformers.LlamaConfig, LLAMA3),
    "granite": (
        transformers.GraniteConfig,
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
        },
    ),
    "glm": (transformers.GlmConfig, {"head_dim": 32, "pad_token_id": 0}),
    "glm4": (transformers.Glm4Config, {"head_dim": 32, "pad_token_id": 0}),
    "qwen2-vl-part": (transformers.Qwen2VLConfig, MROPE),
    "qwen2.5-vl-part": (transformers.Qwen2_5_VLConfig, MROPE),
    "qwen3-vl-part": (transformers.Qwen3VLConfig, {"head_dim": 32, **MROPE}),
    "qwen3-vl-moe-part": (
        transformers.Qwen3VLMoeConfig,
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            **MROPE,
        },
    ),
    "linear": (
        transformers.LlamaConfig,
        {**rope("linear", factor=4.0), "attention_bias": True},
    ),
    "yarn": (transformers.Qwen2Config, YARN),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": (transformers.Phi3Config, {**PHI3, "sliding_window": WINDOW}),
    "phi3-short": (
        transformers.Phi3Config,
        {**PHI3, **LONGROPE, "original_max_position_embeddings": MAX_LEN},
    ),
    "phi3-long": (transformers.Phi3Config, {**PHI3, **LONGROPE, **ORIGINAL}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA3),
    "gemma3-part": (transformers.Gemma3Config, GEMMA3),
    "gemma4": (transformers.Gemma4TextConfig, GEMMA4),
    "gemma4-inputs": (transformers.Gemma4TextConfig, {**GEMMA4, **GEMMA4_INPUTS}),
    "gemma4-sparse": (transformers.Gemma4TextConfig, {**GEMMA4, **GEMMA4_SPARSE}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        {**SPARSE, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek2": (transformers.DeepseekV2Config, {**LATENT, **MSCALE, "q_lora_rank": None}),
    "deepseek2-groups": (
        transformers.DeepseekV2Config,
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek3": (transformers.DeepseekV3Config, {**LATENT, **GROUPS, **MSCALE}),
    "deepseek32": (transformers.DeepseekV32Config, {**LATENT, **GROUPS, **MSCALE, **INDEXER}),
    "glm5": (transformers.GlmMoeDsaConfig, {**LATENT, "q_lora_rank": 48, **INDEXER}),
    "glm5-shared": (
        transformers.GlmMoeDsaConfig,
        {**LATENT, **INDEXER, "q_lora_rank": 48, "indexer_types": ["full", "shared", "full"]},
    ),
    "kimi-k25": (transformers.Kimi_K25Config, {**LATENT, **GROUPS, **MSCALE}),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            **rope("yarn", factor=8.0, truncate=False, **ORIGINAL),
        },
    ),
    "llama4": (transformers.Llama4TextConfig, {**LLAMA4, **LLAMA3}),
    "llama4-part": (
        transformers.Llama4Config,
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    "glm4-moe": (transformers.Glm4MoeConfig, {**GLM4, "use_qk_norm": True}),
    "glm4-moe-air": (transformers.Glm4MoeConfig, {**GLM4, **EXPERT_GROUPS}),
    "glm4-moe-lite": (
        transformers.Glm4MoeLiteConfig,
        {**LATENT, "q_lora_rank": 48, "first_k_dense_replace": None},
    ),
    "mimo-v2": (
        transformers.MiMoV2FlashConfig,
        {
            "head_dim": 32,
            "v_head_dim": 24,
            "num_attention_heads": 8,
            "sliding_window": WINDOW,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "attention_value_scale": 0.707,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "minimax-m2": (
        transformers.MiniMaxM2Config,
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 32, **GROWTH}),
    "ministral3-part": (transformers.Mistral3Config, {"head_dim": 32, **GROWTH}),
    "mistral4": (
        transformers.Mistral4Config,
        {**LATENT, "q_lora_rank": 48, "norm_topk_prob": True, **GROWTH},
    ),
    "seed-oss": (transformers.SeedOssConfig, {"head_dim": 32}),
    "seed-oss-out": (transformers.SeedOssConfig, {"head_dim": 32, "attention_out_bias": True}),
}


PARTS = {  # models of which the language model is a part, and what its config.json needs beside
    transformers.Gemma3Config: (transformers.Gemma3ForConditionalGeneration, {}),
    transformers.Kimi_K25Config: (
        transformers.Kimi_K25ForConditionalGeneration,
        {"model_type": "deepseek_v3"},
    ),
    transformers.Llama4Config: (transformers.Llama4ForConditionalGeneration, {}),
    transformers.Mistral3Config: (
        transformers.Mistral3ForConditionalGeneration,
        {"model_type": "ministral3"},
    ),
    transformers.Qwen2VLConfig: (transformers.Qwen2VLForConditionalGeneration, {}),
    transformers.Qwen2_5_VLConfig: (transformers.Qwen2_5_VLForConditionalGeneration, {}),
    transformers.Qwen3VLConfig: (transformers.Qwen3VLForConditionalGeneration, {}),
    transformers.Qwen3VLMoeConfig: (transformers.Qwen3VLMoeForConditionalGeneration, {}),
    transformers.Qwen3_5Config: (transformers.Qwen3_5ForConditionalGeneration, {}),
}


def make_padded(tokenizer_dir: Path, path: Path, num_rows: int) -> None:
    """A random checkpoint whose embedding has so many rows more than the tokenizer, as most have.
    The model likes them best of all."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / name, path)
    size = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"])
    model = make_checkpoint("llama", path, changes={"vocab_size": size + num_rows})
    with torch.no_grad():
        model.lm_head.weight[size:] *= 3
    model.save_pretrained(path)


def make_checkpoint(
    family: str, path: Path, changes: dict | None = None, **saving
) -> torch.nn.Module:
    """Write a random checkpoint of `family` to `path`; returns transformers' model of it."""
    kind, own = FAMILIES[family]
    return write_checkpoint(kind, SHAPE | own | (changes or {}), path, **saving)


def write_checkpoint(kind: type, fields: dict, path: Path, **saving) -> torch.nn.Module:
    """A random one of transformers' configuration `kind`; returns the model of it."""
    fields = deepcopy(fields)  # Mistral4Config writes into what it is given
    torch.manual_seed(7)
    if kind in PARTS:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {**sizes, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
        vision |= {"depth": 1, "num_heads": 2, "embed_dim": 16, "deepstack_visual_indexes": [0]}
        whole, text = PARTS[kind]
        text = text | fields
        tied = text.get("tie_word_embeddings", kind is transformers.Gemma3Config)
        config = kind(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ENDS)
        model = whole._from_config(config, dtype=torch.float32)
    elif kind is transformers.Mistral4Config:  # not in transformers' own list
        config = kind(**fields)
        model = transformers.Mistral4ForCausalLM._from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_config(
            kind(**fields), dtype=torch.float32, attn_implementation="eager"
        )
    vary(model)
    model.save_pretrained(path, **saving)
    if kind is transformers.Kimi_K25Config:  # it saves layers by a name that is not published
        file = path / "model.safetensors"
        tensors = {
            re.sub(r"^(language_model.model.)blocks", r"\1layers", name): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return model.eval()


def vary(model: torch.nn.Module) -> None:
    """No parameters that are zeros or ones, or alike, where a mistake with them would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name:  # not all zeros or ones
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if name.endswith("dt_bias"):  # small steps, else memories hold next to nothing
                parameter.sub_(4.0)
            if "conv1d" in name:
                parameter.copy_(torch.randn_like(parameter))
            if name.endswith(("router.scale", "per_expert_scale")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if name.endswith("gate.weight") or "experts." in name:  # nor all alike
                parameter.copy_(torch.randn_like(parameter) * SHAPE["initializer_range"])
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)


def low_precision_kind(name: str) -> int:
    """The kind of products with rounded factors; 0 for any other name. Skips where the CPU does
    not multiply so."""
    kind = {"bf16_pairs": BF16_PAIRS, "fp16": FP16, "amx": AMX, "int16": INT16}.get(name, 0)
    # Pairs are multiplied in float32 where there is nothing better, and integers anywhere.
    if kind in (FP16, AMX) and not kernels.load(default_cache_dir()).kvr_multiplies(kind):
        pytest.skip(f"this CPU does not multiply {name}, or other numbers as fast")
    return kind


def make_pool(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Not zeroed: what a sequence has not written must not matter."""
    spec = config.attention_spec(BLOCK_SIZE, "float8_e4m3" if dtype == torch.uint8 else "float32")
    heads = (NUM_BLOCKS, spec.num_layers, spec.num_planes, spec.num_kv_heads)
    if dtype == torch.uint8:
        return torch.randint(0, 120, (*heads, spec.bytes_per_head)).to(dtype)
    return torch.randn(*heads, BLOCK_SIZE, spec.head_dim).to(dtype)


def make_ops(
    kind: str,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    low_precision: int | None = None,
    pool: torch.Tensor | None = None,
    quantization: str = "none",
    threads: int = 2,
):
    pool = make_pool(config, dtype) if pool is None else pool
    if kind == "torch":
        return TorchOps(config, pool, dtype, MAX_LEN, quantization)
    library = kernels.load(default_cache_dir())
    return CpuOps(config, pool, dtype, MAX_LEN, library, threads, quantization, low_precision)


def make_states(config: ModelConfig, filler: float | None = None) -> StatePool:
    """All recurrent layers in a slot; full of `filler`, or random."""
    layout, layers = config.state_layout, config.recurrent_layers
    slots = torch.randn(NUM_SLOTS, layout.num_units * layout.unit_size * len(layers))
    slots = slots if filler is None else torch.full_like(slots, filler)
    places = {layer: (0, at * layout.unit_size) for at, layer in enumerate(layers)}
    return StatePool(slots.view(torch.uint8), layout, places)


class Driver:
    """Feeds sequences to a decoder; each has its own scattered blocks."""

    def __init__(
        self,
        path: Path,
        kind: str,
        config: ModelConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        low_precision: int | None = None,
        quantization: str = "none",
        threads: int = 2,
    ) -> None:
        """`config` is used instead of that of the directory."""
        self.config = config or read_config(path)
        self.pool = make_pool(self.config, torch.uint8 if fp8 else dtype)
        options = (dtype, low_precision, self.pool, quantization, threads)
        self.ops = made = make_ops(kind, self.config, *options)
        with torch.inference_mode():
            weights = load_weights(path, self.config, made, lambda _: None)
        self._decoder = Decoder(self.config, weights, made)
        self._load = partial(
            load_adapter, model_dir=path, config=self.config, ops=made, weights=weights
        )
        self._adapters: dict[bytes, RowTerms] = {}
        self.adapter_of: dict[str, Adapter] = {}  # by sequence
        order = torch.Generator().manual_seed(3)
        self._free = torch.randperm(NUM_BLOCKS, generator=order).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._start: dict[str, int] = {}
        self._windows = self.config.attention_spec(BLOCK_SIZE, "float32").windows
        self.states: dict[str, int] = {}  # slot of each sequence
        if self.config.recurrent is not None:
            self.state_pool = make_states(self.config, torch.nan)
            made.use_states(self.state_pool)

    def adapt(self, name: str, folder: Path) -> None:
        """Sequence `name` has this adapter from its first token on."""
        adapter = Adapter(read_adapter(folder).digest, str(folder))
        self._adapters[adapter.digest] = self._load(adapter)
        self.adapter_of[name] = adapter

    def feed(
        self,
        *parts: tuple[str, list[int]],
        mute: tuple[str, ...] = (),
        states: StateSpans | None = None,
    ) -> torch.Tensor:
        """One step over (name, next tokens) pairs: logits after each that is not in `mute`,
        [R, VOCAB]. Those with adapters come last, by digest. states: by default each sequence has
        a slot of its own."""
        states = states or self._spans(parts)
        seqs, groups = [], len(self._windows)
        for name, tokens in parts:
            blocks = self._blocks.setdefault(name, [])
            start = self._start.get(name, 0)
            while len(blocks) // groups * BLOCK_SIZE < start + len(tokens):
                blocks += [self._free.pop() for _ in range(groups)]
            self._start[name] = start + len(tokens)
            adapter = self.adapter_of.get(name)
            shown = name not in mute
            seqs.append(scheduled(tokens, start, blocks, sample=shown, need=adapter))
        limits = Limits(
            NUM_BLOCKS,
            BLOCK_SIZE,
            MAX_LEN,
            self.config.vocab_size,
            window=self.config.max_window,
            num_sinks=self.config.num_sinks,
            group_windows=self._windows,
        )
        cpu = torch.device("cpu")
        batch = Batch.from_step(Step(0, seqs), limits, cpu, loaded=self._adapters)
        self.batch = batch = replace(batch, states=(states,) if states else ())
        with torch.inference_mode():
            return self._decoder.forward(batch).clone()

    def _spans(self, parts: tuple[tuple[str, list[int]], ...]) -> StateSpans | None:
        if self.config.recurrent is None:
            return None
        rows, load, store, first = [], [], [], 0
        for name, tokens in parts:
            rows.append((first, len(tokens)))
            first += len(tokens)
            load.append(self.states.get(name, NO_STATE))
            store.append(self.states.setdefault(name, len(self.states)))
        return StateSpans(tuple(rows), tuple(load), tuple(store))

    def give_back(self, name: str, first: int, end: int) -> None:
        """Entries [first, end) of its block table; whoever reads those blocks now finds NaN."""
        for entry in range(first, end):
            self.pool[self._blocks[name][entry]] = torch.nan
            self._blocks[name][entry] = -1


def scheduled(tokens: list[int], start: int, blocks: list[int], **changes) -> ScheduledSeq:
    fields = {
        "request_id": "r",
        "tokens": tokens,
        "start": start,
        "block_ids": blocks,
        "sample": True,
        "sampling": SamplingParams(temperature=0.0),
        "context": tokens,
        "num_prompt_tokens": len(tokens),
    }
    return ScheduledSeq(**(fields | changes))


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()
