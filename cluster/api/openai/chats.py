"""Several chats in one call (`/v1/chat/completions/batch`, as in vLLM): `messages` is a list of
conversations, and the answer has a choice for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import invalid
from kvrelay.cluster.api.openai.formats import ChatFormat
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.openai.plan import plan_chat
from kvrelay.cluster.api.openai.schema import MAX_CHOICES, ChatRequest, Message
from kvrelay.cluster.api.tenants import Tenant

_Conversation = Annotated[list[Message], Field(min_length=1), FailFast()]
REFUSED = {"stream": False, "n": 1, "prompt_logprobs": None}
"""Fields that are about one answer, and what they have to be here."""


class ChatsRequest(ChatRequest):
    """`messages` has those of all conversations, one after the other."""

    conversations: Annotated[list[_Conversation], Field(min_length=1, max_length=MAX_CHOICES)]

    @model_validator(mode="before")
    @classmethod
    def _divided(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "messages" not in data:
            return data
        given = data["messages"]
        if not isinstance(given, list) or not all(isinstance(each, list) for each in given):
            raise ValueError(
                "'messages': expected a list of conversations, each a list of messages"
            )
        return data | {"conversations": given, "messages": [*chain.from_iterable(given)]}

    @model_validator(mode="after")
    def _are_apart(self) -> ChatsRequest:
        for name, only in REFUSED.items():
            if getattr(self, name) != only:
                raise ValueError(f"'{name}' is not for several chats: leave it out")
        last = {each[-1].role for each in self.conversations}
        if self.continue_final_message and last != {"assistant"}:
            raise ValueError("'continue_final_message' needs last messages of the assistant")
        return self


async def plan_chats(ctx: ApiContext, request: ChatsRequest, tenant: Tenant) -> Plan:
    """Each of its chats is one choice of one answer. Raises `ApiError`."""
    plans = []
    for messages in request.conversations:
        one = request.model_copy(update={"messages": messages})
        plans.append(await plan_chat(ctx, one, tenant))
    first = plans[0]
    if any(plan.reading != first.reading for plan in plans):
        raise invalid(
            "'messages': conversations of two kinds; ask for them apart", param="messages"
        )
    choices = [
        replace(plan.choices[0], index=i, prompt=i, session=None) for i, plan in enumerate(plans)
    ]
    return replace(first, choices=tuple(choices))


class ChatsFormat(ChatFormat):
    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return await super().whole(pieces, usage) | {"prompt_token_ids": None}  # each has its own
