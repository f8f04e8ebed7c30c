"""What the workers of an attempt are told: what to do for it, and to forget it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decode_worker.messages import Decode
from engine.messages import Abort
from engine.node import NodeId, Send
from prefill_worker.messages import Prefill
from router.placement.endpoint import Endpoint
from router.record import Attempt, RequestRecord
from router.retention import SPARE, RetainOn


def orders(router: NodeId, log: RequestRecord, attempt: Attempt, timeout_s: float) -> list[Send]:
    """Decode, and Prefill where there is a prefill worker. Whoever computes is told who lends: a
    decode worker that waits for a prefill worker reads from that one alone."""
    decode, prefill = attempt.decode.worker, attempt.prefill
    common: dict[str, Any] = {
        "request_id": log.request_id,
        "attempt": attempt.number,
        "router": router,
        "tokens": tuple(log.tokens),
        "num_prompt_tokens": log.num_prompt_tokens,
        "sampling": log.sampling,
        "timeout_s": timeout_s,
        "scope": log.submit.scope,
        "block_hashes": bytes(log.packed_hashes(attempt.decode.info)),
    }
    kept = log.submit.retention
    here = kept if attempt.keeper in (RetainOn.DECODE, RetainOn.BOTH) else SPARE
    there = kept if attempt.keeper in (RetainOn.PREFILL, RetainOn.BOTH) else SPARE
    if prefill is None:
        alone = Decode(prefill_from=None, retention=here, fetch_from=attempt.fetch_from, **common)
        return [Send(decode, alone)]
    to_prefill = Prefill(decode_to=decode, retention=there, fetch_from=attempt.fetch_from, **common)
    return [
        Send(decode, Decode(prefill_from=prefill.worker, retention=here, **common)),
        Send(prefill.worker, to_prefill),
    ]


def aborts(log: RequestRecord, attempt: Attempt, keep: Endpoint | None) -> Iterator[Send]:
    """To the workers of `attempt` that still have it, except `keep`."""
    for endpoint in (attempt.decode, attempt.prefill):
        if endpoint is None or endpoint is keep or not endpoint.alive:
            continue
        # A prefill worker that has done its part only holds KV, until the decode worker has read
        # it; if that did not happen, or is not known, it has to be told.
        served = attempt.prefill_reported and attempt.handed_over
        if endpoint is attempt.decode or not served:
            yield Send(endpoint.worker, Abort(log.request_id, attempt.number))
