"""The grammar of a custom tool's input, as rules of the grammar of its call.

A definition is read here, token by token, so that what is wrong in it is found where it is. A
grammar in which no rule needs itself is one expression: so its terminals are no lexemes, of which
each would take what it can, and it matches what it says. Where a rule needs itself, terminals are
lexemes, as in Lark. Within JSON, terminals are those of the escaped text (`quoted.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.cluster.api.constraints.quoted import (
    BadPattern,
    escaped,
    plain_pattern,
    quoted_pattern,
    repeated_set,
)
from kvrelay.cluster.api.constraints.rules import Rules
from kvrelay.cluster.api.constraints.schema import MAX_SCHEMA_CHARS, SchemaError
from kvrelay.cluster.api.output.tools import InputFormat

_NUMBER = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
_COMMON = {  # what may be imported from Lark's `common`
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": _NUMBER,
    "SIGNED_FLOAT": f"[+-]?(?:{_NUMBER})",
    "NUMBER": f"{_NUMBER}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?(?:{_NUMBER}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}
_TOKEN = re.compile(
    r"""(?P<skip>[ \t]+|(?:\#|//)[^\n]*|%llguidance[ ]*\{[ ]*\})|(?P<line>(?:\r?\n)[ \t]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<pattern>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<statement>%[a-z]+)|(?P<name>[!?]*_?[a-zA-Z][\w-]*)|(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[.:|()\[\]{},~=+*?&])""",
    re.VERBOSE | re.ASCII,
)
_CLOSING = {")": "(", "]": "[", "}": "{"}
MAX_TOKENS = 20_000


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


@dataclass(slots=True)
class _Definition:
    """`rules`: of each name what comes after its colon."""

    source: str
    rules: dict[str, list[_Token]] = field(default_factory=dict)
    ignored: list[list[_Token]] = field(default_factory=list)

    def wrong(self, message: str, at: int) -> SchemaError:
        before = self.source[:at]
        line, column = before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1
        return SchemaError(f"line {line}, column {column}: {message}"[:300])


def input_terms(
    rules: Rules, prefix: str, form: InputFormat, *, quoted: bool, end: str = ""
) -> tuple[str, bool]:
    """Adds rules, whose names begin with `prefix`, for an input. Returns the name of theirs that
    matches it, and whether that is one expression. quoted: within a string of JSON. end: a mark
    that no lexeme has within it. Raises SchemaError, with the place in the definition."""
    if len(form.definition) > MAX_SCHEMA_CHARS:
        size = len(form.definition)
        raise SchemaError(f"the grammar has {size} characters, more than {MAX_SCHEMA_CHARS}")
    if form.syntax == "regex":
        definition = _Definition(form.definition)
        body = _pattern(definition, _Token("pattern", f"/{form.definition}/", -1), quoted)
        return rules.add(f"{prefix.upper()}X", body), True
    definition = _read(form.definition)
    return _Writer(rules, prefix, definition, quoted, end).write()


def _read(source: str) -> _Definition:
    definition = _Definition(source)
    tokens = list(_tokens(definition))
    if len(tokens) > MAX_TOKENS:
        raise SchemaError(f"the grammar has {len(tokens)} words, at most {MAX_TOKENS}")
    for statement in _statements(definition, tokens):
        first = statement[0]
        if first.kind == "name":
            _take_rule(definition, statement)
        elif first.text == "%ignore" and len(statement) > 1:
            definition.ignored.append(statement[1:])
        elif first.text == "%import":
            _take_import(definition, statement)
        elif first.kind == "statement":
            raise definition.wrong(f"{first.text!r} is not supported here", first.at)
        else:
            raise definition.wrong("expected a rule, a terminal or a statement", first.at)
    if "start" not in definition.rules:
        raise definition.wrong("there is no rule 'start'", 0)
    return definition


def _tokens(definition: _Definition) -> Iterator[_Token]:
    source, at = definition.source, 0
    opened: list[_Token] = []  # brackets
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise definition.wrong(f"{source[at : at + 20]!r} is not understood", at)
        token = _Token(str(found.lastgroup), found[0], at)
        if token.text in _CLOSING.values():
            opened.append(token)
        elif token.text in _CLOSING and (not opened or opened.pop().text != _CLOSING[token.text]):
            raise definition.wrong(f"{token.text!r} closes no bracket", at)
        if token.kind != "skip" and not (token.kind == "line" and opened):
            yield token
        at = found.end()
    if opened:
        raise definition.wrong(f"{opened[-1].text!r} is not closed", opened[-1].at)


def _statements(definition: _Definition, tokens: list[_Token]) -> Iterator[list[_Token]]:
    """A line that begins with | continues the one before."""
    statement: list[_Token] = []
    is_new = False
    for token in tokens:
        if token.kind == "line":
            is_new = True
            continue
        if is_new and statement and token.text != "|":
            yield statement
            statement = []
        is_new = False
        statement.append(token)
    if statement:
        yield statement


def _take_rule(definition: _Definition, statement: list[_Token]) -> None:
    first, rest = statement[0], statement[1:]
    name = first.text.lstrip("!?")
    if len(rest) > 1 and rest[0].text == "." and rest[1].kind == "number":
        rest = rest[2:]  # a priority: all that matches may come
    if not rest or rest[0].text != ":":
        at = rest[0].at if rest else first.at
        raise definition.wrong(f"expected ':' after the name {name!r}", at)
    if name in definition.rules:
        raise definition.wrong(f"{name!r} is defined twice", first.at)
    definition.rules[name] = rest[1:]


def _take_import(definition: _Definition, statement: list[_Token]) -> None:
    first, words = statement[0], [token.text for token in statement[1:]]
    names: dict[str, str] = {}
    match words:
        case ["common", ".", name]:
            names[name] = name
        case ["common", ".", name, "->", alias]:
            names[name] = alias
        case ["common", "(", *listed, ")"]:
            names = {name: name for name in listed if name != ","}
    unknown = next((name for name in names if name not in _COMMON), None)
    if not names or unknown is not None:
        what = f"common.{unknown}" if unknown else " ".join(words)
        raise definition.wrong(f"{what!r:.60} cannot be imported", first.at)
    for name, alias in names.items():
        definition.rules[alias] = [_Token("pattern", f"/{_escape_slashes(_COMMON[name])}/", -1)]


def _escape_slashes(pattern: str) -> str:
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)


