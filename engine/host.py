"""Hosts nodes on one asyncio event loop and performs their effects.

A message comes in (from the wire, another node here, or an executor), the node answers with
effects, and each is performed at once and in order: `Send` to a node here or over the wire,
`Wake` by the loop's clock, `Note` to the log, and everything else by the node's executor, which
never blocks the loop and reports back with `deliver_soon`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from itertools import count
from typing import Any, Protocol, TypeVar

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import Effect, Exit, Node, NodeId, Note, Send, Unsendable, Wake, Woken

log = logging.getLogger("kvrelay")
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

RESTART = Backoff(0.5, 10.0)  # before a task that ended begins again

T = TypeVar("T")
SendRemote = Callable[[NodeId, Any], str | None]  # as `Wire.send`
OnFailure = Callable[[NodeId, BaseException], None]
Deliver = Callable[[Any], None]


class NodeExit(Exception):
    """A node has asked for the end of its process; the text says why. `hangs`: as of `Exit`."""

    def __init__(self, reason: str, *, hangs: bool = False) -> None:
        super().__init__(reason)
        self.hangs = hangs


class Executor(Protocol):
    """Performs the effects of one node that the host does not know."""

    def perform(self, effect: Effect) -> None:
        """Begin `effect` and return at once; its answer is delivered to the node."""
        ...

    def close(self) -> None:
        """Stop; blocks until nothing of it runs any more, for a bounded time."""
        ...


class NodeHost:
    """Owns its nodes: only this host's loop calls them, one message at a time.

    A node that raises is a bug and its state is not to be trusted: it gets no further message,
    and `on_failure` decides what becomes of the process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send_remote: SendRemote | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.loop = loop
        self.send_remote = send_remote
        self.counters: Counter[str] = Counter()
        self.nodes: dict[NodeId, Node] = {}
        self.failed: dict[NodeId, BaseException] = {}
        self._executors: dict[NodeId, Executor] = {}
        self._on_failure = on_failure
        self._closed = False

    def add(self, node: Node, executor: Executor | None = None) -> None:
        """Host `node` and start it. On the loop, as everything here but `deliver_soon`."""
        assert node.node_id not in self.nodes
        self.nodes[node.node_id] = node
        if executor is not None:
            self._executors[node.node_id] = executor
        self._run(node.node_id, lambda: node.start(self.loop.time()))

    def deliver(self, to: NodeId, message: Any) -> None:
        node = self.nodes.get(to)
        if node is None:
            self.counters["unknown_node"] += 1
        elif not self._closed and to not in self.failed:
            self._run(to, lambda: node.receive(self.loop.time(), message))

    def deliver_soon(self, to: NodeId, message: Any) -> None:
        """As `deliver`, from any thread; order is kept. Ignored once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.deliver, to, message)
        except RuntimeError:
            log.debug("the loop is closed: %s for %s dropped", type(message).__name__, to)

    def inbox(self, node_id: NodeId) -> Deliver:
        """`deliver_soon` to this node: what its executor reports to."""
        return lambda message: self.deliver_soon(node_id, message)

    def close(self) -> None:
        """No node is called from now on; executors are stopped."""
        self._closed = True
        for executor in self._executors.values():
            executor.close()

    def _run(self, node_id: NodeId, call: Callable[[], list[Effect]]) -> None:
        try:
            for effect in call():
                self._perform(node_id, effect)
        except Exception as error:
            log.exception("%s failed and is stopped", node_id)
            self._fail(node_id, error)

    def _fail(self, node_id: NodeId, error: BaseException) -> None:
        self.failed[node_id] = error
        self.counters["node_failed"] += 1
        if self._on_failure is not None:
            self._on_failure(node_id, error)

    def _perform(self, node_id: NodeId, effect: Effect) -> None:
        if isinstance(effect, Send):
            if effect.to in self.nodes:
                self.loop.call_soon(self.deliver, effect.to, effect.message)
            elif self.send_remote is not None:
                why = self.send_remote(effect.to, effect.message)
                if why is not None:
                    log.error("%s to %s: %s", node_id, effect.to, why)
                    lost = Unsendable(effect.to, effect.message, why)
                    self.loop.call_soon(self.deliver, node_id, lost)
            else:
                self.counters["unknown_node"] += 1
        elif isinstance(effect, Wake):
            self.loop.call_later(effect.after_s, self.deliver, node_id, Woken(effect.tag))
        elif isinstance(effect, Note):
            self.counters[effect.counter] += 1
            log.log(LEVELS[effect.level], "%s: %s", node_id, effect.text)
        elif isinstance(effect, Exit):
            self._fail(node_id, NodeExit(effect.reason, hangs=effect.hangs))
        else:
            self._executors[node_id].perform(effect)


async def keep_running(
    name: str, run: Callable[[], Coroutine[Any, Any, None]], restarts: Counter[str]
) -> None:
    """Run a task that must live as long as the process, until cancelled. If it ends or raises, that
    is logged, counted under `name`, and it begins again after a pause."""
    for failures in count(1):
        pause_s = RESTART.pause_s(failures)
        try:
            await run()
            log.error("%s has ended; again in %g s", name, pause_s)
        except Exception:
            log.exception("%s failed; again in %g s", name, pause_s)
        restarts[name] += 1
        await asyncio.sleep(pause_s)


def in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `call` on a daemon thread: unlike one of asyncio's, it does not hold up the exit when
    the result is not wanted any more (a model may take minutes to download, a disk may hang)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, Any] = (future.set_result, call())
        except BaseException as error:
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class LoopThread:
    """An event loop on a thread of its own, for callers that are not asynchronous themselves."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Run `function` on the loop and wait for what it returns. Raises what it raises."""

        async def wrapped() -> T:
            return function()

        return self.submit(wrapped()).result(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loop.close()


def first_line(error: BaseException) -> str:
    """What went wrong, in a line: of a task that raised, what it raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {first_line(cause)}"
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def settle_memory() -> None:
    """What is there when serving begins stays: the garbage collector need not look at it again.
    Prompts are long lists, and to look at all of them takes it a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 200)
