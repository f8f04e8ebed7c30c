"""Grammars of tool calls: what each format's model may write, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvrelay.cluster.api.constraints.calls import Before, answer_grammar, call_grammar
from kvrelay.cluster.api.constraints.grammar import grammar_of
from kvrelay.cluster.api.constraints.schema import SchemaError
from kvrelay.cluster.api.output.dialect import FORMATS, find_format
from kvrelay.cluster.api.output.format import ToolFormat
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.output.tools import Tool
from tests.cluster.api.constraints.conftest import Matching
from tests.cluster.api.output.reading import FENCED, NAMED_FIRST
from tests.cluster.api.output.test_written_calls import written

SEND = Tool(
    "send",
    {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "copies": {"type": "integer"},
            "kind": {"type": "string", "enum": ["a", "é<b> 😀"]},
        },
        "required": ["to"],
        "additionalProperties": False,
    },
    strict=True,
)
PING = Tool("ns.ping", {})
TOOLS = [SEND, PING]
FORMS = [(name, "") for name in FORMATS if name not in ("pythonic", "gemma4")]
FORMS += [("mistral", NAMED_FIRST), ("deepseek", FENCED)]
FIRST_SPECIAL_ID = 3  # of the special tokens of the default model, which stand for a format's


class Writing:
    """One format's outputs, its markers as text or as special tokens."""

    def __init__(self, matching: Matching, name: str, template: str, special: bool) -> None:
        form = find_format(name, template)
        assert form is not None
        self.form: ToolFormat = form
        self._matching = matching
        names = dict.fromkeys((*form.markers, "<think>", "</think>")) if special else ()
        self.ids = {marker: FIRST_SPECIAL_ID + i for i, marker in enumerate(names)}
        self.before = Before.CHANNELS if isinstance(form, Harmony) else Before.NOTHING
        self.final = "<|channel|>final<|message|>" if isinstance(form, Harmony) else ""

    def calls(self, *calls: tuple[Tool, dict[str, Any]]) -> str:
        syntaxes = [self.form.syntax(tool) for tool, _ in calls]
        text = written(calls, syntaxes, ascii=False)
        # GLM has its values on lines of their own.
        return text.replace("</arg_key><arg_value>", "</arg_key>\n<arg_value>")

    def grammar(self, tools: Sequence[Tool] = TOOLS, **options: Any) -> str:
        chosen = {"required": True, "parallel": True, "before": self.before, **options}
        return call_grammar(self.form, tools, self.ids.get, **chosen)

    def accepts(self, grammar: str, text: str) -> bool:
        return self._matching.accepts(grammar, text, self.ids)


@pytest.fixture(params=[False, True], ids=["text", "special"])
def special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=FORMS, ids=lambda each: "-".join(filter(None, each)))
def writing(request: pytest.FixtureRequest, matching: Matching, special: bool) -> Writing:
    return Writing(matching, *request.param, special)


def right(writing: Writing) -> list[str]:
    """Outputs with one call."""
    return [
        writing.calls((SEND, {"to": "Zoë 👩‍🚀\n\n<b> \"}'"})),
        writing.calls((SEND, {"to": "", "copies": -3, "kind": "é<b> 😀"})),
        writing.calls((PING, {})),
    ]


def wrong(writing: Writing) -> list[str]:
    """Outputs with one call that breaks the schema, or that is none."""
    whole = writing.calls((SEND, {"to": "Ann"}))
    return [
        writing.calls((SEND, {"copies": 1})),
        writing.calls((SEND, {"to": "Ann", "copies": "many"})),
        writing.calls((SEND, {"to": "Ann", "kind": "c"})),
        writing.calls((SEND, {"to": "Ann", "other": 1})),
        writing.calls((SEND, {"copies": 1, "to": "Ann"})),
        writing.calls((Tool("other"), {})),
        whole[:-1],
    ]


def test_a_call_that_is_required_is_the_whole_output(writing: Writing) -> None:
    grammar = writing.grammar()
    assert [text for text in right(writing) if not writing.accepts(grammar, text)] == []
    refused = wrong(writing)
    refused += [f"Hi.{right(writing)[0]}", f"{right(writing)[0]}Hi.", f"{writing.final}Hi.", ""]
    assert [text for text in refused if writing.accepts(grammar, text)] == []


