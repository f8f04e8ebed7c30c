"""The runtime: delivery, faults, lives, steps, and reads that tear."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Note, Send, Wake, Woken
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Execute, StepDone
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected
from kvrelay.lab.sim.executor import ReadFate, SimPool
from kvrelay.lab.sim.faults import FaultPlan, Faults, Partition, Pause
from kvrelay.lab.sim.model import UNWRITTEN, extend_slots, generate
from kvrelay.lab.sim.runtime import PoolShape, SimNode, SimRuntime
from tests.lab.sim.toys import Do, Ping, Recorder, pings, step_of

SHAPE = PoolShape(num_blocks=8, block_size=4)


def add(runtime: SimRuntime, name: str, *effects: object) -> Recorder:
    node = runtime.add(name, lambda epoch, records: Recorder(name, list(effects)), SHAPE)
    assert isinstance(node, Recorder)
    return node


def life(runtime: SimRuntime, name: str) -> SimNode:
    current = runtime.life(name)
    assert current is not None
    return current


def pool(runtime: SimRuntime, name: str) -> SimPool:
    return life(runtime, name).executor.pool


def plan(runtime: SimRuntime, **strengths: float) -> None:
    runtime.faults.plan = FaultPlan(**strengths)  # type: ignore[arg-type]
    runtime.faults.active = True


def test_messages_of_a_pair_arrive_once_and_in_order_without_faults() -> None:
    runtime = SimRuntime(1)
    b = add(runtime, "b")
    add(runtime, "a", *pings("b", 50))
    runtime.run_until(1.0)
    assert b.messages == [Ping(n) for n in range(50)]
    clock_s = life(runtime, "b").clock_s
    assert all(0 < at - clock_s < 0.01 for at, _ in b.got)


def test_lost_duplicated_and_delayed_messages_are_as_many_as_counted() -> None:
    runtime = SimRuntime(1)
    plan(runtime, lose=0.2, duplicate=0.2, delay=0.2, delay_s=0.5)
    b = add(runtime, "b")
    add(runtime, "a", *pings("b", 200))
    runtime.run_until(2.0)
    injected = runtime.faults.injected
    assert len(b.got) == 200 - injected["message lost"] + injected["message duplicated"]
    assert min(injected.values()) > 10
    assert b.messages != sorted(b.messages, key=lambda ping: ping.number)


def test_nodes_of_one_process_lose_nothing() -> None:
    runtime = SimRuntime(1, trusted={"a", "b"})
    plan(runtime, lose=0.9)
    b = add(runtime, "b")
    add(runtime, "a", *pings("b", 50))
    runtime.run_until(1.0)
    assert b.messages == [Ping(n) for n in range(50)]


def test_processes_do_not_agree_on_the_time() -> None:
    runtime = SimRuntime(1)
    nodes = [add(runtime, name, Wake(0.5, "x")) for name in ("a", "b")]
    runtime.run_until(1.0)
    first, second = (node.got[0][0] for node in nodes)
    assert first != second


def test_a_partition_cuts_both_directions_while_it_lasts() -> None:
    runtime = SimRuntime(1)
    runtime.faults.plan = FaultPlan(
        partitions=(Partition(frozenset({"a", "b"}), from_s=0.0, until_s=0.5),)
    )
    runtime.faults.active = True
    a, b, c = (add(runtime, name) for name in "abc")
    runtime.post("test", "a", Do(*pings("b", 3), *pings("c", 3)))
    runtime.post("test", "b", Do(*pings("a", 3)))
    runtime.run_until(0.5)
    assert (len(a.messages), len(b.messages), len(c.messages)) == (0, 0, 3)
    runtime.post("test", "a", Do(*pings("b", 3)))
    runtime.run_until(1.0)
    assert len(b.messages) == 3


def test_a_paused_worker_hears_everything_afterwards_in_order() -> None:
    runtime = SimRuntime(1)
    runtime.faults.plan = FaultPlan(pauses=(Pause("b", from_s=0.0, until_s=0.5),))
    runtime.faults.active = True
    b = add(runtime, "b")
    add(runtime, "a", *pings("b", 20))
    runtime.run_until(0.49)
    assert b.got == []
    runtime.run_until(1.0)
    assert b.messages == [Ping(n) for n in range(20)]


def test_a_wake_up_comes_when_it_is_due_and_a_note_is_counted() -> None:
    runtime = SimRuntime(1)
    a = add(runtime, "a", Wake(0.5, "later"), Wake(0.25, "soon"), Note("info", "said", "hello"))
    runtime.run_until(1.0)
    clock_s = life(runtime, "a").clock_s
    assert a.got == [(clock_s + 0.25, Woken("soon")), (clock_s + 0.5, Woken("later"))]
    assert runtime.notes == {"said": 1}


def test_a_crash_takes_steps_wake_ups_and_messages_on_their_way_with_it() -> None:
    runtime = SimRuntime(1)
    dead = add(runtime, "b", Wake(0.1, "tick"), Execute(step_of([1, 2], [0])))
    add(runtime, "a", *pings("b", 5))
    assert runtime.crash("b") == 1
    reborn = runtime.restart("b")
    assert isinstance(reborn, Recorder)
    reborn.effects.clear()
    runtime.run_until(1.0)
    assert dead.got == []
    assert [m for m in reborn.messages if isinstance(m, Ping)] == []
    assert life(runtime, "b").epoch == 2


def test_what_a_worker_sent_before_it_died_still_arrives() -> None:
    runtime = SimRuntime(1)
    b = add(runtime, "b")
    add(runtime, "a", *pings("b", 3))
    runtime.crash("a")
    runtime.run_until(1.0)
    assert len(b.got) == 3


def test_a_node_that_raises_is_a_violation_and_ends_the_run() -> None:
    class Careless(Recorder):
        def receive(self, now: float, message: object) -> list[object]:
            raise KeyError("what is this")

    runtime = SimRuntime(1)
    runtime.add("a", lambda epoch, records: Careless("a", [Wake(0.1, "x"), Wake(0.2, "y")]))
    assert not runtime.run_until(1.0)
    assert [v.kind for v in runtime.violations] == ["node raised"]
    assert "what is this" in runtime.violations[0].text


def test_steps_give_the_tokens_of_the_oracle() -> None:
    prompt, sampling = [3, 1, 4, 1, 5], SamplingParams(temperature=0, max_tokens=4)
    expected, _ = generate(prompt, sampling, 100)
    runtime = SimRuntime(1)
    a = add(runtime, "a")
    tokens = list(prompt)
    for number in range(4):
        start = 0 if number == 0 else len(tokens) - 1
        step = step_of(tokens, [5, 2, 7], start=start, step_id=number)
        runtime.post("test", "a", Do(Execute(step)))
        runtime.run_until(runtime.now + 0.1)
        done = a.messages[-1]
        assert isinstance(done, StepDone)
        assert done.sampled[0] is not None
        tokens = [*tokens, done.sampled[0].token]
    assert tokens[len(prompt) :] == expected
    assert runtime.violations == []


def test_a_step_over_blocks_that_were_never_written_is_a_violation() -> None:
    runtime = SimRuntime(1)
    add(runtime, "a", Execute(step_of([1, 2, 3, 4, 5], [0, 1], start=4)))
    runtime.run_until(0.1)
    assert [v.kind for v in runtime.violations] == ["block used with wrong content"]
    assert "r block 0 position 0" in runtime.violations[0].text


def test_two_steps_in_flight_are_our_bug() -> None:
    runtime = SimRuntime(1)
    step = step_of([1], [0])
    add(runtime, "a", Execute(step), Execute(step))
    assert [v.kind for v in runtime.violations] == ["node raised"]


def test_a_failed_step_leaves_rubbish_and_samples_nothing() -> None:
    runtime = SimRuntime(1)
    plan(runtime, step_error=1.0)
    a = add(runtime, "a", Execute(step_of([1, 2], [0])))
    runtime.run_until(0.1)
    (done,) = a.messages
    assert done.error == "injected"
    assert done.sampled == [None]
    assert pool(runtime, "a").blocks[0] == [UNWRITTEN] * 4


@pytest.fixture
def pair() -> tuple[SimRuntime, Recorder]:
    """ "c" can read "p", whose blocks 0..3 hold a sequence of 16 tokens."""
    runtime = SimRuntime(7)
    add(runtime, "p", Execute(step_of(list(range(1, 17)), [0, 1, 2, 3])))
    consumer = add(runtime, "c", ConnectPeer("p", 1, 8, b""))
    runtime.run_until(0.1)
    assert consumer.messages == [PeerConnected("p", 1)]
    consumer.got.clear()
    return runtime, consumer


def read(timeout_s: float = 1.0, epoch: int = 1) -> Do:
    return Do(CopyBlocks(0, "p", epoch, (0, 1, 2, 3), (4, 5, 6, 7), timeout_s))


def test_a_read_brings_blocks_and_their_checksums(pair: tuple[SimRuntime, Recorder]) -> None:
    runtime, consumer = pair
    runtime.post("test", "c", read())
    runtime.run_until(1.0)
    (done,) = consumer.messages
    source, here = pool(runtime, "p"), pool(runtime, "c")
    assert done.error is None
    assert here.blocks[4:] == source.blocks[:4]
    assert done.checksums == tuple(source.checksum(block) for block in range(4))
    slots: list[int] = []
    extend_slots(slots, range(1, 17))
    assert here.gather([4, 5, 6, 7], 16) == slots


def test_a_source_overwritten_during_a_read_arrives_torn(
    pair: tuple[SimRuntime, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, consumer = pair
    fate = ReadFate(0.5, None, (0.1, 0.2, 0.3, 0.4))
    monkeypatch.setattr(Faults, "read", lambda *args, **kwargs: fate)
    source, here = pool(runtime, "p"), pool(runtime, "c")
    before = [list(block) for block in source.blocks[:4]]
    start = runtime.now
    runtime.post("test", "c", read())

    def overwrite() -> None:
        source.blocks[:4] = [[9, 9, 9, 9] for _ in range(4)]

    runtime.call_at(start + 0.25, overwrite)
    runtime.run_until(start + 1.0)
    assert here.blocks[4:] == [before[0], before[1], [9] * 4, [9] * 4]
    assert consumer.messages[0].error is None


def test_a_flipped_slot_changes_the_checksum(pair: tuple[SimRuntime, Recorder]) -> None:
    runtime, consumer = pair
    plan(runtime, flip=1.0)
    runtime.post("test", "c", read())
    runtime.run_until(1.0)
    source = pool(runtime, "p")
    expected = [source.checksum(block) for block in range(4)]
    assert sum(a != b for a, b in zip(consumer.messages[0].checksums, expected, strict=True)) == 1


def test_without_checksums_every_block_has_the_same() -> None:
    runtime = SimRuntime(1)
    runtime.add("a", lambda epoch, records: Recorder("a"), PoolShape(2, 4, with_checksums=False))
    pool(runtime, "a").blocks[0][0] = 5
    assert pool(runtime, "a").checksum(0) == pool(runtime, "a").checksum(1)


def test_a_stalled_read_may_write_until_it_is_done_and_never_after(
    pair: tuple[SimRuntime, Recorder],
) -> None:
    runtime, consumer = pair
    plan(runtime, read_stall=1.0)
    here = pool(runtime, "c")
    start = runtime.now
    runtime.post("test", "c", read(timeout_s=2.0))
    runtime.run_until(start + 1.9)
    assert consumer.messages == []
    assert life(runtime, "c").executor.writable[Tier.DEVICE] == {4, 5, 6, 7}
    runtime.run_until(start + 10.0, done=lambda: bool(consumer.messages))
    assert runtime.now - start == pytest.approx(2.0, abs=0.01)
    assert consumer.messages[0].error == "timed out"
    assert any(block[0] != UNWRITTEN for block in here.blocks[4:])
    left = [[n] * 4 for n in range(8)]
    here.blocks[:] = [list(block) for block in left]
    runtime.run_until(start + 20.0)
    assert here.blocks == left


def test_a_step_over_a_block_that_a_read_may_write_to_is_a_violation(
    pair: tuple[SimRuntime, Recorder],
) -> None:
    runtime, _ = pair
    plan(runtime, read_stall=1.0)
    runtime.post("test", "c", read())
    runtime.post("test", "c", Do(Execute(step_of([1, 2], [5]))))
    runtime.run_until(0.5)
    assert "block in use while a transfer can write to it" in {v.kind for v in runtime.violations}


def test_reading_a_worker_that_died_fails_even_when_it_is_back(
    pair: tuple[SimRuntime, Recorder],
) -> None:
    runtime, consumer = pair
    runtime.crash("p")
    runtime.restart("p")
    runtime.post("test", "c", read())
    runtime.run_until(3.0)
    (done,) = consumer.messages
    assert isinstance(done, CopyDone)
    assert done.error is not None
    assert pool(runtime, "c").blocks[4:] == [[UNWRITTEN] * 4] * 4


def test_connecting_to_a_past_epoch_fails(pair: tuple[SimRuntime, Recorder]) -> None:
    runtime, consumer = pair
    runtime.crash("p")
    runtime.restart("p")
    runtime.post("test", "c", Do(ConnectPeer("p", 1, 8, b""), ConnectPeer("p", 2, 8, b"")))
    runtime.run_until(1.0)
    errors = {m.epoch: m.error for m in consumer.messages}
    assert errors[1] is not None
    assert errors[2] is None


def test_the_hash_is_over_what_was_delivered() -> None:
    def run(seed: int, count: int) -> str:
        runtime = SimRuntime(seed)
        add(runtime, "b")
        add(runtime, "a", *pings("b", count))
        runtime.run_until(1.0)
        return runtime.event_hash()

    assert run(1, 5) == run(1, 5)
    assert len({run(1, 5), run(2, 5), run(1, 6)}) == 3


def test_a_message_to_nobody_is_lost() -> None:
    runtime = SimRuntime(1)
    add(runtime, "a", Send("nobody", Ping(1)))
    assert runtime.run_until(1.0)
