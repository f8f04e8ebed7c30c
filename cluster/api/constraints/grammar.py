"""From what a request asks of its output to a grammar, and whether that can be kept.

Compiling takes milliseconds for what people write and seconds for what they should not, so it is
done in a thread of its own, with a deadline; what has compiled is remembered.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llguidance
from llguidance import StructTag, grammar_from

from cluster.api.constraints.schema import (
    MAX_SCHEMA_CHARS,
    SchemaError,
    in_one_line,
    part_grammar,
    schema_grammar,
)
from engine.model.sampling.grammar import GrammarError, compile_grammar, read_vocabulary

COMPILE_TIMEOUT_S = 5.0  # with those that wait before it
MAX_KNOWN = 512
MAX_CHOICES = 10_000
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class Constraints:
    """Checks grammars before their requests are served. Owned by the API; used in its loop."""

    def __init__(self, model_dir: Path, eos_token_ids: Sequence[int]) -> None:
        self._source = model_dir, eos_token_ids
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._known: OrderedDict[str, str | None] = OrderedDict()  # grammar -> what is wrong

    def warm_up(self) -> None:
        """Begin to read the vocabulary: it holds Python's lock for up to a second, which streams
        would wait for later."""
        self._thread.submit(self._read_vocabulary)

    async def check(self, make: Callable[[], str]) -> str:
        """The grammar that `make` makes, in a thread. Raises SchemaError if it cannot be kept."""
        future: Future[tuple[str, str | None]] = self._thread.submit(self._checked, make)
        try:
            waiting = asyncio.wrap_future(future)
            grammar, wrong = await asyncio.wait_for(waiting, COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise SchemaError(f"it was not compiled within {COMPILE_TIMEOUT_S:g} s") from None
        if wrong is not None:
            raise SchemaError(wrong)
        return grammar

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _checked(self, make: Callable[[], str]) -> tuple[str, str | None]:
        grammar = make()
        if grammar not in self._known:
            self._known[grammar] = self._compiled(grammar)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return grammar, self._known[grammar]

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(*self._source)
        return self._vocabulary

    def _compiled(self, grammar: str) -> str | None:
        """What is wrong with it."""
        try:
            matcher = compile_grammar(self._read_vocabulary(), grammar)
            matcher.compute_bitmask()  # a grammar that nothing matches is found here
        except GrammarError as error:
            wrong = str(error)
            if wrong.endswith(":"):  # more is said on other lines
                wrong = llguidance.LLMatcher.validate_grammar(grammar) or wrong
            return in_one_line(wrong)
        if matcher.is_error() or matcher.stop_reason() not in ("NotStopped", "NoExtension"):
            return "no text matches it"
        return None


def grammar_of(kind: str, value: Any, options: Mapping[str, Any]) -> str:
    """`kind`: one of KINDS. `options`: what `structured_outputs` says beside it. Raises
    SchemaError."""
    whitespace = options.get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        raise SchemaError(f"'whitespace_pattern' is a string, got {whitespace!r:.60}")
    match kind:
        case "json":
            return schema_grammar(_parsed(value), whitespace=whitespace)
        case "json_object":
            return schema_grammar({"type": "object"}, whitespace=whitespace)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(_text(value))
        case "choice":
            return choice_grammar(value)
        case "grammar":
            try:
                return grammar_from("grammar", _text(value))
            except ValueError as error:
                raise SchemaError(in_one_line(str(error))) from None
    return tag_grammar(_parsed(value))


def choice_grammar(choices: Any) -> str:
    """One of some texts. Raises SchemaError."""
    is_texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not is_texts or not 0 < len(choices) <= MAX_CHOICES:
        raise SchemaError(f"'choice' is a list of 1 to {MAX_CHOICES} strings that are not empty")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")


def tag_grammar(form: Any) -> str:
    """Free text, and from each trigger on a structure: `structures` ({begin, schema, end}) and
    `triggers`, as in vLLM and SGLang, or their newer `format`. Raises SchemaError."""
    if isinstance(form, dict) and isinstance(form.get("format"), dict):
        form = _triggered(form["format"])
    for name in ("at_least_one", "stop_after_first"):
        if isinstance(form, dict) and form.get(name):
            raise SchemaError(f"'{name}' of a structural tag is not supported")
    structures = form.get("structures") if isinstance(form, dict) else None
    triggers = form.get("triggers") if isinstance(form, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise SchemaError("a structural tag has 'structures' and 'triggers', each a list")
    tags = []
    for each in structures:
        begin, end = (each.get(key) if isinstance(each, dict) else None for key in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise SchemaError("a structure has 'begin', 'schema' and 'end'")
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), ""
        )
        if not trigger:
            raise SchemaError(f"no trigger begins {begin!r:.60}")
        try:
            schema = part_grammar(each.get("schema", {}))
        except SchemaError as error:
            raise SchemaError(f"the structure that begins {begin!r:.60}: {error}") from None
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _triggered(form: dict[str, Any]) -> dict[str, Any]:
    """A `format` of type `triggered_tags`, whose contents are JSON, in the older form."""
    if form.get("type") != "triggered_tags" or not isinstance(form.get("tags"), list):
        raise SchemaError(
            f"'format' of type {form.get('type')!r:.60} is not supported, use 'triggered_tags' with"
            " a list of 'tags'"
        )
    structures = []
    for tag in form["tags"]:
        content = tag.get("content") if isinstance(tag, dict) else None
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise SchemaError("a tag has 'begin', 'end', and a 'content' of type 'json_schema'")
        structures.append({**tag, "schema": content.get("json_schema", {})})
    return {**form, "structures": structures}


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SchemaError(f"expected a string that is not empty, got {value!r:.60}")
    if len(value) > MAX_SCHEMA_CHARS:
        raise SchemaError(f"it has {len(value)} characters, more than {MAX_SCHEMA_CHARS}")
    return value


def _parsed(value: Any) -> Any:
    """JSON that may be given as a string."""
    if not isinstance(value, str):
        return value
    text = _text(value)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"it is not JSON: {error}") from None