@dataclass(slots=True)
class _Writer:
    rules: Rules
    prefix: str
    definition: _Definition
    quoted: bool
    end: str
    is_flat: bool = False  # no rule needs itself
    ignore: str = ""  # terms for what may be between terminals

    numbers: dict[str, int] = field(
        default_factory=dict
    )  # for their names: the places of the rules

    def write(self) -> tuple[str, bool]:
        self.numbers = {name: number for number, name in enumerate(self.definition.rules, 1)}
        self.is_flat = self._cycle_from("start") is None
        if self.definition.ignored:
            each = [self._body(tokens, in_rule=False) for tokens in self.definition.ignored]
            sign = "*" if self.is_flat else "+"
            self.ignore = self.rules.add(self._name("IGNORE"), f"({' | '.join(each)}){sign}")
            self.ignore += "" if self.is_flat else "?"
        for name, tokens in self.definition.rules.items():
            is_rule = _is_rule(name)
            if not is_rule and (cycle := self._cycle_from(name)) is not None:
                token = next(token for token in tokens if token.kind == "name")
                raise self.definition.wrong(f"the terminal {cycle!r} needs itself", token.at)
            self.rules.add(self._name(name), self._body(tokens, in_rule=is_rule))
        return self._name("start"), self.is_flat

    def _cycle_from(self, start: str) -> str | None:
        """The name of a rule that needs itself, among what `start` needs."""
        rules, done = self.definition.rules, set[str]()
        path: dict[str, Iterator[_Token]] = {start: iter(rules[start])}
        while path:
            name, rest = next(reversed(path.items()))
            token = next((token for token in rest if token.kind == "name"), None)
            if token is None:
                done.add(name)
                del path[name]
            elif token.text in path:
                return token.text
            elif token.text not in done and token.text in rules:
                path[token.text] = iter(rules[token.text])
        return None

    def _name(self, name: str) -> str:
        """Makes the name of a rule in the grammar of the call."""
        number = self.numbers.get(name, 0)
        is_rule = _is_rule(name) and not self.is_flat
        return f"{self.prefix}x{number}" if is_rule else f"{self.prefix.upper()}X{number}"

    def _body(self, tokens: list[_Token], *, in_rule: bool) -> str:
        """in_rule: of a rule, whose terminals may have what is ignored after them."""
        made: list[str] = []
        wrong, at = self.definition.wrong, 0
        while at < len(tokens):
            token, after = tokens[at], tokens[at + 1 : at + 3]
            at += 1
            if token.kind in ("string", "pattern", "name"):
                if [each.text for each in after[:1]] == [".."] and len(after) == 2:
                    term, at = self._range(token, after[1]), at + 2
                else:
                    term = self._term(token, in_rule=in_rule)
                is_rule = token.kind == "name" and _is_rule(token.text)
                is_spaced = self.ignore and in_rule and not is_rule
                made.append(f"({term} {self.ignore})" if is_spaced else term)
            elif token.text == "->":  # a name for what comes before it
                at += 1
            elif token.text == "~":
                counts = [each.text for each in tokens[at : at + 3] if each.kind != "line"]
                if not counts or not counts[0].isdigit():
                    raise wrong("'~' is only supported before a number of times", token.at)
                is_range = len(counts) == 3 and counts[1] == ".."
                made.append(f"{{{counts[0]},{counts[2] if is_range else counts[0]}}}")
                at += 3 if is_range else 1
            elif token.text in (":", "=", ".", "..") or token.kind == "statement":
                raise wrong(f"{token.text!r} is not expected here", token.at)
            else:
                made.append(token.text)
        body = " ".join(made)
        return body.replace("{ ", "{").replace(" }", "}") or '""'

    def _term(self, token: _Token, *, in_rule: bool) -> str:
        if token.kind == "string":
            return self._string(token)
        if token.kind == "pattern":
            split = self._split(token) if in_rule else ""
            return split or self._without_end(_pattern(self.definition, token, self.quoted))
        body = self.definition.rules.get(token.text)
        if body is None:
            raise self.definition.wrong(f"there is no {token.text!r}", token.at)
        if in_rule and len(body) == 1 and body[0].kind == "pattern":
            return self._split(body[0]) or self._name(token.text)
        return self._name(token.text)

    def _without_end(self, pattern: str) -> str:
        if self.is_flat or not self.end:
            return pattern
        name = f"{self.prefix.upper()}E{len(self.rules.rules)}"
        return self.rules.add(name, f"{pattern} & {without(self.end)}")

    def _split(self, token: _Token) -> str:
        """A lexeme ends at the first byte that it cannot have, and within JSON an escape may go on
        with it or follow it: where it can be of any length, each escape is a lexeme of its own."""
        if self.is_flat or not self.quoted:
            return ""
        pattern, flags = _parts(token)
        found = repeated_set(pattern, flags)
        if found is None or not found[1]:
            return ""
        plain, escapes, sign = found
        each = " | ".join((f"/{_escape_slashes(plain)}+/", *(f"/{text}/" for text in escapes)))
        return f"({each}){sign}"

    def _string(self, token: _Token) -> str:
        is_any_case = token.text.endswith("i")
        try:
            text = str(json.loads(token.text.removesuffix("i")))
        except ValueError:
            message = f"{token.text:.60} is not a string as JSON has them"
            raise self.definition.wrong(message, token.at) from None
        if not is_any_case:
            return json.dumps(escaped(text) if self.quoted else text)
        pattern = "".join(rf"\x{{{ord(char):x}}}" for char in text)
        return _pattern(self.definition, token._replace(text=f"/{pattern}/i"), self.quoted)

    def _range(self, first: _Token, last: _Token) -> str:
        try:
            ends = [str(json.loads(each.text)) for each in (first, last)]
        except ValueError:
            ends = []
        if [len(each) for each in ends] != [1, 1]:
            raise self.definition.wrong("a range is from one character to another", first.at)
        low, high = (rf"\x{{{ord(each):x}}}" for each in ends)
        token = first._replace(text=f"/[{low}-{high}]/")
        return _pattern(self.definition, token, self.quoted)


def without(text: str) -> str:
    """An expression for what does not have it within."""
    return rf"~/(.|\n)*{_escape_slashes(re.escape(text))}(.|\n)*/"


def _is_rule(name: str) -> bool:
    return name.lstrip("_!?")[:1].islower()


def _parts(token: _Token) -> tuple[str, str]:
    """The pattern of a token, and its flags."""
    body, _, flags = token.text[1:].rpartition("/")
    return body, flags.replace("u", "").replace("l", "")


def _pattern(definition: _Definition, token: _Token, quoted: bool) -> str:
    pattern, flags = _parts(token)
    try:
        made = (quoted_pattern if quoted else plain_pattern)(pattern, flags)
    except BadPattern as error:
        raise definition.wrong(str(error), max(0, token.at + 1 + error.at)) from None
    made = _escape_slashes(made).replace("\n", "\\n").replace("\r", "\\r")
    return f"/{made}/{flags}" if made else '""'
