"""What an answer says of the weights that computed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def usage_of_weights(by_choice: Mapping[int, tuple[tuple[int, str], ...]]) -> dict[str, Any]:
    """Which version answered; and where it has changed on the way, from which token on."""
    changes = [
        {"choice": choice, "index": at, "weight_version": name}
        for choice, ranges in by_choice.items()
        for at, name in ranges
    ]
    if not changes:
        return {}
    names = {change["weight_version"] for change in changes}
    found: dict[str, Any] = {"weight_version": changes[-1]["weight_version"]}
    return found if len(names) == 1 else found | {"weight_versions": changes}
