"""What a call is planned to be, and the pieces that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvrelay.engine.request import RequestSpec, SamplingParams, TokenLogprobs
from kvrelay.engine.service_class import ServiceClass

if TYPE_CHECKING:
    from kvrelay.cluster.api.output.dialect import Reading
    from kvrelay.cluster.api.output.events import Event
    from kvrelay.cluster.api.tenants import Tenant
    from kvrelay.decode_worker.vllm.parse import Part


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice: `index` is its place in the answer, `prompt` the place of its prompt."""

    index: int
    prompt: int
    tokens: tuple[int, ...]
    spec: RequestSpec  # without its name
    text: str = ""  # the prompt, where it is to be echoed
    offsets: tuple[int, ...] = ()  # where the text of each of its tokens begins in it
    is_silent: bool = False  # the one token of output is not wanted, only what the prompt gives
    prompt_logprobs: int | None = None  # so many beside the text, of each of the prompt's tokens
    continues: bool = False  # the output goes on where the prompt's text ends
    session: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling


@dataclass(frozen=True, slots=True)
class Plan:
    choices: tuple[ChoicePlan, ...]
    stop: tuple[str, ...]
    reading: Reading | None  # None: an output is text
    stream: bool
    include_usage: bool
    tenant: Tenant
    service_class: ServiceClass
    includes_stop: bool = False  # a text that is stopped has what stopped it
    shows_special: bool = False  # special tokens are part of texts
    tells_ids: bool = False  # log-probabilities go with token ids: those of what ended it too
    has_branches: bool = False  # the session is as `Submit.has_branches` says
    has_twins: bool = False  # as `Submit.has_twins` says
    call: bytes = b""  # names the call; the same when it is repeated
    weights: str = ""  # version that it is pinned to


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of which log-probabilities were asked for; `offset`: where its text begins."""

    token: int
    logprobs: TokenLogprobs | None  # None: it is the first of all, and follows nothing
    offset: int  # characters from the beginning of the text


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. The last one has `finish_reason`."""

    index: int
    text: str
    tokens: tuple[TokenText, ...]
    finish_reason: str | None
    stopped_by: str | None = None  # the stop string that ended it
    stop_token: int | None = None  # that ended it, if it is not the model's own
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[msgspec.Raw, ...], ...] = ()  # lists, encoded by the answer's format
    embedding: bytes = b""  # float32
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the prompt's second token on
    parts: tuple[Part, ...] = ()  # those of its text, for parsers that are not here
    events: tuple[Event, ...] = ()  # what these have read in it

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing that is new."""
        has_more = self.text or self.tokens or self.prompt_logprobs
        return not has_more and self.finish_reason is None

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's: the stop string or token that ended it; None: the model did, or its length."""
        return self.stop_token if self.stopped_by is None else self.stopped_by
