"""From a checked request to what is submitted: prompts as tokens, sampling, the grammar of what it
asks for, one entry per choice.

The seed of every choice is fixed here, so that an attempt that is repeated anywhere further down
draws the same tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from kvrelay.cluster.api.constraints.calls import Before, answer_grammar, call_grammar
from kvrelay.cluster.api.constraints.grammar import grammar_of, tokens_named
from kvrelay.cluster.api.constraints.schema import SchemaError
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded
from kvrelay.cluster.api.incoming import check_token_ids
from kvrelay.cluster.api.limiter import LimitReached, caller_name
from kvrelay.cluster.api.openai.parts import ChoicePlan, Plan
from kvrelay.cluster.api.openai.pictures import readable, with_images
from kvrelay.cluster.api.openai.reading import budget_of, reading_of, template_kwargs
from kvrelay.cluster.api.openai.schema import (
    MAX_SCORED_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ModelRequest,
)
from kvrelay.cluster.api.openai.tools import AllowedTools
from kvrelay.cluster.api.output.dialect import Reading
from kvrelay.cluster.api.output.marked_calls import Harmony
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.cluster.api.text.chat_template import TemplateOptions
from kvrelay.cluster.api.text.detokenizer import Decoder, Detokenizer
from kvrelay.cluster.api.text.tokenizer import (
    MANY_CHARS,
    ChatPrompt,
    Keep,
    NoInfill,
    Tokenizer,
    TooLong,
    infill_prompt,
)
from kvrelay.cluster.api.text.tool_prompt import TemplateError
from kvrelay.engine.images import Images
from kvrelay.engine.kv.scope import APPROXIMATE, CacheScope
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.model.sampling.vocabulary import GrammarError
from kvrelay.engine.request import (
    DEFAULTS,
    NUMBERS,
    SPEC_FIELDS,
    Refusal,
    RequestSpec,
    SamplingParams,
    needing,
)
from kvrelay.engine.service_class import TIERS, ServiceClass
from kvrelay.router.admission.admission import IncomingCall
from kvrelay.router.messages import Submit

_log = logging.getLogger("kvrelay.api")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions
CHARS_PER_TOKEN = 4  # about
IN_MEMORY_S = 600.0  # OpenAI's: KV that may not be on disk is kept for minutes
DAY_S = 86_400.0


def call_name(body: bytes) -> bytes:
    """By which the router knows a call again that it has refused early."""
    return blake2b(body, digest_size=8).digest()


def call_of(
    ctx: ApiContext, request: ModelRequest, tenant: Tenant, name: bytes, timeout_s: float
) -> IncomingCall:
    """What can be said of a call before its prompt is tokenised. Raises `ApiError`."""
    most_chars = CHARS_PER_TOKEN * ctx.max_model_len
    if isinstance(request, ChatRequest):
        num_chars = min(chars_of(request), most_chars)
        wanted = request.max_completion_tokens or request.max_tokens or ctx.max_model_len
    else:
        prompts: Sequence[str | list[int]] = getattr(request, "prompts", ())
        num_chars = sum(
            min(len(prompt) * (1 if isinstance(prompt, str) else CHARS_PER_TOKEN), most_chars)
            for prompt in prompts
        )
        wanted = getattr(request, "max_tokens", 1)
        wanted = DEFAULT_COMPLETION_TOKENS if wanted is None else wanted
    return IncomingCall(
        name=name,
        tenant=tenant.name,
        priority=priority_of(request, tenant),
        num_prompt_tokens=max(1, num_chars // CHARS_PER_TOKEN),
        max_tokens=min(wanted, ctx.max_model_len),
        timeout_s=timeout_s,
        caller=caller_name(),
    )


def chars_of(request: ChatRequest) -> int:
    """About how many its prompt has."""
    num_chars = sum(len(message.content) for message in request.messages)
    for tool in request.tools or ():
        num_chars += len(tool.function.description or "") + 4 * len(tool.function.parameters or ())
    return num_chars


def choice_seed(seed: int, i: int) -> int:
    """Seed of a prompt's choice `i`, in [0, 2**63): the first one's is `seed` itself."""
    if i == 0:
        return seed % 2**63
    digest = blake2b(f"{seed}:{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


async def plan_chat(ctx: ApiContext, request: ChatRequest, tenant: Tenant) -> Plan:
    """Raises `ApiError`."""
    wanted = request.max_completion_tokens or request.max_tokens
    keep = keep_of(ctx, request, wanted or 1)
    prompt = await chat_prompt(ctx, request, tenant, keep)
    tokens = truncated(prompt.tokens, keep)
    room = room_after(ctx, tokens, "messages", is_scored=request.prompt_logprobs is not None)
    reading = await reading_of(ctx, request, prompt.end)
    grammar = await constrain_chat(ctx, request, reading)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _sampling(ctx.tokenizer, request, min(wanted or room, room), num_logprobs, grammar)
    predicted: list[int] = []
    if request.prediction:
        text, encode = request.prediction[: MANY_CHARS * room], ctx.tokenizer.encode
        predicted = await ctx.in_thread(
            len(text), encode, text, add_special_tokens=False, is_prompt=False
        )
    sampling = replace(
        sampling, reasoning=budget_of(ctx, request, reading), prediction=tuple(predicted[:room])
    )
    last = request.messages[-1]
    choice = ChoicePlan(
        *(0, 0, tuple(tokens), RequestSpec("", sampling, images=prompt.images)),
        text=last.content if request.echo and last.role == "assistant" else "",
        prompt_logprobs=request.prompt_logprobs,
        continues=request.continue_final_message,
    )
    return _plan(ctx, request, tenant, [choice], reading)


async def chat_prompt(
    ctx: ApiContext, request: ChatRequest, tenant: Tenant, keep: Keep | None = None
) -> ChatPrompt:
    """keep: as of `Tokenizer.encode_bounded`. Raises `ApiError`."""
    _check(ctx, request)
    found = [picture for message in request.messages for picture in message.pictures]
    pictures = readable(ctx, request, found)
    if request.add_special_tokens and ctx.tokenizer.encode("", is_prompt=False):
        raise invalid(
            "'add_special_tokens': the chat template adds what is needed",
            param="add_special_tokens",
        )
    messages = [each.for_template(shows_images=bool(pictures)) for each in request.messages]
    options = TemplateOptions(
        [tool.for_template() for tool in request.tools or ()],
        template_kwargs(request),
        request.continue_final_message,
        request.add_generation_prompt is not False,
    )
    try:
        prompt = await ctx.in_thread(
            chars_of(request) + _chars_of_calls(request),
            ctx.tokenizer.chat_prompt,
            messages,
            options,
            ctx.max_model_len,
            keep,
        )
    except TemplateError as error:
        raise invalid(str(error), param="messages") from None
    except TooLong as error:
        raise _too_long(ctx, str(error), "messages") from None
    if not pictures:
        return prompt
    return await with_images(ctx, prompt, pictures, partial(_expansion, ctx, request, tenant))


def _expansion(ctx: ApiContext, request: ModelRequest, tenant: Tenant, images: Images) -> Submit:
    """What asks a worker for the tokens of images."""
    return Submit(
        f"images-{secrets.token_hex(16)}",
        SamplingParams(max_tokens=1, temperature=0.0, expands=True),
        ctx.client.node_id,
        images.tokens,
        ctx.settings.request_timeout_s,
        scope=CacheScope(salt_of(ctx, request, tenant)),
        priority=priority_of(request, tenant),
        images=images,
        tenant=tenant.name,
        share=tenant.share,
        caller=caller_name(),
    )


def _chars_of_calls(request: ChatRequest) -> int:
    """Counts what the assistant said beside texts."""
    calls = (call.function for message in request.messages for call in message.tool_calls or ())
    thoughts = sum(len(message.reasoning_content or "") for message in request.messages)
    return thoughts + sum(len(call.arguments) for call in calls)


async def plan_completion(ctx: ApiContext, request: CompletionRequest, tenant: Tenant) -> Plan:
    """Raises `ApiError`."""
    _check(ctx, request)
    grammar = await constrain(ctx, request)
    prompts: list[ChoicePlan] = []
    decoder = ctx.tokenizer.showing(None) if request.echo else ctx.tokenizer  # as in vLLM
    for prompt in request.prompt:
        special, wanted = request.add_special_tokens, request.max_tokens
        wanted = DEFAULT_COMPLETION_TOKENS if wanted is None else wanted
        keep = keep_of(ctx, request, wanted)
        whole = await prompt_tokens(ctx, prompt, "prompt", keep, add_special_tokens=special)
        tokens = truncated(whole, keep)
        if len(tokens) < len(whole):
            prompt = [*tokens]
        if request.suffix:
            tokens = await _between(ctx, tokens, request.suffix)
        echoes = request.echo and request.logprobs is not None
        is_scored = echoes or request.prompt_logprobs is not None
        room = room_after(ctx, tokens, "prompt", is_scored=is_scored)
        text = ""
        offsets: tuple[int, ...] = ()
        if echoes:
            text, offsets = await ctx.in_thread(len(tokens), texts_of, decoder, tokens)
            if isinstance(prompt, str) and text.endswith(prompt):  # a first token was added
                num_added, text = len(text) - len(prompt), prompt
                offsets = tuple(max(0, offset - num_added) for offset in offsets)
        elif request.echo:
            text = prompt
            if not isinstance(prompt, str):
                text = await ctx.in_thread(len(tokens), decoder.decode, tokens)
        most = min(max(1, wanted), room)
        sampling = _sampling(ctx.tokenizer, request, most, request.logprobs, grammar)
        if offsets:
            num = max(request.logprobs or 0, request.prompt_logprobs or 0)
            sampling = replace(sampling, prompt_logprobs=num)
        prompts.append(
            ChoicePlan(
                *(0, len(prompts), tuple(tokens), RequestSpec("", sampling)),
                *(text, offsets, wanted == 0),
                prompt_logprobs=request.prompt_logprobs,
                continues=True,
            )
        )
    return _plan(ctx, request, tenant, prompts)


async def prompt_tokens(
    ctx: ApiContext, prompt: str | list[int], param: str, keep: Keep | None, **options: bool
) -> list[int]:
    """keep: as of `Tokenizer.encode_bounded`; options: of `encode`. Raises `ApiError`."""
    if isinstance(prompt, str):
        return await text_tokens(ctx, prompt, param, keep, **options)
    check_token_ids(ctx, param, prompt)
    return prompt


def keep_of(ctx: ApiContext, request: ModelRequest, num_after: int) -> Keep | None:
    """What `truncate_prompt_tokens` leaves; -1: what fits, with room for `num_after` tokens. None:
    all."""
    most = request.truncate_prompt_tokens
    if most is None:
        return None
    if most < 0:
        most = max(1, ctx.max_model_len - max(1, num_after))
    return Keep(most, request.truncation_side != "right")


def truncated(tokens: Sequence[int], keep: Keep | None) -> Sequence[int]:
    if keep is None:
        return tokens
    return tokens[-keep.num_tokens :] if keep.from_end else tokens[: keep.num_tokens]


async def text_tokens(
    ctx: ApiContext, text: str, param: str, keep: Keep | None = None, **options: bool
) -> list[int]:
    """As `prompt_tokens`."""

    def encoded() -> list[int]:
        def encode(text: str) -> list[int]:
            return ctx.tokenizer.encode(text, **options)

        return ctx.tokenizer.encode_bounded(text, ctx.max_model_len, keep, encode)

    try:
        return await ctx.in_thread(len(text), encoded)
    except TooLong as error:
        raise _too_long(ctx, str(error), param) from None


async def _between(ctx: ApiContext, tokens: Sequence[int], suffix: str) -> list[int]:
    try:
        if len(suffix) > MANY_CHARS * ctx.max_model_len:
            await text_tokens(ctx, suffix, "suffix", is_prompt=False)
        return await ctx.in_thread(len(suffix), infill_prompt, ctx.tokenizer, tokens, suffix)
    except NoInfill as error:
        raise invalid(f"'suffix': {error}", param="suffix") from None


def texts_of(decoder: Decoder, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Text of `tokens`, and where in it the text of each begins."""
    detokenizer = Detokenizer(decoder)
    texts: list[str] = []
    offsets: list[int] = []
    for token in tokens:
        offsets.append(detokenizer.num_decoded)
        texts.append(detokenizer.push(token))
    texts.append(detokenizer.finish())
    return "".join(texts), tuple(offsets)


