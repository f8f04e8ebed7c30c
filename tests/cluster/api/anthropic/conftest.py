"""The servers whose models know tools."""

from __future__ import annotations

from tests.cluster.api.tools.conftest import (
    mistral,
    mistral_server,
    thinking,
    thinking_server,
)

__all__ = ["mistral", "mistral_server", "thinking", "thinking_server"]
