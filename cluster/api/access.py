"""The access log: a line for each request when it has ended, where `log.access` asks for it.

docs/logs.md has its fields. Prompts are in it only with `log.prompts`, keys and queries never.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Scope

from kvrelay.cluster.api.calls import ServedCall
from kvrelay.cluster.api.limiter import TENANT
from kvrelay.engine.logs import LogSection

MAX_PATH, MAX_PROMPT = 200, 8000  # characters that are shown
# Probes and scrapes come every few seconds: those that went well are not events.
_QUIET = ("/health", "/metrics", "/ping", "/status")

_log = logging.getLogger("kvrelay.access")


class AccessLog:
    """Owned by the API of one process."""

    def __init__(self, section: LogSection, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` makes text of a prompt's tokens."""
        self.is_on = section.access or section.prompts
        self._with_prompts = section.prompts
        self._decode = decode

    def write(
        self,
        scope: Scope,
        status: int,
        elapsed_s: float,
        outcome: str = "",
        served: ServedCall | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """`status` 0: the client has left before any was sent. `served`: what was generated."""
        path: str = scope["path"]
        if status in range(200, 400) and path.startswith(_QUIET):
            return
        fields: dict[str, Any] = {"method": scope["method"], "path": path[:MAX_PATH]}
        fields |= {"status": status, "ms": round(elapsed_s * 1e3, 1)}
        fields |= {"tenant": tenant} if (tenant := TENANT.get()) else {}
        fields |= {"outcome": outcome} if outcome else {}
        if served is not None:
            fields |= _generated(served)
        if self._with_prompts and prompt:
            # The end of a prompt is what is new in it.
            fields["prompt"] = self._decode(prompt)[-MAX_PROMPT:]
        _log.info("request", extra={"fields": fields})


def _generated(served: ServedCall) -> dict[str, Any]:
    usage = served.usage
    first = served.choices[0] if served.choices else None
    fields: dict[str, Any] = {}
    if first is not None and first.ttft_s is not None:
        fields["ttft_ms"] = round(first.ttft_s * 1e3, 1)
    fields |= {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
    attempts = () if first is None or first.explanation is None else first.explanation.attempts
    if attempts:
        last = attempts[-1]
        fields["worker"] = last.decode.worker
        fields |= {} if last.prefill is None else {"prefill_worker": last.prefill.worker}
        fields |= {} if len(attempts) == 1 else {"attempts": len(attempts)}
    return fields
