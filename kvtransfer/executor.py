"""Performs a worker's effects on the model and on the transfer agent, and answers each one once.

Life of a read: posted; polled until it is done, has failed or is out of time; released, as often
as the agent needs to say that nothing writes to its destination any more; checksummed if it was
good; answered. `WorkerExecutor` holds the reads, `TransferLoop` is the thread that drives them and
owns the agent. Steps run in the host's model thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.node import NodeId
from engine.step import Sampled, Step, StepDone
from kvtransfer.agent import Agent, AgentError, ConnectPeer, PeerConnected, ReadBlocks, ReadDone
from kvtransfer.checksum import BlockBytes, checksum_blocks

logger = logging.getLogger(__name__)

Request = ConnectPeer | ReadBlocks
Answer = PeerConnected | ReadDone
Corrupt = Callable[[ReadBlocks, Any], None]

SPINS = 20
"""Polls without a pause after something happened: a read within one host is done in as many."""
FIRST_WAIT_S = 20e-6
MAX_WAIT_S = 500e-6
IDLE_WAIT_S = 1.0


@dataclass(slots=True)
class _Read:
    request: ReadBlocks
    handle: Any
    started: float
    error: str | None = None  # given up for this reason, and not settled yet


class WorkerExecutor:
    """Blocking calls for the host's threads: `execute` from the model thread; all others from the
    one thread that owns the agent.

    Invariant: a read is in `_reads` from `post` until the agent has released its handle, and
    leaves with its only ReadDone.
    """

    def __init__(
        self,
        run_step: Callable[[Step], StepDone],
        agent: Agent,
        pool_bytes: BlockBytes,
        *,
        corrupt: Corrupt | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool_bytes`: the worker's pool, `[num_blocks, bytes_per_block]`. `corrupt`
        is called with every good read before its checksums, to inject faults."""
        self._run_step = run_step
        self._agent = agent
        self._pool_bytes = pool_bytes
        self._corrupt = corrupt
        self._clock = clock
        self._epochs: dict[NodeId, int] = {}
        self._reads: dict[int, _Read] = {}
        self._answered: list[ReadDone] = []  # by `post` itself, for the next `poll_reads`

    def execute(self, step: Step) -> StepDone:
        """Run the step, then checksum `step.checksum_blocks`. An exception becomes the error."""
        started = self._clock()
        try:
            done = self._run_step(step)
            checksums = checksum_blocks(self._pool_bytes, step.checksum_blocks)
        except Exception as error:
            logger.exception("step %d of %d tokens failed", step.step_id, step.num_tokens)
            sampled: list[Sampled | None] = [None] * len(step.seqs)
            return StepDone(step.step_id, sampled, error=_one_line(error))
        return replace(done, checksums=checksums, elapsed_s=self._clock() - started)

    def connect(self, request: ConnectPeer) -> PeerConnected:
        self._epochs.pop(request.peer, None)
        try:
            self._agent.connect(request.peer, request.epoch, request.num_blocks, request.metadata)
        except Exception as error:
            return PeerConnected(request.peer, request.epoch, _one_line(error))
        self._epochs[request.peer] = request.epoch
        return PeerConnected(request.peer, request.epoch)

    def post(self, request: ReadBlocks) -> None:
        """Begin a read; `poll_reads` returns its end."""
        assert request.transfer_id not in self._reads, request.transfer_id
        started = self._clock()
        try:
            handle = self._begin(request)
        except Exception as error:
            self._answered.append(_failed(request, _one_line(error), self._clock() - started))
            return
        if handle is None:
            self._answered.append(ReadDone(request.transfer_id, None))
        else:
            self._reads[request.transfer_id] = _Read(request, handle, started)

    def poll_reads(self) -> list[ReadDone]:
        """The reads that have settled since the last call. Does not wait."""
        done, self._answered = self._answered, []
        for transfer_id, read in list(self._reads.items()):
            answer = self._advance(read)
            if answer is not None:
                del self._reads[transfer_id]
                done.append(answer)
        return done

    def audit(self) -> int:
        """Live transfer handles and answers not fetched: 0 when idle."""
        return len(self._reads) + len(self._answered)

    def close(self, timeout_s: float) -> list[ReadDone]:
        """Give up every read, wait up to `timeout_s` for them to settle, then close the agent,
        which settles the rest. Returns the answers."""
        for read in self._reads.values():
            read.error = read.error or "the worker shuts down"
        done = self.poll_reads()
        deadline = self._clock() + timeout_s
        while self._reads and self._clock() < deadline:
            time.sleep(MAX_WAIT_S)
            done += self.poll_reads()
        self._agent.close()
        done += [self._given_up(read) for read in self._reads.values()]
        self._reads.clear()
        return done

    def _begin(self, request: ReadBlocks) -> Any | None:
        """The handle; None if there is nothing to move."""
        epoch = self._epochs.get(request.peer)
        if epoch != request.epoch:
            raise AgentError(
                f"read from {request.peer} at epoch {request.epoch}: connected to epoch {epoch}"
            )
        if not request.src and not request.dst:
            return None
        return self._agent.read(request.peer, list(request.src), list(request.dst))

    def _advance(self, read: _Read) -> ReadDone | None:
        """The answer, once the read has settled."""
        if read.error is None:
            try:
                if self._agent.poll(read.handle):
                    return self._finish(read)
            except Exception as error:
                read.error = _one_line(error)
        request = read.request
        if read.error is None and self._clock() - read.started >= request.timeout_s:
            read.error = (
                f"read of {len(request.src)} blocks from {request.peer} not done"
                f" after {request.timeout_s:g} s"
            )
        if read.error is None or not self._agent.release(read.handle):
            return None
        return self._given_up(read)

    def _finish(self, read: _Read) -> ReadDone | None:
        """The answer to a good read; None if its handle cannot be released yet."""
        if not self._agent.release(read.handle):
            return None
        request = read.request
        if self._corrupt is not None:
            self._corrupt(request, self._pool_bytes)
        checksums = tuple(checksum_blocks(self._pool_bytes, request.dst))
        return ReadDone(
            transfer_id=request.transfer_id,
            error=None,
            checksums=checksums,
            elapsed_s=self._clock() - read.started,
            num_bytes=len(request.dst) * self._pool_bytes.shape[1],
        )

    def _given_up(self, read: _Read) -> ReadDone:
        assert read.error is not None
        return _failed(read.request, read.error, self._clock() - read.started)


