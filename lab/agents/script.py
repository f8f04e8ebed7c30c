"""What the model says to an agent: a call of a tool for each turn, then a last word.

The answer is a grammar that only one text matches, so everything from sampling on is as for any
other output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.cluster.api.openai.schema import ChatRequest
from kvrelay.cluster.api.output.tools import Tool

FILE, BEFORE, AFTER, COPY = "colours.txt", "sky: red", "sky: blue", "copy.txt"
FIRST_TEXT = f"grass: green\n{BEFORE}\n"
TASK = f"Change '{BEFORE}' to '{AFTER}' in {FILE}, then copy the file to {COPY}."
DONE = f"The sky in {FILE} is blue now, and {COPY} is a copy of it."
ASIDE = "Colours"  # to a request without tools: agents ask for titles and the like
REMARK = " ".join(f"word{i}" for i in range(300))  # so that writing the last call takes a while
READ, COMMAND = f"cat {FILE}", f"cp {FILE} {COPY} # {REMARK}"
CHANGE = f"sed -i 's/{BEFORE}/{AFTER}/' {FILE}"

Arguments = Mapping[str, Any]
Step = Mapping[str, Arguments]
"""Tool -> arguments of its call. The first tool that an agent offers is called; arguments that it
does not know are left out."""


def steps(folder: Path) -> tuple[Step, ...]:
    """Read the file, change it, run a command: by the tools of each agent."""
    path = str(folder / FILE)
    read = {"file_path": path, "filePath": path}
    words = ("old_string", "oldString"), ("new_string", "newString")
    edit: dict[str, Any] = {**read}
    for names, text in zip(words, (BEFORE, AFTER), strict=True):
        edit |= dict.fromkeys(names, text)
    run = {"command": COMMAND, "description": "Copy the file", "is_background": False}
    return (
        {"Read": read, "read": read, "read_file": read, "exec_command": {"cmd": READ}},
        {"Edit": edit, "edit": edit, "exec_command": {"cmd": CHANGE}},
        {"Bash": run, "bash": run, "run_shell_command": run, "exec_command": {"cmd": COMMAND}},
    )


def answer_to(request: ChatRequest, tools: Sequence[Tool], folder: Path) -> str:
    """What the model says next."""
    if not tools:
        return ASIDE
    num_results = sum(message.role == "tool" for message in request.messages)
    script = steps(folder)
    if num_results >= len(script):
        return DONE
    offered = {tool.name: tool for tool in tools}
    for name, arguments in script[num_results].items():
        if name in offered:
            known = offered[name].parameters.get("properties", {})
            return call_of(name, {key: arguments[key] for key in arguments if key in known})
    return f"None of the tools will do: {', '.join(offered)}"


def call_of(name: str, arguments: Arguments) -> str:
    """As a model whose template knows no tools has to write it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
