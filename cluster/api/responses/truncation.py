"""`truncation: auto`: the oldest of a conversation is left out until the rest fits the context.

Never left out are system messages, the last message of the user, and what the conversation ends
with. A call and its output go together, as do reasoning and what follows from it. How much has to
go is estimated from characters; a few prompts are tokenised to find it exactly.

It goes in steps of an eighth of the context: the turns until the next step begin with the same
messages, so their prefix is cached. If each turn left out just enough, none of it would be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, count
from typing import Any

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.openai.plan import CHARS_PER_TOKEN, chars_of, chat_prompt
from kvrelay.cluster.api.openai.schema import Message
from kvrelay.cluster.api.responses.schema import ResponsesChat
from kvrelay.cluster.api.text.tokenizer import ChatPrompt
from kvrelay.engine.request import Refusal

# Shares of the context: what an answer has where it is not said how long it may be, and the most
# that is kept for one. A client that always asks for very long answers still has a conversation.
ROOM_SHARE, MOST_SHARE = 8, 2
STEP_SHARE = 8  # an 8th of the context is left out at once
_NUM_ESTIMATES = 4  # then the rest is halved
_MESSAGE_CHARS = 16  # around each, about
_LEAST_RATE = 1 / 64  # tokens of a character
_ALWAYS = ("system", "developer")


async def truncated(ctx: ApiContext, chat: ResponsesChat) -> tuple[ResponsesChat, ChatPrompt]:
    """What is left, and its prompt: the most, in steps, that leaves room for the
    answer, or if nothing does, the least. Raises `ApiError`."""
    units = units_of(chat.messages)
    try:
        return await _longest(ctx, chat, units, range(len(units) + 1))
    except ApiError:
        # Some models' templates take no conversation that begins with the assistant.
        messages, last_user = chat.messages, _last_user(chat.messages)
        firsts = [messages[min(unit[0], last_user)] for unit in units]
        cuts = [cut for cut, first in enumerate(firsts) if first.role == "user"]
        return await _longest(ctx, chat, units, [*cuts, len(units)])


def units_of(messages: Sequence[Message]) -> list[list[int]]:
    """Places of messages that may be left out, those together that go together; oldest first."""
    last_user = _last_user(messages)
    units: list[list[int]] = []
    of_call: dict[str | None, list[int]] = {}
    for i, message in enumerate(messages):
        if message.role in _ALWAYS or i == last_user:
            continue
        if message.role == "tool" and message.tool_call_id in of_call:
            of_call[message.tool_call_id].append(i)
            continue
        units.append([i])
        of_call |= {call.id: units[-1] for call in message.tool_calls or ()}
    return [unit for unit in units if len(messages) - 1 not in unit]


def with_their_calls(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without outputs of calls that are not among them."""
    of_calls = {item.get("call_id") for item in items if not _is_output(item)}
    return [item for item in items if not _is_output(item) or item.get("call_id") in of_calls]


def _is_output(item: dict[str, Any]) -> bool:
    return str(item.get("type")).endswith("_call_output")


async def _longest(
    ctx: ApiContext, chat: ResponsesChat, units: Sequence[Sequence[int]], cuts: Sequence[int]
) -> tuple[ResponsesChat, ChatPrompt]:
    """cuts: how many units may be left out, ascending."""
    wanted = chat.max_completion_tokens or ctx.max_model_len // ROOM_SHARE
    limit = ctx.max_model_len - min(wanted, ctx.max_model_len // MOST_SHARE)
    chars = [_chars(message) for message in chat.messages]
    left_out = [0, *accumulate(sum(chars[i] for i in unit) for unit in units)]
    total = chars_of(chat.model_copy(update={"messages": []})) + sum(chars)
    cuts = in_steps(cuts, left_out, ctx.max_model_len * CHARS_PER_TOKEN // STEP_SHARE)
    made: dict[int, tuple[ResponsesChat, ChatPrompt] | ApiError] = {}

    async def measure(place: int) -> int:
        gone = {i for unit in units[: cuts[place]] for i in unit}
        kept = [message for i, message in enumerate(chat.messages) if i not in gone]
        shorter = chat.model_copy(update={"messages": kept})
        try:
            prompt = await chat_prompt(ctx, shorter)
        except ApiError as error:
            if error.code != Refusal.CONTEXT_LENGTH.value:
                raise
            # Plainly too long: it was not counted to its end. Without what was raised, whose
            # frames hold all texts.
            made[place] = invalid(error.message, error.param, error.code)
            return max(limit + 1, sizes[place] // CHARS_PER_TOKEN)
        made[place] = shorter, prompt
        return len(prompt.tokens)

    sizes = [total - left_out[cut] for cut in cuts]
    found = made[await first_that_fits(sizes, limit, measure)]
    if isinstance(found, ApiError):
        raise found
    return found


def in_steps(cuts: Sequence[int], left_out: Sequence[int], step: int) -> list[int]:
    """Takes of `cuts` the first that leaves out at least each multiple of `step` characters, and
    the last. left_out: characters, by cut."""
    firsts = {left_out[cut] // step: cut for cut in reversed(cuts)}
    return sorted({*firsts.values(), cuts[-1]})


async def first_that_fits(
    sizes: Sequence[int], limit: int, measure: Callable[[int], Awaitable[int]]
) -> int:
    """The first place of which `measure` says at most `limit` tokens; if there is none, the last.
    It has been measured. sizes: about how many characters each has, descending."""
    low, high = -1, len(sizes)  # too long; not too long
    size, num_tokens, rate = 0, 0, 1 / CHARS_PER_TOKEN
    for attempt in count():
        if high - low == 1:
            break
        fitting = size + (limit - num_tokens) / rate
        place = bisect_left(sizes, -fitting, key=lambda each: -each)
        if attempt >= _NUM_ESTIMATES:
            place = (low + high) // 2
        place = min(max(place, low + 1), high - 1)
        measured = await measure(place)
        if sizes[place] != size:  # what lies between this and the last one shows the rate
            rate = max((measured - num_tokens) / (sizes[place] - size), _LEAST_RATE)
        size, num_tokens = sizes[place], measured
        low, high = (low, place) if measured <= limit else (place, high)
    return min(high, len(sizes) - 1)


def _chars(message: Message) -> int:
    calls = message.tool_calls or ()
    num_chars = sum(len(call.function.name) + len(call.function.arguments) for call in calls)
    return _MESSAGE_CHARS + len(message.content) + len(message.reasoning_content or "") + num_chars


def _last_user(messages: Sequence[Message]) -> int:
    """Place of the last message of the user; -1: there is none."""
    return max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
