"""Requests and tokens a minute of each tenant: buckets that refill all the time.

Each API process counts for itself, so with several routers a tenant may have as many times its
rates. A request is admitted by what its prompt has, about; what it has used is known, and counted,
when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.tenants import Tenant

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """`per_minute` is also the most that it holds. Times are of one clock."""

    per_minute: float
    level: float
    at: float

    def refill(self, now: float) -> None:
        self.level += (now - self.at) * self.per_minute / MINUTE_S
        self.level, self.at = min(self.level, self.per_minute), now

    def wait_s(self, amount: float) -> float:
        """Until it holds `amount`, or all that it can hold."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)


class RateLimits:
    """Owned by the API. Invariant: there are buckets only for tenants that have rates."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, Bucket]] = {}

    def admit(self, now: float, tenant: Tenant, num_tokens: int) -> None:
        """Take a request and its tokens. Raises `ApiError` (429) and takes nothing."""
        buckets = self._of(now, tenant)
        amounts = {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            wait_s = bucket.wait_s(amounts[kind])
            if wait_s > 0:
                raise ApiError(
                    429,
                    f"Rate limit reached: {bucket.per_minute:g} {kind} a minute, of which"
                    f" {max(0, int(bucket.level))} are left; try again in {wait_s:.1f} s",
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        for kind, bucket in buckets.items():
            bucket.level -= amounts[kind]

    def settle(self, now: float, tenant: Tenant, num_taken: int, num_used: int) -> None:
        """A request is over."""
        bucket = self._of(now, tenant).get("tokens")
        if bucket is not None:
            bucket.level = min(bucket.level + num_taken - num_used, bucket.per_minute)

    def headers(self, now: float, tenant: Tenant) -> dict[str, str]:
        """As OpenAI names them."""
        found: dict[str, str] = {}
        for kind, bucket in self._of(now, tenant).items():
            full_s = bucket.wait_s(bucket.per_minute)
            found[f"x-ratelimit-limit-{kind}"] = f"{bucket.per_minute:g}"
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
            found[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3g}s"
        return found

    def _of(self, now: float, tenant: Tenant) -> dict[str, Bucket]:
        buckets = self._buckets.get(tenant.name)
        given = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
        rates = {kind: rate for kind, rate in given.items() if rate}
        if buckets is None or rates != {kind: b.per_minute for kind, b in buckets.items()}:
            buckets = {kind: Bucket(rate, rate, now) for kind, rate in rates.items()}
            self._buckets[tenant.name] = buckets
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets
