"""How the output of a chat will be read: reasoning, calls of tools, and by whose parsers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import invalid, parser_lost
from kvrelay.cluster.api.openai.schema import ChatRequest
from kvrelay.cluster.api.openai.tools import AllowedTools
from kvrelay.cluster.api.output.dialect import Reading
from kvrelay.cluster.api.output.json_calls import Llama3
from kvrelay.cluster.api.output.vllm_parsers import ParsersAway
from kvrelay.engine.request import ReasoningBudget


async def reading_of(ctx: ApiContext, request: ChatRequest, prompt_end: str) -> Reading:
    """`prompt_end`: as of Reading.after. Raises `ApiError`."""
    given = [tool.tool() for tool in request.tools or ()]
    reading = Reading.after(ctx.dialect, prompt_end, given, calls=request.tool_choice != "none")
    reading = replace(
        reading, most_calls=most_calls(request), calls_first=request.constraint() is not None
    )
    return await _with_outside(ctx, request, reading)


async def _with_outside(ctx: ApiContext, request: ChatRequest, reading: Reading) -> Reading:
    """`reading` with what parsers of vLLM have to know. A call that is demanded is written as JSON
    by a grammar, and read by ours. Raises `ApiError`."""
    if reading.outside is None or ctx.vllm_parsers is None:
        return reading
    choice = request.tool_choice
    choice = choice.mode if isinstance(choice, AllowedTools) else choice
    if reading.outside.calls and choice not in (None, "auto", "none"):
        if reading.outside.reasons:
            raise invalid(
                "'tool_choice': reasoning of this model is read by a parser of vLLM, and no call"
                " can be demanded behind it: use 'auto'",
                param="tool_choice",
            )
        return replace(reading, outside=None, tools=Llama3())
    try:
        return await ctx.vllm_parsers.known(reading, template_kwargs(request))
    except ParsersAway as away:
        raise parser_lost(str(away)) from None


def most_calls(request: ChatRequest) -> int | None:
    """How many calls of tools an answer has at most."""
    if not request.parallel_tool_calls:
        return 1
    most: int | None = getattr(request, "max_tool_calls", None)  # a field of the Responses API
    return most


def budget_of(ctx: ApiContext, request: ChatRequest, reading: Reading) -> ReasoningBudget | None:
    """None: no bound, or there is no reasoning. Raises `ApiError`."""
    most = request.thinking_budget
    if most is None:
        most = request.thinking_token_budget
    if most is not None and most >= 0 and reading.outside and reading.outside.reasons:
        raise invalid(
            "'thinking_budget': reasoning of this model is read by a parser of vLLM, and cannot be"
            " ended",
            param="thinking_budget",
        )
    if most is None or most < 0 or not reading.thinks:
        return None
    start, end = map(ctx.tokenizer.token_id, reading.tags)
    if end is None or (start is None and not reading.begun):
        raise invalid(
            f"'thinking_budget': for this model {' and '.join(reading.tags)} are no tokens, so its"
            " reasoning cannot be ended",
            param="thinking_budget",
        )
    return ReasoningBudget(min(most, ctx.max_model_len), end, None if reading.begun else start)


def template_kwargs(request: ChatRequest) -> dict[str, Any]:
    given = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        given.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            given.setdefault("enable_thinking", False)
    return given
