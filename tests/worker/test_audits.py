"""An audit of a worker whose books contradict themselves reports it; the worker goes on."""

from __future__ import annotations

from kvrelay.engine.node import Send
from kvrelay.engine.stats import Audit, AuditRequest
from tests.worker.world import World

PROMPT = [1, 2, 3, 4, 5, 6]


def audited(world: World) -> Audit:
    (sent,) = world.decode.receive(0.0, AuditRequest("router"))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Audit)
    return sent.message


def test_a_worker_whose_books_are_right_has_nothing_wrong() -> None:
    world = World()
    world.submit("a", PROMPT, 4, remote=False)
    world.step()
    assert audited(world).wrong == ()
    assert audited(world).left != ()
    world.drain()
    assert (audited(world).wrong, audited(world).left) == ((), ())


def test_what_contradicts_itself_is_a_line_and_not_the_end_of_the_worker() -> None:
    world = World()
    pool = world.decode.core.kv.pool
    taken = pool._refs[3]
    pool._refs[3] = 1  # in use, and free as well
    found = audited(world)
    (line,) = found.wrong
    assert line.startswith("blocks do not add up: AssertionError")
    assert "check_integrity, line" in line
    pool._refs[3] = taken
    world.submit("a", PROMPT, 4, remote=False)
    world.assert_finishes("a", PROMPT, 4)