def test_a_forced_call_has_no_arguments_that_its_tool_does_not_name(writing: Writing) -> None:
    """Unless the schema says more than names; what is only offered may have them."""
    named = {"type": "object", "properties": {"to": {"type": "string"}}}
    alike: list[dict[str, Any]] = [{}, {"type": "object", "properties": {}}, named]
    for schema in alike:
        tool = Tool("open", schema)
        grammar = writing.grammar([tool])
        assert writing.accepts(grammar, writing.calls((tool, {})))
        assert not writing.accepts(grammar, writing.calls((tool, {"other": 1})))
    if writing.form.syntax(SEND).parameters is None:
        for more in ({"additionalProperties": True}, {"anyOf": [{"required": []}]}):
            tool = Tool("open", named | more)
            assert writing.accepts(writing.grammar([tool]), writing.calls((tool, {"other": 1})))
        tool = Tool("open", named)
        offered = writing.grammar([tool], required=False)
        assert writing.accepts(offered, writing.calls((tool, {"other": 1})))


def test_a_call_that_is_offered_matches_its_schema_wherever_it_is(writing: Writing) -> None:
    grammar = writing.grammar(required=False)
    texts = [f"{writing.final}Hi é 😀.\n", f"{writing.final}[1] < 2 {{}}"]
    assert [text for text in texts if not writing.accepts(grammar, text)] == []
    assert [text for text in right(writing) if not writing.accepts(grammar, text)] == []
    assert [text for text in wrong(writing) if writing.accepts(grammar, text)] == []
    if writing.form.syntax(SEND).trigger and not writing.final:
        assert all(writing.accepts(grammar, f"Hi.\n{text}\nDone.") for text in right(writing))
        assert not any(writing.accepts(grammar, f"Hi.\n{text}") for text in wrong(writing))


def test_calls_may_be_parallel(writing: Writing) -> None:
    calls = [(SEND, {"to": "a"}), (PING, {}), (SEND, {"to": "b", "copies": 2})]
    two, three = writing.calls(*calls[:2]), writing.calls(*calls)
    mixed = writing.calls(calls[0], (SEND, {"copies": 2}))
    for required in (True, False):
        grammar = writing.grammar(required=required)
        assert writing.accepts(grammar, two)
        assert writing.accepts(grammar, three)
        assert not writing.accepts(grammar, mixed)


def test_one_call_is_all_where_calls_are_not_parallel(writing: Writing) -> None:
    calls = [(SEND, {"to": "a"}), (PING, {})]
    one, two = writing.calls(calls[0]), writing.calls(*calls)
    for required in (True, False):
        grammar = writing.grammar(required=required, parallel=False)
        assert writing.accepts(grammar, one)
        assert not writing.accepts(grammar, two)
        assert not writing.accepts(grammar, f"{one}\n{writing.calls(calls[1])}")


def test_a_call_without_its_section_is_held_to_its_schema_too(writing: Writing) -> None:
    """It is read as a call."""
    opening = writing.form.opening
    if not opening or not writing.form.syntax(SEND).trigger:
        return
    last = writing.form.syntax(SEND).last
    good, bad = (
        opening + text.partition(opening)[2].removesuffix(last)
        for text in (right(writing)[0], writing.calls((SEND, {"to": "a", "copies": "x"})))
    )
    grammar = writing.grammar(required=False)
    assert writing.accepts(grammar, f"Hi. {good}")
    assert not writing.accepts(grammar, f"Hi. {bad}")


def test_reasoning_comes_before_calls(writing: Writing) -> None:
    if writing.final:
        reasoning = "<|channel|>analysis<|message|>Hm, {}.<|end|><|start|>assistant"
        befores = {Before.CHANNELS: [reasoning, ""]}
    else:
        befores = {
            Before.BEGUN: ["Hm, {}.</think>\n\n", "</think>"],
            Before.MAY_THINK: ["<think>\nHm.\n</think>\n", ""],
            Before.NOTHING: [""],
        }
    call, bad = right(writing)[0], wrong(writing)[0]
    for before, texts in befores.items():
        for required in (True, False):
            grammar = writing.grammar(required=required, before=before)
            assert [text for text in texts if not writing.accepts(grammar, text + call)] == []
            assert [text for text in texts if writing.accepts(grammar, text + bad)] == []
            final = texts[0] + writing.final + "Hi."
            assert writing.accepts(grammar, final) is not required


