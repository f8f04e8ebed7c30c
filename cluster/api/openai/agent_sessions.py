"""Which session a request of a coding agent is a turn of, by the agent's own header.

Claude Code, OpenCode and Codex send the name of their session in a header. Requests without tools
(titles, summaries) are not turns of it. Requests of subagents come under the same name: the router
tells them apart by how their prompts begin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvrelay.cluster.api.openai.parts import Plan

KNOWN = "x-claude-code-session-id x-session-affinity session-id"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def session_in(request: Any, headers: Mapping[str, str], names: str) -> str:
    """The session that a request names, itself or by a header; "": none. `names`: of the headers
    that count, the first that is there; "auto": those of `KNOWN`."""
    own = getattr(request, "prompt_cache_key", None)
    if own or not getattr(request, "tools", None):
        return own or ""
    names = KNOWN if names == "auto" else names
    given = next((headers[name] for name in names.split() if name in headers), "")
    return given if _NAME.fullmatch(given) else ""


def with_session(plan: Plan, request: Any, headers: Mapping[str, str], names: str) -> Plan:
    """The plan with the session of an agent's header. `names`: as of `session_in`."""
    first, last = plan.choices[0], plan.choices[-1]
    has_several_prompts = last.prompt != first.prompt
    given = session_in(request, headers, names)
    if first.session is not None or has_several_prompts or not given:
        return plan
    choices = (replace(first, session=given), *plan.choices[1:])
    return replace(plan, choices=choices, has_branches=True)
