"""Grammars of custom tools, in each model's format of calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher

from kvrelay.cluster.api.constraints.calls import Before, call_grammar
from kvrelay.cluster.api.constraints.schema import SchemaError
from kvrelay.cluster.api.output.custom_input import CustomInput
from kvrelay.cluster.api.output.dialect import OutputParser
from kvrelay.cluster.api.output.events import Arguments, CallBegin
from kvrelay.cluster.api.output.format import CallSyntax
from kvrelay.cluster.api.output.tools import InputFormat, Tool
from tests.cluster.api.constraints.conftest import Matching
from tests.cluster.api.constraints.test_calls import FORMS, Writing
from tests.cluster.api.output.test_written_calls import written

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
# The grammar of patches in OpenAI's Codex (codex-rs/core/src/tools/handlers/tool_apply_patch.lark),
# under the Apache License 2.0.
APPLY_PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """*** Begin Patch
*** Update File: a "b"\\c.py
@@ def f():
-    return "x\\n"
+\treturn 'é' # </parameter
 x
*** Add File: n
+1
*** End Patch
"""
SUMS = """
start: sum
sum: product (("+" | "-") product)*
product: factor (/[*]/ factor)*
?factor: NUMBER -> number
    | "(" sum ")"
    | TEXT
TEXT: /"[^"]*"/
%import common (NUMBER, WS_INLINE)
%ignore WS_INLINE
"""
QUERY = """
%llguidance {}
start: "select"i COLUMNS "from"i NAME where?   // one table
COLUMNS.1: NAME ("," NAME)*
NAME.2: "a".."z" /[a-z_]/~0..8
where: "where"i NAME "=" STRING
STRING: "'" /[^']/* "'"
%ignore " "
%ignore /\\n/
"""
MORSE = InputFormat("regex", r"^[.\-]+( [.\-]+)*$")
LINES = InputFormat("regex", r"(?:[^\n]*\n)+")
# What each takes, and what it does not.
CASES: list[tuple[InputFormat, Sequence[str], Sequence[str]]] = [
    (
        InputFormat("lark", APPLY_PATCH),
        [PATCH, PATCH[:-1], "*** Begin Patch\n*** Delete File: é\n*** End Patch"],
        ["", "x", PATCH + "\n", PATCH.replace("*** End", "***End"), PATCH.replace("+1", "1")],
    ),
    (MORSE, ["...", "- .-"], ["", "a", "- ", "-\n"]),
    (LINES, ['a "b"\\\n', "\n\n", "<b>\n</b>\n"], ["", "a", "a\nb"]),
    (
        InputFormat("lark", SUMS),
        ["1+2", "(1 + 2)\t* 3.5", '"a\nb" + (("\\"))', "((((1))))"],
        ["", "1+", "(1", "1\n+2", '"a'],
    ),
    (
        InputFormat("lark", QUERY),
        ["select a,bc from t", "SELECT a from t\nwhere x='a \"b\"'", "select a from t "],
        [
            "select a, from t",
            "select A from t",
            'select a from t where x="a"',
            "selecta",
            " select a from t",
        ],
    ),
]
SOME_IDS = 3000  # of the vocabulary: all characters, and more
FORMATS = [each for each in FORMS if each[0] != "mistral" or each[1]]


@pytest.fixture(params=FORMATS, ids=lambda each: "-".join(filter(None, each)))
def writing(request: pytest.FixtureRequest, matching: Matching) -> Writing:
    return Writing(matching, *request.param, False)


def tool(form: InputFormat) -> Tool:
    return Tool("apply_patch", SCHEMA, custom=form)


def outputs(writing: Writing, form: InputFormat, texts: Sequence[str]) -> list[str]:
    return [writing.calls((tool(form), {"input": text})) for text in texts]


def read(writing: Writing, text: str, form: InputFormat, *, is_last: bool = True) -> str:
    """What a client is told of the call."""
    events = OutputParser(writing.form, [tool(form)]).read(text, is_last=is_last)
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["apply_patch"]
    given = CustomInput()
    parts = [given.push(event.text) for event in events if isinstance(event, Arguments)]
    return "".join((*parts, given.finish() if is_last else ""))


@pytest.mark.parametrize("case", CASES, ids=["patch", "morse", "lines", "sums", "query"])
def test_a_call_has_an_input_that_matches(
    writing: Writing, case: tuple[InputFormat, Sequence[str], Sequence[str]]
) -> None:
    form, right, wrong = case
    grammar = writing.grammar([tool(form)])
    texts = outputs(writing, form, right)
    assert [text for text in texts if not writing.accepts(grammar, text)] == []
    assert [text for text in outputs(writing, form, wrong) if writing.accepts(grammar, text)] == []
    assert [read(writing, text, form) for text in texts] == list(right)


def test_a_tool_without_a_grammar_takes_any_text(writing: Writing) -> None:
    form = InputFormat()
    grammar = writing.grammar([tool(form)])
    for text in outputs(writing, form, ["", PATCH, "1+"]):
        assert writing.accepts(grammar, text)
    assert not writing.accepts(grammar, writing.calls((tool(form), {})))


@pytest.mark.parametrize("case", CASES[:4], ids=["patch", "morse", "lines", "sums"])
def test_what_is_drawn_by_the_grammar_is_read_as_a_text_of_it(
    writing: Writing, matching: Matching, case: tuple[InputFormat, Sequence[str], Sequence[str]]
) -> None:
    """Tokens drawn at random, where the grammar leaves a choice. A call need not end, but what has
    been read of its input begins a text that the grammar alone lets through."""
    form = case[0]
    alone = f"%llguidance {{}}\n{form.definition}"
    if form.syntax == "regex":
        alone = LLMatcher.grammar_from_regex(form.definition.strip("^$"))
    draw = random.Random(1)
    short = [i for i in range(SOME_IDS) if len(matching.vocabulary.decode_str([i])) <= 2]
    grammar = writing.grammar([tool(form)], parallel=False, before=Before.NOTHING)
    for _ in range(2):
        matcher = matching.compiled(grammar)
        tokens: list[int] = []
        while len(tokens) < 50 and not matcher.is_accepting():
            allowed = allowed_tokens(matcher.compute_bitmask(), short)
            assert allowed, matching.vocabulary.decode_str(tokens)  # it is never stuck
            tokens.append(draw.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        has_ended = matcher.is_accepting()
        drawn = matching.vocabulary.decode_bytes(tokens).decode(errors="ignore")
        text = read(writing, drawn, form, is_last=has_ended)
        if "%ignore" in alone:  # the library takes less than Lark of it at the end
            text = text.rstrip()
        ids = matching.vocabulary.tokenize_str(text)
        plain = matching.compiled(alone)
        assert plain.try_consume_tokens(ids) == len(ids), text
        assert plain.is_accepting() or not has_ended, text


def allowed_tokens(mask: bytes, short: Sequence[int]) -> list[int]:
    """Short ones, so that outputs come to an end, unless there are only others."""
    found = [i for i in short if mask[i // 8] >> (i % 8) & 1]
    return found or [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]


def test_no_text_ends_the_argument_that_it_is_in(matching: Matching) -> None:
    """Where arguments stand between tags, a tag within one would be read as its end."""
    writing = Writing(matching, "qwen3_coder", "", False)
    nested = InputFormat("lark", 'start: "(" start ")" | TEXT\nTEXT: /[^()]+/')
    for form, right in ((nested, "((a<b>))"), (InputFormat("regex", "(?s).+"), "(a<b>\n)")):
        grammar = writing.grammar([tool(form)])
        for text, is_right in ((right, True), (f"({right[1:-1]}</parameter>)", False)):
            (output,) = outputs(writing, form, [text])
            assert writing.accepts(grammar, output) == is_right


def test_rules_that_nobody_needs_change_nothing(matching: Matching) -> None:
    writing = Writing(matching, "hermes", "", False)
    form = InputFormat("lark", 'start: A\nA: "a"\nother: "(" other ")" | B\nB: "b"')
    grammar = writing.grammar([tool(form)])
    texts = outputs(writing, form, ["a", "b", "(b)"])
    assert [writing.accepts(grammar, text) for text in texts] == [True, False, False]


def test_only_the_input_of_a_call_is_held(matching: Matching) -> None:
    """Where calls are offered: text before one is free, and so are other tools' arguments."""
    writing = Writing(matching, "hermes", "", False)
    morse, ping = tool(MORSE), Tool("ping", {})
    grammar = writing.grammar([morse, ping], required=False)
    (call, wrong), other = outputs(writing, MORSE, ["...", "x"]), writing.calls((ping, {"a": 1}))
    for text in ("Hi.", call, f"I look.\n{call}", f"{other}\n{call}"):
        assert writing.accepts(grammar, text)
    assert not writing.accepts(grammar, f"I look.\n{wrong}")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (InputFormat("lark", "begin: /a/"), "line 1, column 1: there is no rule 'start'"),
        (InputFormat("lark", "start: a\n  b"), "line 2, column 3: expected ':' after the name 'b'"),
        (InputFormat("lark", 'start: "a"\n b: c'), "line 2, column 5: there is no 'c'"),
        (InputFormat("lark", "start: x\nx: /a(?=b)/"), "line 2, column 6: this kind of group"),
        (InputFormat("lark", 'start: "a'), "line 1, column 8: '\"a' is not understood"),
        (InputFormat("lark", "start: <|im_end|>"), "line 1, column 8: '<|im_end|>' is not"),
        (InputFormat("lark", "start: %json {}"), "line 1, column 8: '%json' is not expected here"),
        (InputFormat("lark", "start: A\n%declare A"), "line 2, column 1: '%declare' is not"),
        (InputFormat("lark", "start: ("), "line 1, column 8: '(' is not closed"),
        (InputFormat("lark", 'start: ("a"\nb: "b"'), "line 1, column 8: '(' is not closed"),
        (InputFormat("lark", 'start: ["a")'), "line 1, column 12: ')' closes no bracket"),
        (InputFormat("lark", "start: A\n%import x.A"), "line 2, column 1: 'x . A' cannot be"),
        (InputFormat("lark", "start: A\nA: B\nB: A"), "the terminal 'A' needs itself"),
        (InputFormat("lark", 'start: "a"\nstart: "b"'), "'start' is defined twice"),
        (InputFormat("lark", 'start: "\\x41"'), "is not a string as JSON has them"),
        (InputFormat("lark", 'start: "ab".."c"'), "a range is from one character to another"),
        (InputFormat("regex", "a\n(b"), "line 2, column 3: a group is not closed"),
        (InputFormat("regex", "a" * 300_000), "the grammar has 300000 characters"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_bad_grammar_is_refused_at_its_place(
    name: str, form: InputFormat, message: str, matching: Matching
) -> None:
    writing = Writing(matching, name, "", False)
    with pytest.raises(SchemaError) as caught:
        call_grammar(writing.form, [tool(form)], writing.ids.get, required=True, parallel=True)
    said = str(caught.value)
    assert said.startswith("tool 'apply_patch': "), said
    assert message in said
    assert "\n" not in said


def test_written_calls_are_those_of_the_reader(writing: Writing) -> None:
    """The tests' own writer escapes as the grammar does."""
    syntax: CallSyntax = writing.form.syntax(tool(MORSE))
    text = written([(tool(MORSE), {"input": 'a"\\'})], [syntax], ascii=False)
    assert syntax.parameters is not None or json.dumps('a"\\') in text
