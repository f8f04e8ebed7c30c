"""Requests as every role sees them: what was asked for, reasons to end, reasons to refuse.

`RequestSpec` is what a request is. The API writes it down; routers, workers and their messages
carry it whole, so what is added to it is everywhere, and copied nowhere field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.needs import Need
from kvrelay.engine.service_class import ServiceClass


class FinishReason(StrEnum):
    """Why a request that was served ended. Values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"


class Refusal(StrEnum):
    """Why a request was not (or no longer) served: also the metric label and the error code."""

    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"  # it would miss its deadline
    CONTEXT_LENGTH = "context_length_exceeded"
    NEVER_FITS = "kv_cache_too_small"
    DEADLINE = "deadline_exceeded"
    NO_WORKERS = "no_workers"
    DUPLICATE = "duplicate_request_id"
    ATTEMPTS = "attempts_exhausted"
    UNKNOWN = "unknown_request"
    CANCELLED = "cancelled"
    EXECUTION = "execution_failed"  # a step for it alone, on a worker that is well
    SAMPLING = "sampling_failed"  # its logits are not numbers, or its parameters cannot be applied
    BLOCK_TABLE = "block_table_fault"  # the worker's: the request goes on elsewhere
    WORKER_FAILED = "worker_failed"  # likewise
    UNENCODABLE = "unencodable"  # some value of it does not fit into a message
    GRAMMAR = "grammar_failed"  # the request's; it would fail anywhere
    NEED = "adapter_failed"  # the request's: what it needs cannot be loaded
    INVALID_TOKENS = "invalid_tokens"  # the request's: the model has no such token ids
    WEIGHTS = "weight_version_not_found"  # no worker has those that it is pinned to
    UNSUPPORTED = "unsupported_parameter"  # the request's: what computes the model has none such

    @property
    def fault(self) -> str:
        """What a worker counts and notes where a sequence is left out of a step for this."""
        return (
            "request_fault" if self is Refusal.INVALID_TOKENS else self.replace("failed", "fault")
        )


class Pooling(StrEnum):
    """How the hidden states of a prompt become one embedding."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"  # the first token's, which encoders have for this


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """So many tokens of reasoning, then `end` follows, by which the model ends it."""

    max_tokens: int
    end: int
    start: int | None = None  # after which it begins; None: with the output

    def is_used_up(self, output: Sequence[int]) -> bool:
        """Whether `end` has to be the next token after those of `output`."""
        if len(output) < self.max_tokens:
            return False
        begins_at = 0
        if self.start is not None:
            if self.start not in output:
                return False
            begins_at = output.index(self.start) + 1
        return len(output) - begins_at >= self.max_tokens and self.end not in output


@dataclass(frozen=True, slots=True)
class Number:
    """Clients may give the field, which is a number: chats, completions and responses have it with
    its name, type and default. (`/v1/messages` has what Anthropic says.)"""

    least: float
    most: float | None = None  # None: no bound
    recommended: bool = False  # a model's files may have another default
    gguf: str = ""  # its name in a GGUF file, where that is another
    in_vllm: bool = True  # which calls it the same; False: its workers refuse the request


class Effect(Enum):
    """What a field that is not at its default does to the logits."""

    NARROWS = "fewer tokens may be drawn"  # a column of every draw: torch's, C's and Triton's
    # By how often they have come: a column of C's and Triton's draws, for torch an `Edit`.
    PENALIZES = "tokens of the context are changed"
    EDITS = "some are changed"  # by an `Edit`: the row is sampled by torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and what else is wanted. Randomness is a pure function of
    `(seed, position)`.

    What the API takes of a number, and what the engine does with it, stands beside its type: the
    bodies of requests, the defaults of models, vLLM's parameters and draws take it from here."""

    max_tokens: int = 16
    temperature: Annotated[float, Number(0, 2, recommended=True, gguf="temp")] = 1.0  # 0 is greedy
    top_p: Annotated[float, Number(0, 1, recommended=True), Effect.NARROWS] = 1.0
    top_k: Annotated[int, Number(-1, recommended=True), Effect.NARROWS] = 0  # 0, -1: all
    min_p: Annotated[float, Number(0, 1, recommended=True), Effect.NARROWS] = 0.0
    # Below 0.01 logits would become so large that they are no numbers any more.
    repetition_penalty: Annotated[float, Number(0.01, 10, recommended=True), Effect.PENALIZES] = 1.0
    presence_penalty: Annotated[float, Number(-2, 2), Effect.PENALIZES] = 0.0
    frequency_penalty: Annotated[float, Number(-2, 2), Effect.PENALIZES] = 0.0
    logit_bias: Annotated[dict[int, float], Effect.EDITS] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids are among them
    min_tokens: Annotated[int, Number(0)] = 0
    seed: int = 0
    is_seeded: bool = True  # by the client; else `seed` was drawn, and nobody counts on it
    logprobs: int | None = None  # None: none; k: of the chosen token and the k best
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: of these instead of the k best
    # No other may come; empty: all.
    allowed_token_ids: Annotated[tuple[int, ...], Effect.EDITS] = ()
    # Tokens that may not follow each other in outputs.
    bad_words: Annotated[tuple[tuple[int, ...], ...], Effect.EDITS] = ()
    grammar: str = ""  # that the output has to match, as of `llguidance`; empty: none
    reasoning: ReasoningBudget | None = None  # None: without bound
    prediction: tuple[int, ...] = ()  # tokens that the output may well have: drafts come of them
    prompt_logprobs: int | None = None  # likewise, of the prompt's tokens after the first
    pooling: Pooling | None = None  # an embedding of the prompt is wanted
    expands: bool = False  # nothing is wanted but the tokens that its images are to the model

    @property
    def is_masked(self) -> bool:
        """Whether not every token may come next."""
        return bool(self.grammar) or self.reasoning is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether each token of the prompt gives outputs: none of it may come from a cache."""
        return self.prompt_logprobs is not None or self.pooling is not None or self.expands

    def must_go_on(self, num_output_tokens: int) -> bool:
        """Whether no stop token may follow so many tokens of output, unless nothing else can."""
        return num_output_tokens < self.min_tokens

    def finish_reason(self, last: int | None, num_output_tokens: int) -> FinishReason | None:
        """Why nothing follows `last`, the last of so many tokens of output; None: more does.
        A stop token before `min_tokens` was the only one that the grammar left: it has ended."""
        is_stop = last in self.stop_token_ids
        if is_stop and (bool(self.grammar) or num_output_tokens >= self.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None

    @property
    def is_penalized(self) -> bool:
        """Whether what has come before is more, or less, likely to come again."""
        return bool(_penalties(self) != _NO_PENALTIES)

    def is_drawn(self, num_output_tokens: int) -> bool:
        """Whether the kernels draw the next token, after `num_output_tokens`: it needs no edited
        logits but for penalties, and no logprobs. A grammar's mask is no edit."""
        return (
            self.logprobs is None
            and not self.reads_prompt
            and _edits(self) == _NO_EDITS
            and not self.must_go_on(num_output_tokens)
        )

    def is_plain(self, num_output_tokens: int) -> bool:
        """Whether it is drawn of the logits as they are, but for a mask: only then are drafts
        verified."""
        return self.is_drawn(num_output_tokens) and not self.is_penalized


_NOTES = {
    name: getattr(hint, "__metadata__", ())
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
}
NUMBERS = {
    name: note for name, notes in _NOTES.items() for note in notes if isinstance(note, Number)
}
NARROWING = tuple(name for name, notes in _NOTES.items() if Effect.NARROWS in notes)
PENALTIES = tuple(name for name, notes in _NOTES.items() if Effect.PENALIZES in notes)
EDITING = tuple(name for name, notes in _NOTES.items() if Effect.EDITS in notes)
DEFAULTS = SamplingParams()
_edits = attrgetter(*EDITING)
_NO_EDITS = _edits(DEFAULTS)
_penalties = attrgetter(*PENALTIES)
_NO_PENALTIES = _penalties(DEFAULTS)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request, the same for each of its attempts and for everybody who works on it."""

    request_id: str
    sampling: SamplingParams
    _: KW_ONLY
    scope: CacheScope = UNSALTED  # who may share its KV; what it needs has a part in it
    need: Need | None = None  # what has to be loaded where it is computed
    images: Images | None = None  # None: its prompt has none
    retention: Retention | None = None  # for its KV; None: the workers' own
    priority: int = 0  # the lowest goes first; says of which class of service it is

    @property
    def service_class(self) -> ServiceClass:
        return ServiceClass.of(self.priority)

    @property
    def is_low(self) -> bool:
        """Whether others go before it at workers too."""
        return self.service_class.is_low

    def carried(self) -> dict[str, Any]:
        """Its fields by name, for a message that carries it."""
        return {name: getattr(self, name) for name in SPEC_FIELDS}


def needing(need: Need | None, scope: CacheScope) -> dict[str, Any]:
    """Fields of a `RequestSpec` that is computed with `need`, of someone who has `scope`."""
    return {"scope": scope if need is None else need.scoped(scope), "need": need}


SPEC_FIELDS = tuple(each.name for each in fields(RequestSpec))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw logits (no penalties, no temperature)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), best first


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What the tokens of a prompt gave."""

    logprobs: tuple[TokenLogprobs, ...] = ()  # for the second token and those that follow
    embedding: bytes = b""  # float32, of the hidden size; not normalized
    expanded: Expanded | None = None  # the prompt with the tokens of its images


NO_OUTPUTS = PromptOutputs()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request, by absolute position, so that gaps and repeats are seen.

    `position` is the index of `tokens[0]` in prompt + output. `tokens` may be empty (still alive).
    """

    request_id: str
    attempt: int
    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one per token
    finish: FinishReason | None = None
    num_cached_tokens: int | None = None  # prompt tokens not computed; None: not known yet
    # By "device", "host", "disk", "object", "peer".
    cached_by_source: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)  # phase name -> seconds
    prompt: PromptOutputs = NO_OUTPUTS  # with the first token of output
    # With num_cached_tokens: prompt tokens that were computed though attention KV of them was
    # cached, as a "state" or a "window" to go on from was not.
    recomputed: dict[str, int] = field(default_factory=dict)
    # (position, name of the weights from there on), with an attempt's first tokens from a worker,
    # and in each delta once there are several; empty: as before
    weights: tuple[tuple[int, str], ...] = ()
    drafts: tuple[int, int] = (0, 0)  # draft tokens accepted and rejected since the last delta
    # With num_cached_tokens: images that were encoded for it, and whose embeddings were kept.
    images: tuple[int, int] = (0, 0)
