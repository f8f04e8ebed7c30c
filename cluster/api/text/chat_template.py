"""Chat templates: Jinja source that a model's author ships, so it is rendered in a sandbox.

It may use what Hugging Face documents: `raise_exception`, `strftime_now`, `tojson`, loop controls
and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.api.text.tool_prompt import TemplateError, describe_tools

_MARK = "\ue000"  # of no script
_CUT = "\ue001"  # likewise


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the model said; for a prompt it is its content, no more."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is jinja2's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """What was JSON before is written as it was (see `cluster.api.openai.tools.RawObject`)."""
    if indent is not None:
        return json.dumps(value, ensure_ascii=False, indent=indent)
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if raw := getattr(value, "raw", ""):
            raws.append(raw)
            return f"{_MARK}{len(raws) - 1}{_MARK}"
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list | tuple) else value

    text = json.dumps(marked(value), ensure_ascii=False)
    for i, raw in enumerate(raws):
        text = text.replace(f'"{_MARK}{i}{_MARK}"', raw, 1)
    return text


class ChatTemplate:
    """A compiled template. Immutable; may be used from any thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        environment.globals.update(functions)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = special_tokens
        self.source = source
        self.knows_tools = bool(re.search(r"\btools\b", source))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt up to where the assistant speaks, or if it `continues` the last message, where
        that ends; without `add_generation_prompt`, up to the end of the last message. `options`:
        what else the template may know. Raises `TemplateError`."""
        if continues:
            last = messages[-1] | {"content": f"{messages[-1]['content']}{_CUT}"}
            messages = [*messages[:-1], last]
        if not self.knows_tools:
            messages, tools = describe_tools(messages, tools or []), None
        try:
            text = self._template.render(
                {
                    **(options or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt and not continues,
                    "tools": tools or None,
                    "documents": None,
                    **self._special_tokens,
                }
            )
        except TemplateError as error:
            raise TemplateError(f"the model's chat template refuses: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error
        if not continues:
            return text
        text, cut, _ = text.rpartition(_CUT)
        if not cut:
            raise TemplateError("the model's chat template does not let a message be continued")
        return text


def read_chat_template(model_dir: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Source of the template from `chat_template.jinja` or `tokenizer_config.json`; None: none."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default", next(iter(by_name.values()), None))
    return found
