"""Regular expressions of texts as JSON writes them, beside Python's of the texts themselves."""

from __future__ import annotations

import json
import random
import re

import llguidance
import pytest

from kvrelay.cluster.api.constraints.quoted import BadPattern, plain_pattern, quoted_pattern
from tests.cluster.api.constraints.conftest import Matching

PATTERNS = [
    r".",
    r".*",
    r"(?s:.)+",
    r"(?s).*x",
    r"[^a]*",
    r"[^\n]+\n",
    r"\s+",
    r"\S*",
    r"\d+(\.\d+)?",
    r"\w*\W",
    r"[\s\S]*",
    r'"[^"]*"',
    r'"(?:[^"\\]|\\.)*"',
    r"\\+",
    r"[\\\]\-a]+",
    r"[]a]+",
    r"[^]a]+",
    r"[ -~]*",
    r"[\x00-\x1f]+",
    r"\t|\x0a|\u00e9",
    r"(?i)ab\n+",
    r"(?i:n)\n",
    r"a{2,3}\n{2}",
    r"(?P<x>a|\n)*?",
    r"(?:é|😀)+",
    r"^a\nb$",
    r"^a|b$",
]
ALPHABET = ["a", "b", "n", "N", "x", "1", ".", " ", "\n", "\t", "\r", '"', "\\", "\x00", "\x07"]
ALPHABET += ["\x7f", "é", "😀", "]", "-", "/", "u"]


def of(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_matches_what_the_pattern_matches(matching: Matching, pattern: str) -> None:
    draw = random.Random(pattern)
    texts = [*ALPHABET, "", "a\nb", '"a"', '"\\""', "aa\n\n", "1.5", "n\n", "N\n", "AB\n\n", "\nx"]
    texts += ["".join(draw.choices(ALPHABET, k=draw.randint(2, 6))) for _ in range(80)]
    quoted, plain = of(quoted_pattern(pattern)), of(plain_pattern(pattern))
    wrong = []
    for text in texts:
        # Rust's . is any character but \n, and \s, \w and \d are Unicode's, as in Python.
        right = re.fullmatch(pattern, text) is not None
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        if matching.accepts(quoted, written) != right or matching.accepts(plain, text) != right:
            wrong.append(text)
    assert wrong == []
    assert any(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize("written", [r"\/", r"\u000a", r"\u0061", "\n", r"\q", r"\u001F", '"'])
def test_each_character_is_written_in_one_way(matching: Matching, written: str) -> None:
    assert not matching.accepts(of(quoted_pattern(r"[\s\S]*")), written)


@pytest.mark.parametrize(
    ("pattern", "at", "what"),
    [
        ("ab(?=c)", 2, "this kind of group"),
        ("(a", 2, "a group is not closed"),
        ("a)b", 1, "')' closes no group"),
        ("x[ab", 1, "a set is not closed"),
        (r"a\b", 1, "is not supported"),
        (r"a(b)\1", 4, "is not supported"),
        ("[a[b]]", 2, "sets within sets"),
        ("[a-z&&b]", 4, "sets within sets"),
        ("[z-a]", 1, "begins with the lower one"),
        ("a^b", 1, "only supported around the whole"),
        ("(a$)", 2, "only supported around the whole"),
        (r"\p{Greek}", 0, "general category"),
        (r"\x{d800}", 0, "is no character"),
        ("a\\", 1, "is not supported"),
    ],
)
def test_what_cannot_be_read_is_refused_at_its_place(pattern: str, at: int, what: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(what)) as caught:
        quoted_pattern(pattern)
    assert caught.value.at == at
