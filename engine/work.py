"""What both kinds of worker are asked to do: the fields that their requests have in common."""

from __future__ import annotations

from typing import Protocol

from engine.kv.block_hash import CacheScope
from engine.kv.tier import Retention
from engine.node import NodeId
from engine.request import SamplingParams


class WorkRequest(Protocol):
    """What `Prefill` and `Decode` have in common."""

    @property
    def request_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def router(self) -> NodeId: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def scope(self) -> CacheScope: ...
    @property
    def retention(self) -> Retention | None: ...
    @property
    def block_hashes(self) -> bytes: ...
