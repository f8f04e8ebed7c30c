"""Which session a request of a coding agent is a turn of, by the agent's own header.

Claude Code, OpenCode and Codex send the name of their session in a header. Requests without tools
(titles, summaries) are not turns of it. Requests of subagents come under the same name: the router
tells them apart by how their prompts begin. Qwen Code sends no name: its conversations have one by
what they begin with, and those that begin alike are distinguished by their later messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from kvrelay.cluster.api.openai.parts import Plan

KNOWN = "x-claude-code-session-id x-session-affinity session-id"
NAMELESS, NUM_OPENING = "QwenCode/", 2
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AgentSession(NamedTuple):
    """Which session a request is a turn of."""

    name: str = ""  # "": of none
    has_twins: bool = False  # as `Submit.has_twins`


def session_in(request: Any, headers: Mapping[str, str], names: str) -> AgentSession:
    """The session that a request names, itself, by a header or by its beginning. `names`: of the
    headers that count, the first that is there; "auto": those of `KNOWN`, and agents that are known
    to send none."""
    own = getattr(request, "prompt_cache_key", None)
    if own or not getattr(request, "tools", None):
        return AgentSession(own or "")
    is_auto = names == "auto"
    names = KNOWN if is_auto else names
    given = next((headers[name] for name in names.split() if name in headers), None)
    if given is None and is_auto and headers.get("user-agent", "").startswith(NAMELESS):
        return AgentSession(_by_opening(getattr(request, "messages", ())), has_twins=True)
    return AgentSession(given if given and _NAME.fullmatch(given) else "")


def with_session(plan: Plan, session: AgentSession) -> Plan:
    """The plan as a turn of this session, if it does not name one itself."""
    first, last = plan.choices[0], plan.choices[-1]
    has_several_prompts = last.prompt != first.prompt
    if first.session is not None or has_several_prompts or not session.name:
        return plan
    choices = (replace(first, session=session.name), *plan.choices[1:])
    return replace(plan, choices=choices, has_branches=True, has_twins=session.has_twins)


def _by_opening(messages: Sequence[Any]) -> str:
    """A name by all up to the second message of the user: the first tells about the machine, and an
    answer to it follows that no model has given. "": there is no such message."""
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(users) < NUM_OPENING:
        return ""
    opening = [each.model_dump(mode="json") for each in messages[: users[NUM_OPENING - 1] + 1]]
    digest = blake2b(json.dumps(opening).encode(), digest_size=8)
    return f"qwen-code-{digest.hexdigest()}"
