"""The one error that a user of a model sees."""

from __future__ import annotations

from collections.abc import Sequence


class ModelError(Exception):
    """The model cannot be used. The text is one line: what is wrong, with its value, and what would
    be right."""


def check_one_of(name: str, value: str, supported: Sequence[str]) -> None:
    """Raises ModelError if `value` is not supported."""
    if value not in supported:
        raise ModelError(f"{name} {value} is not supported; supported: {', '.join(supported)}")
