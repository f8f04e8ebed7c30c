"""A router under a script: messages in, what it sends out, and virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.messages import Refused, TokenDeltas
from kvrelay.engine.node import Note, Send, Wake, Woken
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams, TokenDelta
from kvrelay.engine.stats import Role, WorkerInfo, WorkerStats
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.config import RouterConfig
from kvrelay.router.index.watcher import CacheWatcher
from kvrelay.router.messages import Failed, Output, Submit, WorkerDown, WorkerUp
from kvrelay.router.router import SESSIONS_TICK, TICK, Router

M = TypeVar("M")
BLOCK = 4
CLIENT = "api"


def worker_info(name: str, **changes: Any) -> WorkerInfo:
    """A worker whose role is in its name."""
    info = WorkerInfo(
        worker=name,
        role=Role.PREFILL if name.startswith("prefill") else Role.DECODE,
        epoch=1,
        num_blocks=64,
        block_size=BLOCK,
        bytes_per_block=4096,
        max_model_len=256,
        max_num_batched_tokens=64,
        fingerprint=b"tiny",
    )
    return replace(info, **changes)


def worker_stats(name: str, **changes: Any) -> WorkerStats:
    stats = WorkerStats(
        worker=name,
        epoch=1,
        num_free_blocks=64,
        num_cached_blocks=0,
        num_waiting=0,
        num_running=0,
        num_handoffs=0,
        pending_prefill_tokens=0,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        read_bytes_per_s=1e9,
    )
    return replace(stats, **changes)


class Outbox:
    """What a router sent and no test has looked at yet."""

    sent: list[tuple[str, Any]]

    def take(self, kind: type[M], to: str | None = None) -> list[M]:
        """All sent messages of this kind, to this node, which are forgotten then."""
        taken = [m for at, m in self.sent if isinstance(m, kind) and to in (None, at)]
        self.sent = [
            (at, m) for at, m in self.sent if not (isinstance(m, kind) and to in (None, at))
        ]
        return taken

    def one(self, kind: type[M], to: str | None = None) -> M:
        taken = self.take(kind, to)
        assert len(taken) == 1, (kind, taken, self.sent)
        return taken[0]


class Script(Outbox):
    """Feeds one router. `sent` holds what it sent and no test has looked at yet."""

    def __init__(self, *workers: str, watcher: CacheWatcher | None = None, **config: Any) -> None:
        self.now = 100.0
        self.router = Router(
            "router-0", RouterConfig(**config), controller="controller", watcher=watcher
        )
        self.sent: list[tuple[str, Any]] = []
        self.notes: list[Note] = []
        self.wakes: list[float] = []
        self.num_snapshots = 0
        self._perform(self.router.start(self.now))
        for name in workers:
            self.up(name)
            self.tell(KVSnapshot(name, 1, 0, ()))
        self.sent.clear()

    def tell(self, message: Any) -> None:
        self._perform(self.router.receive(self.now, message))

    def up(self, name: str, **changes: Any) -> None:
        self.tell(WorkerUp(worker_info(name, **changes)))

    def down(self, name: str, epoch: int = 1) -> None:
        self.tell(WorkerDown(name, epoch, "killed"))

    def holds(self, worker: str, device: Any = (), host: Any = (), disk: Any = ()) -> None:
        """The worker tells that it holds the blocks of these tokens, and no others."""
        self.num_snapshots += 1
        fingerprint = worker_info(worker).fingerprint
        names = [
            tuple(hash_blocks(fingerprint, UNSALTED, tuple(tokens), BLOCK))
            for tokens in (device, host, disk)
        ]
        tiers = (TierHashes(Tier.HOST, names[1]), TierHashes(Tier.DISK, names[2]))
        self.tell(KVSnapshot(worker, 1, self.num_snapshots, names[0], tiers))

    def submit(
        self,
        request_id: str = "r",
        tokens: Any = range(10),
        timeout_s: float = 60.0,
        priority: int = 0,
        scope: CacheScope = UNSALTED,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(**{"max_tokens": 8, "stop_token_ids": (999,), **sampling})
        self.tell(
            Submit(
                request_id, params, CLIENT, tuple(tokens), timeout_s, priority=priority, scope=scope
            )
        )

    def delta(
        self,
        worker: str,
        position: int,
        *tokens: int,
        request_id: str = "r",
        attempt: int = 1,
        epoch: int = 1,
        finish: FinishReason | None = None,
        **more: Any,
    ) -> None:
        delta = TokenDelta(request_id, attempt, position, tokens, finish=finish, **more)
        self.tell(TokenDeltas(worker, epoch, (delta,)))

    def refuse(
        self, worker: str, reason: Refusal, attempt: int = 1, epoch: int = 1, request_id: str = "r"
    ) -> None:
        self.tell(Refused(worker, epoch, request_id, attempt, reason, "because"))

    def pass_time(self, seconds: float) -> None:
        """Let the router tick as often as it asked for."""
        end = self.now + seconds
        while self.wakes and min(self.wakes) <= end:
            self.now = min(self.wakes)
            self.wakes.remove(self.now)
            self.tell(Woken(TICK))
        self.now = end

    def dispatched(self) -> tuple[str, str | None, Decode]:
        """The one attempt that was just sent: decode worker, prefill worker, Decode."""
        decodes = [(to, m) for to, m in self.sent if isinstance(m, Decode)]
        prefills = [(to, m) for to, m in self.sent if isinstance(m, Prefill)]
        assert len(decodes) == 1, self.sent
        to, decode = decodes[0]
        assert [p for p, _ in prefills] == ([decode.prefill_from] if decode.prefill_from else [])
        for _, prefill in prefills:
            assert prefill.decode_to == to
            for name in ("request_id", "attempt", "tokens", "num_prompt_tokens", "sampling"):
                assert getattr(prefill, name) == getattr(decode, name)
        self.take(Decode)
        self.take(Prefill)
        return to, decode.prefill_from, decode

    def streamed(self, request_id: str = "r") -> list[int]:
        """Tokens of all `Output`s so far taken together; they must be gapless."""
        tokens: list[int] = []
        for output in self.take(Output):
            assert output.request_id == request_id
            assert output.index == len(tokens)
            tokens += output.tokens
        return tokens

    def failure(self) -> Failed:
        failed = self.one(Failed, CLIENT)
        assert self.router.check_idle() == []
        return failed

    def assert_idle(self) -> None:
        assert self.router.check_idle() == []
        self.router.index.check_integrity()

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.sent.append((to, message))
                case Wake(after_s, tag):
                    if tag == SESSIONS_TICK:
                        continue
                    assert tag == TICK
                    self.wakes.append(self.now + after_s)
                case Note():
                    self.notes.append(effect)
                case _:
                    raise AssertionError(f"unexpected effect {effect!r}")
        assert len(self.wakes) <= 1, "more than one tick is under way"
