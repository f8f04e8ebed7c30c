"""Adapters of a runner: loaded beside steps, in a bounded memory, and rows in whatever order."""

import threading

import pytest

from kvrelay.engine import adapter_copies
from kvrelay.engine.adapters import Adapter, AdapterError, read_adapter
from kvrelay.engine.model import loads as module
from kvrelay.engine.model.loads import Loads
from kvrelay.engine.model.terms import RowTerms
from kvrelay.engine.request import Refusal, SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import scheduled, tokens_of
from tests.support.adapters import merge, write_adapter

PROMPTS = [tokens_of(20 + number, seed=number) for number in range(6)]
SIZE = 10


class Big:
    nbytes = SIZE


class World:
    """Adapters whose loading ends when it is said so, under a clock that stands still."""

    def __init__(self, monkeypatch, num_fitting: int) -> None:
        monkeypatch.setattr(module, "IDLE_WAIT_S", 0.0)
        self.now, self.gate = 0.0, threading.Semaphore(0)
        self.broken: set[bytes] = set()
        most = num_fitting * SIZE
        self.adapters = Loads(self.load, most, clock=lambda: self.now)

    def load(self, adapter):
        assert self.gate.acquire(timeout=60)
        if adapter.digest in self.broken:
            raise AdapterError(f"{adapter.source} is broken")
        return RowTerms(((object(), Big()),))

    def step(self, names, loads=0):
        """Names of those that run in this step, after so many were loaded."""
        seqs = self.seqs(names)
        waiting, failed = self.adapters.choose(seqs)
        if loads:
            futures = [entry.future for entry in self.adapters._entries.values()]
            for _ in range(loads):
                self.gate.release()
            for future in futures[-loads:]:
                future.exception(timeout=60)
            waiting, failed = self.adapters.choose(seqs)
        here = [i for i in range(len(names)) if i not in waiting and i not in failed]
        assert len(self.adapters.loaded([seqs[i] for i in here])) == len(
            {names[i] for i in here} - {"-"}
        )
        return "".join(names[i] for i in here), sorted(failed.values())

    def seqs(self, names):
        return [scheduled([1], 0, [0], need=self.named(name)) for name in names]

    @staticmethod
    def named(name):
        return None if name == "-" else Adapter(name.encode(), name)


def test_those_that_are_not_loaded_yet_wait_and_the_others_run(monkeypatch):
    world = World(monkeypatch, 4)
    assert world.step("-a-b") == ("--", [])
    assert world.step("-a-b", loads=2) == ("-a-b", [])
    assert world.adapters.num_loads == 2
    assert world.step("ba-") == ("ba-", [])


def test_what_was_not_used_for_the_longest_makes_room(monkeypatch):
    world = World(monkeypatch, 2)
    for name in "abac":
        world.step(name, loads=not world.step(name)[0])
    assert world.step("a") == ("a", [])
    assert world.adapters.num_loads == 3
    assert world.adapters.held(world.seqs("a")).digests == (b"a", b"c"), "what routers know of it"
    assert world.adapters.held(world.seqs("-")) is None
    assert world.step("b") == ("", []), "b was dropped for c"
    world.gate.release()


def test_where_more_are_in_use_than_fit_they_take_turns(monkeypatch):
    world, served = World(monkeypatch, 2), dict.fromkeys("abcde", 0)
    world.step("abcde")
    world.gate.release(1000)
    for _ in range(40):
        for entry in [*world.adapters._entries.values()]:
            entry.future.exception(timeout=60)
        ran, failed = world.step("abcde")
        assert not failed
        for name in ran:
            served[name] += 1
        world.now += module.TURN_S / 4
    assert min(served.values()) >= 5, served
    assert world.adapters.num_loads < 25, "they are not loaded again in every step"


def test_a_failure_is_told_at_once_and_tried_again_later(monkeypatch):
    world = World(monkeypatch, 2)
    world.broken = {b"a"}
    assert world.step("ab", loads=2) == ("b", ["the adapter cannot be loaded: a is broken"])
    assert world.step("a") == ("", ["the adapter cannot be loaded: a is broken"])
    world.now += module.RETRY_S
    world.broken = set()
    assert world.step("a", loads=1) == ("a", [])


