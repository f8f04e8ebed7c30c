"""Checks of a configuration that need a part of it alone: who has a name, what vLLM obeys, and
which modules have to be installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.settings import ConfigError
from kvrelay.engine.support import Capability, Trait, refusal_of


def name_table(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Who has each name: models, aliases and adapters share one space of names. `given`: a name,
    and who has it, in words. Raises ConfigError where a name has two."""
    table: dict[str, str] = {}
    for name, who in given:
        if name in table:
            told = f"{name!r} is {table[name]}" + ("" if who == table[name] else f", and {who}")
            twice = ", twice" if who == table[name] else ""
            raise ConfigError(f"{told}{twice}: give each a name of its own")
        table[name] = who
    return table


def not_of_vllm(engine: EngineSection, model: ModelSection) -> str:
    """Which setting vLLM would not obey, and what does what it does; "": none."""
    default = EngineSection()
    by_arguments = "set it by engine.arguments, as vLLM calls it"
    without = f"{refusal_of(Capability.HEAD_DRAFTS, (Trait.VLLM,))}: leave it out"
    refused = {
        "model.quantization": (model.quantization, ("none", "fp8"), by_arguments),
        "engine.attention_backend": (engine.attention_backend, ("auto",), by_arguments),
        "engine.moe_backend": (engine.moe_backend, ("auto",), by_arguments),
        "engine.drafter": (engine.drafter, ("",), without),
        "engine.num_speculative_tokens": (
            *(engine.num_speculative_tokens, (default.num_speculative_tokens, 0)),
            without,
        ),
        "engine.window": (engine.window, (0,), "leave it out"),
        "engine.sinks": (engine.sinks, (0,), "leave it out"),
    }
    for name, (value, obeyed, instead) in refused.items():
        if value not in obeyed:
            return f"{name} = {value!r}: vLLM does not obey it: {instead}"
    return ""


def require_extra(extra: str, *modules: str) -> None:
    """Import `modules`, which the extra of that name installs. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            wanted = f"pip install 'kvrelay[{extra}]'"
            raise ConfigError(f"{name} is not installed: {wanted}") from error
