"""What a checkpoint says of its vision tower, and of how pictures are prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.checkpoint.fields import count, number, numbers, read_json
from kvrelay.engine.model.checkpoint.quantized_config import float_type
from kvrelay.engine.model.checkpoint.rope import rope_spec
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.vision.config import RESCALED, THETA, Vision

PROCESSOR = "preprocessor_config.json"
# model_type of the whole -> numbers of frequencies that turn by time, height and width, where the
# file does not say so.
SECTIONS = {
    "qwen3_vl": [24, 20, 20],
    "qwen3_5": [11, 11, 10],
    "qwen3_5_moe": [11, 11, 10],
}
TAPS = (8, 16, 24)  # where Qwen3-VL's file does not say; the others have none
ACTIVATION = "gelu_pytorch_tanh"
BICUBIC = 3
# Name of pictures' size and of the tower's; the latter where the file does not say, and the former.
SIZES = (
    ("patch_size", "patch_size", 16, 14),
    ("merge_size", "spatial_merge_size", 2, 2),
    ("temporal_patch_size", "temporal_patch_size", 2, 2),
)


def read_vision(path: Path, raw: Mapping[str, Any]) -> Vision | None:
    """Those of the model in `path`, whose config.json is `raw`. None: there is none that is known,
    or no word of how pictures are prepared. Raises ModelError for settings that are not."""
    kind, own = raw.get("model_type"), raw.get("vision_config")
    if kind not in SECTIONS or not own or not (path / PROCESSOR).is_file():
        return None
    given = read_json(path / PROCESSOR)
    text = raw.get("text_config") or {}
    _check(own, given)
    positions = count(own, "num_position_embeddings", 2304)
    side = isqrt(positions)
    if side * side != positions:
        raise ModelError(f"config.json: num_position_embeddings {positions} is not a square")
    size = given.get("size") or {}
    section = rope_spec(text).get("mrope_section", SECTIONS[kind])
    return Vision(
        depth=count(own, "depth", 27),
        hidden_size=count(own, "hidden_size", 1152),
        intermediate_size=count(own, "intermediate_size", 4304),
        num_heads=count(own, "num_heads", 16),
        patch_size=count(own, "patch_size", 16),
        merge_size=count(own, "spatial_merge_size", 2),
        frames=count(own, "temporal_patch_size", 2),
        out_size=count(own, "out_hidden_size", 3584),
        side=side,
        taps=tuple(own.get("deepstack_visual_indexes", TAPS)) if kind == "qwen3_vl" else (),
        image_token=count(raw, "image_token_id"),
        section=tuple(map(int, section)),
        least_pixels=count(given, "min_pixels", size.get("shortest_edge", 56 * 56)),
        most_pixels=count(given, "max_pixels", size.get("longest_edge", 28 * 28 * 1280)),
        mean=numbers(given, "image_mean", 3),
        spread=numbers(given, "image_std", 3),
        bytes_per_number=DTYPE_BYTES[float_type(raw)],
    )


def _check(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ModelError for what would change numbers and is not known here."""
    needed: dict[str, Any] = {"in_channels": 3, "hidden_act": ACTIVATION}
    for key, value in needed.items():
        if own.get(key, value) != value:
            raise ModelError(f"config.json: vision_config has {key} {own[key]!r}, not {value!r}")
    flags = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    needed = flags | {"resample": BICUBIC}
    for key, value in needed.items():
        if given.get(key, value) not in (value, None):
            raise ModelError(f"{PROCESSOR}: {key} {given[key]!r} is not supported, only {value!r}")
    for key, name, default, unstated in SIZES:
        value, found = count(own, name, default), count(given, key, unstated)
        if found != value:
            stated = "" if given.get(key) else ", which it is where it is not stated,"
            raise ModelError(f"{PROCESSOR}: {key} {found}{stated} is not supported, only {value}")
    theta = (own.get("rope_parameters") or {}).get("rope_theta", THETA)
    if theta != THETA:
        raise ModelError(f"config.json: vision_config has rope_theta {theta}, not {THETA}")
    if abs(number(given, "rescale_factor", RESCALED) - RESCALED) > 1e-9:
        raise ModelError(f"{PROCESSOR}: rescale_factor {given['rescale_factor']} is not 1 / 255")
