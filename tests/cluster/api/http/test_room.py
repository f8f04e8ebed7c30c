"""Which connection makes room, whatever comes and goes."""

from __future__ import annotations

import random

from kvrelay.cluster.api.http.room import OpenConnections, Stage

MOST = 16


def check(room: OpenConnections[int], at: dict[int, tuple[str, Stage]]) -> None:
    assert {each: room.stage(each) for each in range(1000)} == {
        each: at[each][1] if each in at else None for each in range(1000)
    }
    under_way = [address for address, stage in at.values() if stage >= Stage.BODY]
    assert room.under_way.num_taken == len(under_way)
    for address in "abc":
        assert room.under_way.of((address,)) == under_way.count(address)


def test_what_is_open_is_known_and_the_right_one_makes_room() -> None:
    rng, room = random.Random(3), OpenConnections[int](MOST)
    at: dict[int, tuple[str, Stage]] = {}
    for number in range(1000):
        address = rng.choice("aaab" if number % 200 < 100 else "abc")
        if len(at) >= MOST:
            of = {name: [s for a, s in at.values() if a == name] for name in "abc"}
            dropped = room.drop_for(address)
            if dropped is not None:
                whose, stage = at.pop(dropped)
                assert stage is not Stage.ANSWER
                assert stage is not Stage.BODY or len(of[whose]) > len(of[address]) + 1
                assert stage is min(of[whose])
            else:
                assert all(stage >= Stage.BODY for _, stage in at.values())
                for own in of.values():
                    assert (
                        Stage.BODY not in own
                        or len(own) <= len(of[address]) + 1
                        or any(len(other) > len(own) for other in of.values())
                    )
                at.pop(gone := rng.choice(list(at)))
                room.leave(gone)
        room.enter(number, address)
        at[number] = address, Stage.IDLE
        for _ in range(4):
            each, stage = rng.choice(list(at)), rng.choice(list(Stage))
            if room.put(each, stage):
                at[each] = at[each][0], stage
            else:
                assert at[each][1] < Stage.BODY <= stage
        check(room, at)
    for each in (*at, *at):
        room.leave(each)
        room.put(each, Stage.ANSWER)
    check(room, {})
    assert not room._at
    assert (room._most_resting._keys, room._most_droppable._keys) == ({}, {})


def test_the_body_that_has_stood_still_for_the_longest_goes_first() -> None:
    room = OpenConnections[str](MOST)
    for name in ("one", "two", "three"):
        room.enter(name, "a")
        assert room.put(name, Stage.BODY)
    assert room.put("one", Stage.BODY)  # it gets on
    assert [room.drop_for("b") for _ in range(3)] == ["two", "three", None], "the last one stays"
    room.enter("idle", "a")
    assert room.drop_for("a") == "idle"
    assert room.drop_for("a") is None
