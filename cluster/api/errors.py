"""Everything that can go wrong, as OpenAI's error JSON.

Inside the API an error is an `ApiError`; at its edge it becomes
`{"error": {"message", "type", "param", "code"}}` with a status. Refusals of the router keep their
enum value as `code`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed, SessionRefusal, SessionReply

# Refusal -> (HTTP status, OpenAI's error type)
_STATUS: dict[Refusal, tuple[int, str]] = {
    Refusal.QUEUE_FULL: (429, "rate_limit_error"),
    Refusal.OVERLOADED: (429, "rate_limit_error"),
    Refusal.CONTEXT_LENGTH: (400, "invalid_request_error"),
    Refusal.NEVER_FITS: (400, "invalid_request_error"),
    Refusal.DEADLINE: (504, "timeout_error"),
    Refusal.NO_WORKERS: (503, "service_unavailable_error"),
    Refusal.DUPLICATE: (409, "conflict_error"),
    Refusal.ATTEMPTS: (503, "service_unavailable_error"),
    Refusal.UNKNOWN: (503, "service_unavailable_error"),
    Refusal.CANCELLED: (503, "service_unavailable_error"),
    Refusal.EXECUTION: (500, "server_error"),
    Refusal.SAMPLING: (500, "server_error"),
    Refusal.BLOCK_TABLE: (503, "service_unavailable_error"),
    Refusal.WORKER_FAILED: (503, "service_unavailable_error"),
    Refusal.UNENCODABLE: (400, "invalid_request_error"),
    Refusal.GRAMMAR: (400, "invalid_request_error"),
    Refusal.NEED: (400, "invalid_request_error"),
    Refusal.INVALID_TOKENS: (400, "invalid_request_error"),
    Refusal.WEIGHTS: (409, "conflict_error"),
    Refusal.UNSUPPORTED: (400, "invalid_request_error"),
}
WATCHED = {
    **{refusal.value: status for refusal, (status, _) in _STATUS.items() if status >= 500},
    # The client is told to change its request, and an operator should know of it all the same.
    **{
        refusal.value: _STATUS[refusal][0]
        for refusal in (Refusal.NEED, Refusal.GRAMMAR, Refusal.NEVER_FITS)
    },
    **{refusal.value: 429 for refusal in (Refusal.QUEUE_FULL, Refusal.OVERLOADED)},
}
"""Ends of requests that alerts look at: their outcome -> their status."""
_SESSION_STATUS: dict[SessionRefusal, tuple[int, str]] = {
    SessionRefusal.UNKNOWN: (404, "invalid_request_error"),
    SessionRefusal.CONFLICT: (409, "conflict_error"),
    SessionRefusal.DEADLINE: (504, "timeout_error"),
    SessionRefusal.BUSY: (429, "rate_limit_error"),
    SessionRefusal.LIMIT: (403, "permission_error"),
}


_INTERNAL = {
    Refusal.ATTEMPTS: "All attempts at this request have failed; the server's log says why",
    Refusal.UNKNOWN: "The worker that served this request has lost it: send it again",
    Refusal.CANCELLED: "The request was cancelled within the server: send it again",
    Refusal.EXECUTION: "Steps fail by this request; the server's log says why",
    Refusal.BLOCK_TABLE: "A worker failed at this request; the server's log says why",
    Refusal.WORKER_FAILED: "A worker failed at this request; the server's log says why",
}
"""Refusal -> what clients are told, where its detail is about the inside of the server."""

MAX_NAMES = 20  # that an error lists

_log = logging.getLogger("kvrelay.api")


class ApiError(Exception):
    """An answer that is an error. `outcome` is its metric label."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def outcome(self) -> str:
        return self.code or self.type

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.code == "unsupported_content_encoding":
            return {"accept-encoding": "gzip, deflate"}
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about the chat that a request of another API means name what that request has. names:
    a chat's field -> the request's."""
    try:
        yield
    except ApiError as error:
        for theirs, ours in names.items():
            error.message = re.sub(rf"'{theirs}(?=['.\[])", f"'{ours}", error.message)
            error.param = ours if error.param == theirs else error.param
        raise


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def disk_full() -> ApiError:
    """507: the server's disk, or its quota, takes no more."""
    return ApiError(
        507,
        "The server's disk takes no more: delete files, or ask its operator for room",
        type="server_error",
        code="insufficient_storage",
    )


def unauthorized(message: str) -> ApiError:
    """401: the caller is unknown."""
    return ApiError(401, message, code="invalid_api_key")


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """`known`: names of those that the caller may use."""
    names = [f"'{each}'" for each in known]
    there = ", ".join(names[:MAX_NAMES]) or "none for this API key"
    there += f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ApiError(
        404,
        f"The model '{name[:200]}' does not exist; this server has {there}",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """429: the request is fine, but not now."""
    status, type = _STATUS[Refusal.QUEUE_FULL]
    code = Refusal.QUEUE_FULL.value
    return ApiError(status, message, type=type, code=code, retry_after_s=retry_after_s)


def parser_lost(message: str) -> ApiError:
    """503: what reads an answer is not there, or has ended within it."""
    type = "service_unavailable_error"
    return ApiError(503, message, type=type, code="parser_lost", retry_after_s=10.0)


def shutting_down() -> ApiError:
    """503: the server has given live requests all the time that it had."""
    return ApiError(
        503,
        "The server is shutting down",
        type="service_unavailable_error",
        code="shutting_down",
    )


def draining() -> ApiError:
    """503: the server finishes what it has, and ends."""
    return ApiError(
        503,
        "The server takes no new requests: it is about to end",
        type="service_unavailable_error",
        code="draining",
        retry_after_s=1.0,
    )


def controller_away() -> ApiError:
    """503: only the controller knows, and it is not there just now."""
    return ApiError(
        503,
        "The controller does not answer; it is started again by itself: try again in some seconds",
        type="service_unavailable_error",
        code="controller_away",
        retry_after_s=2.0,
    )


def store_away() -> ApiError:
    """503: what several servers share does not answer."""
    return ApiError(
        503,
        "The store that the servers share does not answer: try again in some seconds",
        type="service_unavailable_error",
        code="store_away",
        retry_after_s=2.0,
    )


def refused(failed: Failed) -> ApiError:
    """What the router said, in HTTP's words. What went wrong inside is logged: clients are told
    what they can do."""
    status, type = _STATUS[failed.reason]
    retry_after_s = failed.retry_after_s
    if retry_after_s is None and status == 429:
        retry_after_s = 1.0
    message = failed.detail or failed.reason.value.replace("_", " ")
    if failed.reason in _INTERNAL:
        _log.warning("%s failed (%s): %s", failed.request_id, failed.reason.value, message)
        message = _INTERNAL[failed.reason]
    code = failed.reason.value
    return ApiError(status, message, type=type, code=code, retry_after_s=retry_after_s)


def session_refused(reply: SessionReply) -> ApiError:
    """Why a command about a session was not carried out."""
    assert reply.refusal is not None
    status, type = _SESSION_STATUS[reply.refusal]
    retry_after_s = 1.0 if status == 429 else None
    code = reply.refusal.value
    return ApiError(status, reply.detail, type=type, code=code, retry_after_s=retry_after_s)
