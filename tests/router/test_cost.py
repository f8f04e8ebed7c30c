"""What a placement costs, part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.cost import blocks_worth_loading
from router.cost import SMOOTHING, CostModel, Intake, Seconds
from router.endpoint import Endpoint
from router.prefix_index import Held
from tests.router.fleet import STATS, endpoint, on, work
from tests.router.script import worker_info

KB = 1024.0  # bytes of a token's KV here: N * KB bytes/s are N tokens/s


def rates(**tokens_per_s: float) -> dict[str, float]:
    return {f"{name}_bytes_per_s": value * KB for name, value in tokens_per_s.items()}


def test_a_placement_is_the_sum_of_its_parts() -> None:
    cost = CostModel(handoff_s=0.01, stalled_at_least=0.5, free_tokens=100, crowding=0.1)
    decode = endpoint("decode-0", num_running=2, pending_prefill_tokens=502)
    decode.typical_decoding = 3.0
    todo = work(1000, output_tokens=100.0, decode_0=400)
    local = cost.local(decode, todo).seconds
    assert local.queue == pytest.approx(0.5)
    assert local.prefill == pytest.approx(0.6)
    assert local.stall == pytest.approx(0.5 * 3.0)
    assert local.decode == pytest.approx(100 * 0.01 * 1.2)
    assert (local.transfer, local.memory) == (0.0, 0.0)
    assert local.total == pytest.approx(0.5 + 0.6 + 1.5 + 1.2)
    prefill = endpoint("prefill-0", pending_prefill_tokens=100)
    first = cost.prefill(prefill, todo)
    remote = cost.remote(decode, first, todo).seconds
    assert remote.queue == pytest.approx(0.1)
    assert remote.prefill == pytest.approx(1.0)
    assert remote.stall == 0.0
    # 1024 bytes a token, 1e9 bytes/s; all but the last 64 tokens are read during the prefill.
    assert remote.transfer == pytest.approx(0.01 + 64 * 1024 / 1e9)
    assert remote.decode == local.decode


def test_a_transfer_slower_than_the_prefill_is_what_is_waited_for() -> None:
    cost = CostModel()
    slow = endpoint("decode-0", read_bytes_per_s=1024 * 500.0)
    todo = work(1000)
    first = cost.prefill(endpoint("prefill-0"), todo)
    assert cost.remote(slow, first, todo).seconds.transfer == pytest.approx(
        cost.handoff_s + 2.0 - 1.0
    )


def test_too_few_blocks_cost_the_wait_for_some() -> None:
    cost = CostModel()
    full = endpoint("decode-0")
    full.book(0.0, "other", 0, 990)
    assert cost.local(full, work(1000)).seconds.memory == pytest.approx(100 / 2 * 0.01)


def test_pushing_prefixes_out_of_a_cache_costs_what_their_reuse_saves() -> None:
    full = endpoint("decode-0", num_cached_blocks=1000)
    cost = CostModel(reuse=0.5)
    assert cost.local(full, work(500, 0)).seconds.evict == pytest.approx(0.25)  # half of 0.5 s
    assert cost.local(endpoint("decode-1"), work(500, 0)).seconds.evict == 0
    assert CostModel().local(full, work(500, 0)).seconds.evict == 0, (
        "nothing is known to be used again"
    )
    in_use = endpoint("decode-2", num_cached_blocks=900, num_free_blocks=100)
    assert in_use.num_blank_blocks == 100, "sealed blocks that are in use are not evicted"


def test_rates_not_measured_are_those_of_the_fleet() -> None:
    cost = CostModel(prefill_tokens_per_s=1000.0)
    silent = Endpoint(worker_info("decode-9"), heard_at=0.0)
    assert cost.prefill(silent, work(500)).seconds.prefill == pytest.approx(0.5)
    cost.observe(replace(STATS, prefill_tokens_per_s=100.0, decode_step_s=0.0))
    assert cost.prefill(silent, work(500)).seconds.prefill == pytest.approx(5.0)
    assert cost.decode_step_s == CostModel().decode_step_s
    silent.observe(0.0, replace(STATS, worker="decode-9", prefill_tokens_per_s=250.0))
    assert cost.prefill(silent, work(500)).seconds.prefill == pytest.approx(2.0)


def test_what_is_pushed_out_of_the_device_is_loaded_again_where_it_has_a_host_copy() -> None:
    cost = CostModel(reuse=1.0)
    full = endpoint("decode-0", num_cached_blocks=1000)
    backed = endpoint(
        "decode-1", num_cached_blocks=1000, num_host_blocks=9, host_read_bytes_per_s=KB * 1e4
    )
    assert cost.local(full, work(500, 0)).seconds.evict == pytest.approx(0.5)
    assert cost.local(backed, work(500, 0)).seconds.evict == pytest.approx(0.05)


def test_a_prefix_in_any_tier_counts_as_used_again() -> None:
    cost = CostModel()
    cost.observe_hit(work(1000, decode_0=on(100), decode_1=on(100, 200, 300)))
    assert cost.reuse == pytest.approx(SMOOTHING * 0.6)


def test_every_part_counts_in_the_total() -> None:
    parts = Seconds(*(2.0**n for n in range(9)))
    assert parts.total == 511.0


# -- the tiers below --------------------------------------------------------------------------


def test_host_and_disk_are_read_at_the_workers_rates_and_the_rest_computed() -> None:
    decode = endpoint("decode-0", **rates(host_read=10_000, disk_read=2000))
    placed = CostModel().local(decode, work(1000, decode_0=on(device=100, host=200, disk=300)))
    assert placed.seconds.load == pytest.approx(0.02 + 0.15)
    assert placed.seconds.prefill == pytest.approx(0.4)
    assert (placed.intake.loaded, placed.intake.computed) == (500, 400)
    prefill = endpoint("prefill-0", **rates(host_read=10_000, disk_read=2000))
    placed = CostModel().prefill(prefill, work(1000, prefill_0=on(device=100, host=200, disk=300)))
    assert placed.seconds.load == pytest.approx(0.17)


def test_blocks_that_are_loaded_need_room_in_the_device() -> None:
    full = endpoint("decode-0", **rates(host_read=10_000))
    full.book(0.0, "other", 0, 800)
    assert CostModel().local(full, work(1000, decode_0=900)).seconds.memory == 0
    assert CostModel().local(full, work(1000, decode_0=on(host=900))).seconds.memory > 0


def test_a_tier_slower_than_computing_counts_as_nothing() -> None:
    slow = endpoint("decode-0", **rates(host_read=5000, disk_read=900))
    todo = work(1000, decode_0=on(host=200, disk=300))
    assert CostModel().local(slow, todo).intake == Intake(800, 200, load_s=pytest.approx(0.04))
    slower = endpoint("decode-0", **rates(host_read=900, disk_read=900))
    assert CostModel().local(slower, todo).intake == Intake(1000)


@pytest.mark.parametrize("host_rate", [700, 2000])
@pytest.mark.parametrize("disk_rate", [900, 1500])
@pytest.mark.parametrize(("host", "disk"), [(40, 20), (20, 400), (0, 40), (40, 0)])
def test_the_router_loads_what_the_worker_will(
    host_rate: float, disk_rate: float, host: int, disk: int
) -> None:
    decode = endpoint("decode-0", **rates(host_read=host_rate, disk_read=disk_rate))
    load_s = [4 / host_rate] * (host // 4) + [4 / disk_rate] * (disk // 4)
    expected = 4 * blocks_worth_loading(load_s, 4 / 1000)
    todo = work(1000, decode_0=on(host=host, disk=disk))
    assert CostModel().local(decode, todo).intake.loaded == expected


def test_rates_of_tiers_that_were_not_measured_are_those_of_the_fleet() -> None:
    cost, todo = CostModel(), work(1000, decode_9=on(host=500))
    silent = Endpoint(worker_info("decode-9"), heard_at=0.0)
    cost.observe(replace(STATS, **rates(host_read=5000)))
    assert cost.local(silent, todo).seconds.load == pytest.approx(0.1)


def test_a_decode_worker_reads_from_the_prefill_worker_what_its_own_tiers_do_not_have() -> None:
    cost = CostModel(handoff_s=0.01)
    prefill = endpoint("prefill-0")
    todo = work(1000, prefill_0=900, decode_0=on(device=100, host=800))
    decode = endpoint("decode-0", **rates(read=2000, host_read=10_000))
    remote = cost.remote(decode, cost.prefill(prefill, todo), todo)
    # The last 64 tokens are read after the prefill, which took as long as reading all of them.
    assert remote.seconds.transfer == pytest.approx(0.01 + 64 / 2000)
    assert remote.intake.computed == 100
    sleepy = endpoint("decode-0", **rates(read=2000, host_read=1600))
    late = cost.remote(sleepy, cost.prefill(prefill, todo), todo)
    assert late.seconds.transfer == pytest.approx(0.01 + 800 / 1600 - 0.1)


# -- fetching ---------------------------------------------------------------------------------


def test_a_prefix_is_fetched_where_that_is_quicker_than_computing_it() -> None:
    cost = CostModel(handoff_s=0.01)
    holder = endpoint("decode-1", **rates(disk_read=2000))
    decode = endpoint("decode-0", **rates(read=10_000))
    todo = work(1000, decode_1=on(device=500, disk=200), lenders=(holder,))
    placed = cost.local(decode, todo)
    assert placed.seconds.fetch == pytest.approx(0.01 + 700 / 10_000 + 200 / 2000)
    assert placed.seconds.prefill == pytest.approx(0.3)
    assert (placed.intake.fetch_from, placed.intake.fetched) == ("decode-1", 700)
    slow = endpoint("decode-0", **rates(read=300))
    placed = cost.local(slow, todo)
    assert (placed.seconds.fetch, placed.intake.fetch_from) == (0.0, None)
    assert placed.seconds.prefill == pytest.approx(1.0)


def test_what_the_prefill_worker_loads_and_fetches_is_waited_for_on_the_decode_worker() -> None:
    cost = CostModel()
    prefill, decode = endpoint("prefill-0", **rates(host_read=10_000)), endpoint("decode-0")
    todo = work(1000, prefill_0=on(host=200), decode_0=700, lenders=(decode,))
    first = cost.prefill(prefill, todo)
    assert first.seconds.load > 0
    assert first.seconds.fetch > 0
    both = cost.remote(decode, first, todo)
    assert (both.seconds.load, both.seconds.fetch) == (first.seconds.load, first.seconds.fetch)
    assert both.intake == first.intake


def test_only_what_lies_behind_the_own_blocks_is_fetched() -> None:
    cost = CostModel(handoff_s=0.0)
    holder = endpoint("decode-1")
    decode = endpoint("decode-0", **rates(read=10_000, host_read=10_000))
    own = on(device=100, host=200)
    todo = work(1000, decode_0=own, decode_1=on(host=700), lenders=(holder,))
    placed = cost.local(decode, todo)
    assert (placed.intake.loaded, placed.intake.fetched, placed.intake.computed) == (200, 400, 300)
    assert placed.seconds.fetch == pytest.approx(400 / 10_000)
    todo = work(1000, decode_0=own, decode_1=on(host=300), lenders=(holder,))
    assert cost.local(decode, todo).intake.fetch_from is None, "it has no more"


def test_nothing_is_fetched_for_less_than_computing_a_block_takes() -> None:
    holder = endpoint("prefill-1")
    prefill = endpoint("prefill-0", **rates(read=1e6))
    todo = work(1000, prefill_1=100, lenders=(holder,))
    worth = CostModel(handoff_s=0.095)  # 100 ms of computing, and a block takes 4
    assert worth.prefill(prefill, todo).intake.fetch_from == "prefill-1"
    assert CostModel(handoff_s=0.097).prefill(prefill, todo).intake.fetch_from is None


def test_what_computing_holds_up_counts_for_fetching() -> None:
    holder = endpoint("prefill-1")
    todo = work(1000, prefill_1=100, lenders=(holder,))
    busy = endpoint("decode-0", num_running=9, **rates(read=1e6))
    assert CostModel(handoff_s=0.2).local(busy, todo).intake.fetch_from == "prefill-1"


def test_nobody_fetches_from_itself_or_from_another_model() -> None:
    worker = endpoint("decode-0", **rates(host_read=500))  # slower than computing
    other = endpoint("decode-1", info={"fingerprint": b"another"})
    held = on(host=900)
    todo = work(1000, decode_0=held, decode_1=held, lenders=(worker, other))
    assert CostModel().local(worker, todo).intake == Intake(1000)


def test_what_is_only_expected_at_a_worker_is_not_fetched_from_it() -> None:
    holder = endpoint("decode-1")
    todo = work(1000, decode_1=Held(device=900, said=200), lenders=(holder,))
    placed = CostModel().local(endpoint("decode-0"), todo)
    assert placed.intake.fetched == 200


def test_of_several_holders_the_one_that_saves_most_lends() -> None:
    memory, disk = endpoint("decode-1"), endpoint("decode-2", **rates(disk_read=1100))
    longer = endpoint("decode-3")
    held = {"decode_1": on(800), "decode_2": on(disk=900), "decode_3": on(host=810)}
    decode = endpoint("decode-0", **rates(read=1e5))
    todo = work(1000, lenders=(memory, disk), **held)
    assert CostModel().local(decode, todo).intake.fetch_from == "decode-1"
    todo = replace(todo, lenders=(disk, memory, longer))
    assert CostModel().local(decode, todo).intake.fetch_from == "decode-3"
