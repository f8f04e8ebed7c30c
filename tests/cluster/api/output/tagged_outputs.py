"""Outputs in the formats that write each argument between tags, and as Python calls."""

from __future__ import annotations

from kvrelay.cluster.api.output.events import Text
from tests.cluster.api.output.reading import call, output


def qwen(*parameters: str, name: str = "send") -> str:
    pairs = (each.split("=", 1) for each in parameters)
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


QWEN3_CODER = [
    output("no call", "if a <b> c: <function", Text("if a <b> c: <function")),
    output(
        "all types",
        qwen("to=Ann", "copies=3", "urgent=True", 'tags=["a", "b"]', "extra=1.5", "note=null"),
        call(
            "send",
            '{"to": "Ann", "copies": 3, "urgent": true, "tags": ["a", "b"], "extra": 1.5, '
            '"note": null}',
        ),
    ),
    output(
        "two calls and text around them",
        f"Yes.\n{qwen(name='ping')}\n{qwen('to=Bo')}\nDone.\n",
        *(Text("Yes."), call("ping", "{}"), call("send", '{"to": "Bo"}'), Text("Done.")),
    ),
    output(
        "unicode, lines, quotes, brackets and other tags in a text",
        qwen('to=Zoë 👾\n\n"<b>}\\n</function></tool_call>\n'),
        call("send", '{"to": "Zoë 👾\\n\\n\\"<b>}\\\\n</function></tool_call>\\n"}'),
    ),
    output(
        "without a section, and on one line",
        "<function=send><parameter=to>x</parameter><parameter=copies>2</parameter></function>",
        call("send", '{"to": "x", "copies": 2}'),
    ),
    output(
        "a text that begins like null, and one that is it",
        qwen("note=nullify", "to=null"),
        call("send", '{"note": "nullify", "to": "null"}'),
    ),
    output(
        "values that are not of their type, and a parameter that is not known",
        qwen("copies=many", "extra=NaN", "tags=[1", "other=5", "urgent=maybe"),
        call(
            "send",
            '{"copies": "many", "extra": "NaN", "tags": "[1", "other": "5", "urgent": "maybe"}',
        ),
    ),
    output(
        "no end of the first call",
        "<tool_call>\n<function=send>\n<parameter=to>\nAnn\n</parameter>\n</tool_call>\n"
        + qwen("copies=2"),
        *(call("send", '{"to": "Ann"}'), call("send", '{"copies": 2}')),
    ),
    output("cut in the section", "Yes <tool_c", Text("Yes <tool_c")),
    output("cut in the name", "<tool_call>\n<function=se", Text("<tool_call>\n<function=se")),
    output("cut in a key", "<function=send>\n<parameter=t", call("send")),
    output("cut in a text", "<function=send><parameter=to>\nAn", call("send", '{"to": "An')),
    output(
        "cut in the end of a text",
        "<function=send><parameter=to>\nAnn\n</param",
        call("send", '{"to": "Ann\\n</param'),
    ),
    output("cut in a number", "<function=send><parameter=copies>\n1", call("send", '{"copies": ')),
    output(
        "no function in the section",
        "<tool_call>\nping\n</tool_call>",
        Text("<tool_call>\nping\n</tool_call>"),
    ),
    output("no name", "<function=></function>", Text("<function=></function>")),
]


def glm(*parameters: str, name: str = "send") -> str:
    pairs = (each.split("=", 1) for each in parameters)
    lines = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


