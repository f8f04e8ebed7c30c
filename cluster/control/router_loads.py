"""What the further routers say of themselves, asked again and again by the process that serves.

A router that hangs is asked once, and counts as silent until it has answered: its process takes a
few calls at a time, and has to be free to be told to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from cluster.control.router_processes import RouterLoad
from engine.node import NodeId

POLL_S = 1.0
ANSWER_TIMEOUT_S = 2.0

Life = tuple[NodeId, int]  # a router and its epoch
Questions = Mapping[Life, Callable[[], Awaitable[RouterLoad]]]


class RouterLoads:
    """Owned by the deployment; lives on its loop. Invariant: at most one question to a life of a
    router is open that `watch` has asked; `known` is of those that answered the last one in time.
    """

    def __init__(self, questions: Callable[[], Questions]) -> None:
        """`questions`: the routers that have a process now, and how to ask each."""
        self._questions = questions
        self._open: dict[Life, asyncio.Future[RouterLoad]] = {}
        self.known: dict[Life, RouterLoad] = {}

    async def watch(self) -> None:
        """Keep `known` up to date, until cancelled."""
        try:
            while True:
                await self.poll(ANSWER_TIMEOUT_S)
                await asyncio.sleep(POLL_S)
        finally:
            for asked in self._open.values():
                asked.cancel()

    async def poll(self, timeout_s: float) -> None:
        """Ask those who owe no answer, and wait so long for all."""
        questions = self._questions()
        for life in self._open.keys() - questions.keys():
            self._open[life].cancel()
        self._open = {
            life: self._open[life] if life in self._open else _asked(ask)
            for life, ask in questions.items()
        }
        if self._open:
            await asyncio.wait(self._open.values(), timeout=timeout_s)
        answered = {life: asked for life, asked in self._open.items() if asked.done()}
        for life in answered:
            del self._open[life]
        self.known = {life: asked.result() for life, asked in answered.items() if _is_good(asked)}

    async def num_live(self, timeout_s: float) -> int:
        """Requests at all of them, asked now. One that does not answer counts as one: who knows."""
        asked = [_asked(ask) for ask in self._questions().values()]
        if asked:
            await asyncio.wait(asked, timeout=timeout_s)
        for each in asked:
            each.cancel()
        return sum(each.result().num_live if _is_good(each) else 1 for each in asked)


def _asked(ask: Callable[[], Awaitable[RouterLoad]]) -> asyncio.Future[RouterLoad]:
    asked = asyncio.ensure_future(ask())
    asked.add_done_callback(_is_good)  # whoever is gone by then has no error to be told of
    return asked


def _is_good(asked: asyncio.Future[RouterLoad]) -> bool:
    return asked.done() and not asked.cancelled() and asked.exception() is None
