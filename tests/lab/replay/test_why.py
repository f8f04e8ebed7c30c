"""Where the time to the first token goes: phases that sum to it, and the fate of each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvrelay.cluster.cli.main import main
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.tier import Retention, Tier, TierHashes
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.lab.replay.config import Fault
from kvrelay.lab.replay.replay import replay
from kvrelay.lab.replay.report import summary
from kvrelay.lab.replay.why import FATES, Watch, Why, why_table
from kvrelay.router.explain import Explanation
from tests.lab.replay.replay_kit import comparable, config, made_up

SIZE = 16
NAMES = [bytes([number]) * 16 for number in range(8)]


def events(worker: str, seq: int, stored: str = "", removed: str = "", epoch: int = 1) -> KVEvents:
    return KVEvents(worker, epoch, seq, names(stored), names(removed))


def names(numbers: str) -> tuple[bytes, ...]:
    return tuple(NAMES[int(number)] for number in numbers)


def sent(watch: Watch, now: float, request_id: str, numbers: str, keep_s: float = 60.0) -> None:
    num_tokens = SIZE * len(numbers) + 1
    work = Decode(
        request_id,
        SamplingParams(max_tokens=1),
        1,
        "router-0",
        (0,) * num_tokens,
        num_tokens,
        60.0,
        block_hashes=b"".join(names(numbers)),
        retention=Retention(keep_s),
    )
    watch.on_send(now, work)


def why(watch: Watch, request_id: str, numbers: str, num_cached: int = 0) -> Why:
    ended = Explanation(
        request_id=request_id,
        tenant="",
        service_tier="",
        session=None,
        outcome=FinishReason.LENGTH,
        num_prompt_tokens=SIZE * len(numbers) + 1,
        num_output_tokens=1,
        num_cached_tokens=num_cached,
        cached_by_source={},
        recomputed={},
        drafts=(0, 0),
        images=(0, 0),
        waited_s={},
        attempts=[],
        submitted_at=0.0,
        first_token_at=2.0,
        ended_at=2.0,
        prediction=None,
    )
    return watch.explain(ended, 2.0, num_cached)


def assert_evicted(watch: Watch, place: str) -> None:
    """The block of the second prompt was lost there."""
    found = why(watch, "second", "0")
    assert found.computed == {"evicted": SIZE, "new": 1}
    assert found.loss is not None
    assert found.loss.place == place


def test_each_token_that_was_computed_has_its_fate() -> None:
    watch = Watch(SIZE)
    sent(watch, 1.0, "first", "01234")
    watch.on_send(2.0, events("decode-0", 1, "0123"))
    watch.on_send(2.0, events("decode-1", 1, "4"))
    watch.on_send(9.0, events("decode-0", 2, removed="3"))
    watch.on_send(9.0, events("decode-1", 2, "2"))
    sent(watch, 31.0, "second", "012345")
    found = why(watch, "second", "012345", num_cached=SIZE)
    # Block 0 was cached, 1 and 2 were held, 3 has gone, so 4 is of no use; 5 and the last are new.
    assert found.computed == {"elsewhere": 2 * SIZE, "evicted": 2 * SIZE, "new": SIZE + 1}
    assert found.loss is not None
    assert found.loss.place == "decode device"
    assert (found.loss.kept_s, found.loss.gap_s) == (8.0, 30.0)


def test_what_several_workers_hold_together_is_apart() -> None:
    watch = Watch(SIZE)
    sent(watch, 1.0, "first", "012")
    watch.on_send(2.0, events("decode-0", 1, "0"))
    watch.on_send(2.0, events("decode-1", 1, "12"))
    sent(watch, 3.0, "second", "012")
    found = why(watch, "second", "012")
    assert found.computed == {"elsewhere": SIZE, "apart": 2 * SIZE, "new": 1}
    assert found.loss is None


@pytest.mark.parametrize(("keep_s", "fate"), [(0.0, "dropped"), (60.0, "evicted")])
def test_what_was_not_to_be_kept_was_dropped(keep_s: float, fate: str) -> None:
    watch = Watch(SIZE)
    sent(watch, 1.0, "first", "0", keep_s)
    watch.on_send(2.0, events("prefill-0", 1, "0"))
    watch.on_send(3.0, events("prefill-0", 2, removed="0"))
    sent(watch, 5.0, "second", "0")
    assert why(watch, "second", "0").computed == {fate: SIZE, "new": 1}


def test_a_block_is_held_until_its_last_tier_has_lost_it() -> None:
    watch = Watch(SIZE)
    host = TierHashes(Tier.HOST, names("0"))
    watch.on_send(1.0, KVEvents("decode-0", 1, 1, names("0"), (), (host,)))
    watch.on_send(2.0, events("decode-0", 2, removed="0"))
    sent(watch, 3.0, "first", "0")
    assert why(watch, "first", "0").computed == {"elsewhere": SIZE, "new": 1}
    lost = TierHashes(Tier.HOST, (), names("0"))
    watch.on_send(4.0, KVEvents("decode-0", 1, 3, (), (), (lost,)))
    sent(watch, 5.0, "second", "0")
    assert_evicted(watch, "decode host")


def test_a_worker_that_has_died_holds_nothing() -> None:
    watch = Watch(SIZE)
    watch.on_send(1.0, events("decode-0", 1, "0"))
    sent(watch, 1.5, "first", "0")
    watch.on_send(2.0, events("decode-0", 1, "1", epoch=2))
    sent(watch, 3.0, "second", "0")
    assert_evicted(watch, "decode died")


def test_phases_sum_to_the_time_and_fates_to_what_was_computed() -> None:
    run = config(num_blocks=60, num_host_blocks=30, why=True, faults=(Fault("decode-1", 4.0, 3.0),))
    result = replay(made_up(), run)
    fates = set()
    for sample in result.samples:
        found = sample.why
        assert found is not None
        assert sum(found.phases.values()) == pytest.approx(sample.ttft_s)
        assert sum(found.computed.values()) == sample.input_length - sum(sample.cached.values())
        fates |= found.computed.keys()
    assert fates >= {"evicted", "new"}


def test_an_infinite_cache_loses_nothing() -> None:
    trace = made_up()
    lost, kept = (
        summary(replay(trace, config(num_blocks=60, oracle=oracle, why=True)))["why"]
        for oracle in (False, True)
    )
    assert lost["computed_tokens"]["evicted"] > 0
    assert lost["lost_from"]
    gone = [
        sum(tokens.get(fate, 0) for fate in ("evicted", "dropped", "apart"))
        for tokens in (lost["computed_tokens"], kept["computed_tokens"])
    ]
    assert gone[1] < gone[0] / 10, "but for blocks that go before they are copied down"
    assert sum(each["share"] for each in lost["lost_from"].values()) == pytest.approx(1.0)


def test_watching_changes_nothing() -> None:
    trace, run = made_up(60), config(num_blocks=60)
    watched = replay(trace, replace(run, why=True))
    for sample in watched.samples:
        sample.why = None
    assert comparable(watched) == comparable(replay(trace, run))


def test_the_table_shows_phases_and_fates_in_80_columns() -> None:
    trace = made_up(60)
    found = [
        summary(replay(trace, config(num_blocks=60, oracle=oracle, why=True)))
        for oracle in (False, True)
    ]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(why_table(found))
    shown = capture.get()
    for word in ("prefix", "oracle", "of it evicted", "of it new", "without use", "all"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert set(found[0]["why"]["computed_ms"]) <= set(FATES)


def test_the_command_adds_the_oracle(tmp_path: Path) -> None:
    arguments = ["replay", "synthetic:chat", "--requests", "20", "--why"]
    done = CliRunner().invoke(main, [*arguments, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "mean TTFT, ms" in done.output
    assert "oracle" in done.output
