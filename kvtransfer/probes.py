"""Small reads from peers that were just connected, timed: how fast KV will come.

Life of a probe: one block, whose time does not count, because the transport connects by it -> reads
that grow, each timed alone, until one takes long enough to differ from its overhead or is as large
as they get -> `PeerConnected` with the rate. A probe that fails, or is not done in time, is
reported without one: whether a peer can be read is not for it to say. What it has posted may be
long in settling, and until then writes to memory that only probes use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.kvtransfer.agent import PROBE_BYTES, PeerAgent, PeerConnected

TIMEOUT_S = 0.1
"""A connection is reported so much later at most."""
ENOUGH_S = 0.002
GROWTH = 8


@dataclass(slots=True)
class _Probe:
    connected: PeerConnected
    deadline: float
    handle: Any = None
    asked: int = 1  # bytes, of the read that was posted last
    num_bytes: int = 0  # that it has
    posted_at: float = 0.0
    is_timed: bool = False  # it is not the first


class Probes:
    """Owned by a TransferExecutor. Invariant: each connection that it was given is returned once,
    `TIMEOUT_S` later at most, and every handle is polled until it has settled."""

    def __init__(self, agent: PeerAgent, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent = agent
        self._clock = clock
        self._probes: list[_Probe] = []
        self._ended: list[PeerConnected] = []  # in `begin` itself, for the next `poll`
        self._settling: list[Any] = []  # handles of reads that were given up

    @property
    def num_live(self) -> int:
        """Connections that were not returned, and reads that have not settled."""
        return len(self._probes) + len(self._ended) + len(self._settling)

    @property
    def is_timing(self) -> bool:
        """How often `poll` is called decides how exact a time is."""
        return bool(self._probes)

    def begin(self, connected: PeerConnected) -> None:
        """Time a read from a peer that can be read from now on."""
        probe = _Probe(connected, self._clock() + TIMEOUT_S)
        try:
            self._post(probe)
        except Exception as error:
            self._ended.append(_untimed(connected, str(error)))
        else:
            self._probes.append(probe)

    def poll(self) -> list[PeerConnected]:
        """The connections whose probes have ended since the last call. Does not wait."""
        self._settling = [each for each in self._settling if self._agent.poll(each) is None]
        ended, self._ended = self._ended, []
        for probe in list(self._probes):
            answer = self._advance(probe)
            if answer is not None:
                self._probes.remove(probe)
                ended.append(answer)
        return ended

    def close(self, why: str) -> list[PeerConnected]:
        """Give up what runs; the agent, which is closed next, settles it."""
        ended = [*self._ended, *(_untimed(probe.connected, why) for probe in self._probes)]
        self._probes, self._ended, self._settling = [], [], []
        return ended

    def _post(self, probe: _Probe) -> None:
        probe.posted_at = self._clock()
        peer = probe.connected.peer
        probe.handle, probe.num_bytes = self._agent.post_probe(peer, probe.asked)

    def _advance(self, probe: _Probe) -> PeerConnected | None:
        """The answer, once there is one."""
        try:
            done, now = self._agent.poll(probe.handle), self._clock()
            if done is None:
                if now < probe.deadline:
                    return None
                self._settling.append(probe.handle)
                return self._out_of_time(probe)
            if done.error is not None:
                return _untimed(probe.connected, done.error)
            if probe.is_timed:
                took_s = max(now - probe.posted_at, 1e-9)
                connected = replace(probe.connected, bytes_per_s=probe.num_bytes / took_s)
                probe.connected = connected
                if probe.num_bytes < probe.asked or probe.asked >= PROBE_BYTES:
                    return connected
                if took_s >= ENOUGH_S:
                    return connected
                probe.asked = min(GROWTH * probe.num_bytes, PROBE_BYTES)
            probe.is_timed = True
            if now >= probe.deadline:
                return self._out_of_time(probe)
            self._post(probe)
        except Exception as error:
            return _untimed(probe.connected, str(error))
        return None

    def _out_of_time(self, probe: _Probe) -> PeerConnected:
        if probe.connected.bytes_per_s:
            return probe.connected
        why = f"a read of {probe.num_bytes} bytes was not done after {TIMEOUT_S:g} s"
        return _untimed(probe.connected, why)


def _untimed(connected: PeerConnected, why: str) -> PeerConnected:
    lines = why.splitlines() or ["it failed"]
    return replace(connected, bytes_per_s=0.0, not_timed=lines[0])
