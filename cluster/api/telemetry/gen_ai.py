"""Metrics by OpenTelemetry's names for model servers, in the form that Prometheus knows them in:
`gen_ai.server.time_to_first_token` is `gen_ai_server_time_to_first_token_seconds`.

Buckets and attributes are those of the convention (semantic conventions for generative AI, in
development). Times to and between tokens are of requests that succeeded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

PROVIDER = "kvrelay"
_SUCCESS = ("stop", "length")
_GONE = "cancelled"  # by the client: not an error of the server
_DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_NEXT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
_OPERATIONS = {
    "completions": "text_completion",
    **dict.fromkeys(("embeddings", "score", "rerank"), "embeddings"),
}


def operation_of(endpoint: str) -> str:
    """By the convention's names; every other endpoint that generates is a chat within."""
    return _OPERATIONS.get(endpoint, "chat")


class GenAiMetrics:
    """Owned by the metrics of one API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._duration_s = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the arrival of a request to its last byte; error_type is empty without an error.",
            [*_LABELS, "error_type"],
            buckets=_DURATION_S,
            registry=registry,
        )
        self._first_s = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the arrival of a request that succeeded to its first token.",
            _LABELS,
            buckets=_FIRST_S,
            registry=registry,
        )
        self._next_s = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token after the first, mean of a request that succeeded.",
            _LABELS,
            buckets=_NEXT_S,
            registry=registry,
        )

    def ended(self, endpoint: str, model: str, outcome: str, elapsed_s: float) -> None:
        """A call, whether it was served or not. `outcome`: as in `kvrelay_requests_total`."""
        error = "" if outcome in (*_SUCCESS, _GONE) else outcome
        self._duration_s.labels(*self._labels(endpoint, model), error).observe(elapsed_s)

    def served(
        self, endpoint: str, model: str, outcome: str, ttft_s: float, rest_s: float, num_tokens: int
    ) -> None:
        """One choice of a call. `rest_s`: from its first token to its last; `num_tokens`: of its
        output."""
        if outcome not in _SUCCESS:
            return
        labels = self._labels(endpoint, model)
        self._first_s.labels(*labels).observe(ttft_s)
        if num_tokens > 1:
            self._next_s.labels(*labels).observe(rest_s / (num_tokens - 1))

    @staticmethod
    def _labels(endpoint: str, model: str) -> tuple[str, str, str]:
        return operation_of(endpoint), PROVIDER, model