GLM = [
    output("no call", "<tool> <arg_key>a</arg_key>", Text("<tool> <arg_key>a</arg_key>")),
    output(
        "all types",
        glm("to=Ann", "copies=3", "urgent=false", 'tags=["a"]', 'extra={"b": [1]}', "note=null"),
        call(
            "send",
            '{"to": "Ann", "copies": 3, "urgent": false, "tags": ["a"], "extra": {"b": [1]}, '
            '"note": null}',
        ),
    ),
    output(
        "two calls and text around them",
        f"Yes.\n{glm(name='ping')}\n{glm('to=Bo')} Done.",
        *(Text("Yes."), call("ping", "{}"), call("send", '{"to": "Bo"}'), Text("Done.")),
    ),
    output(
        "unicode, lines, quotes, brackets and other tags in a text",
        glm("to=é 🐉\n'\"</tool_call> <arg_key>]"),
        call("send", '{"to": "é 🐉\\n\'\\"</tool_call> <arg_key>]"}'),
    ),
    output("a call on one line", "<tool_call>ping</tool_call>", call("ping", "{}")),
    output(
        "tags within the strings of a value, and values that are no JSON",
        glm('tags=["</arg_value>", "é"]', 'extra="</arg_value', "copies=12 or 13"),
        call(
            "send",
            '{"tags": ["</arg_value>", "é"], "extra": "\\"</arg_value", "copies": "12 or 13"}',
        ),
    ),
    output("cut in the tag", "Yes.\n<tool_cal", Text("Yes.\n<tool_cal")),
    output("cut in the name", "<tool_call>sen", Text("<tool_call>sen")),
    output("cut in a key", "<tool_call>send\n<arg_key>t", call("send")),
    output(
        "cut before a value",
        "<tool_call>send\n<arg_key>to</arg_key>\n",
        call("send", '{"to": "'),
    ),
    output(
        "cut in a text",
        "<tool_call>send\n<arg_key>to</arg_key>\n<arg_value>A</arg_",
        call("send", '{"to": "A</arg_'),
    ),
    output("no name", "<tool_call></tool_call>", Text("<tool_call></tool_call>")),
]


def minimax(*calls: str) -> str:
    return "<minimax:tool_call>\n" + "".join(calls) + "</minimax:tool_call>"


def invoke(*parameters: str, name: str = "send") -> str:
    pairs = (each.split("=", 1) for each in parameters)
    lines = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{lines}</invoke>\n'


MINIMAX = [
    output("no call", "<minimax> <invoke>", Text("<minimax> <invoke>")),
    output(
        "all types",
        minimax(invoke("to=Ann", "copies=3", "urgent=TRUE", "tags=[]", "extra=null", "note=null")),
        call(
            "send",
            '{"to": "Ann", "copies": 3, "urgent": true, "tags": [], "extra": null, "note": null}',
        ),
    ),
    output(
        "two calls in one section and text around it",
        f"Yes. {minimax(invoke(name='ping'), invoke('to=Bo'))} Done.",
        *(Text("Yes."), call("ping", "{}"), call("send", '{"to": "Bo"}'), Text("Done.")),
    ),
    output(
        "unicode, lines, quotes, brackets and other tags in a text",
        minimax(invoke('to=\nü 🧨 "<invoke name="ping">}\n</invoke>\n')),
        call("send", '{"to": "\\nü 🧨 \\"<invoke name=\\"ping\\">}\\n</invoke>\\n"}'),
    ),
    output(
        "no end of the first call",
        minimax('<invoke name="send">\n<parameter name="to">a</parameter>\n') + " Done.",
        *(call("send", '{"to": "a"}'), Text("Done.")),
    ),
    output("cut in the section", "Yes. <minimax:too", Text("Yes. <minimax:too")),
    output("cut in the name", '<invoke name="se', Text('<invoke name="se')),
    output(
        "cut in a key",
        '<minimax:tool_call>\n<invoke name="send">\n<parameter name="t',
        call("send"),
    ),
    output(
        "cut in a text",
        '<invoke name="send"><parameter name="to">A\n',
        call("send", '{"to": "A\\n'),
    ),
    output(
        "cut after a value",
        '<invoke name="send"><parameter name="copies">1</parameter>',
        call("send", '{"copies": 1'),
    ),
    output(
        "no call in the section",
        minimax("ping\n"),
        Text("<minimax:tool_call>\nping\n</minimax:tool_call>"),
    ),
]

