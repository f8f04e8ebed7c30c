"""From what a request asks of its output to a grammar, and whether that can be kept.

Compiling takes milliseconds for what people write and minutes for what they should not, so it is
done in a process that can be ended (`cluster.api.constraints.compiler`); its answers are
remembered.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llguidance
from llguidance import grammar_from

from kvrelay.cluster.api.constraints.rules import Rules
from kvrelay.cluster.api.constraints.schema import (
    MAX_SCHEMA_CHARS,
    TOO_DEEP,
    SchemaError,
    in_one_line,
    part_grammar,
    schema_grammar,
)
from kvrelay.cluster.api.limiter import LimitReached, Turns
from kvrelay.cluster.api.text.chat_template import strings_in
from kvrelay.engine.model.sampling.vocabulary import GrammarError

# What people write takes milliseconds; the largest schema that is let in takes 0.1 s.
CPU_S = 1.0
REAL_S = 2.0  # on a machine that has other things to do
MEMORY_BYTES = 128 * 2**20
BEGUN = b"+"  # of an answer
WAIT_S = 2.5  # for a turn
START_S = 20.0  # of the process, where it has just been started
MAX_AT_ONCE = 2  # grammars that compile, of one tenant one
MAX_WAITING = 64  # calls of one tenant
MAX_CALL_BYTES = 2**20  # schemas of one call
MAX_KNOWN = 512
MAX_KNOWN_BYTES = 32 * 2**20
MAX_CHOICES = 10_000
_NONE: Mapping[str, int] = MappingProxyType({})
_NAME = re.compile(r"<[^<>\s]+>|\[[^][\s]+\]")
# What Lark has: strings, regular expressions, comments, and names of tokens.
_LARK_WORD = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>', re.DOTALL)
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# Types of a structural tag's `format` that are all of the output: what each is here, and the field
# that says it.
_WHOLE_FORMATS = {
    "json_schema": ("json", "json_schema"),
    "const_string": ("choice", "value"),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar", "grammar"),
}
_MADE = re.compile(r'\{"grammars": ?\[')  # a grammar as the engine has it
_TOO_MUCH = (
    f"it takes more than {CPU_S:g} s of computing or {MEMORY_BYTES >> 20} MiB of memory to compile"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """`kind`: of the compiler's answer, "grammar" or why there is none."""

    kind: str
    text: str


