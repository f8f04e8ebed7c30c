"""Chat templates: Jinja source that a model's author ships, so it is rendered in a sandbox.

It may use what Hugging Face documents: `raise_exception`, `strftime_now`, `tojson`, loop controls
and `{% generation %}` blocks.

What messages, tools and template arguments say is text: a special token written in it must not
become that token. A template makes one string of everything, so `ControlStrings` puts a character
that occurs nowhere else into such texts before they are rendered; what is still whole in the
prompt afterwards, the template wrote.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.cluster.api.output.events import ALL_TAGS
from kvrelay.cluster.api.text.tool_prompt import TemplateError, describe_tools, knows_tools

_MARK = "\ue000"  # of no script
_CUT = "\ue001"  # likewise
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # code points of private use
_END_CHARS = 32  # of a prompt, where the template's own end cannot be told apart
_LOOKED_UP = re.compile(r"""[.'"](\w+)""")  # names in a template's source
_CHANGES_CASE = re.compile(r"\b(lower|upper|title|capitalize)\b")
_KEYS = frozenset({"function", "name", "arguments"})  # that `describe_tools` looks up


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


def private_text(length: int) -> str:
    """Random characters of private use, which nobody else can write."""
    return "".join(chr(secrets.choice(_PRIVATE[0])) for _ in range(length))


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys too."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
            left.append(getattr(value, "raw", None))
        elif isinstance(value, list | tuple):
            left += value


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with each string, keys too, replaced by `change` of it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_with_strings(each, change) for each in value]
    if not isinstance(value, dict):
        return value
    made = {_with_strings(key, change): _with_strings(each, change) for key, each in value.items()}
    raw = getattr(value, "raw", None)
    if raw is None:
        return made
    written = type(value)(made)
    written.raw = change(raw)  # type: ignore[attr-defined]
    return written


def pattern_of(strings: Iterable[str], *, at_end: bool = False, depth: int = 0) -> str:
    """A regular expression of the longest of `strings`, or with `at_end` also of the beginning of
    one, two characters or more, with which the text ends. It is a trie: time does not grow with
    the number of strings."""
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for string in strings:
        rests[string[:1]].add(string[1:])
    is_whole = bool(rests.pop("", None))
    if not rests:
        return ""
    parts = [
        re.escape(first) + pattern_of(rest, at_end=at_end, depth=depth + 1)
        for first, rest in sorted(rests.items())
    ]
    if at_end and depth >= 2:
        parts.append(r"\Z")
    return f"(?:{'|'.join(parts)}){'?' if is_whole else ''}"