PYTHONIC = [
    output("no call", "Use f(x) = [1, 2].", Text("Use f(x) = [1, 2].")),
    output(
        "all types",
        "[send(to='Ann', copies=-3, urgent=True, tags=['a', (1, 2.5)], extra={'b': None})]",
        call(
            "send",
            '{"to": "Ann", "copies": -3, "urgent": true, "tags": ["a", [1, 2.5]], '
            '"extra": {"b": null}}',
        ),
    ),
    output(
        "two calls and text around them",
        "Yes. <|python_start|>[ping(), send( to = 'Bo' , )]<|python_end|> Done.",
        *(Text("Yes."), call("ping", "{}"), call("send", '{"to": "Bo"}'), Text("Done.")),
    ),
    output(
        "unicode, escapes, quotes, brackets and a marker within strings",
        "[send(to=\"Zoë's 🐍 \\n\\\")], f(a=1\", note='\\u00e9<|python_end|>')] Done.",
        call("send", '{"to": "Zoë\'s 🐍 \\n\\")], f(a=1", "note": "é<|python_end|>"}'),
        Text("Done."),
    ),
    output(
        "a name with dots, a colon and a slash",
        "[a.b:c/d-e(x=1)]",
        call("a.b:c/d-e", '{"x": 1}'),
    ),
    output(
        "values that are no literals, or no JSON",
        "[send(extra=other(1), copies=1e999, to='\\ud83d\\ude00\\ud83d')]",
        call("send", '{"extra": "other(1)", "copies": "1e999", "to": "😀\ufffd"}'),
    ),
    output("a list that is no call", "[1, 2]\n", Text("[1, 2]\n")),
    output("a link", "[send it](there)", Text("[send it](there)")),
    output("code in brackets", "[len('a'), 2]", Text("[len('a'), 2]")),
    output(
        "a call of a tool that is not known",
        "<|python_start|>[len(x=1)]<|python_end|>",
        call("len", '{"x": 1}'),
    ),
    output("a list of words", "[send it (now)]", Text("[send it (now)]")),
    output("cut in a marker", "Yes. <|python_", Text("Yes. <|python_")),
    output("cut in the name", "[sen", Text("[sen")),
    output("cut after the name", "[ping(), send(", *(call("ping", "{}"), call("send"))),
    output("cut in a key", "[send(to='Ann', cop", call("send", '{"to": "Ann"')),
    output("cut in a string", "[send(to='Ann', note='\\", call("send", '{"to": "Ann"')),
    output("cut in a number", "[send(copies=12", call("send")),
    output("cut in a list", "[send(tags=['a', ['b']", call("send")),
    output("cut before the end", "[send(to='Ann')", call("send", '{"to": "Ann"}')),
    output(
        "arguments without a name",
        "<|python_start|>[send('Ann')]<|python_end|> Done.",
        *(call("send"), Text("Done.")),
    ),
    output("no call among calls", "[ping(), 5, ping()]", call("ping", "{}")),
]


def in_seed(parameters: str) -> str:
    inner = qwen(*parameters.split(" "))
    inner = inner.removeprefix("<tool_call>").removesuffix("</tool_call>")
    return f"<seed:tool_call>{inner}</seed:tool_call>"


SEED_OSS = [
    output("no call", "<tool_call> is another's", Text("<tool_call> is another's")),
    output(
        "text around calls",
        f"Yes.\n{in_seed('to=Ann copies=3')}\n{in_seed('urgent=true')}\nDone.",
        Text("Yes."),
        call("send", '{"to": "Ann", "copies": 3}'),
        call("send", '{"urgent": true}'),
        Text("Done."),
    ),
]

Q = '<|"|>'


def in_gemma(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


GEMMA4 = [
    output("no call", "<tool_call> is another's", Text("<tool_call> is another's")),
    output(
        "text around calls",
        f"Yes.\n{in_gemma(f'send{{to:{Q}Ann{Q},copies:3}}')}{in_gemma('ping{}')}\nDone.",
        Text("Yes."),
        call("send", '{"to": "Ann", "copies": 3}'),
        call("ping", "{}"),
        Text("Done."),
    ),
    output(
        "values in values, and marks of JSON in a text",
        in_gemma(
            f'send{{to:{Q}a"}},{{\n{Q},tags:[{Q}x{Q}, {Q}y{Q}],'
            f"extra:{{{Q}k{Q}:[1,{{n:null}}]}},urgent:true}}"
        ),
        call(
            "send",
            '{"to": "a\\"},{\\n", "tags": ["x", "y"], "extra": {"k": [1, {"n": null}]},'
            ' "urgent": true}',
        ),
    ),
    output(
        "a name without arguments, and texts without their marks",
        f"<|tool_call>call:ping<tool_call|>{in_gemma('send{to:Ann}')}",
        Text("<|tool_call>call:ping<tool_call|>"),
        call("send", '{"to": "Ann"}'),
    ),
    output(
        "a call that does not end",
        f"<|tool_call>call:send{{to:{Q}An",
        call("send", '{"to": "An'),
    ),
    output(
        "a bracket that is missing",
        f"{in_gemma('send{copies:[1,2')} Done.",
        call("send", '{"copies": [1, 2, '),
        Text("Done."),
    ),
]

OUTPUTS = {
    "gemma4": GEMMA4,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "minimax": MINIMAX,
    "pythonic": PYTHONIC,
    "seed_oss": SEED_OSS,
}
