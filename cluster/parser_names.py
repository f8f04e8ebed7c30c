"""Names of parsers of tool calls and of reasoning: ours, and vLLM's for the same.

Data, for the settings and the command line. A name that is none of these is vLLM's, which reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TOOLS = (
    *("auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek"),
    *("glm", "kimi", "minimax", "harmony", "seed_oss", "llama4_json", "gemma4"),
)
REASONING = ("auto", "none", "think", "mistral", "seed_oss", "gemma4")
TOOLS_OF_VLLM = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek_v32"), "deepseek"),
    **dict.fromkeys(("glm45", "glm47"), "glm"),
    "kimi_k2": "kimi",
    "minimax_m2": "minimax",
    "openai": "harmony",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
REASONING_OF_VLLM = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "glm47", "qwen3", "minimax_m2", "kimi_k2"), "think"
    ),
    "openai_gptoss": "auto",
}


def own(name: str, ours: Sequence[str], theirs: Mapping[str, str]) -> str:
    """Which of `ours` reads what `name` says; "": none."""
    name = theirs.get(name, name)
    return name if name in ours else ""


def not_ours(tool: str, reasoning: str) -> str:
    """Why these cannot be read where vLLM does not run; "": they are ours."""
    for setting, name, ours in (("tool", tool, TOOLS), ("reasoning", reasoning, REASONING)):
        if name:
            return (
                f"api.{setting}_parser = {name!r}: expected one of {', '.join(ours)}; parsers of"
                " vLLM are for engine.runs = 'vllm'"
            )
    return ""
