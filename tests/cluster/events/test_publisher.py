"""KV events as they go over the wire: a plain subscriber, and MessagePack."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvrelay.cluster.events import publisher as module
from kvrelay.cluster.events.form import number_of
from kvrelay.cluster.events.publisher import endpoint_of, salt_tag
from kvrelay.engine.kv.block_hash import group_hash
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.needs import Need
from tests.cluster.events.peer import (
    MODEL,
    SIZE,
    Peer,
    Publishing,
    names_of,
    numbers,
    spec_of,
    wait_for,
    zmq,
)

PROMPT = list(range(5 * SIZE))


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """What is closed at the end."""
    found: list[Any] = []
    yield found
    for each in reversed(found):
        each.publisher.close() if isinstance(each, Publishing) else each.close()


def publishing(made: list[Any], *args: Any, **changes: Any) -> Publishing:
    made.append(Publishing(*args, **changes))
    return made[-1]


def peer(made: list[Any], of: Publishing, *args: Any, **options: Any) -> Peer:
    made.append(Peer(of, *args, **options))
    return made[-1]


def test_who_subscribes_learns_tokens_parents_and_tiers(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0", "prefill-0")
    router.start()
    listener = peer(made, router)
    names = router.name(PROMPT)
    router.say("decode-0", names)
    router.say("prefill-0", names[:2])
    router.say("decode-0", names[:3], tier=Tier.HOST)
    router.say("decode-0", names[:1], tier=Tier.DISK)
    listener.follow(router)
    assert listener.held[0, "GPU"] == {
        number_of(name): (
            number_of(names[at - 1]) if at else None,
            PROMPT[at * SIZE : (at + 1) * SIZE],
        )
        for at, name in enumerate(names)
    }
    assert (listener.has(0, "CPU"), listener.has(0, "DISK")) == (
        numbers(names[:3]),
        numbers(names[:1]),
    )
    assert listener.has(1) == numbers(names[:2])
    router.say("decode-0", removed=names[3:])
    listener.follow(router)
    assert listener.has(0) == numbers(names[:3])
    assert listener.topics[0] == f"kv@decode-0@{MODEL}"


def test_a_whole_prompt_is_one_event(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0")
    router.start()
    router.say("decode-0", router.name(PROMPT))
    listener = peer(made, router)
    listener.follow(router)
    [stored] = [each for each in listener.events if each[0] == "BlockStored"]
    names = [number_of(name) for name in names_of(PROMPT, spec_of())]
    assert stored == ["BlockStored", names, None, PROMPT, SIZE, None, "GPU", None, None]


def test_tokens_may_be_known_before_or_after_the_worker_says_it_has_them(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0")
    router.start()
    names = names_of(PROMPT, spec_of())
    router.say("decode-0", names)
    listener = peer(made, router)
    listener.follow(router)
    assert listener.has(0) == set()
    router.name(PROMPT)
    listener.follow(router)
    assert listener.has(0) == numbers(names)


def test_of_a_model_with_groups_the_blocks_of_the_first_are_published(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0")
    router.start()
    names = router.name(PROMPT)
    router.say("decode-0", [*names, *(group_hash(name, 1) for name in names)])
    listener = peer(made, router)
    listener.follow(router)
    assert listener.has(0) == numbers(names)


def test_who_comes_late_asks_for_all_that_was_published(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0")
    router.start()
    names = router.name(PROMPT)
    for name in names:
        router.say("decode-0", [name])
        router.settle()
    listener = peer(made, router)
    listener.follow(router)
    assert listener.has(0) == numbers(names)
    assert len(listener.replayed) == len(set(listener.replayed)) == 4 + len(names)


def test_what_is_no_longer_kept_is_replayed_as_all_that_is_held(made: list[Any]) -> None:
    router = publishing(made, buffer_steps=3)
    router.up("decode-0", "decode-1")
    router.start()
    listener = peer(made, router)
    listener.follow(router)
    rng, held = Random(1), list[bytes]()
    for _ in range(20):
        held += router.name([rng.randrange(1000) for _ in range(2 * SIZE)])
        router.say("decode-0", held[-2:])
        router.settle()
    router.say("decode-0", removed=held[:6])
    router.say("decode-1", held[:2])
    others = peer(made, router)
    for each in (others, listener):
        each.follow(router)
        assert (each.has(0), each.has(1)) == (numbers(held[6:]), numbers(held[:2]))
    assert len(set(others.replayed)) < len(others.replayed), "one number for all that is held"


def test_a_worker_that_dies_takes_its_blocks_along_and_nobody_elses(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0", "decode-1")
    router.start()
    names = router.name(PROMPT)
    for worker in ("decode-0", "decode-1"):
        router.say(worker, names)
        router.say(worker, names, tier=Tier.HOST)
    listener = peer(made, router)
    listener.follow(router)
    router.index.remove("decode-0")
    listener.follow(router)
    assert not listener.has(0)
    assert not listener.has(0, "CPU")
    assert listener.has(1) == listener.has(1, "CPU") == numbers(names)
    router.up("decode-0", epoch=2)
    router.say("decode-0", names[:1])
    listener.follow(router)
    assert listener.has(0) == numbers(names[:1])


def test_a_snapshot_changes_only_what_has_changed(made: list[Any]) -> None:
    router = publishing(made)
    router.up("decode-0")
    router.start()
    names = router.name(PROMPT)
    router.say("decode-0", names)
    listener = peer(made, router)
    listener.follow(router)
    before = len(listener.events)
    router.index.apply(0.0, KVSnapshot("decode-0", 1, 9, tuple(names[:4])))
    listener.follow(router)
    assert listener.events[before:] == [["BlockRemoved", [number_of(names[4])], "GPU"]]


def test_a_router_that_is_started_again_is_heard_again(made: list[Any]) -> None:
    first = publishing(made)
    first.up("decode-0", "decode-1")
    first.start()
    names = first.name(PROMPT)
    first.say("decode-0", names)
    first.say("decode-1", names)
    listener = peer(made, first)
    listener.follow(first)
    assert listener.has(0) == listener.has(1) == numbers(names)
    second = publishing(made, first.endpoints)
    second.up("decode-1")  # another one died meanwhile
    second.start()  # while the first one still has the ports
    second.say("decode-1", names)
    first.publisher.close()
    listener.follow(second)
    assert not listener.has(0)
    assert not listener.has(1), "nobody has said yet what its tokens are"
    second.name(PROMPT)
    listener.follow(second)
    assert listener.has(0) == numbers(names)


def test_who_is_slow_loses_batches_and_gets_them_by_a_replay(made: list[Any]) -> None:
    router = publishing(made, hwm=2)
    router.up("decode-0")
    router.start()
    listener = peer(made, router, RCVHWM=2, RCVBUF=4096)
    listener.follow(router)
    rng, held = Random(2), list[bytes]()
    for _ in range(100):
        held += router.name(rng.choices(range(100_000), k=900 * SIZE))
        router.say("decode-0", held[-900:])
        router.settle()
    before = len(listener.replayed)
    listener.follow(router)
    assert len(listener.replayed) > before + 10
    assert listener.has(0) == numbers(held)


def test_who_reads_no_replay_holds_nobody_up(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_S", 0.5)
    router = publishing(made, hwm=2)
    router.up("decode-0")
    router.start()
    rng, held = Random(3), list[bytes]()
    for _ in range(100):
        held += router.name(rng.choices(range(100_000), k=900 * SIZE))
        router.say("decode-0", held[-900:])
        router.settle()
    silent = peer(made, router)
    silent.dealer.setsockopt(zmq.RCVHWM, 1)
    silent.dealer.connect(router.endpoints[1])
    for _ in range(4):
        silent.dealer.send_multipart([b"", bytes(8)])
        silent.dealer.send_multipart([b"", b"short"])
        silent.dealer.send(b"nothing")
    listener = peer(made, router)
    listener.follow(router)
    assert listener.has(0) == numbers(held)
    wait_for(lambda: not router.publisher._replays)


def test_what_comes_too_fast_is_dropped_and_starts_over_with_the_index(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 100_000)
    router = publishing(made)
    router.up("decode-0", "decode-1")
    router.start()
    names = router.name(PROMPT)
    router.say("decode-0", names)
    listener = peer(made, router)
    listener.follow(router)
    router.publisher._stop.set()
    router.publisher._thread.join()  # it hangs
    router.index.remove("decode-1")
    router.up("decode-2")
    router.say("decode-2", names)
    router.say("decode-0", removed=names[2:])
    for _ in range(3000):
        router.say("decode-0", names[2:3])
        router.say("decode-0", removed=names[2:3])
    assert router.publisher.counts["dropped"] > 1
    assert len(router.publisher._waiting.calls) < 1000
    router.publisher._stop.clear()
    blocks = router.publisher._blocks
    router.publisher._take()
    blocks.take_changes()
    told = {worker: {c.block.name for c in found} for worker, _, found in blocks.everything()}
    assert told == {"decode-0": {*names[:2]}, "decode-2": {*names}}


def test_blocks_of_tenants_and_adapters_say_whose_they_are(made: list[Any]) -> None:
    router = publishing(made, salt_prefix="salt:")
    router.up("decode-0")
    router.start()
    salt, need = b"s" * 32, Need(b"\x81" * 32, "my-adapter", "adapter")
    specs = {
        "tenant": spec_of(CacheScope(salt, num_public_tokens=2 * SIZE + 1)),
        "adapter": spec_of(need=need),
        "both": spec_of(CacheScope(salt), need),
    }
    for spec in specs.values():
        router.say("decode-0", router.name(PROMPT, spec))
    listener = peer(made, router)
    listener.follow(router)
    stored = {tuple(each[1]): each for each in listener.events if each[0] == "BlockStored"}
    of = {
        name: stored[tuple(number_of(each) for each in names_of(PROMPT, spec))]
        for name, spec in specs.items()
    }
    tag = f"salt:{salt_tag(salt)}"
    assert of["tenant"][5:] == [None, "GPU", None, [None, None, [tag], [tag], [tag]]]
    number = int.from_bytes(b"\x81" * 8, "big") >> 33
    assert of["adapter"][5:] == [number, "GPU", "my-adapter", [["my-adapter"]] * 5]
    scoped = f"salt:{salt_tag(specs['both'].scope.salt)}"
    assert of["both"][5:] == [number, "GPU", "my-adapter", [["my-adapter", scoped]] * 5]
    assert salt.hex() not in tag


def test_each_router_has_an_endpoint_of_its_own() -> None:
    assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("ipc:///run/events", 0) == "ipc:///run/events"
    assert endpoint_of("ipc:///run/events", 2) == "ipc:///run/events-2"
    assert endpoint_of("", 1) == ""
