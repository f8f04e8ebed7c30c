"""Outputs in the formats that name the tool between markers."""

from __future__ import annotations

from kvrelay.cluster.api.output.events import Reasoning, Text
from tests.cluster.api.output.reading import FENCED, call, output

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

DEEPSEEK = [
    output("no call", "a < b ｜ c", Text("a < b ｜ c")),
    output(
        "a call",
        f'{SECTION}{BEGIN}send{SEP}{{"to": "Ann"}}{END}{SECTION_END}',
        call("send", '{"to": "Ann"}'),
    ),
    output(
        "calls in fences, and text around them",
        f"Yes.\n\n{SECTION}{BEGIN}function{SEP}ping\n```json\n{{}}\n```{END}\n"
        f'{BEGIN}function{SEP}send\n```json\n{{"to": "```\\n"}}\n```{END}{SECTION_END}\nDone.',
        *(Text("Yes."), call("ping", "{}"), call("send", '{"to": "```\\n"}'), Text("Done.")),
        template=FENCED,
    ),
    output(
        "unicode, quotes, brackets and markers within strings",
        f'{SECTION}{BEGIN}send{SEP}{{"to": "深🐳 \\"}}]", "note": "{END}"}}{END}{SECTION_END}',
        call("send", f'{{"to": "深🐳 \\"}}]", "note": "{END}"}}'),
    ),
    output(
        "a tool that is called function",
        f'{BEGIN}function{SEP}{{"a": 1}}{END}',
        call("function", '{"a": 1}'),
    ),
    output("cut in a marker", "Yes. <｜tool▁cal", Text("Yes. <｜tool▁cal")),
    output("cut in the name", f"{SECTION}{BEGIN}se", Text(f"{BEGIN}se")),
    output(
        "cut in the name before a fence",
        f"{SECTION}{BEGIN}function{SEP}se",
        Text(f"{BEGIN}function{SEP}se"),
    ),
    output(
        "cut in the fence", f"{SECTION}{BEGIN}function{SEP}send\n``", call("send"), template=FENCED
    ),
    output("cut in the arguments", f'{BEGIN}send{SEP}{{"to": "', call("send", '{"to": "')),
    output(
        "a bracket is missing",
        f'{BEGIN}send{SEP}{{"copies": 1{END}{BEGIN}ping{SEP}{{}}{END}{SECTION_END}Done.',
        *(call("send", '{"copies": 1'), call("ping", "{}"), Text("Done.")),
    ),
    output(
        "no end before the next call and the end of all",
        f"{SECTION}{BEGIN}ping{SEP}{{}}{BEGIN}ping{SEP}{{}}{SECTION_END}Done.",
        *(call("ping", "{}"), call("ping", "{}"), Text("Done.")),
    ),
    output("no name", f"{BEGIN}{SEP}{{}}{END}", Text(f"{BEGIN}{SEP}{{}}{END}")),
]

KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, ARGS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

KIMI_OUTPUTS = [
    output("no call", "functions.ping:0 is an id.", Text("functions.ping:0 is an id.")),
    output(
        "a call",
        f'{KIMI_SECTION}{KIMI}functions.send:0{ARGS}{{"to": "Ann"}}{KIMI_END}{KIMI_SECTION_END}',
        call("send", '{"to": "Ann"}', "functions.send:0"),
    ),
    output(
        "two calls and text around them",
        f"Yes. {KIMI_SECTION}{KIMI} functions.ping:3 {ARGS} {{}} {KIMI_END}"
        f'{KIMI}functions.send:4{ARGS}{{"copies": 1}}{KIMI_END}{KIMI_SECTION_END} Done.',
        Text("Yes."),
        call("ping", "{}", "functions.ping:3"),
        call("send", '{"copies": 1}', "functions.send:4"),
        Text("Done."),
    ),
    output(
        "unicode, quotes, brackets and markers within strings",
        f'{KIMI}functions.send:0{ARGS}{{"to": "月🌙 \\"}}", "note": "{KIMI_END}"}}{KIMI_END}',
        call("send", f'{{"to": "月🌙 \\"}}", "note": "{KIMI_END}"}}', "functions.send:0"),
    ),
    output(
        "a name with a colon and without what comes before it",
        f"{KIMI}ns:1:12{ARGS}{{}}{KIMI_END}",
        call("ns:1", "{}", "ns:1:12"),
    ),
    output("cut in a marker", "Yes. <|tool_call_be", Text("Yes. <|tool_call_be")),
    output("cut in the name", f"{KIMI}functions.se", Text(f"{KIMI}functions.se")),
    output(
        "cut in the arguments",
        f'{KIMI_SECTION}{KIMI}functions.send:0{ARGS}{{"tags": [',
        call("send", '{"tags": [', "functions.send:0"),
    ),
    output(
        "no end of the call",
        f"{KIMI}functions.ping:0{ARGS}{{}}{KIMI_SECTION_END}Done.",
        *(call("ping", "{}", "functions.ping:0"), Text("Done.")),
    ),
    output(
        "no arguments",
        f"{KIMI}functions.ping:0{KIMI_END}Done.",
        Text(f"{KIMI}functions.ping:0{KIMI_END}Done."),
    ),
    output(
        "no name",
        f"{KIMI}functions.:0{ARGS}{{}}{KIMI_END}",
        Text(f"{KIMI}functions.:0{ARGS}{{}}{KIMI_END}"),
    ),
]

FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_SEND = "<|channel|>commentary to=functions.send <|constrain|>json<|message|>"
TO_PING = TO_SEND.replace("send", "ping")

HARMONY = [
    output("an answer", f"{FINAL}a < b | c <|return|>", Text("a < b | c ")),
    output(
        "reasoning and an answer",
        f"{ANALYSIS} Why? {NEXT}{FINAL}So.<|return|>",
        *(Reasoning("Why?"), Text("So.")),
    ),
    output(
        "reasoning, a preamble and a call",
        f'{ANALYSIS}Why?{NEXT}<|channel|>commentary<|message|>Wait.{NEXT}{TO_SEND}{{"to": "A"}}',
        *(Reasoning("Why?"), Text("Wait."), call("send", '{"to": "A"}')),
    ),
    output(
        "two calls, the second's recipient in the role",
        f"{TO_PING}{{}}<|call|><|start|>assistant to=functions.send<|channel|>commentary json"
        '<|message|>{"copies": 1}<|call|>',
        *(call("ping", "{}"), call("send", '{"copies": 1}')),
    ),
    output(
        "unicode, quotes and brackets within strings, and white space around",
        f'{TO_SEND}\n{{"to": "Ω🔱 \\"}}]\\n"}}<|call|>',
        call("send", '\n{"to": "Ω🔱 \\"}]\\n"}'),
    ),
    output(
        "markers within strings, and arguments that are no JSON",
        f'{TO_SEND}{{"to": "<|call|>", "note": "<|end|>"}}<|call|><|start|>assistant'
        f"{TO_PING}{{1, 2<|call|><|start|>assistant{TO_PING}a < b<|call|>",
        call("send", '{"to": "<|call|>", "note": "<|end|>"}'),
        *(call("ping", "{1, 2"), call("ping", "a < b")),
    ),
    output(
        "messages of one channel are paragraphs",
        f"{ANALYSIS}One.\n{NEXT}{ANALYSIS}Two.{NEXT}<|channel|>commentary<|message|>Three."
        f"{NEXT}{FINAL}Four.",
        *(Reasoning("One.\n\n\nTwo."), Text("Three.\n\nFour.")),
    ),
    output(
        "a tool of the model's own", f"{TO_PING}".replace("functions.", "") + "x", call("ping", "x")
    ),
    output("no channels at all", "Hello 👋\n", Text("Hello 👋\n")),
    output("cut in a header", f"{ANALYSIS}Why?{NEXT}<|chan", Reasoning("Why?")),
    output("cut in a name", "<|channel|>commentary to=functions.se"),
    output("cut in the arguments", f'{TO_SEND}{{"to": ', call("send", '{"to": ')),
    output("cut in an end", f"{FINAL}So.<|retu", Text("So.<|retu")),
    output(
        "no end before the next message",
        f"{FINAL}So.<|end|>{ANALYSIS}Why?",
        *(Text("So."), Reasoning("Why?")),
    ),
]

OUTPUTS = {"deepseek": DEEPSEEK, "kimi": KIMI_OUTPUTS, "harmony": HARMONY}
