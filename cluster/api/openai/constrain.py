"""The grammar of a request's output: what it asks for, its tools, and reasoning before them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.cluster.api.constraints.calls import Before, SpecialId, answer_grammar, call_grammar
from kvrelay.cluster.api.constraints.grammar import grammar_of
from kvrelay.cluster.api.constraints.schema import SchemaError
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.limiter import LimitReached
from kvrelay.cluster.api.openai.schema import ChatRequest, GenerationRequest
from kvrelay.cluster.api.output.format import THINK, THINK_END
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.engine.model.sampling.grammar import GrammarError

if TYPE_CHECKING:
    from kvrelay.cluster.api.output.dialect import Reading

_log = logging.getLogger("kvrelay.api")


async def constrain(ctx: ApiContext, request: GenerationRequest) -> str:
    """Of a completion; empty: anything is right. Raises `ApiError`."""
    asked = request.constraint()
    if asked is None:
        return ""
    make = partial(grammar_of, asked.kind, asked.value, asked.options)
    return await _checked(ctx, asked.param, make)


async def constrain_chat(ctx: ApiContext, request: ChatRequest, reading: Reading) -> str:
    """Of a chat. Raises `ApiError`."""
    choice = request.tool_choice
    required = choice not in (None, "auto", "none")
    if required and reading.tools is None:
        raise invalid(
            "'tool_choice': this server does not read tool calls (api.tool_parser is none), so it"
            " cannot demand one",
            param="tool_choice",
        )
    answer = await constrain(ctx, request)
    before = _before(reading)
    form, given = reading.tools, reading.given
    offered = form is not None and bool(given) and choice != "none"
    if form is not None and offered and (required or answer or any(t.strict for t in given)):
        if isinstance(choice, tuple):
            given = [tool for tool in given if tool.name == choice[0]]
        make = partial(
            call_grammar,
            form,
            given,
            _ids(ctx, form.markers),
            required=required,
            parallel=request.parallel_tool_calls and not isinstance(choice, tuple),
            before=before,
            answer="" if required else answer,
        )
        return await _checked(ctx, "tools", make)
    if not answer or before is Before.NOTHING:
        return answer
    make = partial(answer_grammar, answer, _ids(ctx, Harmony.markers), before)
    return await _checked(ctx, "response_format", make)


async def _checked(ctx: ApiContext, param: str, make: Callable[[], str]) -> str:
    """Raises `ApiError`, which names `param`. `make` is pickled."""
    try:
        return await ctx.constraints.check(make)
    except LimitReached as reached:
        message = f"'{param}': too many others wait to be compiled"
        raise overloaded(message, reached.retry_after_s) from None
    except SchemaError as error:
        raise invalid(f"'{param}': {error}", param=param) from None
    except GrammarError as error:
        _log.error("%s", error)
        message = "This server's tokenizer is not one that outputs can be held to"
        raise ApiError(501, message, param=param, type="server_error") from None


def _ids(ctx: ApiContext, markers: Sequence[str]) -> SpecialId:
    """The only ones that a grammar asks for: the tokenizer does not go to the compiler."""
    return {text: ctx.tokenizer.special_id(text) for text in (*markers, THINK, THINK_END)}.get


def _before(reading: Reading) -> Before:
    if isinstance(reading.tools, Harmony):
        return Before.CHANNELS
    if not reading.thinks:
        return Before.NOTHING
    return Before.BEGUN if reading.begun else Before.MAY_THINK