def test_an_answer_without_calls_matches_its_own_grammar(writing: Writing) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema["additionalProperties"] = False
    answer = grammar_of("json", schema, {})
    grammar = writing.grammar(required=False, answer=answer)
    assert writing.accepts(grammar, writing.final + '{"name": "send"}')
    assert writing.accepts(grammar, right(writing)[0])
    assert not writing.accepts(grammar, writing.final + '{"name": 5}')
    assert not writing.accepts(grammar, writing.final + "Hi.")
    assert not writing.accepts(grammar, wrong(writing)[0])


def test_harmony_may_say_something_before_a_call(matching: Matching, special: bool) -> None:
    writing = Writing(matching, "harmony", "", special)
    said = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    grammar = writing.grammar(required=False)
    assert writing.accepts(grammar, said + right(writing)[0])
    assert writing.accepts(grammar, f"{said}{writing.final}Hi.")
    assert not writing.accepts(grammar, said + wrong(writing)[0])
    assert not writing.accepts(writing.grammar(), said + right(writing)[0])


def test_llama_may_not_begin_a_text_as_a_call(matching: Matching, special: bool) -> None:
    writing = Writing(matching, "llama3_json", "", special)
    grammar = writing.grammar(required=False, before=Before.MAY_THINK)
    assert writing.accepts(grammar, " \nHi {}")
    assert not writing.accepts(grammar, '{"answer": 5}')
    bad = '{"name": "send", "parameters": {}}'
    for begin in ("", " \n", "Hi <|python_tag|>", "<think>Hm.</think>", " <think></think>\n"):
        assert not writing.accepts(grammar, begin + bad)


ANSWERS: list[tuple[str, Any, str, str]] = [
    ("json", {"type": "integer"}, "5", "a"),
    ("json_object", True, '{"a": []}', "[]"),
    ("regex", "[0-9]+x", "12x", "x"),
    ("choice", ["yes", "é"], "é", "e"),
    ("grammar", 'start: "a" b\nb: /[0-9]/', "a1", "b"),
    (
        "structural_tag",
        {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
         "triggers": ["<f>"]},
        "Hi <f>null</f>",
        "Hi <f>1</f>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "good", "bad"), ANSWERS)
def test_reasoning_comes_before_an_answer_of_any_kind(
    matching: Matching, kind: str, value: Any, good: str, bad: str, special: bool
) -> None:
    name = "harmony" if special else "hermes"
    ids = Writing(matching, name, "", special).ids
    answer, final = grammar_of(kind, value, {}), "<|channel|>final<|message|>"
    befores = {
        Before.NOTHING: [""],
        Before.BEGUN: ["Hm.</think>\n\n", "</think>"],
        Before.MAY_THINK: ["<think>Hm.</think>\n", ""],
        Before.CHANNELS: [
            final,
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}",
        ],
    }
    for before, texts in befores.items():
        grammar = answer_grammar(answer, ids.get, before)
        for text in texts:
            assert matching.accepts(grammar, text + good, ids)
            assert not matching.accepts(grammar, text + bad, ids)


def test_a_format_without_json_has_no_grammar() -> None:
    form = find_format("pythonic", "")
    assert form is not None
    with pytest.raises(NotImplementedError):
        call_grammar(form, TOOLS, lambda _: None, required=True, parallel=True)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_schema_that_cannot_be_kept_is_refused_with_its_tool(
    matching: Matching, name: str
) -> None:
    writing = Writing(matching, name, "", special=False)
    for schema, told in (({"not": {}}, '"not"'), ({"format": "iri"}, "iri"), (5, "object")):
        tool = Tool("bad", {"type": "object", "properties": {"a": schema}}, strict=True)
        with pytest.raises(SchemaError, match=f"^tool 'bad': .*{told}"):
            writing.grammar([SEND, tool])
    lenient = Tool("bad", {"type": "object", "properties": {"a": {"not": {}}}})
    assert writing.accepts(writing.grammar([lenient]), writing.calls((lenient, {"a": 1})))
