"""Which layers attend to a window of positions, as config.json states it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count
from kvrelay.engine.model.checkpoint.rope import SLIDING
from kvrelay.engine.model.errors import ModelError

Raw = Mapping[str, Any]


def windows_of(raw: Raw, window: int | None, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer: of those that `layer_types` or, without it, `sliding` names."""
    layers = count(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if sliding(index) else "full_attention" for index in range(layers)]
    unknown = [kind for kind in kinds if kind not in (SLIDING, "full_attention")]
    if unknown or len(kinds) != layers:
        wrong = unknown[0] if unknown else f"of {len(kinds)} layers for {layers}"
        raise ModelError(f"config.json: layer_types {wrong} is not supported")
    if window is None:
        return ()
    if window < 1:
        raise ModelError(f"config.json: sliding_window is {window}, a positive integer is needed")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def every_layer(_: int) -> bool:
    return True


def optional_window(raw: Raw) -> int | None:
    """For the families that have a switch for it."""
    return count(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None
