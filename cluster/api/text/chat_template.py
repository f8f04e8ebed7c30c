"""Chat templates: Jinja source that a model's author ships, so rendered in a sandbox.

The source is read once, beside the tokenizer; each chat call renders it with its messages. What a
template may use is what Hugging Face documents: `raise_exception`, `strftime_now`, `tojson`, loop
controls and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(Exception):
    """The messages cannot be rendered; the text is meant for the client."""


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
    return json.dumps(value, ensure_ascii=False, indent=indent)


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

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt up to where the assistant speaks. Raises `TemplateError`."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise TemplateError(f"the model's chat template refuses: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error


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
