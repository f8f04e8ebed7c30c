"""What further routers say of themselves, asked by the process that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cluster.control.router_loads import Life, RouterLoads
from cluster.control.router_processes import RouterLoad

ONE, TWO = ("router-1", 1), ("router-2", 1)
BUSY = RouterLoad(5, 2, True)


class Routers:
    """`answers`: what each says; an exception is raised, None is no answer until it is `freed`."""

    def __init__(self, answers: dict[Life, RouterLoad | Exception | None]) -> None:
        self.answers = answers
        self.num_asked: dict[Life, int] = {}
        self.freed = asyncio.Event()
        self.loads = RouterLoads(
            lambda: {life: self.question(life) for life in self.answers},
        )

    def question(self, life: Life) -> Callable[[], Awaitable[RouterLoad]]:
        async def ask() -> RouterLoad:
            self.num_asked[life] = self.num_asked.get(life, 0) + 1
            answer = self.answers[life]
            if answer is None:
                await self.freed.wait()
                return BUSY
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


def test_what_each_answers_is_known_and_who_does_not_is_not() -> None:
    async def scene() -> None:
        routers = Routers({ONE: BUSY, TWO: ConnectionError("gone")})
        await routers.loads.poll(1.0)
        assert routers.loads.known == {ONE: BUSY}
        routers.answers = {("router-1", 2): RouterLoad(0, 0, False)}
        await routers.loads.poll(1.0)
        assert routers.loads.known == {("router-1", 2): RouterLoad(0, 0, False)}

    asyncio.run(scene())


def test_one_that_hangs_is_asked_once_and_known_again_when_it_answers() -> None:
    async def scene() -> None:
        routers = Routers({ONE: BUSY, TWO: None})
        for _ in range(3):
            await routers.loads.poll(0.01)
        assert routers.loads.known == {ONE: BUSY}
        assert routers.num_asked == {ONE: 3, TWO: 1}
        routers.freed.set()
        await routers.loads.poll(1.0)
        assert routers.loads.known == {ONE: BUSY, TWO: BUSY}

    asyncio.run(scene())


@pytest.mark.parametrize("silent", [None, OSError("lost")])
def test_requests_are_counted_anew_and_a_silent_router_may_have_one(
    silent: Exception | None,
) -> None:
    async def scene() -> None:
        routers = Routers({ONE: BUSY, TWO: silent})
        assert await routers.loads.num_live(0.01) == 5 + 1
        routers.answers = {}
        assert await routers.loads.num_live(0.01) == 0

    asyncio.run(scene())
