"""Tools for models whose chat template does not know any: described in the system message, in the
Hermes format, which most models have seen."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_BEFORE = (
    "You can call tools. Each of these lines describes one, with a JSON schema of its arguments:"
)
_AFTER = (
    "To call one, write its name and arguments as JSON between tags, and so for each call:"
    '\n<tool_call>\n{"name": <its name>, "arguments": <object of its arguments>}\n</tool_call>\n'
    "The result comes between <tool_response> tags."
)


class TemplateError(Exception):
    """The messages cannot be rendered; the text is meant for the client."""


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools; else they are described to the model here."""
    return bool(re.search(r"\btools\b", template))


def describe_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` as a template without tools understands them."""
    shown = [_shown(message) for message in messages]
    if not tools:
        return shown
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([_BEFORE, "<tools>", *lines, "</tools>", _AFTER])
    if shown and shown[0].get("role") == "system":
        content = _around("", shown[0]["content"], f"\n\n{text}")
        content = content.lstrip() if isinstance(content, str) else content
        return [{**shown[0], "content": content}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content", "")
        shown = _around("<tool_response>\n", content, "\n</tool_response>")
        return {"role": "user", "content": shown}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        arguments = function["arguments"]
        text = getattr(arguments, "raw", "") or json.dumps(arguments, ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>')
    return {"role": message["role"], "content": "\n".join(parts)}


def _around(before: str, content: Any, after: str) -> Any:
    """`content`, a text or parts with images among them, with texts before and after it."""
    if not isinstance(content, list):
        return f"{before}{content}{after}"
    texts = [{"type": "text", "text": text} if text else None for text in (before, after)]
    return [part for part in (texts[0], *content, texts[1]) if part]