class Constraints:
    """Checks grammars before their requests are served. Owned by the API; used in its loop.
    Invariant: of one tenant, one grammar compiles at a time, so others do not wait behind it."""

    def __init__(self, model_dir: Path, eos_token_ids: Sequence[int]) -> None:
        self._source = model_dir, eos_token_ids
        self._turns = Turns(MAX_AT_ONCE, MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # to the process
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # by what asked for it
        self._num_known_bytes = 0

    def warm_up(self) -> None:
        """Start the compiler, which reads the vocabulary first."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            model_dir, ends = self._source
            words = [
                sys.executable,
                "-m",
                "kvrelay.cluster.api.constraints.compiler",
                theirs.fileno(),
            ]
            self._process = subprocess.Popen(
                [*map(str, (*words, model_dir, *ends))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    async def check(self, make: Callable[[], str]) -> str:
        """The grammar that `make` makes, in the compiler's process, which it is pickled for.
        Raises SchemaError if it cannot be kept, LimitReached, and GrammarError if the tokenizer is
        none for grammars."""
        call = await asyncio.to_thread(_pickled, make)
        key = blake2b(call, digest_size=16).digest()
        if key not in self._known:
            async with self._turns.turn(WAIT_S):
                if key not in self._known:
                    self._remember(key, await self._compiled(call))
        found = self._known[key]
        self._known.move_to_end(key)
        if found.kind == "unusable":
            raise GrammarError(found.text)
        if found.kind == "wrong":
            raise SchemaError(found.text)
        return found.text

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _remember(self, key: bytes, found: _Known) -> None:
        self._known[key] = found
        self._num_known_bytes += len(found.text)
        while len(self._known) > MAX_KNOWN or (
            self._num_known_bytes > MAX_KNOWN_BYTES and len(self._known) > 1
        ):
            _, oldest = self._known.popitem(last=False)
            self._num_known_bytes -= len(oldest.text)

    async def _compiled(self, call: bytes) -> _Known:
        for _ in range(2):
            self.warm_up()
            try:
                async with asyncio.timeout(START_S + REAL_S):
                    answer = await self._asked(call)
            except TimeoutError:
                break
            except OSError:
                answer = b""
            if answer == BEGUN:
                return _Known("wrong", _TOO_MUCH)
            if answer:
                return _Known(*json.loads(answer.removeprefix(BEGUN)))
            self.close()  # the process is ending
        raise LimitReached(1.0)

    async def _asked(self, call: bytes) -> bytes:
        """Empty: the process has ended. Raises OSError."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(call)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()


class _Bounded:
    """A file that takes MAX_CALL_BYTES."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> int:
        self._size += len(data)
        if self._size > MAX_CALL_BYTES:
            raise SchemaError(f"what the output has to match has more than {MAX_CALL_BYTES} bytes")
        self.parts.append(bytes(data))
        return len(data)


def _pickled(make: Callable[[], str]) -> bytes:
    """Raises SchemaError."""
    file = _Bounded()
    try:
        pickle.Pickler(file, protocol=5).dump(make)
    except RecursionError:
        raise SchemaError(TOO_DEEP) from None
    return b"".join(file.parts)


def grammar_of(
    kind: str, value: Any, options: Mapping[str, Any], added: Mapping[str, int] = _NONE
) -> str:
    """`kind`: one of KINDS. `options`: what `structured_outputs` says beside it. `added`: ids of
    those added tokens that are among `tokens_named`. Raises SchemaError."""
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
        case "grammar" if isinstance(value, str) and _MADE.match(value):  # it was rendered
            return _text(value)
        case "grammar":
            try:
                return grammar_from("grammar", _with_ids(_text(value), added))
            except ValueError as error:
                raise SchemaError(in_one_line(str(error))) from None
    return tag_grammar(_parsed(value), added)


def tokens_named(kind: str, value: Any) -> set[str]:
    """Names in `value` that mean an added token where the model has one."""
    if kind not in ("grammar", "structural_tag"):
        return set()
    return {name for text in strings_in(value) for name in _NAME.findall(text)}


def _with_ids(lark: str, added: Mapping[str, int]) -> str:
    """`lark`, where added tokens that it names are named by their ids. What is within quotes is
    text."""

    def named(found: re.Match[str]) -> str:
        token = added.get(found[0])
        return found[0] if token is None else f"<[{token}]>"

    return _LARK_WORD.sub(named, lark)


def choice_grammar(choices: Any) -> str:
    """One of some texts. Raises SchemaError."""
    is_texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not is_texts or not 0 < len(choices) <= MAX_CHOICES:
        raise SchemaError(f"'choice' is a list of 1 to {MAX_CHOICES} strings that are not empty")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")


def tag_grammar(form: Any, added: Mapping[str, int] = _NONE) -> str:
    """Free text, and from each trigger on a structure: `structures` ({begin, schema, end}) and
    `triggers`, as in vLLM and SGLang, or their newer `format`. Raises SchemaError."""
    if isinstance(form, dict) and isinstance(form.get("format"), dict):
        form = form["format"]
        if whole := _WHOLE_FORMATS.get(str(form.get("type"))):
            kind, field = whole
            return grammar_of(kind, _field(form, field), {}, added)
        form = _triggered(form)
    for name in ("at_least_one", "stop_after_first"):
        if isinstance(form, dict) and form.get(name):
            raise SchemaError(f"'{name}' of a structural tag is not supported")
    structures = form.get("structures") if isinstance(form, dict) else None
    triggers = form.get("triggers") if isinstance(form, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise SchemaError("a structural tag has 'structures' and 'triggers', each a list")
    rules = Rules(added.get, tuple(added))
    for i, each in enumerate(structures):
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
        head = rules.text_until(f"head_{i}", trigger)
        rest = (rules.quote(begin.removeprefix(trigger)), f"%json {json.dumps(schema)}")
        rules.add(f"tag_{i}", " ".join((head, *rest, rules.quote(end))))
    tags = " | ".join(f"tag_{i}" for i in range(len(structures)))
    return rules.made(f"({tags})* TEXT")


def _field(form: dict[str, Any], name: str) -> Any:
    """What a `format` has to say; a constant is a choice of one. Raises SchemaError."""
    if form.get(name) is None:
        raise SchemaError(f"a 'format' of type {form['type']!r} has a {name!r}")
    return [_text(form[name])] if name == "value" else form[name]


def _triggered(form: dict[str, Any]) -> dict[str, Any]:
    """A `format` of type `triggered_tags`, whose contents are JSON, in the older form."""
    if form.get("type") != "triggered_tags" or not isinstance(form.get("tags"), list):
        raise SchemaError(
            f"'format' of type {form.get('type')!r:.60} is not supported, use 'triggered_tags' with"
            f" a list of 'tags', or {', '.join(map(repr, _WHOLE_FORMATS))}"
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
