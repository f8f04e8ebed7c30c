"""Which session a request of a coding agent is a turn of, by the agent's own header.

Claude Code, OpenCode and Codex send the name of their session in a header. Requests without tools
(titles, summaries) are not turns of it. Requests of subagents come under the same name: the router
tells them apart by how their prompts begin. Qwen Code sends no name: its conversations have one by
what they begin with, and those that begin alike are told apart by what was said since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from kvrelay.cluster.api.openai.parts import Plan

KNOWN = "x-claude-code-session-id x-session-affinity session-id"
NAMELESS, NUM_OPENING = "QwenCode/", 2
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def session_in(request: Any, headers: Mapping[str, str], names: str) -> str:
    """The session that a request is of, named by itself, by a header or by its beginning; "": none.
    `names`: of the headers that count, the first that is there; "auto": those of `KNOWN`, and
    agents that are known to send none."""
    own = getattr(request, "prompt_cache_key", None)
    if own or not getattr(request, "tools", None):
        return own or ""
    if _is_nameless(headers, names):
        return _by_opening(getattr(request, "messages", ()))
    names = KNOWN if names == "auto" else names
    given = next((headers[name] for name in names.split() if name in headers), "")
    return given if _NAME.fullmatch(given) else ""


def with_session(plan: Plan, request: Any, headers: Mapping[str, str], names: str) -> Plan:
    """The plan with the session of an agent that names none in its request. `names`: as of
    `session_in`."""
    first, last = plan.choices[0], plan.choices[-1]
    has_several_prompts = last.prompt != first.prompt
    name = session_in(request, headers, names)
    if first.session is not None or has_several_prompts or not name:
        return plan
    choices = (replace(first, session=name), *plan.choices[1:])
    has_twins = _is_nameless(headers, names)
    return replace(plan, choices=choices, has_branches=True, has_twins=has_twins)


def _is_nameless(headers: Mapping[str, str], names: str) -> bool:
    is_named = any(name in headers for name in KNOWN.split())
    is_known = headers.get("user-agent", "").startswith(NAMELESS)
    return names == "auto" and is_known and not is_named


def _by_opening(messages: Sequence[Any]) -> str:
    """A name by all up to the second message of the user: the first tells about the machine, and an
    answer to it follows that no model has given. "": there is no such message."""
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(users) < NUM_OPENING:
        return ""
    opening = [each.model_dump(mode="json") for each in messages[: users[NUM_OPENING - 1] + 1]]
    digest = blake2b(json.dumps(opening).encode(), digest_size=8)
    return f"qwen-code-{digest.hexdigest()}"
