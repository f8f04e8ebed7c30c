"""`/requests`: which calls ended last, and of each where its time went and why it went there.

Without tenants it needs no key; with tenants, each sees its own calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.calls import ServedCall, ServedChoice
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import limit_of, owner
from kvrelay.cluster.api.openai.generation import draft_tokens
from kvrelay.router.explain import Explanation, name_of, reason
from kvrelay.router.placement.policy import Option
from kvrelay.router.record import Attempt

DEFAULT_LIMIT = 20
MAX_LIMIT = 512
SHOWN_TOKENS = 16  # around the place where a prefix ends


def explanation_routes(ctx: ApiContext) -> list[ApiRoute]:
    async def show(http: Request) -> Response:
        tenant = owner(ctx, http)
        name: str = http.path_params["id"]
        found = ctx.calls.find(name, tenant.name)
        if found is None:
            raise ApiError(
                404,
                f"Request '{name[:80]}' is not known: it runs still, or is not one of the last "
                "that ended at this server",
                param="id",
                code="request_not_found",
            )
        shown = explanation_json(*found) | {
            "prefix": prefix_json(ctx.models.get(found[0].model, ctx), found[0])
        }
        return JSONResponse(shown)

    async def recent(http: Request) -> Response:
        tenant = owner(ctx, http)
        limit = limit_of(http, DEFAULT_LIMIT, MAX_LIMIT)
        calls = ctx.calls.recent(tenant.name)
        data = [summary_json(call) for _, call in zip(range(limit), calls, strict=False)]
        return JSONResponse({"object": "list", "data": data})

    return [
        ApiRoute("GET", "/requests", recent, "Requests that were answered lately"),
        ApiRoute(
            "GET", "/requests/{id}/explanation", show, "Why it went where it went, in seconds"
        ),
    ]


def summary_json(call: ServedCall) -> dict[str, Any]:
    """A call in one line; of its choices the first."""
    first = call.choices[0] if call.choices else None
    return {
        "id": call.request_id,
        "endpoint": call.endpoint,
        "model": call.model,
        "outcome": call.outcome,
        "num_choices": len(call.choices),
        "usage": call.usage,
        "ttft_s": None if first is None else first.ttft_s,
        "e2e_s": call.e2e_s,
        "prediction": None if first is None else _prediction_json(first.explanation),
    }


def explanation_json(call: ServedCall, choice: ServedChoice) -> dict[str, Any]:
    """Seconds throughout. `phases` follow each other and sum to `e2e_s`; those before the first
    token sum to `ttft_s`."""
    explanation = choice.explanation
    return summary_json(call) | {
        "object": "explanation",
        "request": choice.request_id,
        "session": None if explanation is None else explanation.session,
        "service_tier": None if explanation is None else explanation.service_tier,
        "ttft_s": choice.ttft_s,
        "phases": [asdict(phase) for phase in choice.phases],
        "prediction": _prediction_json(explanation),
        "recomputed_tokens": {} if explanation is None else explanation.recomputed,
        "images": {} if explanation is None else images_json(*explanation.images),
        "waited_for": {} if explanation is None else explanation.waited_s,
        "draft_tokens": {} if explanation is None else draft_tokens(*explanation.drafts),
        "attempts": [] if explanation is None else [_attempt(a) for a in explanation.attempts],
    }


def images_json(encoded: int, found: int) -> dict[str, int]:
    """How many embeddings of images were made, and found, for a prompt that has some."""
    return {"encoded": encoded, "found": found} if encoded or found else {}


def prefix_json(ctx: ApiContext, call: ServedCall) -> dict[str, Any] | None:
    """How far the call's prompt begins as an earlier one did, and what is there where it ceases
    to. None: it begins as none of those that are kept."""
    earlier = ctx.calls.prompts.closest(call.request_id)
    if earlier is None:
        return None
    at, mine = earlier.num_common, ctx.calls.prompts.tokens(call.request_id)

    def text(tokens: Sequence[int]) -> str:
        return b"".join(map(ctx.tokenizer.token_bytes, tokens)).decode(errors="replace")

    return {
        "earlier": earlier.call,
        "earlier_tokens": len(earlier.tokens),
        "common_tokens": at,
        "is_continued": at == len(earlier.tokens),
        "before": text(mine[max(0, at - SHOWN_TOKENS) : at]),
        "earlier_text": text(earlier.tokens[at : at + SHOWN_TOKENS]),
        "text": text(mine[at : at + SHOWN_TOKENS]),
    }


def _prediction_json(explanation: Explanation | None) -> dict[str, float] | None:
    """Explains the time from the decision to the first token."""
    prediction = None if explanation is None else explanation.prediction
    if prediction is None:
        return None
    return {
        "predicted_s": prediction.predicted_s,
        "real_s": prediction.real_s,
        "relative_error": prediction.error,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    tried: dict[str, Any] = {
        "number": attempt.number,
        "decode": attempt.decode.worker,
        "prefill": None if attempt.prefill is None else attempt.prefill.worker,
        "fetch_from": attempt.fetch_from,
        "cause": attempt.cause,
        "redraws": attempt.redraws,
        "decision": None,
    }
    decision = attempt.decision
    if decision is not None:
        tried["decision"] = {
            "policy": decision.policy,
            "num_tokens": decision.num_tokens,
            "predicted_ttft_s": decision.predicted_ttft_s,
            "reason": reason(decision),
            "decode_candidates": [_candidate(c) for c in decision.options.decodes],
            "prefill_candidates": [_candidate(c) for c in decision.options.prefills],
        }
    return tried


def _candidate(candidate: Option) -> dict[str, Any]:
    held = candidate.held
    return {
        "name": name_of(candidate),
        "worker": candidate.worker,
        "prefill_from": candidate.prefill_from,
        "fetch_from": candidate.fetch_from,
        "cached_tokens": {
            "device": held.device,
            "host": held.host,
            "disk": held.disk,
            "object": held.object,
        },
        "seconds": candidate.seconds._asdict(),
        "total_s": candidate.seconds.total,
    }
