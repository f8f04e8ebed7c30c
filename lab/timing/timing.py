"""How long things take on hardware that is not here: forward passes and transfers of KV."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class TimingError(Exception):
    """A timing that cannot be used; one line for the user: what, its value, what would be right."""


def read_json(path: Path) -> Any:
    """Raises TimingError if it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TimingError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TimingError(f"{path}: not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class Links:
    """What KV moves over. Seconds and bytes; KV moves between two workers one transfer at a time
    in each direction."""

    bytes_per_token: int = 131_072  # KV of one token: Llama-3-8B in bf16
    peer_bytes_per_s: float = 50e9  # between workers: 400 Gbit/s
    host_bytes_per_s: float = 50e9  # from host memory into the device
    disk_bytes_per_s: float = 6e9
    transfer_s: float = 0.0005  # what every transfer takes, whatever its size
    message_s: float = 0.0002  # from one process to another


@dataclass(frozen=True, slots=True)
class Overheads:
    """What requests and passes take beyond the model, where workers, router, API and clients share
    the cores of one machine; nothing where they do not. `step_s` and `sequence_s` are a part of
    `pass_s` already; the rest is for who replays. A slowdown is how many times as long a pass of
    one role takes while a worker of the other role computes too (see `contention`)."""

    request_s: float = 0.0  # HTTP and tokenizing before the router, HTTP after the first token
    step_s: float = 0.0  # between two passes of a worker
    sequence_s: float = 0.0  # more of that for each decoding sequence: its token is streamed
    prefill_slowdown: float = 1.0
    prefill_alone_slowdown: float = 1.0  # while no worker of the other role computes
    decode_slowdown: float = 1.0
    decode_alone_slowdown: float = 1.0
    spread: float = 0.0  # standard deviation of the logarithms of equal passes of 10 ms
    start_s: float = 0.0  # that a worker takes to start; 0: not measured

    @property
    def shares_cores(self) -> bool:
        """Whether what others do changes what a pass takes."""
        slowdowns = {self.prefill_slowdown, self.prefill_alone_slowdown}
        slowdowns |= {self.decode_slowdown, self.decode_alone_slowdown}
        return slowdowns != {1.0} or self.spread > 0


class Timing(Protocol):
    """Seconds of one forward pass over a ragged batch of prompts and decoding sequences."""

    @property
    def name(self) -> str:
        """For tables: "polynomial", "h100:llama-3-8b", ..."""
        ...

    @property
    def links(self) -> Links: ...

    def pass_s(
        self,
        prompt_tokens: int,
        prompt_pairs: float,
        num_prompts: int,
        num_decodes: int,
        kv_tokens: int,
        pool_tokens: int,
    ) -> float:
        """`prompt_tokens`: fed of prompts; `prompt_pairs`: (query, key) pairs of them, which is
        the sum of n * (start + n / 2) over the chunks of n tokens; `num_decodes` sequences are fed
        one token each, and their contexts have `kv_tokens` together, of the `pool_tokens` that the
        worker's pool holds."""
        ...


@dataclass(frozen=True, slots=True)
class Polynomial:
    """`prefill_ms` [a, b, c]: a n^2 + b n + c for a pass of n new prompt tokens; `decode_ms`
    [d, e, f]: d u^2 + e u + f for a step with u the used fraction of the KV pool. A pass of both
    takes the sum."""

    prefill_ms: tuple[float, float, float]
    decode_ms: tuple[float, float, float]
    name: str = "polynomial"
    links: Links = Links()

    def pass_s(
        self,
        prompt_tokens: int,
        prompt_pairs: float,
        num_prompts: int,
        num_decodes: int,
        kv_tokens: int,
        pool_tokens: int,
    ) -> float:
        milliseconds = 0.0
        if prompt_tokens:
            a, b, c = self.prefill_ms
            milliseconds += (a * prompt_tokens + b) * prompt_tokens + c
        if num_decodes:
            d, e, f = self.decode_ms
            used = kv_tokens / pool_tokens
            milliseconds += (d * used + e) * used + f
        return milliseconds / 1e3


def overheads_of(timing: Timing) -> Overheads:
    """Returns those of a profile of this machine; a timing that knows none has none."""
    found = getattr(timing, "overheads", None)
    return found if isinstance(found, Overheads) else Overheads()