def _check(ctx: ApiContext, request: GenerationRequest) -> None:
    check_token_ids(ctx, "logit_bias", request.logit_bias)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(ctx, name, getattr(request, name) or ())


def room_after(
    ctx: ApiContext, tokens: Sequence[int], param: str, *, is_scored: bool = False
) -> int:
    """Tokens that may follow the prompt: at least one. `is_scored`: each of the prompt has its
    log-probabilities told."""
    if not tokens:
        raise invalid("The prompt is empty: it has no tokens", param=param)
    if len(tokens) >= ctx.max_model_len:
        raise _too_long(ctx, str(len(tokens)), param)
    if is_scored and len(tokens) > MAX_SCORED_TOKENS:
        raise invalid(
            f"The prompt has {len(tokens)} tokens: log-probabilities are told of prompts of at most"
            f" {MAX_SCORED_TOKENS}",
            param=param,
            code=Refusal.UNENCODABLE.value,
        )
    return ctx.max_model_len - len(tokens)


def _too_long(ctx: ApiContext, length: str, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {ctx.max_model_len} tokens, and the prompt "
        f"has {length}: shorten it to at most {ctx.max_model_len - 1}",
        param=param,
        code=Refusal.CONTEXT_LENGTH.value,
    )


def _sampling(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    max_tokens: int,
    num_logprobs: int | None,
    grammar: str,
) -> SamplingParams:
    numbers = _numbers(tokenizer, request)
    if numbers["min_tokens"] > max_tokens:
        raise invalid(
            f"'min_tokens': {numbers['min_tokens']} is more than the {max_tokens} tokens that may "
            "be generated",
            param="min_tokens",
        )
    bad_words, allowed = _bad_words(tokenizer, request.bad_words), request.allowed_token_ids or ()
    if allowed and {(token,) for token in allowed} <= set(bad_words):
        raise invalid("'bad_words': they leave none of 'allowed_token_ids'", param="bad_words")
    # What follows a text that is complete matches no grammar.
    ends = () if request.ignore_eos and not grammar else tokenizer.eos_token_ids
    return SamplingParams(
        **numbers,
        max_tokens=max_tokens,
        logit_bias=request.logit_bias,
        stop_token_ids=tuple(dict.fromkeys((*ends, *request.stop_token_ids))),
        logprobs=num_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
        bad_words=bad_words,
        grammar=grammar,
        prompt_logprobs=request.prompt_logprobs,
    )