def test_one_that_exceeds_the_bound_alone_is_refused(monkeypatch):
    world = World(monkeypatch, 0)
    told = "the adapter takes 10 bytes, engine.adapter_bytes allows 0"
    assert world.step("a", loads=1) == ("", [told])


def digest_of(folder):
    return Adapter(read_adapter(folder).digest, str(folder))


def run(runner, adapters, count, **step_fields):
    """Greedy tokens of each prompt, with the adapter that it has, in steps of all of them."""
    outputs = [[] for _ in PROMPTS]
    for number in range(count):
        seqs = []
        for i, (prompt, adapter, out) in enumerate(zip(PROMPTS, adapters, outputs, strict=True)):
            context = [*prompt, *out]
            feed, start = ([context[-1]], len(context) - 1) if out else (context, 0)
            sampling = SamplingParams(temperature=0.0, max_tokens=count)
            blocks = [*range(4 * i, 4 * i + 4)]
            fields = {"context": context, "sampling": sampling, "need": adapter}
            drafts = {"draft_tokens": [7, 8]} if step_fields.get("drafts") and out else {}
            named = {"request_id": f"r{i}", "num_prompt_tokens": len(prompt)}
            seqs.append(scheduled(feed, start, blocks, **fields, **drafts, **named))
        done = runner.execute(Step(number, seqs, repeats=step_fields.get("repeats", 1)))
        while done.waiting:
            done = runner.execute(Step(number, seqs))
        assert not done.failed
        assert not done.unloaded
        for out, sampled in zip(outputs, done.sampled, strict=True):
            out.extend((sampled.token, *sampled.more))
    return [out[:count] for out in outputs]


@pytest.mark.parametrize("step_fields", [{}, {"drafts": True}, {"repeats": 4}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_several_adapters_give_each_its_tokens(tmp_path, llama, dtype, step_fields):
    options = {"num_blocks": 32, "threads": 2, "dtype": dtype}
    folders = [write_adapter(tmp_path / f"{i}", llama, seed=i, rank=4 + i) for i in range(2)]
    named = [digest_of(folder) for folder in folders]
    adapters = [named[1], None, named[0], named[1], None, named[0]]
    mixed = run(model_runner(llama, **options), adapters, 12, **step_fields)
    without = run(model_runner(llama, **options), 6 * [None], 12, **step_fields)
    assert [mixed[1], mixed[4]] == [without[1], without[4]]
    for place, adapter in enumerate(adapters):
        if adapter is not None:
            assert mixed[place] != without[place], "the adapter changes nothing"
    if dtype == "float32":
        for i, (folder, adapter) in enumerate(zip(folders, named, strict=True)):
            merged = model_runner(merge(tmp_path / f"merged{i}", llama, folder), **options)
            alone = run(merged, 6 * [None], 12)
            places = [place for place in range(6) if adapters[place] == adapter]
            assert [mixed[place] for place in places] == [alone[place] for place in places]


def test_a_changed_adapter_is_that_requests_own_failure(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(adapter_copies, "copies_dir", lambda: tmp_path / "copies")
    folder = write_adapter(tmp_path / "adapter", llama)
    adapter = digest_of(folder)
    write_adapter(folder, llama, seed=1)
    seqs = [
        scheduled(PROMPTS[0], 0, [0, 1], need=adapter, request_id="a"),
        scheduled(PROMPTS[1], 0, [2, 3], request_id="b"),
    ]
    runner = model_runner(llama, num_blocks=8, dtype="float32", threads=2)
    done = runner.execute(Step(0, seqs))
    while done.waiting:
        done = runner.execute(Step(0, seqs))
    assert done.sampled[1] is not None
    reason, why = done.fault(0)
    assert reason is Refusal.NEED
    changed = "its files have changed since it was registered; register it again"
    assert why == f"the adapter cannot be loaded: {changed}", "and not where it lay"
