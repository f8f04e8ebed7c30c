"""How each agent finds its model. They are run as they come from npm."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrelay.lab.agents.script import TASK

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
