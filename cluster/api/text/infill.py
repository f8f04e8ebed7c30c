"""Prompts for text between a beginning and an end, by the special tokens that models know for it
(fill-in-the-middle; Bavarian et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.cluster.api.text.tokenizer import Tokenizer

# What goes before the beginning, before the end, and after both; by the models that know them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_END_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


class NoInfill(ValueError):
    """The model knows no tokens for it."""


def infill_prompt(tokenizer: Tokenizer, before: Sequence[int], after: str) -> list[int]:
    """before: tokens of the beginning, with what every prompt begins with. Raises NoInfill."""
    end = tokenizer.encode(after, add_special_tokens=False, is_prompt=False)
    start = tokenizer.num_start_tokens
    for names in _MARKS:
        marks = [tokenizer.token_id(name) for name in names]
        if None not in marks:
            prefix, suffix, middle = (mark for mark in marks if mark is not None)
            return [*before[:start], prefix, *before[start:], suffix, *end, middle]
    marks = [tokenizer.token_id(name) for name in _END_FIRST]
    if None not in marks:
        suffix, prefix = (mark for mark in marks if mark is not None)
        return [*before[:start], suffix, *end, prefix, *before[start:]]
    raise NoInfill("this model has no tokens for text in the middle")