class ControlStrings:
    """Finds control strings in texts, and breaks them. Immutable.

    A template may also complete one: it writes `<` and `>` around a key, or puts two texts behind
    each other. So two or more characters of one count too where the text begins or ends, and so
    does a text that is the inside of one, if the template does not look it up by that name."""

    def __init__(
        self,
        strings: Iterable[str],
        source: str,
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        """`strings`: the model's. `source`: of its template. `normalize`: what its tokenizer does
        to a text before it looks for control tokens."""
        self._normalize = normalize
        found = {*strings, *ALL_TAGS}
        self._strings = frozenset(string for string in found if len(string) > 1)
        rests: defaultdict[str, set[str]] = defaultdict(set)
        for string in self._strings:
            rests[string[0]].add(string[1:])
        parts = [
            f"{re.escape(first)}(?={pattern_of(rest, at_end=True, depth=1)})"
            for first, rest in sorted(rests.items())
        ]
        flags = re.IGNORECASE if _CHANGES_CASE.search(source) else 0
        self._begins = re.compile("|".join(parts) or "(?!)", flags)
        self._firsts = "".join({case for c in rests for case in (c, c.lower(), c.upper())})
        ends = {string[i:] for string in self._strings for i in range(1, len(string) - 1)}
        self._ends = frozenset(end for end in ends if not end.isidentifier())
        self._pairs = frozenset(end[:2] for end in ends)
        self._longest = max(map(len, self._strings), default=0)
        self._joined = "\0".join(self._strings)
        self._names = _KEYS.union(_LOOKED_UP.findall(source))

    def are_in(self, text: str) -> bool:
        """Whether `text` has one, or a part of one."""
        if self._are_written_in(text):
            return True
        if self._normalize is None:
            return False
        normal = self._normalize(text)
        return normal != text and self._are_written_in(normal)

    def _are_written_in(self, text: str) -> bool:
        if any(first in text for first in self._firsts) and self._begins.search(text):
            return True
        return text[:2] in self._pairs and self._is_part(text)

    def _is_part(self, text: str) -> bool:
        most = min(len(text), self._longest)
        if any(text[:length] in self._ends for length in range(2, most + 1)):
            return True
        if text in self._names or text not in self._joined:
            return False
        wrapped = (f"<{text}>", f"</{text}>", f"[{text}]", f"[/{text}]")
        return not text.isidentifier() or any(each in self._strings for each in wrapped)

    def broken(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of each."""
        found = self._begins.sub(lambda first: first[0] + mark, text)
        if text[:2] in self._pairs and self._is_part(text):
            found = f"{found[0]}{mark}{found[1:]}"
        return found

    def unused_char(self, texts: Iterable[str]) -> str:
        """A character that none of `texts` has. Raises `TemplateError`."""
        used = set().union(*texts)
        for code in (code for codes in _PRIVATE for code in codes):
            if chr(code) not in used:
                return chr(code)
        raise TemplateError("these messages have all characters of private use: leave one out")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What else decides what a template makes of messages: the prompt up to where the assistant
    speaks, or if it `continues` the last message, where that ends; without `add_generation_prompt`
    it ends with the last message."""

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None  # what else the template may know
    continues: bool = False
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. `mark`: breaks control strings in what messages say; "": there are none.
    `end`: what the template adds after the last message, or where that is continued, what it has
    of it so far."""

    text: str
    mark: str
    end: str


class ChatTemplate:
    """A compiled template. Immutable; may be used from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        controls: ControlStrings | None = None,
    ) -> None:
        """`controls`: what messages may not write; None: they may. Raises ValueError."""
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
            raise ValueError(
                f"the chat template is not valid Jinja, line {error.lineno}: {error}"
            ) from error
        self._special_tokens = special_tokens
        self.source = source
        self.knows_tools = knows_tools(source)
        self._may_think = any(tag in source for tag in ALL_TAGS)
        self._controls = controls

    def prompt(
        self, messages: list[dict[str, Any]], options: TemplateOptions = TemplateOptions()
    ) -> Rendered:
        """What `render` makes of the same, with control strings broken in what messages, tools and
        arguments say. Raises `TemplateError`."""
        mark = ""
        if self._controls is not None:
            said = [{**message, "role": None} for message in messages]
            texts = [*strings_in((said, options.tools, options.chat_template_kwargs))]
            if any(map(self._controls.are_in, texts)):
                mark = self._controls.unused_char((*texts, self.source))
        try:
            if mark:
                messages, options = self._broken(mark, messages, options)
            text = self.render(messages, options)
        except TemplateError as error:
            raise TemplateError(str(error).replace(mark, "")) from error
        end = self._end(text, messages, options) if self._may_think else ""
        return Rendered(text, mark, end)

    def _broken(
        self, mark: str, messages: list[dict[str, Any]], options: TemplateOptions
    ) -> tuple[list[dict[str, Any]], TemplateOptions]:
        assert self._controls is not None
        controls = self._controls

        def change(text: str) -> str:
            return controls.broken(text, mark)

        try:
            said = [
                {
                    key: value if key == "role" else _with_strings(value, change)
                    for key, value in message.items()
                }
                for message in messages
            ]
            tools = _with_strings(options.tools, change)
            given = _with_strings(options.chat_template_kwargs, change)
            return said, replace(options, tools=tools, chat_template_kwargs=given)
        except RecursionError:
            raise TemplateError("the messages or tools are nested too deep") from None

    def _end(self, text: str, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """Of `text`, what comes after the messages, or after all but the one that continues."""
        before = messages[:-1] if options.continues else messages
        plain = replace(options, continues=False, add_generation_prompt=False)
        try:
            known = self.render(before, plain)
        except TemplateError:
            known = ""  # it refuses a conversation without its last message
        num_common = len(known)
        if not text.startswith(known):
            pairs = enumerate(zip(text, known, strict=False))
            num_common = next((i for i, (a, b) in pairs if a != b), len(text))
        return text[num_common:] or text[-_END_CHARS:]

    def render(
        self, messages: list[dict[str, Any]], options: TemplateOptions = TemplateOptions()
    ) -> str:
        """The prompt. Raises `TemplateError`."""
        continues, tools = options.continues, options.tools
        if continues:
            last = messages[-1] | {"content": f"{messages[-1]['content']}{_CUT}"}
            messages = [*messages[:-1], last]
        if not self.knows_tools:
            messages, tools = describe_tools(messages, tools or []), None
        try:
            text = self._template.render(
                {
                    **(options.chat_template_kwargs or {}),
                    "messages": messages,
                    "add_generation_prompt": options.add_generation_prompt and not continues,
                    "tools": tools or None,
                    "documents": None,
                    **self._special_tokens,
                }
            )
        except TemplateError as error:
            raise TemplateError(f"the model's chat template refuses: {error}") from error
        except RecursionError:
            raise TemplateError("the messages or tools are nested too deep") from None
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