def _numbers(tokenizer: Tokenizer, request: GenerationRequest) -> dict[str, Any]:
    """What the client says, else what the model's makers recommend, else OpenAI's defaults."""
    found = {}
    for name in NUMBERS:
        given = getattr(request, name)
        default = tokenizer.sampling_defaults.get(name, getattr(DEFAULTS, name))
        found[name] = default if given is None else given
    found["top_p"] = max(found["top_p"], 1e-6)  # at 0 only the best token is left, as at 1e-6
    if not 0 < found["top_k"] < tokenizer.vocab_size:
        found["top_k"] = 0
    return found


def _bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of each as it is, and within a text."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    found = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def _retention(ctx: ApiContext, request: GenerationRequest) -> Retention | None:
    if request.prompt_cache_retention is None:
        return None
    if request.prompt_cache_retention == "24h":
        return Retention(DAY_S, to_disk=True)
    return Retention(min(IN_MEMORY_S, ctx.retention_s), to_disk=False)


def priority_of(request: ModelRequest, tenant: Tenant) -> int:
    """What is asked for; without that, the tenant's own. A tier that goes before all that the
    tenant may ask for becomes its best one, which the answer says."""
    tier, most = TIERS.get(request.service_tier or ""), tenant.min_priority
    if request.priority is None:
        return max((tenant.service_class if tier is None else tier).priority, most)
    if tier not in (None, found := ServiceClass.of(request.priority)):
        raise invalid(
            f"'service_tier': {request.service_tier!r} has other priorities than "
            f"{request.priority}, which is of {found.tier!r}; leave one of the two out",
            param="service_tier",
        )
    if request.priority < tenant.min_priority:
        raise invalid(
            f"'priority': {request.priority} goes before {tenant.min_priority}, which is the first "
            "that this API key may ask for",
            param="priority",
        )
    return request.priority


