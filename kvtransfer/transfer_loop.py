"""The thread that copies blocks for a worker: one for its memory, one for each of its stores.

Requests are taken in the order in which they came. The loop polls without a pause while copies are
about to end, with growing pauses while they run, with short ones while a peer's read is timed, and
sleeps while there is nothing to do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from kvrelay.engine.backoff import Backoff
from kvrelay.kvtransfer.agent import (
    AttachStore,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    FindStored,
    PeerConnected,
    StoreFailed,
    StoreGone,
    StoreIndex,
)
from kvrelay.kvtransfer.executor import (
    IDLE_WAIT_S,
    SHUTS_DOWN,
    Store,
    StoreChange,
    TransferExecutor,
    failed_copy,
    one_line,
)

log = logging.getLogger("kvrelay.transfers")

Request = ConnectPeer | CopyBlocks | StoreIndex | AttachStore | FindStored
Answer = PeerConnected | CopyDone | StoreChange

SPINS = 20
"""Polls without a pause after something happened: a copy within one host is done in as many."""
WAIT = Backoff(20e-6, 500e-6)


class TransferLoop:
    """Owns a TransferExecutor, and its mover by it, and the store of the tier.

    Invariant: each connection and each copy is answered through `on_done` exactly once, a change of
    the index if it failed. At most `max_outstanding` requests are not done; one more is refused,
    which is its answer.
    """

    def __init__(
        self,
        executor: TransferExecutor,
        on_done: Callable[[Answer], None],
        *,
        store: Store | None = None,
        max_outstanding: int = 1024,
        name: str = "kv-transfer",
    ) -> None:
        """`on_done` is called from this loop's thread, or from `submit` for a refusal; it must not
        block."""
        self._executor = executor
        self._store = store
        self._on_done = on_done
        self._max_outstanding = max_outstanding
        self._lock = threading.Lock()  # guards _outstanding and _stopped
        self._outstanding = 0
        self._stopped = False
        self._requests: queue.SimpleQueue[Request | float] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """From any thread; does not wait."""
        with self._lock:
            refusal = None
            if self._stopped:
                refusal = SHUTS_DOWN
            elif self._outstanding >= self._max_outstanding:
                refusal = f"{self._outstanding} transfers are outstanding, the most allowed"
            else:
                self._outstanding += 1
                self._requests.put(request)
        if refusal is not None:
            answer = _refused(request, refusal)
            if answer is not None:
                self._on_done(answer)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Begin to end, without waiting: refuse what is new, give up what runs, answer everything,
        close the mover and the store. Copies that run have `timeout_s` to settle."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._requests.put(timeout_s)

    def join(self, timeout_s: float = 10.0) -> bool:
        """Wait for the end. False if it has not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> bool:
        """`stop`, then wait twice as long as the copies may take."""
        self.stop(timeout_s)
        return self.join(2 * timeout_s)

    def _run(self) -> None:
        quiet = 0  # polls since something happened
        while True:
            wait_s = _wait_s(quiet)
            if self._executor.is_timing:
                wait_s = min(wait_s, WAIT.base_s)
            if not self._executor.audit():
                wait_s = IDLE_WAIT_S if self._store is None else self._store.wait_s
            request = self._next(wait_s)
            if isinstance(request, float | int):
                break  # the time that `stop` allows; every request came before it
            quiet += 1
            try:
                if self._work(request):
                    quiet = 0
            except Exception:  # a fault of ours; whoever waits for other copies is answered
                log.exception("%s goes on after an error", threading.current_thread().name)
        try:
            for answer in self._executor.close(request):
                self._answer(answer)
        finally:
            self._close_store()

    def _close_store(self) -> None:
        try:
            if self._store is not None:
                self._store.close()
        except Exception as error:
            name = threading.current_thread().name
            log.warning("%s: its store was not closed: %s", name, one_line(error))

    def _work(self, request: Request | None) -> bool:
        """Returns whether anything has happened."""
        if request is not None:
            self._begin(request)
        answers = self._executor.poll_copies()
        for answer in answers:
            self._answer(answer)
        self._check_store()
        return request is not None or bool(answers)

    def _next(self, wait_s: float) -> Request | float | None:
        try:
            return self._requests.get(wait_s > 0, wait_s)
        except queue.Empty:
            return None

    def _begin(self, request: Request) -> None:
        match request:
            case ConnectPeer():
                connected = self._executor.connect(request)
                if connected is not None:
                    self._answer(connected)
            case CopyBlocks() if self._stopped:
                self._answer(failed_copy(request, SHUTS_DOWN))
            case CopyBlocks():
                self._executor.post(request)
            case StoreIndex() | AttachStore() | FindStored():
                self._answer(self._update(request))

    def _update(self, request: StoreIndex | AttachStore | FindStored) -> StoreFailed | None:
        assert self._store is not None, request
        try:
            self._store.update(request)
        except Exception as error:
            return StoreFailed(one_line(error), tier=request.tier)
        return None

    def _check_store(self) -> None:
        if self._store is not None:
            for change in self._store.check(self._executor.audit() > 0):
                self._on_done(change)

    def _answer(self, answer: Answer | None) -> None:
        with self._lock:
            self._outstanding -= 1
        if answer is not None:
            self._on_done(answer)


def _wait_s(quiet: int) -> float:
    """How long to wait for a request before the next poll: nothing at first, then doubling."""
    return WAIT.pause_s(1 + quiet - SPINS)


def _refused(request: Request, reason: str) -> Answer | None:
    match request:
        case ConnectPeer():
            return PeerConnected(request.peer, request.epoch, reason)
        case CopyBlocks():
            return failed_copy(request, reason)
        case StoreIndex():
            return StoreFailed(f"the index was not changed: {reason}", tier=request.tier)
        case AttachStore(tier, _, first, num_slots):
            return StoreGone(tier, first, num_slots)
        case FindStored():
            return None  # what is not found is computed
