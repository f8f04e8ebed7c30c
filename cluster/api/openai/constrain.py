"""The grammar of a request's output: what it asks for, its tools, and reasoning before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.api.constraints.calls import Before, answer_grammar, call_grammar
from cluster.api.constraints.grammar import grammar_of
from cluster.api.constraints.schema import SchemaError
from cluster.api.context import ApiContext
from cluster.api.errors import invalid
from cluster.api.openai.schema import ChatRequest, GenerationRequest
from cluster.api.output.marked_calls import Harmony

if TYPE_CHECKING:
    from cluster.api.output.dialect import Reading


async def constrain(ctx: ApiContext, request: GenerationRequest) -> str:
    """Of a completion; empty: anything is right. Raises `ApiError`."""
    asked = request.constraint()
    if asked is None:
        return ""
    try:
        return await ctx.constraints.check(
            lambda: grammar_of(asked.kind, asked.value, asked.options)
        )
    except SchemaError as error:
        raise invalid(f"'{asked.param}': {error}", param=asked.param) from None


async def constrain_chat(ctx: ApiContext, request: ChatRequest, reading: Reading) -> str:
    """Of a chat. Raises `ApiError`."""
    if reading.tools is None and request.tool_choice not in (None, "auto", "none"):
        raise invalid(
            "'tool_choice': this server does not read tool calls (api.tool_parser is none), so it"
            " cannot demand one",
            param="tool_choice",
        )
    answer = await constrain(ctx, request)
    before = _before(reading)
    special_id = ctx.tokenizer.special_id
    if reading.given and reading.tools is not None and request.tool_choice != "none":
        required = request.tool_choice not in (None, "auto")
        if required or answer or any(tool.strict for tool in reading.given):
            form, given = reading.tools, reading.given
            if isinstance(request.tool_choice, tuple):
                given = [tool for tool in given if tool.name == request.tool_choice[0]]
            parallel = request.parallel_tool_calls and not isinstance(request.tool_choice, tuple)
            try:
                return await ctx.constraints.check(
                    lambda: call_grammar(
                        form,
                        given,
                        special_id,
                        required=required,
                        parallel=parallel,
                        before=before,
                        answer="" if required else answer,
                    )
                )
            except (SchemaError, NotImplementedError) as error:
                raise invalid(f"'tools': {error}", param="tools") from None
    if not answer:
        return ""
    return await ctx.constraints.check(lambda: answer_grammar(answer, special_id, before))


def _before(reading: Reading) -> Before:
    if isinstance(reading.tools, Harmony):
        return Before.CHANNELS
    if not reading.thinks:
        return Before.NOTHING
    return Before.BEGUN if reading.begun else Before.MAY_THINK