def salt_of(ctx: ApiContext, request: ModelRequest, tenant: Tenant) -> bytes:
    """The tenant's, and within that the request's own: it divides a cache, and opens none. Marked
    where KV may be another than exact. Raises `ApiError`."""
    salt = tenant.salt
    if request.cache_salt is not None:
        own = request.cache_salt.encode()
        salt = blake2b(own, digest_size=16, key=salt[:64], person=b"kvrelay-salt").digest()
    if request.kv == "quest" and not ctx.quest_mark:
        raise invalid(
            "'kv': 'quest' needs a server with engine.quest_budget, which is 0 here: ask for"
            " 'exact' or 'approximate'",
            param="kv",
        )
    marks = {"approximate": APPROXIMATE, "quest": ctx.quest_mark}
    return marks.get(request.kv or tenant.kv, b"") + salt


def _about(ctx: ApiContext, request: GenerationRequest, tenant: Tenant) -> dict[str, Any]:
    """Fields of the RequestSpec that all choices share: those that a body has by the same name, and
    what follows from others. Raises `ApiError`."""
    same = type(request).model_fields.keys() & set(SPEC_FIELDS)
    return {name: getattr(request, name) for name in same} | {
        "priority": priority_of(request, tenant),
        "retention": _retention(ctx, request),
    }


