"""Outputs in the formats whose calls are JSON objects."""

from __future__ import annotations

from kvrelay.cluster.api.output.events import Text
from tests.cluster.api.output.reading import NAMED_FIRST, call, output

PING = '{"name": "ping", "arguments": {}}'
LLAMA_PING = '{"name": "ping", "parameters": {}}'

HERMES = [
    output("no call", "Four is 2 + 2, and a < b.\n", Text("Four is 2 + 2, and a < b.\n")),
    output(
        "a call",
        '<tool_call>\n{"name": "send", "arguments": {"to": "Ann", "copies": 2}}\n</tool_call>',
        call("send", '{"to": "Ann", "copies": 2}'),
    ),
    output(
        "two calls and text before, between and after",
        f"One.\n<tool_call>\n{PING}\n</tool_call>\nTwo.\n<tool_call>{PING}</tool_call>\nThree.\n",
        *(Text("One."), call("ping", "{}"), Text("Two."), call("ping", "{}"), Text("Three.")),
    ),
    output(
        "unicode, escapes, brackets and tags within strings",
        '<tool_call>{"name": "send", "arguments": {"to": "Zoë 👩‍🚀 \\u00e9 \\"]}{[\\"", '
        '"note": "</tool_call> <tool_call>", "extra": [{"a": [1, {}]}, "\\\\"]}}</tool_call>',
        call(
            "send",
            '{"to": "Zoë 👩‍🚀 \\u00e9 \\"]}{[\\"", '
            '"note": "</tool_call> <tool_call>", "extra": [{"a": [1, {}]}, "\\\\"]}',
        ),
    ),
    output(
        "arguments before the name, as JSON within JSON, and other keys",
        '<tool_call>{"id": [1], "arguments": "{\\"to\\": \\"ü\\"}", "name": "send"}</tool_call>',
        call("send", '{"to": "ü"}'),
    ),
    output("no arguments", '<tool_call>{"name": "ping"}</tool_call>', call("ping", "{}")),
    output(
        "arguments that are an empty string",
        '<tool_call>{"name": "ping", "arguments": ""}</tool_call>',
        call("ping", "{}"),
    ),
    output("cut in the tag", "Well: <tool_ca", Text("Well: <tool_ca")),
    output("cut after the tag", "Well: <tool_call>\n", Text("Well: <tool_call>\n")),
    output("cut in the name", '<tool_call>{"name": "se', Text('<tool_call>{"name": "se')),
    output("cut after the name", '<tool_call>{"name": "send", ', call("send")),
    output(
        "cut in a string",
        '<tool_call>{"name": "send", "arguments": {"to": "An',
        call("send", '{"to": "An'),
    ),
    output(
        "cut in JSON within JSON",
        '<tool_call>{"name": "send", "arguments": "{\\"to',
        call("send"),
    ),
    output("cut before the end tag", f"<tool_call>{PING}", call("ping", "{}")),
    output("cut in the end tag", f"<tool_call>{PING}</tool_", call("ping", "{}")),
    output(
        "no end tag before the next call",
        f"<tool_call>{PING}\n<tool_call>{PING}</tool_call>",
        *(call("ping", "{}"), call("ping", "{}")),
    ),
    output(
        "one bracket is missing",
        '<tool_call>{"name": "send", "arguments": {"to": "Ann"}</tool_call> Done.',
        *(call("send", '{"to": "Ann"}'), Text("Done.")),
    ),
    output(
        "two brackets are missing",
        '<tool_call>{"name": "send", "arguments": {"extra": {"a": 1}</tool_call> Done.',
        *(call("send", '{"extra": {"a": 1}'), Text("Done.")),
    ),
    output(
        "no object",
        "<tool_call>ping()</tool_call> Done.",
        Text("<tool_call>ping()</tool_call> Done."),
    ),
    output(
        "no name",
        '<tool_call>{"arguments": {"to": "Ann"}}</tool_call>',
        Text('<tool_call>{"arguments": {"to": "Ann"}}</tool_call>'),
    ),
    output(
        "an empty name",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        Text('<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ),
    output(
        "half of a character in the name",
        '<tool_call>{"name": "a\\ud83d", "arguments": "\\ud83d\\ude00"}</tool_call>',
        call("a\ufffd", "😀"),
    ),
    output(
        "arguments that are no JSON",
        '<tool_call>{"name": "send", "arguments": NaN}</tool_call>',
        call("send"),
    ),
]

LLAMA3 = [
    output("no call", " Yes; {no}.\n", Text(" Yes; {no}.\n")),
    output(
        "a call",
        '{"name": "send", "parameters": {"to": "Ann"}}',
        call("send", '{"to": "Ann"}'),
    ),
    output(
        "two calls",
        f'\n{LLAMA_PING};\n{{"type": "function", "name": "send", "parameters": {{"to": "é"}}}}; ',
        *(call("ping", "{}"), call("send", '{"to": "é"}')),
    ),
    output(
        "text before a tag, and after the call",
        f"Let me look.\n<|python_tag|>{LLAMA_PING} That is all.",
        *(Text("Let me look."), call("ping", "{}"), Text("That is all.")),
    ),
    output(
        "a tag before each call",
        f"<|python_tag|>{LLAMA_PING}<|python_tag|>{LLAMA_PING}",
        *(call("ping", "{}"), call("ping", "{}")),
    ),
    output(
        "unicode, quotes, brackets and the tag within strings",
        '{"name": "send", "parameters": {"to": "🦙}; {\\"", "note": "<|python_tag|>"}}',
        call("send", '{"to": "🦙}; {\\"", "note": "<|python_tag|>"}'),
    ),
    output("JSON that is no call", '{"answer": {"name": 5}}\n', Text('{"answer": {"name": 5}}\n')),
    output(
        "JSON that is no call, and then one",
        f'{{"answer": 42}}\n<|python_tag|>{LLAMA_PING}',
        *(Text('{"answer": 42}'), call("ping", "{}")),
    ),
    output(
        "an object with a name that is no tool's",
        '{"name": "Bob", "parameters": {}}',
        Text('{"name": "Bob", "parameters": {}}'),
    ),
    output(
        "a call of a tool that is not known",
        '<|python_tag|>{"name": "Bob", "parameters": {}}',
        call("Bob", "{}"),
    ),
    output("code after the tag", "See <|python_tag|>1 + 1", Text("See <|python_tag|>1 + 1")),
    output("cut in the tag", "So <|python_t", Text("So <|python_t")),
    output("cut in the name", '{"name": "pi', Text('{"name": "pi')),
    output(
        "cut in the arguments",
        '{"name": "send", "parameters": {"tags": ["a", "',
        call("send", '{"tags": ["a", "'),
    ),
    output(
        "cut in the second call",
        f'{LLAMA_PING}; {{"nam',
        *(call("ping", "{}"), Text('{"nam')),
    ),
]

MISTRAL = [
    output("no call", "[1] is a reference.", Text("[1] is a reference.")),
    output(
        "a call",
        '[TOOL_CALLS][{"name": "send", "arguments": {"to": "Ann"}}]',
        call("send", '{"to": "Ann"}'),
    ),
    output(
        "two calls and text before and after",
        f"Now.\n[TOOL_CALLS] [{PING}, {PING}] Done.",
        *(Text("Now."), call("ping", "{}"), call("ping", "{}"), Text("Done.")),
    ),
    output(
        "the name first",
        '[TOOL_CALLS]send[ARGS]{"to": "Ann"}[TOOL_CALLS]ping[ARGS]{}',
        *(call("send", '{"to": "Ann"}'), call("ping", "{}")),
        template=NAMED_FIRST,
    ),
    output(
        "the name first, with an id and without a marker of arguments",
        '[TOOL_CALLS]send[CALL_ID]k1[ARGS]{"to": "é"}[TOOL_CALLS] send {"copies": 1} Done.',
        *(call("send", '{"to": "é"}'), call("send", '{"copies": 1}'), Text("Done.")),
    ),
    output(
        "unicode, quotes, brackets and a marker within strings",
        '[TOOL_CALLS][{"name": "send", "arguments": '
        '{"to": "🐈 ]}, \\"[", "note": "[TOOL_CALLS]"}}]',
        call("send", '{"to": "🐈 ]}, \\"[", "note": "[TOOL_CALLS]"}'),
    ),
    output("cut in the marker", "Now [TOOL_CA", Text("Now [TOOL_CA")),
    output("cut after the marker", "Now [TOOL_CALLS]", Text("Now [TOOL_CALLS]")),
    output("cut in the name", "[TOOL_CALLS]sen", Text("[TOOL_CALLS]sen")),
    output(
        "cut in the arguments",
        '[TOOL_CALLS]send[ARGS]{"to": "A\\',
        call("send", '{"to": "A\\'),
    ),
    output("cut between calls", f"[TOOL_CALLS][{PING}, ", call("ping", "{}")),
    output(
        "cut in the second call",
        f'[TOOL_CALLS][{PING}, {{"na',
        *(call("ping", "{}"), Text('{"na')),
    ),
    output("a comma at the end", f"[TOOL_CALLS][{PING},]", call("ping", "{}")),
    output("no name", "[TOOL_CALLS][{}] Done.", Text("[TOOL_CALLS][{}] Done.")),
    output(
        "no JSON after the name",
        "[TOOL_CALLS]ping[ARGS]<none> Done.",
        *(call("ping"), Text("<none> Done.")),
    ),
]

LLAMA4 = [
    output("no call", "Yes; {no}.", Text("Yes; {no}.")),
    output(
        "calls one after another",
        f'{LLAMA_PING}{{"name": "send", "parameters": {{"to": "Ann"}}}}',
        *(call("ping", "{}"), call("send", '{"to": "Ann"}')),
    ),
    output(
        "text between the tags, and calls behind",
        f"<|python_start|>Let me look.<|python_end|>{LLAMA_PING}{LLAMA_PING}",
        *(Text("Let me look."), call("ping", "{}"), call("ping", "{}")),
    ),
    output(
        "a call between the tags",
        f"Wait.<|python_start|>{LLAMA_PING}<|python_end|> Done.",
        *(Text("Wait."), call("ping", "{}"), Text("Done.")),
    ),
    output(
        "an object that names no tool",
        '{"name": "Ann", "parameters": {}}',
        Text('{"name": "Ann", "parameters": {}}'),
    ),
    output("cut within the tag", "Hi <|python_st", Text("Hi <|python_st")),
]

OUTPUTS = {"hermes": HERMES, "llama3_json": LLAMA3, "llama4_json": LLAMA4, "mistral": MISTRAL}
