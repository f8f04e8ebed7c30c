"""Regular expressions of texts as they are within a string of JSON.

Each character of a text becomes itself, or the escape that JSON needs for it, and always the same
one. So an expression is rewritten character by character and matches the escaped forms of exactly
the texts that it matched before. It is read here for that, in the syntax of Rust's `regex`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

SPECIAL = '"\\' + "".join(map(chr, range(32)))  # what JSON escapes
_NOT_SPECIAL = r'[^"\\\x00-\x1f]'
_SPACES = frozenset("\t\n\v\f\r")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_NUMBERED = re.compile(r"x([0-9a-fA-F]{2})|[xuU]\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})")
_PROPERTY = re.compile(r"[pP](?:\{\^?(\w+)\}|(\w))")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|([imsuU-]*)(:|\)))")
_COUNT = re.compile(r"\{\d*,?\d*\}")


class BadPattern(ValueError):
    """A pattern that cannot be read; `at` is the place in it."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


def escaped(text: str) -> str:
    """As it is within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_pattern(pattern: str, flags: str = "") -> str:
    """Returns the pattern of the escaped forms. Raises BadPattern."""
    return "".join(_Pattern(pattern, flags, is_quoted=True).read())


def plain_pattern(pattern: str, flags: str = "") -> str:
    """Without the anchors around it: it is the whole of a text that has to match. Raises
    BadPattern."""
    return "".join(_Pattern(pattern, flags, is_quoted=False).read())


def repeated_set(pattern: str, flags: str = "") -> tuple[str, list[str], str] | None:
    """Where `pattern` is one set of characters, repeated: the set without what JSON escapes, the
    escapes of the rest, and `+` or `*`. Raises BadPattern."""
    while pattern.startswith("(") and pattern.endswith(")") and "(" not in pattern[1:]:
        pattern = pattern[1:-1]
    if not pattern.endswith(("+", "*")):
        return None
    reader = _Pattern(pattern[:-1], flags, is_quoted=True)
    reader.read()
    if reader.num_atoms != 1 or reader.last_set is None:
        return None
    return (*reader.last_set, pattern[-1])


@dataclass
class _Pattern:
    pattern: str
    flags: str
    is_quoted: bool
    num_atoms: int = 0
    last_set: tuple[str, list[str]] | None = None
    _at: int = 0
    _dots: list[bool] = field(default_factory=list)  # for each open group, whether . is a newline

    def read(self) -> list[str]:
        if "x" in self.flags:
            raise BadPattern("the flag 'x' is not supported", 0)
        self._dots = ["s" in self.flags]
        made: list[str] = []
        while self._at < len(self.pattern):
            made.append(self._next(self.pattern[self._at]))
        if len(self._dots) > 1:
            raise BadPattern("a group is not closed", len(self.pattern))
        return made

    def _next(self, char: str) -> str:
        begin, self._at = self._at, self._at + 1
        match char:
            case "\\":
                return self._escape(begin)
            case "[":
                return self._class(begin)
            case ".":
                has_newline = self._dots[-1]
                found = [s for s in SPECIAL if has_newline or s != "\n"]
                return self._set("." if has_newline else r"[^\n]", found, begin)
            case "(":
                return self._group(begin)
            case ")":
                if len(self._dots) == 1:
                    raise BadPattern("')' closes no group", begin)
                self._dots.pop()
                return char
            case "^" | "$":
                is_first = begin == 0 or self.pattern[begin - 1] == "|"
                is_last = self.pattern[self._at : self._at + 1] in ("", "|")
                if len(self._dots) > 1 or not (is_first if char == "^" else is_last):
                    raise BadPattern(f"{char!r} is only supported around the whole", begin)
                return ""
            case "*" | "+" | "?" | "|":
                return char
            case "{" if count := _COUNT.match(self.pattern, begin):
                self._at = count.end()
                return count[0]
        return self._char(char, self.pattern[begin : self._at])

    def _char(self, char: str, written: str) -> str:
        self.num_atoms += 1
        if not self.is_quoted:
            return written
        return f"(?-i:{re.escape(escaped(char))})" if char in SPECIAL else written

    def _set(self, written: str, found: list[str], begin: int) -> str:
        """found: those of SPECIAL that are in it."""
        self.num_atoms += 1
        if not self.is_quoted:
            return self.pattern[begin : self._at]
        if not found:
            self.last_set = written, []
            return written
        plain = _NOT_SPECIAL if written == "." else f"[{written}&&{_NOT_SPECIAL}]"
        escapes = [re.escape(escaped(each)) for each in found]
        self.last_set = plain, escapes
        return f"(?:{plain}|(?-i:{'|'.join(escapes)}))"

    def _escape(self, begin: int) -> str:
        what = self._escaped_char(begin)
        written = self.pattern[begin : self._at]
        if callable(what):
            return self._set(written, [each for each in SPECIAL if what(each)], begin)
        return self._char(what, written)

    def _escaped_char(self, begin: int) -> str | Callable[[str], bool]:
        """A character, or what says which characters are meant."""
        letter = self.pattern[self._at : self._at + 1]
        if found := _NUMBERED.match(self.pattern, self._at):
            self._at = found.end()
            number = int(next(filter(None, found.groups())), 16)
            if number >= 0x110000 or 0xD800 <= number < 0xE000:
                raise BadPattern(f"{found[0]!r} is no character", begin)
            return chr(number)
        if found := _PROPERTY.match(self.pattern, self._at):
            self._at = found.end()
            name, is_not = found[1] or found[2], (letter == "P") != ("^" in found[0])
            if len(name) > 2:
                raise BadPattern(f"use a general category in place of {name!r}", begin)
            return lambda c: unicodedata.category(c).startswith(name) != is_not
        self._at += 1
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        match letter:
            case "d" | "w":
                return lambda c: False
            case "D" | "W":
                return lambda c: True
            case "s":
                return lambda c: c in _SPACES
            case "S":
                return lambda c: c not in _SPACES
        if not letter or letter.isalnum():
            raise BadPattern(f"'\\{letter}' is not supported", begin)
        return letter

    def _class(self, begin: int) -> str:
        """A set in brackets, whose members are looked at one by one."""
        is_not = self.pattern.startswith("^", self._at)
        self._at += is_not
        members: list[Callable[[str], bool]] = []
        is_first = True
        while is_first or self.pattern[self._at : self._at + 1] != "]":
            if self._at >= len(self.pattern):
                raise BadPattern("a set is not closed by ']'", begin)
            members.append(self._member())
            is_first = False
        self._at += 1
        found = [c for c in SPECIAL if any(has(c) for has in members) != is_not]
        return self._set(self.pattern[begin : self._at], found, begin)

    def _member(self) -> Callable[[str], bool]:
        at = self._at
        if self.pattern[at] == "[" or self.pattern[at : at + 2] in ("&&", "--", "~~"):
            raise BadPattern("sets within sets are not supported", at)
        first = self._member_char()
        if callable(first):
            return first
        is_range = self.pattern.startswith("-", self._at)
        if not is_range or self.pattern[self._at + 1 : self._at + 2] in ("]", ""):
            return lambda c: c == first
        self._at += 1
        last = self._member_char()
        if callable(last) or last < first:
            raise BadPattern("a range of characters begins with the lower one", at)
        return lambda c: first <= c <= last

    def _member_char(self) -> str | Callable[[str], bool]:
        begin, self._at = self._at, self._at + 1
        char = self.pattern[begin]
        return self._escaped_char(begin) if char == "\\" else char

    def _group(self, begin: int) -> str:
        dots = self._dots[-1]
        if not self.pattern.startswith("?", self._at):
            self._dots.append(dots)
            return "("
        found = _GROUP.match(self.pattern, self._at)
        if found is None:
            raise BadPattern("this kind of group is not supported", begin)
        self._at = found.end()
        on, _, off = (found[1] or "").partition("-")
        dots = (dots or "s" in on) and "s" not in off
        if found[2] == ")":  # from here to the end of the group
            self._dots[-1] = dots
        else:
            self._dots.append(dots)
        return self.pattern[begin : self._at]