def _plan(
    ctx: ApiContext,
    request: GenerationRequest,
    tenant: Tenant,
    prompts: list[ChoicePlan],
    reading: Reading | None = None,
) -> Plan:
    """`n` choices of each prompt, in OpenAI's order. The first of all is the session's turn."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    choices: list[ChoicePlan] = []
    is_seeded = request.seed is not None
    salt, about = salt_of(ctx, request, tenant), _about(ctx, request, tenant)
    need = ctx.need_of(request.model)
    for prompt in prompts:
        scope = CacheScope(salt, ctx.public_prompts.num_public_tokens(prompt.tokens))
        about |= needing(need, scope)
        for i in range(request.n):
            own_seed: dict[str, Any] = {"seed": choice_seed(seed, i), "is_seeded": is_seeded}
            sampling = replace(prompt.sampling, **own_seed)
            if reading is not None and i:  # a chat tells those of its prompt once
                sampling = replace(sampling, prompt_logprobs=None)
            session = None if choices else request.prompt_cache_key
            spec = replace(prompt.spec, sampling=sampling, **about)
            choices.append(replace(prompt, index=len(choices), spec=spec, session=session))
    return Plan(
        choices=tuple(choices),
        stop=tuple(request.stop),
        reading=reading,
        stream=request.stream,
        include_usage=request.include_usage,
        tenant=tenant,
        service_class=ServiceClass.of(about["priority"]),
        includes_stop=request.includes_stop,
        shows_special=not request.skip_special_tokens or (reading is not None and reading.shows),
        tells_ids=request.return_token_ids,
        weights=request.pinned_to,
    )


async def constrain(ctx: ApiContext, request: GenerationRequest) -> str:
    """Returns the grammar of a completion; empty: anything is right. Raises `ApiError`."""
    asked = request.constraint()
    if asked is None:
        return ""
    added = ctx.tokenizer.added_ids(tokens_named(asked.kind, asked.value))
    make = partial(grammar_of, asked.kind, asked.value, asked.options, added)
    return await _checked(ctx, asked.param, make)


async def constrain_chat(ctx: ApiContext, request: ChatRequest, reading: Reading) -> str:
    """Returns the grammar of a chat: what is asked for, its tools, and reasoning before them.
    Raises `ApiError`."""
    choice = request.tool_choice
    allowed = choice.names if isinstance(choice, AllowedTools) else None
    choice = choice.mode if isinstance(choice, AllowedTools) else choice
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
    named = choice if isinstance(choice, tuple) else allowed
    if named is not None:
        given = [tool for tool in given if tool.name in named]
    is_held = required or bool(answer) or len(given) < len(reading.given)
    if form is not None and offered and (is_held or any(tool.is_held for tool in given)):
        make = partial(
            call_grammar,
            form,
            given,
            ctx.tokenizer.added_ids((*form.markers, *reading.tags)).get,
            required=required,
            parallel=request.parallel_tool_calls and not isinstance(choice, tuple),
            before=before,
            tags=reading.tags,
            answer="" if required else answer,
        )
        return await _checked(ctx, "tools", make)
    lead = ctx.dialect.tools.lead if ctx.dialect.tools else ""
    if not answer or (before is Before.NOTHING and not lead):
        return answer
    ids = ctx.tokenizer.added_ids((*Harmony.markers, *reading.tags))
    make = partial(answer_grammar, answer, ids.get, before, reading.tags, lead)
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


def _before(reading: Reading) -> Before:
    if isinstance(reading.tools, Harmony):
        return Before.CHANNELS
    if not reading.thinks:
        return Before.NOTHING
    return Before.BEGUN if reading.begun else Before.MAY_THINK
