"""How each agent finds its model, and what that model says: a call of a tool for each turn, then a
last word. Agents are run as they come from npm.

The answer is a grammar that only one text matches, so everything from sampling on is as for any
other output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


MODEL = "scripted"
KEY = "none"
PACKAGES = "@anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code"


@dataclass(frozen=True, slots=True)
class Agent:
    """`prepare` writes its settings into a home of its own, for the server at a URL, and returns
    the variables that it needs. `arguments` follow its command."""

    name: str
    command: str
    endpoint: str  # the one that it uses
    prepare: Callable[[Path, str], Mapping[str, str]]
    arguments: tuple[str, ...]


def _claude(home: Path, url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # it may be root in a scratch folder
    }


def _codex(home: Path, url: str) -> Mapping[str, str]:
    folder = home / ".codex"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "kvrelay"',
        "[model_providers.kvrelay]",
        'name = "KVRelay"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
        'env_key = "KVRELAY_API_KEY"',
    ]
    (folder / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"KVRELAY_API_KEY": KEY}


def _opencode(home: Path, url: str) -> Mapping[str, str]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "KVRelay",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 65_536, "output": 4096}}},
    }
    settings = {
        "provider": {"kvrelay": provider},
        "model": f"kvrelay/{MODEL}",
        "small_model": f"kvrelay/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"edit": "allow", "bash": "allow"},
    }
    (folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return {}


def _qwen(home: Path, url: str) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}


AGENTS = (
    Agent(
        "Claude Code", "claude", "/v1/messages", _claude,
        ("-p", TASK, "--dangerously-skip-permissions"),
    ),
    Agent(
        "Codex", "codex", "/v1/responses", _codex,
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    ),
    Agent("opencode", "opencode", "/v1/chat/completions", _opencode, ("run", TASK)),
    Agent(
        "Qwen Code", "qwen", "/v1/chat/completions", _qwen,
        ("--auth-type", "openai", "--yolo", "-p", TASK),
    ),
)  # fmt: skip
