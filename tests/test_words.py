"""Words: comments and docstrings are sentences, and identifiers are the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from tests.structure import PACKAGES, ROOT

SOURCES = sorted(
    path for top in (*PACKAGES, "benchmarks", "tests") for path in ROOT.glob(f"{top}/**/*.py")
)
# Where sentences are still to be mended. What is wrong there may only become less.
NOT_YET = (
    "worker/",
    "cluster/",
    "tests/cluster/api/",
)
MOST_NOT_YET = 152

# Words that stood for the field's own -> those.
WORDS = {
    "believed": "estimated",
    "foretold": "drafted",
    "guess": "draft token",
    "guesses": "draft tokens",
    "heed": "on_kv_events",
    "lender": "producer of a prefix export; fetch source",
    "lending": "prefix export; fetch",
    "loan": "prefix export",
    "news": "status, update, progress",
    "strangers": "unauthenticated connections",
    "told": "announced, sent, reported",
}

_BEGINS_AMISS = re.compile(r"(of|the same|as of)\b", re.IGNORECASE)
# Either a form that is a verb's, or what may be one: no grammar is parsed here.
_VERB = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|do|does|did|can|may|must|will|would|should|cannot"
    r"|could|might|need|\w\w+s|\w+ed|ask|became|become|begin|came|carry|compare|compute|count|draw"
    r"|end|fill|find|give|host|let|make|measure|perform|prepare|print|put|read|run|say|send|serve"
    r"|set|start|stop|take|talk|wait|went|write|build)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_NAME = re.compile(r"^\w?[\"']([A-Za-z_][\w.]*)[\"']$")  # a text that is one


@lru_cache(maxsize=1)
def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def wrong_comments(text: str) -> Iterator[str]:
    """Yields line and text of comments that begin with no subject. Further lines of one go on."""
    previous = 0
    for token in tokens_of(text):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            stands_alone = not token.line[:column].strip()
            begins = not stands_alone or previous != line - 1
            previous = line if stands_alone else 0
            if begins and _BEGINS_AMISS.match(token.string.lstrip("#: ")):
                yield f"{line}: {token.string}"


def wrong_docstrings(text: str) -> Iterator[str]:
    """Yields those that begin with no subject, have less than five words, or no verb. A shape
    (`[n, in] -> [n, out]`) needs none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said is None:
                continue
            is_short = len(said.split()) < 5
            has_verb = "[" in said or "->" in said or _VERB.search(said)
            if is_short or not has_verb or _BEGINS_AMISS.match(said):
                yield f"{node.body[0].lineno}: {said.splitlines()[0]}"


def wrong_names(text: str) -> Iterator[str]:
    """Yields identifiers, also such in quotes, with a word that has been replaced."""
    seen = set()
    for token in tokens_of(text):
        name = token.string if token.type == tokenize.NAME else ""
        if token.type == tokenize.STRING and (quoted := _NAME.match(token.string)):
            name = quoted[1]  # metrics, attributes, keys
        for word in _WORD.findall(name):
            if word.lower() in WORDS and name not in seen:
                seen.add(name)
                yield f"{token.start[0]}: {name}: say {WORDS[word.lower()]}"


def test_comments_docstrings_and_names_are_in_plain_words() -> None:
    wrong: list[str] = []
    not_yet: Counter[str] = Counter()
    for path in SOURCES:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        found = [*wrong_comments(text), *wrong_docstrings(text)]
        if not name.startswith("tests/"):
            found += wrong_names(text)
        if name.startswith(NOT_YET):
            not_yet[name] += len(found)
        else:
            wrong += [f"{name}:{each}" for each in found]
    assert not wrong, "\n".join(wrong)
    assert not_yet.total() <= MOST_NOT_YET, f"one more than before is in one of these: {not_yet}"


def test_wrong_words_are_found() -> None:
    assert [*wrong_comments("x = 1  # of all\n# As of y\n# of z\ny = 2  # often\n")] == [
        "1: # of all",
        "2: # As of y",
    ]
    code = 'def f():\n    """{}"""\n'
    for said in ("By name.", "The same as is said there.", "A very long text of nothing."):
        assert [*wrong_docstrings(code.format(said))] == [f"2: {said}"]
    for said in ("Returns what the worker has.", "x [n, in] -> [n, out], bfloat16."):
        assert not [*wrong_docstrings(code.format(said))]
    assert [*wrong_names("is_told = KVRead.x('lending')")] == [
        f"1: is_told: say {WORDS['told']}",
        f"1: lending: say {WORDS['lending']}",
    ]
