"""Environment variables that Ray reads when it is imported, and never again."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 lets every other process delay a decode step
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns of a change to come
}


def apply() -> None:
    """Set what the user has not set. Call before Ray is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if has_token or (Path.home() / ".ray" / "auth_token").is_file():
        # A cluster that was started where there is a token asks for it; joining needs telling.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
