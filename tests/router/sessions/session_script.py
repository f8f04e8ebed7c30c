"""A router with sessions under a script: turns, commands, what workers are asked, virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.node import Note, Send, Wake, Woken
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.kvtransfer.messages import CacheOrder, CacheOrderDone
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import (
    Cancel,
    SessionCommand,
    SessionInfo,
    SessionOp,
    SessionReply,
    Submit,
    TenantShare,
    WorkerDown,
    WorkerUp,
)
from kvrelay.router.router import Router
from kvrelay.router.sessions.session import DeleteSession, SaveSession, SessionConfig, SessionRecord
from kvrelay.router.sessions.sessions import TICK
from tests.router.script import BLOCK, Outbox, worker_info

M = TypeVar("M")
API = "api"


def names_of(tokens: Sequence[int], scope: CacheScope = UNSALTED) -> tuple[bytes, ...]:
    """Names of the blocks whose KV is there after a turn that ended with `tokens`."""
    return tuple(hash_blocks(b"tiny", scope, list(tokens)[:-1], BLOCK))


class SessionScript(Outbox):
    """Feeds one router; after each message the table's invariant is checked."""

    def __init__(
        self,
        *workers: str,
        records: Iterable[SessionRecord] = (),
        router: RouterConfig | None = None,
        **config: Any,
    ) -> None:
        self.now = 1000.0
        self.router = Router("router-0", router, SessionConfig(**config), records)
        self.sent: list[tuple[str, Any]] = []
        self.stored: list[SaveSession | DeleteSession] = []
        self.wakes: list[tuple[float, str]] = []
        self.num_wakes = 0  # by the sessions
        self.obeyed: list[tuple[str, CacheOrder]] = []
        self._ids = itertools.count()
        self._seqs = itertools.count()
        self._perform(self.router.start(self.now))
        for name in workers:
            self.up(name)
            self.holds(name)
        self.sent.clear()

    def tell(self, message: Any) -> None:
        self._perform(self.router.receive(self.now, message))
        self.router.sessions.table.check_integrity()

    def up(self, name: str, epoch: int = 1) -> None:
        self.tell(WorkerUp(worker_info(name, epoch=epoch)))

    def down(self, name: str, epoch: int = 1) -> None:
        self.tell(WorkerDown(name, epoch, "killed"))

    def holds(self, worker: str, epoch: int = 1, **names: Iterable[bytes]) -> None:
        """The worker says that it holds these blocks, by tier, and no others."""
        by_tier = {Tier(tier): tuple(found) for tier, found in names.items()}
        lower = tuple(TierHashes(t, found) for t, found in by_tier.items() if t is not Tier.DEVICE)
        device = by_tier.get(Tier.DEVICE, ())
        self.tell(KVSnapshot(worker, epoch, next(self._seqs), device, lower))

    def begin(
        self,
        session: str | None,
        tokens: Iterable[int] = range(10),
        tenant: str = "",
        scope: CacheScope = UNSALTED,
        retention: Retention | None = None,
        share: TenantShare = TenantShare(),
        **more: Any,
    ) -> str:
        """Submit a turn; returns the id of its request."""
        request_id = f"r{next(self._ids)}"
        sampling = SamplingParams(max_tokens=8, stop_token_ids=(999,))
        self.tell(
            Submit(
                request_id,
                sampling,
                API,
                tuple(tokens),
                600.0,
                scope=scope,
                retention=retention,
                session=session,
                tenant=tenant,
                share=share,
                **more,
            )
        )
        return request_id

    def deliver(self, request_id: str, *tokens: int, finish: FinishReason | None = None) -> None:
        """Tokens come from the decode worker that has the request."""
        record = self.router._requests.live[request_id]
        attempt = record.current
        assert attempt is not None
        delta = TokenDelta(request_id, attempt.number, len(record.tokens), tokens, finish=finish)
        info = attempt.decode.info
        self.tell(TokenDeltas(info.worker, info.epoch, (delta,)))

    def turn(self, session: str, tokens: Iterable[int] = range(10), **more: Any) -> list[int]:
        """A whole turn whose answer is 50, 51; returns what the session's tokens are then."""
        tokens = list(tokens)
        request_id = self.begin(session, tokens, **more)
        self.deliver(request_id, 50, 51, finish=FinishReason.STOP)
        self.take(Decode)
        return [*tokens, 50, 51]

    def cancel(self, request_id: str) -> None:
        self.tell(Cancel(request_id))

    def command(self, op: str, session: str = "", argument: str = "", **more: Any) -> str:
        """Sends it, and returns the command's id."""
        command_id = f"c{next(self._ids)}"
        tenant = more.pop("tenant", "")
        self.tell(SessionCommand(command_id, API, tenant, SessionOp(op), session, argument, **more))
        return command_id

    def ask(self, op: str, session: str = "", argument: str = "", **more: Any) -> SessionReply:
        """A command that is answered at once, or as soon as all workers have done all of it."""
        command_id = self.command(op, session, argument, **more)
        self.obey()
        (reply,) = [r for r in self.take(SessionReply) if r.command_id == command_id]
        return reply

    def show(self, session: str, **more: Any) -> SessionInfo:
        (info,) = self.ask("show", session, **more).sessions
        return info

    def names(self, tenant: str = "") -> list[str]:
        """Lists the sessions of a tenant."""
        return [info.session for info in self.ask("list", tenant=tenant, limit=100).sessions]

    def obey(self) -> list[tuple[str, CacheOrder]]:
        """Workers do what they were asked; returns what that was."""
        orders = [(to, m) for to, m in self.sent if isinstance(m, CacheOrder)]
        self.take(CacheOrder)
        self.obeyed += orders
        for worker, order in orders:
            self.tell(CacheOrderDone(worker, order.order_id, len(order.block_hashes)))
        return orders

    def pass_time(self, seconds: float) -> None:
        """Let the router be woken as often as it asked for."""
        end = self.now + seconds
        while self.wakes and min(self.wakes)[0] <= end:
            due = min(self.wakes)
            self.wakes.remove(due)
            self.now = due[0]
            self.tell(Woken(due[1]))
        self.now = end

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.sent.append((to, message))
                case Wake(after_s, tag):
                    assert after_s > 0
                    self.num_wakes += tag == TICK
                    self.wakes.append((self.now + after_s, tag))
                case SaveSession() | DeleteSession():
                    self.stored.append(effect)
                case Note():
                    pass
                case _:
                    raise AssertionError(f"unexpected effect {effect!r}")
