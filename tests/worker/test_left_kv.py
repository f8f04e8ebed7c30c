"""A stream that is taken over waits a moment for the KV that its dead worker left."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.node import Wake, Woken
from kvrelay.engine.request import SamplingParams
from kvrelay.kvtransfer.agent import FindStored, StoreFound
from kvrelay.worker.left_kv import WAIT_S
from tests.worker.world import BLOCK_SIZE, World, checksum, reference

PROMPT = list(range(1, 21))  # 5 blocks
BEFORE = reference(PROMPT, 12)  # what the dead worker has generated
TOKENS = PROMPT + BEFORE  # 8 blocks


class Machine(World):
    """Its decode worker finds what others have left when `leave` is called."""

    def __init__(self, **limits: Any) -> None:
        self.wakes: list[tuple[float, str]] = []
        self.asked: list[tuple[bytes, ...]] = []
        options = {"num_host_blocks": 40, "host_outlives": True, "reads_left_kv": True}
        super().__init__(**{**options, **limits})

    def perform(self, node: str, effects: list[Any]) -> None:
        wakes = [each for each in effects if isinstance(each, Wake) and each.tag != "tick"]
        self.asked += [each.names for each in effects if isinstance(each, FindStored)]
        self.wakes += [(self.now + each.after_s, each.tag) for each in wakes]
        super().perform(node, effects)

    def pass_time(self, until: float) -> None:
        """Timers that come due by `until` go off."""
        for at, tag in sorted(self.wakes):
            if at <= until:
                self.wakes.remove((at, tag))
                self.now = at
                self.deliver("decode", Woken(tag))
        self.now = until

    def leave(self, tokens: list[int], *, first: int = 0, has_more: bool = False) -> None:
        """Blocks of `tokens` from `first` on were left by a worker that has died."""
        chain = BlockChain(b"tiny", UNSALTED, BLOCK_SIZE)
        slots = self.lower["decode"][Tier.LEFT]
        found, at = [], len(slots)
        for index, name in enumerate(chain.extend(tokens)):
            slots.append(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            if index >= first:
                found.append(DiskRecord(at + index, name, checksum(slots[-1]), 60.0))
        place = Tier.LEFT, at, len(slots) - at
        self.queue.append(("decode", StoreFound(*place, tuple(found), has_more=has_more)))

    def take_over(self, name: str = "a", count: int = 20, **options: Any) -> None:
        """The router hands over a stream of which it has `BEFORE`."""
        params = SamplingParams(max_tokens=count, temperature=0)
        work = (name, params, 1, "router", tuple(TOKENS), len(PROMPT), 60.0)
        self.queue.append(("decode", Decode(*work, **options)))

    def cached(self, name: str = "a") -> dict[str, int]:
        frames = [frame for frame in self.to_router if isinstance(frame, TokenDeltas)]
        deltas = [each for frame in frames for each in frame.deltas if each.request_id == name]
        return next(d.cached_by_source for d in deltas if d.num_cached_tokens is not None)

    @property
    def num_steps(self) -> float:
        return self.decode.core.counters.get("steps", 0)

    def assert_right(self, name: str = "a", count: int = 20) -> None:
        self.drain()
        # The router has the first ones: what comes begins behind them.
        assert self.output(name, TOKENS) == reference(PROMPT, count)[len(BEFORE) :]
        self.assert_idle()


def test_it_goes_on_with_what_is_found_at_once() -> None:
    machine = Machine()
    machine.take_over()
    machine.drain()
    assert machine.num_steps == 0
    machine.leave(TOKENS)
    machine.assert_right()
    assert machine.now == 0.0
    assert machine.cached() == {"orphaned": len(TOKENS) - BLOCK_SIZE}


def test_it_asks_for_what_it_lacks_and_waits_for_all_of_that() -> None:
    machine = Machine()
    machine.take_over()
    machine.drain()
    (asked,) = machine.asked
    assert asked == tuple(BlockChain(b"tiny", UNSALTED, BLOCK_SIZE).extend(TOKENS)[:-1])
    machine.leave(TOKENS[:16], has_more=True)
    machine.drain()
    assert machine.num_steps == 0
    machine.leave(TOKENS)
    machine.assert_right()
    assert machine.cached() == {"orphaned": len(TOKENS) - BLOCK_SIZE}


def test_it_loads_what_was_left_however_slow_the_last_load_was() -> None:
    machine = Machine()
    machine.submit("b", [60, 61, 62], 2, remote=False)
    machine.drain()  # so that it knows how fast it computes
    machine.decode.exchange.connector.rates.add(Tier.LEFT, 32, 1e6)
    machine.take_over()
    machine.leave(TOKENS)
    machine.assert_right()
    assert machine.cached() == {"orphaned": len(TOKENS) - BLOCK_SIZE}


def test_it_computes_when_nothing_is_found_in_time() -> None:
    machine = Machine()
    machine.take_over()
    machine.drain()
    machine.pass_time(WAIT_S / 2)
    machine.drain()
    assert machine.num_steps == 0
    machine.pass_time(2 * WAIT_S)
    machine.assert_right()
    assert machine.cached() == {}


def test_what_is_of_no_use_to_it_does_not_end_the_wait() -> None:
    machine = Machine()
    machine.take_over()
    machine.leave([50] * 40)
    machine.leave(TOKENS, first=2)  # its beginning is not here yet
    machine.drain()
    assert machine.num_steps == 0
    machine.leave(TOKENS)
    machine.assert_right()
    assert machine.cached() == {"orphaned": len(TOKENS) - BLOCK_SIZE}


@pytest.mark.parametrize(
    "limits",
    [{"reads_left_kv": False}, {"num_held": len(TOKENS) - BLOCK_SIZE}, {"prompt": True}],
    ids=["nothing_is_left_here", "a_peer_has_it", "nobody_has_read_any_of_it"],
)
def test_others_do_not_wait(limits: dict[str, Any]) -> None:
    machine = Machine(reads_left_kv=limits.get("reads_left_kv", True))
    if limits.get("prompt"):
        machine.submit("a", PROMPT, 4, remote=False)
        machine.assert_finishes("a", PROMPT, 4)
    else:
        machine.take_over(num_held=limits.get("num_held", 0))
        machine.assert_right()
    assert machine.now == 0.0
    assert machine.wakes == []


def test_it_holds_up_no_others_and_ends_when_it_is_cancelled() -> None:
    machine = Machine()
    machine.take_over()
    machine.submit("b", PROMPT, 4, remote=False)
    machine.assert_finishes("b", PROMPT, 4)
    machine.deliver("decode", Abort("a", 1))
    machine.leave(TOKENS)
    machine.drain()
    machine.assert_idle()
