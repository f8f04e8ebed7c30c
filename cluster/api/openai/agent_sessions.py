"""Which conversation a call of an agent is a turn of, by what agents send of themselves.

Claude Code, OpenCode and Codex name theirs in a header. What they ask beside it under that name has
no tools (a title, a summary), and is no turn; an agent that another one has begun has, and is told
apart by the router, as its conversation begins otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvrelay.cluster.api.openai.parts import Plan

KNOWN = "x-claude-code-session-id x-session-affinity session-id"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def with_session(plan: Plan, request: Any, headers: Mapping[str, str], names: str) -> Plan:
    """`names`: of the headers that count, the first that is there; "auto": those of `KNOWN`."""
    names = KNOWN if names == "auto" else names
    first = plan.choices[0]
    if first.session is not None or not getattr(request, "tools", None):
        return plan
    given = next((headers[name] for name in names.split() if name in headers), "")
    if not _NAME.fullmatch(given):
        return plan
    choices = (replace(first, session=given), *plan.choices[1:])
    return replace(plan, choices=choices, has_branches=True)
