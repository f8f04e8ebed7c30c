"""The requests that wait for a worker, and the order in which they get one.

Life of a request here: pushed -> charged, when it is sent to a worker -> settled, when it has
ended; `restore` brings one back whose attempt failed. The order, by the first rule that decides:

1. The lowest priority number goes first. While others wait behind it, a small share of the service
   is theirs (`low_share`, split evenly between the priorities): each gets credit for its part of
   what is served, and goes first once its credit covers its next request. So none starves.
2. Within a priority, requests whose attempt failed, in order of arrival. Those whose clients have
   tokens already go before all others, whatever their priority.
3. Tenants share by weight: start-time fair queueing (Goyal, Vin, Cheng 1996). A tenant's next
   request starts, in virtual time, where its last one finished; the earliest start goes first.
4. Within a tenant, those whose first token cannot be on time (`put_late`) go last, but for one in
   `1 / low_share`.
5. Within a tenant its callers share alike, by start-time fair queueing too, and so do the agents
   of a caller, which are its sessions, each with its subagents; of an agent the oldest goes first.

Service is in units of work (`router.admission.admission`): charged as estimated when a request is
sent, and corrected to what it took when it has ended.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvrelay.router.admission.blocked import Blocked
from kvrelay.router.admission.flow import Flow, Key, Level, QueueEntry
from kvrelay.router.record import RequestRecord
from kvrelay.router.state import TenantLoad


def seen_by(is_low: bool, units: list[float]) -> float:
    """What is in the way of a request: low classes are in that of low ones only."""
    return sum(units) if is_low else units[0]


LEAST_LEFT = 0.25  # part of a request, until it ends: estimates are means, and some take far more


class FairQueue:
    """Owned by the router. Invariant: a live request waits here at most once; `num_running` counts
    each tenant's requests that have an attempt, `num_queued` those that wait for their first,
    `num_prefilling` each agent's that are served and never had a token."""

    def __init__(self, low_share: float) -> None:
        self._low_share = low_share
        self._levels: list[Level] = []  # by priority, those where something waits
        self._entries: dict[str, QueueEntry] = {}
        self._num_waiting = 0
        # Sums over all that are served: of interactive classes, and of low ones.
        self.units_running, self.units_left = [0.0, 0.0], [0.0, 0.0]
        self.num_running: Counter[str] = Counter()
        self.num_queued: Counter[str] = Counter()
        self.num_prefilling: Counter[Key] = Counter()
        self._low_running: Counter[str] = Counter()  # those of them that are of low classes
        self._low_queued: Counter[str] = Counter()
        # By tenant, caller, and whether they are of low classes.
        self._queued_by_caller: Counter[tuple[str, str, bool]] = Counter()
        self.elsewhere: Mapping[str, TenantLoad] = {}  # at other routers, by tenant

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, record: RequestRecord) -> bool:
        entry = self._entries.get(record.request_id)
        return entry is not None and not entry.is_served

    @property
    def num_new(self) -> int:
        return sum(level.num_new for level in self._levels)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Those where something waits, highest priority first. Not to be changed."""
        return tuple(self._levels)

    def in_order(self) -> Iterator[RequestRecord]:
        """All that wait, by priority and tenant: not the order of service."""
        for level in self.levels:
            yield from [entry.record for _, entry in level.returned]
            for flow in list(level.flows.values()):
                yield from [each.record for each in flow.entries()]

    def entry(self, record: RequestRecord) -> QueueEntry:
        return self._entries[record.request_id]

    def is_limited(self, flow: Flow) -> bool:
        """Whether its tenant has as many running as it may. The limit is of all routers together:
        here it is what others leave of it, or the part of it that has come here where requests wait
        at others too; but at least one. What it has of low classes counts for these alone."""
        limit = flow.share.max_concurrent
        if not limit:
            return False
        running, queued = self.load(flow.tenant).seen_by(flow.is_low)
        if running < 1:
            return False
        others = self.elsewhere.get(flow.tenant)
        if others is None:
            return running >= limit
        running_there, queued_there = others.seen_by(flow.is_low)
        left = limit - running_there
        if queued_there:
            here, there = running + queued, running_there + queued_there
            left = min(left, limit * here // (here + there))
        return running >= left

    def load(self, tenant: str) -> TenantLoad:
        """How many of its requests run and wait here."""
        of_low = self._low_running[tenant], self._low_queued[tenant]
        return TenantLoad(self.num_running[tenant], self.num_queued[tenant], *of_low)

    def num_before(self, flow: Flow, caller: str | None = None) -> int:
        """New requests that wait and count against it: of its tenant, here or at other routers, or
        of one caller of it, here. Those of low classes count for low ones alone."""
        if caller is not None:
            counts, key = self._queued_by_caller, (flow.tenant, caller)
            return counts[*key, False] + (counts[*key, True] if flow.is_low else 0)
        loads = self.load(flow.tenant), self.elsewhere.get(flow.tenant)
        return sum(load.seen_by(flow.is_low)[1] for load in loads if load)

    def find(self, priority: int, tenant: str) -> tuple[Level | None, Flow | None]:
        """Priority and tenant, where such requests wait; None where none does."""
        level = next((each for each in self._levels if each.priority == priority), None)
        return level, None if level is None else level.flows.get(tenant)

    def sent_at(self, record: RequestRecord) -> float | None:
        """When it was sent to the workers that still have it; None: another attempt failed before,
        or it never came here."""
        entry = self._entries.get(record.request_id)
        return None if entry is None else entry.sent_at

    def push(self, record: RequestRecord, units: float, num_held: int = 0) -> None:
        """A new request, to the end of its caller's. `num_held`: tokens of its prompt whose KV some
        worker holds."""
        assert record.request_id not in self._entries, f"{record.request_id} is known already"
        submit = record.submit
        level = self._level(submit.priority)
        flow = level.flows.get(submit.tenant)
        if flow is None:
            flow = level.flows[submit.tenant] = Flow((submit.tenant,), is_low=submit.is_low)
        flow.share = submit.share
        needs, caller = record.num_prompt_tokens - num_held, flow.caller(submit.caller)
        agent = caller.agent(submit.root)
        entry = QueueEntry(record, units, needs, level, flow, caller, agent)
        self._entries[record.request_id] = entry
        self._add(entry)

    def restore(self, record: RequestRecord) -> None:
        """A request whose attempt failed: before all new ones of its priority."""
        entry = self._entries[record.request_id]
        assert entry.is_served, f"{record.request_id} waits already"
        self._stop_running(entry)
        entry.sent_at = None
        entry.level = self._level(record.submit.priority)
        insort(entry.level.returned, (record.arrival, entry), key=lambda pair: pair[0])
        entry.level.units += entry.units
        self._num_waiting += 1

    def next(self, blocked: Blocked) -> QueueEntry | None:
        """The next request to be served; None: none, or only those that `blocked` has or makes
        wait, and those of tenants that have as many running as they may. It waits until it is
        charged."""
        for level in self._levels:
            for _, stream in level.returned:
                if stream.record.num_output_tokens and stream.record.request_id not in blocked:
                    return stream
        first: QueueEntry | None = None
        credited: tuple[float, QueueEntry] | None = None
        for level in self._levels:
            entry = self._head(level, blocked)
            if entry is None:
                continue
            if first is None:
                first = entry
            elif level.credit >= entry.units and (credited is None or level.credit > credited[0]):
                credited = level.credit, entry
        return first if credited is None else credited[1]

    def charge(self, now: float, record: RequestRecord) -> None:
        """It is sent to a worker: charge its tenant and its caller, and credit the lower priorities
        that wait."""
        entry = self._entries[record.request_id]
        level, flow = entry.level, entry.flow
        self._take_out(entry)
        entry.is_served = True
        self.num_running[record.submit.tenant] += 1
        if entry.is_low:
            self._low_running[record.submit.tenant] += 1
        if record.first_token_at is None:
            entry.is_prefilling = True
            self.num_prefilling[entry.agent.key] += 1
        entry.units_left = entry.units
        self.units_running[entry.is_low] += entry.units
        self.units_left[entry.is_low] += entry.units
        if entry.is_charged:
            return
        entry.is_charged, entry.sent_at = True, now
        level.virtual = max(level.virtual, flow.start)
        flow.finish = flow.start + entry.units / flow.share.weight
        flow.charge(entry)
        for idle in [f for f in level.flows.values() if not f]:
            if idle.finish <= level.virtual:  # a new flow would start here as well
                del level.flows[idle.tenant]
        top = min(each.priority for each in (level, *self._levels[:1]))
        if level.priority > top:
            level.credit = max(0.0, level.credit - entry.units)
        behind = [each for each in self._levels if each.priority > top]
        for each in behind:
            earned = self._low_share * entry.units / len(behind)
            each.credit = min(each.credit + earned, each.units)

    def put_late(self, record: RequestRecord) -> None:
        """A new request that cannot have its first token on time: others go before it."""
        entry = self._entries[record.request_id]
        entry.flow.put_late(entry)

    def on_first_token(self, record: RequestRecord) -> None:
        entry = self._entries.get(record.request_id)
        if entry is not None and entry.is_prefilling:
            entry.is_prefilling = False
            _decrement(self.num_prefilling, entry.agent.key)

    def work_on(self, record: RequestRecord, units: float) -> None:
        """So much more of its service is done."""
        entry = self._entries.get(record.request_id)
        if entry is not None and entry.is_served:
            left = max(entry.units_left - units, LEAST_LEFT * entry.units)
            self.units_left[entry.is_low] += left - entry.units_left
            entry.units_left = left

    def settle(self, record: RequestRecord, units: float) -> None:
        """It has ended, queued or served, after `units` of service: its tenant and its caller are
        charged the difference to the estimate."""
        entry = self._entries.get(record.request_id)
        if entry is None:
            return
        if entry.is_served:
            self._stop_running(entry)
        else:
            self._take_out(entry)
        if entry.is_charged:
            entry.flow.finish += (units - entry.units) / entry.flow.share.weight
            entry.flow.correct(entry, units - entry.units)
        del self._entries[record.request_id]

    def surplus(self, max_new: int) -> RequestRecord | None:
        """The new request to refuse because more than `max_new` wait; None: no more do.

        It is the newest of the caller that has most waiting, of the tenant that has most for its
        weight, in the lowest priority that has more waiting than its guaranteed share."""
        if self.num_new <= max_new:
            return None
        levels = [level for level in self._levels if level.num_new]
        chosen = levels[0]
        if len(levels) > 1:
            guaranteed = int(self._low_share * max_new / (len(levels) - 1))
            lower = (each for each in reversed(levels[1:]) if each.num_new > guaranteed)
            chosen = next(lower, chosen)

        def excess(flow: Flow) -> tuple[float, int]:
            return len(flow) / flow.share.weight, flow.newest.record.arrival

        newest: RequestRecord = max(
            (f for f in chosen.flows.values() if f), key=excess
        ).newest.record
        return newest

    def check_integrity(self) -> None:
        """Raises AssertionError where a sum is wrong."""
        counted: Counter[str] = Counter()
        for entry in self._entries.values():
            counted[entry.record.submit.tenant] += entry.is_served
        assert +self.num_running == +counted, (self.num_running, counted)
        low = Counter(e.record.submit.tenant for e in self._entries.values() if e.is_low)
        assert self._low_running + self._low_queued <= low, (self._low_running, self._low_queued)
        prefilling = Counter(e.agent.key for e in self._entries.values() if e.is_prefilling)
        assert self.num_prefilling == prefilling, (self.num_prefilling, prefilling)
        left = sum(entry.units_left for entry in self._entries.values() if entry.is_served)
        assert abs(sum(self.units_left) - left) < 1e-6 * max(1.0, left), (self.units_left, left)
        assert self._num_waiting == sum(1 for _ in self.in_order())
        for level in self._levels:
            assert level, f"nothing of priority {level.priority} waits"
            flows = level.flows.values()
            assert level.num_new == sum(len(flow) for flow in flows)
            for flow in flows:
                flow.check_integrity()
            units = sum(flow.units for flow in flows) + sum(e.units for _, e in level.returned)
            assert abs(level.units - units) < 1e-6 * max(1.0, units), (level.units, units)

    def _level(self, priority: int) -> Level:
        for level in self._levels:
            if level.priority == priority:
                return level
        level = Level(priority)
        insort(self._levels, level, key=lambda each: each.priority)
        return level

    def _head(self, level: Level, blocked: Blocked) -> QueueEntry | None:
        """What is next of `level`."""
        skip, without = blocked.entries, blocked.held_back_tenants
        for _, entry in level.returned:
            if entry.record.request_id not in skip and not blocked.is_held_back(entry):
                return entry
        held_back, late_share = blocked.held_back, self._low_share
        heads = [
            (flow.start, head)
            for flow in level.flows.values()
            if flow
            and flow.tenant not in without
            and not self.is_limited(flow)
            and (head := flow.head(skip, held_back, late_share, blocked.limit(flow)))
        ]
        found = min(heads, key=lambda each: (each[0], each[1].record.arrival), default=None)
        return None if found is None else found[1]

    def _add(self, entry: QueueEntry) -> None:
        level, flow = entry.level, entry.flow
        if not flow:
            flow.floor = level.virtual
        flow.add(entry)
        level.units += entry.units
        level.num_new += 1
        self.num_queued[flow.tenant] += 1
        self._queued_by_caller[flow.tenant, entry.caller.name, flow.is_low] += 1
        if flow.is_low:
            self._low_queued[flow.tenant] += 1
        self._num_waiting += 1

    def _take_out(self, entry: QueueEntry) -> None:
        level, flow = entry.level, entry.flow
        if flow.remove(entry):
            level.num_new -= 1
            _decrement(self.num_queued, flow.tenant)
            _decrement(self._queued_by_caller, (flow.tenant, entry.caller.name, flow.is_low))
            if flow.is_low:
                _decrement(self._low_queued, flow.tenant)
        else:
            level.returned = [pair for pair in level.returned if pair[1] is not entry]
        level.units -= entry.units
        self._num_waiting -= 1
        if not level:
            self._levels.remove(level)

    def _stop_running(self, entry: QueueEntry) -> None:
        self.on_first_token(entry.record)
        entry.is_served = False
        _decrement(self.num_running, entry.record.submit.tenant)
        if entry.is_low:
            _decrement(self._low_running, entry.record.submit.tenant)
        self.units_running[entry.is_low] -= entry.units
        self.units_left[entry.is_low] -= entry.units_left
        if not self.num_running:  # so that errors of rounding do not add up
            self.units_running, self.units_left = [0.0, 0.0], [0.0, 0.0]


def _decrement(counts: Counter[Any], name: Any) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
