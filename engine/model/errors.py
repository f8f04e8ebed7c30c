"""The one error that a user of a model sees."""

from __future__ import annotations

from collections.abc import Sequence


class ModelError(Exception):
    """The model cannot be used. The text is one line: what is wrong, with its value, and what would
    be right."""


class WeightsMissing(ModelError):
    """Weights that took the place of the model's own are nowhere any more."""

    def __init__(self, text: str, digest: bytes) -> None:
        super().__init__(text)
        self.digest = digest


def check_one_of(name: str, value: str, supported: Sequence[str]) -> None:
    """Raises ModelError if `value` is not supported."""
    if value not in supported:
        raise ModelError(f"{name} {value} is not supported; supported: {', '.join(supported)}")