class TransferLoop:
    """The thread that owns a WorkerExecutor's agent. Owned by the worker's host.

    Invariant: each submitted request is answered through `on_done` exactly once. At most
    `max_outstanding` are unanswered; one more is refused, which is its answer.
    """

    def __init__(
        self,
        executor: WorkerExecutor,
        on_done: Callable[[Answer], None],
        *,
        max_outstanding: int = 1024,
        name: str = "kv-transfer",
    ) -> None:
        """`on_done` is called from this loop's thread, or from `submit` for a refusal; it must
        not block."""
        self._executor = executor
        self._on_done = on_done
        self._max_outstanding = max_outstanding
        self._lock = threading.Lock()  # guards _outstanding and _closed
        self._outstanding = 0
        self._closed = False
        self._requests: queue.SimpleQueue[Request | float] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """From any thread; does not wait."""
        with self._lock:
            refusal = None
            if self._closed:
                refusal = "the worker shuts down"
            elif self._outstanding >= self._max_outstanding:
                refusal = f"{self._outstanding} transfers are outstanding, the most allowed"
            else:
                self._outstanding += 1
                self._requests.put(request)
        if refusal is not None:
            self._on_done(_refused(request, refusal))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse what is new, give up what runs, answer everything, close the agent, and end the
        thread. False if it has not ended after twice `timeout_s`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._requests.put(timeout_s)
        self._thread.join(2 * timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        quiet = 0  # polls since something happened
        while True:
            request = self._next(_wait_s(quiet) if self._executor.audit() else IDLE_WAIT_S)
            if isinstance(request, float | int):
                break  # the time that `close` allows; every request came before it
            quiet += 1
            if request is not None:
                self._begin(request)
                quiet = 0
            for answer in self._executor.poll_reads():
                self._answer(answer)
                quiet = 0
        for answer in self._executor.close(request):
            self._answer(answer)

    def _next(self, wait_s: float) -> Request | float | None:
        try:
            return self._requests.get(wait_s > 0, wait_s)
        except queue.Empty:
            return None

    def _begin(self, request: Request) -> None:
        if isinstance(request, ConnectPeer):
            self._answer(self._executor.connect(request))
        else:
            self._executor.post(request)

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            self._outstanding -= 1
        self._on_done(answer)


def _wait_s(quiet: int) -> float:
    """How long to wait for a request before the next poll: nothing at first, then doubling."""
    if quiet < SPINS:
        return 0.0
    doublings = min(quiet - SPINS, 10)  # any more is beyond MAX_WAIT_S, or a float
    return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0**doublings)


def _refused(request: Request, reason: str) -> Answer:
    if isinstance(request, ConnectPeer):
        return PeerConnected(request.peer, request.epoch, reason)
    return _failed(request, reason, 0.0)


def _failed(request: ReadBlocks, error: str, elapsed_s: float) -> ReadDone:
    return ReadDone(request.transfer_id, error, elapsed_s=elapsed_s)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    if isinstance(error, AgentError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
