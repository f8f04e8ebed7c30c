"""The settings of a replay: how large the cluster is, how its router decides, what goes wrong.

Made by the command line or a benchmark, checked once, never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.lab.timing.timing import Timing
from kvrelay.router.config import RouterConfig

ORACLE = "oracle"
"""What stands beside the router's policies."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker is killed at `at_s` of virtual time, and started again `down_s` later."""

    worker: str  # "prefill-0", "decode-3"
    at_s: float
    down_s: float


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """A cluster that does not exist. Raises ValueError for what no cluster could be."""

    timing: Timing
    num_prefill: int = 1  # 0: decode workers do both
    num_decode: int = 1
    num_blocks: int = 400  # in each worker's device pool
    block_size: int = 512  # tokens
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    num_host_blocks: int = 0  # in each worker's host tier; 0: none
    num_disk_blocks: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)  # its policy among others
    oracle: bool = False  # a cache without end that costs nothing: the ceiling
    speedup: float = 1.0  # arrivals come this many times as fast as in the trace
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 600.0  # for each request
    itl_target_s: float = 0.0  # at decode workers; 0: prompts there are computed whole
    stats_interval_s: float = 1.0  # workers tell their statistics so often
    at_once: int = 0  # sessions: the next one starts when one ends; 0: each in its time
    why: bool = False  # say where the time to the first token goes: see `why`

    def __post_init__(self) -> None:
        if self.oracle and self.router.policy != "prefix":
            raise ValueError(f"an oracle's policy is prefix, not {self.router.policy}")
        at_least = {"at_once": 0, "num_prefill": 0, "num_host_blocks": 0, "num_disk_blocks": 0}
        at_least |= {"num_decode": 1, "num_blocks": 1, "block_size": 1, "max_num_seqs": 1}
        at_least |= {"max_num_batched_tokens": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; at least {least} is needed")
        for name in ("speedup", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for fault in self.faults:
            self._check(fault)

    @property
    def policy(self) -> str:
        """What the tables call it."""
        return ORACLE if self.oracle else self.router.policy

    def _check(self, fault: Fault) -> None:
        role, _, number = fault.worker.rpartition("-")
        many = {"prefill": self.num_prefill, "decode": self.num_decode}.get(role, 0)
        if not (number.isascii() and number.isdigit() and int(number) < many):
            raise ValueError(f"there is no worker {fault.worker!r}; there are {self._workers()}")
        if not 0 <= fault.at_s < float("inf") or not 0 <= fault.down_s < float("inf"):
            raise ValueError(
                f"{fault.worker} is killed at {fault.at_s} s for {fault.down_s} s; "
                "neither may be negative"
            )

    def _workers(self) -> str:
        pools = (("prefill", self.num_prefill), ("decode", self.num_decode))
        names = [f"{role}-0" + (f"..{n - 1}" if n > 1 else "") for role, n in pools if n]
        return " and ".join(names)
