"""Requests of the queue that cannot be sent now, and who may be sent before them.

A router tries its queue in order. What no worker has memory for stays, and of those behind it only
such are tried as need less: no prompt is looked up twice to learn that the memory is full. Whose
they are makes no difference, so one tenant's large requests stop neither its own short ones nor
those of others. What waits for another reason than memory keeps its order: after a few of an agent
none of it is tried, after a few agents of a caller none of that, and after a few callers of a
tenant none of that."""

from __future__ import annotations

from collections import Counter
from math import inf

from kvrelay.engine.waiting import MAX_PASSED
from kvrelay.router.admission.flow import Flow, Key, QueueEntry, Sent

# An agent may have so many that wait for another reason than memory, a caller such agents, and a
# tenant such callers.
MAX_HELD_BACK = 4


class Blocked:
    """Owned by the requests of a router, from when it begins with its queue until it has tried all.
    Invariant: `entries` has them in the order in which they were tried."""

    def __init__(self) -> None:
        self.entries: dict[str, QueueEntry] = {}
        self.held_back_tenants: set[str] = set()
        self.held_back: set[Key] = set()  # callers and agents
        self._held_back: dict[str, Key] = {}  # request -> its agent
        self._lacking: set[Flow] = set()  # one of it waits for memory: no other needs be tried
        self._least = [inf, inf]  # tokens that no worker has memory for: interactive, low classes

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.entries

    def limit(self, flow: Flow) -> float:
        """Those of `flow` are tried that need memory for fewer tokens."""
        return self._least[flow.is_low] if flow in self._lacking else inf

    def lacks_memory(self, entry: QueueEntry) -> bool:
        """Whether no worker had memory for one that needs no more."""
        return not entry.is_charged and entry.needs >= self._least[entry.is_low]

    def no_memory_for(self, num_tokens: int, *, is_low: bool) -> None:
        """What interactive classes lack, low ones do too: to these less is free."""
        for each in range(is_low, 2):
            self._least[each] = min(self._least[each], num_tokens)

    def count_passes(self, entry: QueueEntry) -> None:
        """It may not have been tried while it was passed, since another one of its flow was."""
        passes = entry.passes
        times = [sent.at for sent in entry.flow.passed_by if sent.has_passed(entry)]
        if len(times) > passes.count and not entry.is_late:
            passes.count, passes.since = len(times), min(passes.since, times[0])

    def add(self, entry: QueueEntry, *, is_held_back: bool = False) -> None:
        """It was tried, or needs not be. `is_held_back`: not because there is no memory."""
        self.entries[entry.record.request_id] = entry
        if is_held_back:
            self._held_back[entry.record.request_id] = entry.agent.key
            self._count_held_back()
        elif self.lacks_memory(entry):
            self._lacking.add(entry.flow)

    def are_passed(self, now: float, by: QueueEntry) -> list[QueueEntry]:
        """Another one is sent. Returns those that may not be passed again without being tried."""
        sent = Sent(by.record.arrival, by.agent.key, by.flow, by.starts, now)
        for flow in {entry.flow: None for entry in self.entries.values()}:
            flow.passed_by.append(sent)
        due = []
        for entry in self.entries.values():
            if not entry.is_late:
                entry.passes.add(now)
                if entry.passes.count == MAX_PASSED:
                    due.append(entry)
        return due

    def try_again(self, entry: QueueEntry) -> None:
        """It may be tried again, before others pass it."""
        del self.entries[entry.record.request_id]
        self._lacking.discard(entry.flow)
        if self._held_back.pop(entry.record.request_id, None) is not None:
            self._count_held_back()

    def _count_held_back(self) -> None:
        agents = Counter(self._held_back.values())
        callers = Counter(key[:2] for key in agents)
        tenants = Counter(key[0] for key in callers)
        many = (*agents.items(), *callers.items())
        self.held_back = {key for key, count in many if count >= MAX_HELD_BACK}
        self.held_back_tenants = {each for each in tenants if tenants[each] >= MAX_HELD_BACK}

    def is_held_back(self, entry: QueueEntry) -> bool:
        keys = entry.caller.key, entry.agent.key
        return not self.held_back.isdisjoint(keys) or entry.flow.tenant in self.held_back_tenants
