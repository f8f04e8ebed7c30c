"""What a placement costs, term by term."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kvrelay.engine.cost import TOKENS_UNIT, blocks_worth_loading, prompt_features
from kvrelay.router.index.prefix_index import Held
from kvrelay.router.messages import Cancel
from kvrelay.router.native.bindings import ffi
from kvrelay.router.placement import cost as costs
from kvrelay.router.placement.cost import (
    AT_COMPUTING,
    AT_DECODING,
    AT_READING,
    READING,
    SMOOTHING,
    TERMS,
    CostModel,
    Seconds,
)
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.work import Intake, Work
from tests.router.fleet import (
    ROOMY,
    STATS,
    endpoint,
    local_cost,
    on,
    prefill_cost,
    remote_cost,
    work,
)
from tests.router.script import Script, worker_info, worker_stats

KB = 1024.0  # bytes of a token's KV here: N * KB bytes/s are N tokens/s


def rates(**tokens_per_s: float) -> dict[str, float]:
    return {f"{name}_bytes_per_s": value * KB for name, value in tokens_per_s.items()}


def test_a_placement_is_the_sum_of_its_parts() -> None:
    cost = CostModel(handoff_s=0.01, stalled_at_least=0.5, free_tokens=100)
    decode = endpoint("decode-0", num_running=2, pending_prefill_tokens=502)  # other routers'
    decode.typical_decoding = 3.0
    todo = work(1000, output_tokens=100.0, decode_0=400)
    local = local_cost(cost, 0.0, decode, todo).seconds
    assert local.queue == pytest.approx(0.5)
    assert local.prefill == pytest.approx(0.6)
    assert local.stall == pytest.approx(0.5 * 3.0)
    assert 100 * 0.01 < local.decode < 2 * 100 * 0.01, "a step takes longer with one more"
    assert (local.transfer, local.memory, local.delay) == (0.0, 0.0, 0.0)
    assert local.total == pytest.approx(0.5 + 0.6 + 1.5 + local.decode + local.crowd)
    prefill = endpoint("prefill-0", pending_prefill_tokens=100)
    remote = remote_cost(cost, decode, prefill, todo).seconds
    assert remote.queue == pytest.approx(0.1)
    assert remote.prefill == pytest.approx(1.0)
    assert remote.stall == 0.0
    # 1024 bytes a token, 1e9 bytes/s; all but the last 64 tokens are read during the prefill.
    assert remote.transfer == pytest.approx(0.01 + 64 * 1024 / 1e9)
    assert (remote.decode, remote.crowd) == (local.decode, local.crowd)


def test_every_term_counts_in_the_total_and_some_in_the_first_token() -> None:
    terms = Seconds(*(2.0**n for n in range(len(TERMS))))
    assert terms.total == 2.0 ** len(TERMS) - 1
    read = terms.load + terms.fetch + terms.need
    assert terms.sum_of(READING) == read
    assert terms.ttft == terms.queue + terms.prefill + terms.images + read


def test_terms_of_native_code_are_those_without_a_function_in_its_order() -> None:
    *named, terms = ffi.typeof("seconds").fields
    assert [n for n, term in TERMS.items() if not term.seconds] == [n for n, _ in named]
    assert list(TERMS)[: len(named)] == [n for n, _ in named]
    assert terms[0] == "terms"
    assert len(TERMS) <= terms[1].type.length
    assert all(bool(term.at) == bool(term.seconds) for term in TERMS.values())


@pytest.mark.parametrize(
    ("at", "alone_s", "handed_over_s"),
    [
        (AT_COMPUTING, 1001.0, 1002.0),
        (AT_DECODING, 1001.0, 1001.0),
        (AT_READING, 0.0, 1001.0),
        (AT_COMPUTING | AT_READING, 1001.0, 1002.0 + 1001.0),
    ],
)
def test_a_function_counts_where_a_worker_does_what_its_term_says(
    at: int, alone_s: float, handed_over_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(_: CostModel, worker: Endpoint, asked: Work) -> float:
        return asked.num_tokens + (1.0 if worker.worker == "decode-0" else 2.0)

    number = Seconds._fields.index("need")
    monkeypatch.setattr(costs, "FUNCTIONS", [(number, seconds_of)])
    cost, todo = CostModel(), work(1000)
    cost.struct.terms_at[number] = at
    decode, prefill = endpoint("decode-0"), endpoint("prefill-0")
    assert local_cost(cost, 0.0, decode, todo).seconds.need == alone_s
    assert remote_cost(cost, decode, prefill, todo).seconds.need == handed_over_s


def test_a_transfer_slower_than_the_prefill_is_what_is_waited_for() -> None:
    cost = CostModel()
    slow = endpoint("decode-0", read_bytes_per_s=1024 * 500.0)
    todo = work(1000)
    assert remote_cost(cost, slow, endpoint("prefill-0"), todo).seconds.transfer == pytest.approx(
        cost.struct.handoff_s + 2.0 - 1.0
    )


# -- prompts that wait ------------------------------------------------------------------------


def test_a_prompt_waits_for_shorter_ones_and_longer_ones_wait_for_it() -> None:
    cost = CostModel()
    prefill = endpoint("prefill-0")
    for number, tokens in enumerate((200, 300, 5000, 9000)):
        prefill.book(1.0, f"r{number}", tokens, 0, tokens / 1000)
    placed = prefill_cost(cost, 1.0, prefill, work(1000)).seconds
    assert placed.queue == pytest.approx(0.2 + 0.3)
    assert placed.delay == pytest.approx(2 * 1.0)
    shortest = prefill_cost(cost, 1.0, prefill, work(100)).seconds
    assert (shortest.queue, shortest.delay) == pytest.approx((0.0, 4 * 0.1))
    later = prefill_cost(cost, 1.4, prefill, work(1000)).seconds
    assert later.queue == pytest.approx(0.1, abs=0.01), "the rest of it is done by now"


def test_prompts_of_other_routers_all_go_before_it() -> None:
    prefill = endpoint("prefill-0", pending_prefill_tokens=700)
    prefill.book(0.0, "mine", 300, 0, 0.3)
    assert prefill_cost(CostModel(), 0.0, prefill, work(1000)).seconds.queue == pytest.approx(1.0)


# -- decoding and memory ----------------------------------------------------------------------


def test_too_few_blocks_cost_the_wait_for_some() -> None:
    cost, todo = CostModel(), work(1000)  # 250 blocks and one to grow
    full, fuller, free = (endpoint(f"decode-{n}") for n in range(3))
    full.book(0.0, "other", 0, 800)
    fuller.book(0.0, "other", 0, 990)
    free.book(0.0, "other", 0, 700)
    waits = [local_cost(cost, 0.0, worker, todo).seconds.memory for worker in (free, full, fuller)]
    assert waits[0] == 0
    assert 0 < waits[1] < waits[2]
    # A quarter of what is in use has to end: a quarter of the time that a request decodes.
    assert waits[2] == pytest.approx(241 / 990 * 100 * 0.01, rel=0.1)


def test_memory_is_free_when_others_end_however_short_the_own_output_is() -> None:
    s = Script("decode-0", max_memory_wait_s=inf)
    s.tell(worker_stats("decode-0", num_free_blocks=0, num_running=1, decode_step_s=0.03))
    waits = []
    for max_tokens in (100, 1):
        tokens = range(1000 * max_tokens, 1000 * max_tokens + 120)
        s.submit(f"{max_tokens}", tokens=tokens, max_tokens=max_tokens)
        s.tell(Cancel(f"{max_tokens}"))
        waits.append(s.router.explain(f"{max_tokens}")[0].options.best.seconds.memory)
    assert waits[1] == pytest.approx(waits[0])
    assert waits[1] > 1.0


def test_blocks_that_others_wait_for_are_not_free() -> None:
    cost, todo = CostModel(), work(1000)
    wanted = endpoint("decode-0", num_free_blocks=300, num_wanted_blocks=200)
    assert (
        local_cost(cost, 0.0, endpoint("decode-1", num_free_blocks=300), todo).seconds.memory == 0
    )
    assert local_cost(cost, 0.0, wanted, todo).seconds.memory > 0


def test_a_crowd_makes_each_step_longer_for_all_of_it() -> None:
    cost, todo = CostModel(), work(100)
    some = local_cost(cost, 0.0, endpoint("decode-0", num_running=5), todo).seconds
    many = local_cost(cost, 0.0, endpoint("decode-1", num_running=50), todo).seconds
    assert many.decode > some.decode
    assert many.crowd > some.crowd > 0
    assert local_cost(cost, 0.0, endpoint("decode-2"), todo).seconds.crowd == 0, "nobody is there"


def test_kv_that_is_there_makes_steps_longer_where_the_worker_says_so() -> None:
    cost, todo = CostModel(), work(100)
    weights = (0.005, 0.0, 0.0, 0.02)  # all of it from how full the pool is
    told = {"num_running": 4, "decode_weights": weights}
    empty = endpoint("decode-0", **told)
    pool_tokens = ROOMY["num_blocks"] * empty.info.block_size
    full = endpoint("decode-1", decoding_tokens=int(0.6 * pool_tokens), **told)
    near, far = (local_cost(cost, 0.0, worker, todo).seconds for worker in (empty, full))
    assert near.decode == pytest.approx(100 * 0.005, rel=0.1)
    assert far.decode == pytest.approx(100 * (0.005 + 0.02 * 0.6**2), rel=0.1)
    assert far.crowd > near.crowd


# -- rates ------------------------------------------------------------------------------------


def test_rates_not_measured_are_those_of_the_fleet() -> None:
    cost = CostModel()
    silent = Endpoint(worker_info("prefill-9"), last_seen_at=0.0)
    assert prefill_s(cost, silent, 500) == pytest.approx(0.5)
    cost.on_stats(replace(STATS, prefill_tokens_per_s=100.0, decode_step_s=0.0))
    assert prefill_s(cost, silent, 500) == pytest.approx(5.0)
    assert cost.rates["decode_step_s"] == CostModel().rates["decode_step_s"]
    silent.on_stats(0.0, replace(STATS, worker="prefill-9", prefill_tokens_per_s=250.0))
    assert prefill_s(cost, silent, 500) == pytest.approx(2.0)


def prefill_s(cost: CostModel, worker: Endpoint, num_tokens: int) -> float:
    return prefill_cost(cost, 0.0, worker, work(num_tokens)).seconds.prefill


WEIGHTS = (0.01, 2.0, 1.0, 0.5)


def test_what_a_worker_has_learned_of_prompts_counts_for_more_than_its_rate() -> None:
    worker = endpoint("prefill-0", prompt_weights=WEIGHTS)
    passes = prompt_features(600, 400, worker.info.max_num_batched_tokens)
    expected = sum(w * f for w, f in zip(WEIGHTS, passes, strict=True))
    placed = prefill_cost(CostModel(), 0.0, worker, work(1000, prefill_0=400))
    assert placed.seconds.prefill == pytest.approx(expected)


def test_a_worker_that_has_learned_nothing_yet_is_taken_for_one_of_the_fleet() -> None:
    cost, new = CostModel(), endpoint("prefill-1")
    cost.on_stats(replace(STATS, prompt_weights=WEIGHTS))
    known = endpoint("prefill-0", prompt_weights=WEIGHTS)
    assert prefill_s(cost, new, 500) == prefill_s(cost, known, 500)
    cost.on_stats(replace(STATS, prompt_weights=tuple(2 * w for w in WEIGHTS)))
    nearer = prefill_s(cost, new, 500) / prefill_s(cost, known, 500)
    assert nearer == pytest.approx(1 + SMOOTHING)


def test_a_fit_is_not_believed_that_says_next_to_nothing_or_ten_times_the_rate() -> None:
    wrong = endpoint("prefill-0", prompt_weights=(0.0, -5.0, 0.0, 0.0))
    assert prefill_s(CostModel(), wrong, 1000) > 0
    known = prefill_cost(CostModel(), 0.0, wrong, work(1000, prefill_0=999))
    assert known.intake.computed == 1
    assert known.seconds.prefill < 1e-4
    wild = endpoint("prefill-0", prompt_weights=(0.01, 0.0, 0.0, 1e6))
    assert prefill_s(CostModel(), wild, 200) == pytest.approx(10 * 200 / 1000)


def test_chunks_of_a_long_prompt_cost_a_pass_each() -> None:
    worker = endpoint("prefill-0", prompt_weights=(0.5, 0.1 * TOKENS_UNIT / 1000, 0.0, 0.0))
    assert worker.info.max_num_batched_tokens == 64
    assert prefill_s(CostModel(), worker, 640) == pytest.approx(10 * 0.5 + 0.1 * 0.64)


# -- the tiers below --------------------------------------------------------------------------


def test_host_and_disk_are_read_at_the_workers_rates_and_the_rest_computed() -> None:
    decode = endpoint("decode-0", **rates(host_read=10_000, disk_read=2000))
    placed = local_cost(
        CostModel(), 0.0, decode, work(1000, decode_0=on(device=100, host=200, disk=300))
    )
    assert placed.seconds.load == pytest.approx(0.02 + 0.15)
    assert placed.seconds.prefill == pytest.approx(0.4)
    assert (placed.intake.loaded, placed.intake.computed) == (500, 400)
    prefill = endpoint("prefill-0", **rates(host_read=10_000, disk_read=2000))
    placed = prefill_cost(
        CostModel(), 0.0, prefill, work(1000, prefill_0=on(device=100, host=200, disk=300))
    )
    assert placed.seconds.load == pytest.approx(0.17)


def test_blocks_that_are_loaded_need_room_in_the_device() -> None:
    full = endpoint("decode-0", **rates(host_read=10_000))
    full.book(0.0, "other", 0, 800)
    assert local_cost(CostModel(), 0.0, full, work(1000, decode_0=900)).seconds.memory == 0
    assert local_cost(CostModel(), 0.0, full, work(1000, decode_0=on(host=900))).seconds.memory > 0


def test_a_tier_slower_than_computing_counts_as_nothing() -> None:
    slow = endpoint("decode-0", **rates(host_read=5000, disk_read=900))
    todo = work(1000, decode_0=on(host=200, disk=300))
    assert local_cost(CostModel(), 0.0, slow, todo).intake == Intake(
        800, 200, load_s=pytest.approx(0.04)
    )
    slower = endpoint("decode-0", **rates(host_read=900, disk_read=900))
    assert local_cost(CostModel(), 0.0, slower, todo).intake == Intake(1000)


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
    assert local_cost(CostModel(), 0.0, decode, todo).intake.loaded == expected


def test_rates_of_tiers_that_were_not_measured_are_those_of_the_fleet() -> None:
    cost, todo = CostModel(), work(1000, decode_9=on(host=500))
    silent = Endpoint(worker_info("decode-9"), last_seen_at=0.0)
    cost.on_stats(replace(STATS, **rates(host_read=5000)))
    assert local_cost(cost, 0.0, silent, todo).seconds.load == pytest.approx(0.1)


def test_a_decode_worker_reads_from_the_prefill_worker_what_its_own_tiers_do_not_have() -> None:
    cost = CostModel(handoff_s=0.01)
    prefill = endpoint("prefill-0")
    todo = work(1000, prefill_0=900, decode_0=on(device=100, host=800))
    decode = endpoint("decode-0", **rates(read=2000, host_read=10_000))
    remote = remote_cost(cost, decode, prefill, todo)
    # The last 64 tokens are read after the prefill, which took as long as reading all of them.
    assert remote.seconds.transfer == pytest.approx(0.01 + 64 / 2000)
    assert remote.intake.computed == 100
    sleepy = endpoint("decode-0", **rates(read=2000, host_read=1600))
    late = remote_cost(cost, sleepy, prefill, todo)
    assert late.seconds.transfer == pytest.approx(0.01 + 800 / 1600 - 0.1)


# -- fetching ---------------------------------------------------------------------------------


def test_a_prefix_is_fetched_where_that_is_quicker_than_computing_it() -> None:
    cost = CostModel(handoff_s=0.01)
    holder = endpoint("decode-1", **rates(disk_read=2000))
    decode = endpoint("decode-0", **rates(read=10_000))
    todo = work(1000, decode_1=on(device=500, disk=200), sources=(holder,))
    placed = local_cost(cost, 0.0, decode, todo)
    assert placed.seconds.fetch == pytest.approx(0.01 + 700 / 10_000 + 200 / 2000)
    assert placed.seconds.prefill == pytest.approx(0.3)
    assert (placed.intake.fetch_from, placed.intake.fetched) == ("decode-1", 700)
    slow = endpoint("decode-0", **rates(read=300))
    placed = local_cost(cost, 0.0, slow, todo)
    assert (placed.seconds.fetch, placed.intake.fetch_from) == (0.0, None)
    assert placed.seconds.prefill == pytest.approx(1.0)


def test_what_the_prefill_worker_loads_and_fetches_is_waited_for_on_the_decode_worker() -> None:
    cost = CostModel()
    prefill, decode = endpoint("prefill-0", **rates(host_read=100_000)), endpoint("decode-0")
    todo = work(1000, prefill_0=on(host=200), decode_0=700, sources=(decode,))
    first = prefill_cost(cost, 0.0, prefill, todo)
    assert first.seconds.load > 0
    assert first.seconds.fetch > 0
    both = remote_cost(cost, decode, prefill, todo)
    assert (both.seconds.load, both.seconds.fetch) == (first.seconds.load, first.seconds.fetch)
    assert both.intake == first.intake


def test_only_what_lies_behind_the_own_blocks_is_fetched() -> None:
    cost = CostModel(handoff_s=0.0)
    holder = endpoint("decode-1")
    decode = endpoint("decode-0", **rates(read=10_000, host_read=10_000))
    own = on(device=100, host=200)
    todo = work(1000, decode_0=own, decode_1=on(host=700), sources=(holder,))
    placed = local_cost(cost, 0.0, decode, todo)
    assert (placed.intake.loaded, placed.intake.fetched, placed.intake.computed) == (200, 400, 300)
    assert placed.seconds.load == pytest.approx(200 / 10_000)
    assert placed.seconds.fetch == pytest.approx((400 - 200) / 10_000), "both go on at once"
    todo = work(1000, decode_0=own, decode_1=on(host=300), sources=(holder,))
    assert local_cost(cost, 0.0, decode, todo).intake.fetch_from is None, "it has no more"


def test_nothing_is_fetched_for_less_than_computing_a_block_takes() -> None:
    holder = endpoint("prefill-1")
    prefill = endpoint("prefill-0", **rates(read=1e6))
    todo = work(1000, prefill_1=100, sources=(holder,))
    worth = CostModel(handoff_s=0.095)  # 100 ms of computing, and a block takes 4
    assert prefill_cost(worth, 0.0, prefill, todo).intake.fetch_from == "prefill-1"
    assert prefill_cost(CostModel(handoff_s=0.097), 0.0, prefill, todo).intake.fetch_from is None


def test_what_computing_holds_up_counts_for_fetching() -> None:
    """Fetching takes twice as long as computing it, but three longer prompts wait."""
    cost, holder = CostModel(handoff_s=0.2), endpoint("prefill-1")
    todo = work(1000, prefill_1=100, sources=(holder,))
    worker = endpoint("decode-0", **rates(read=1e6))
    assert local_cost(cost, 0.0, worker, todo).intake.fetch_from is None
    for number in range(3):
        worker.book(0.0, f"r{number}", 5000, 0, 5.0)
    assert local_cost(cost, 0.0, worker, todo).intake.fetch_from == "prefill-1"


def test_nobody_fetches_from_itself_or_from_another_model() -> None:
    worker = endpoint("decode-0", **rates(host_read=500))  # slower than computing
    other = endpoint("decode-1", info={"fingerprint": b"another"})
    held = on(host=900)
    todo = work(1000, decode_0=held, decode_1=held, sources=(worker, other))
    assert local_cost(CostModel(), 0.0, worker, todo).intake == Intake(1000)


def test_what_is_only_expected_at_a_worker_is_not_fetched_from_it() -> None:
    holder = endpoint("decode-1")
    todo = work(1000, decode_1=Held(device=900, said=200), sources=(holder,))
    placed = local_cost(CostModel(), 0.0, endpoint("decode-0"), todo)
    assert placed.intake.fetched == 200


def test_of_several_holders_the_one_that_saves_most_is_fetched_from() -> None:
    memory, disk = endpoint("decode-1"), endpoint("decode-2", **rates(disk_read=1100))
    longer = endpoint("decode-3")
    held = {"decode_1": on(800), "decode_2": on(disk=900), "decode_3": on(host=810)}
    decode = endpoint("decode-0", **rates(read=1e5))
    todo = work(1000, sources=(memory, disk), **held)
    assert local_cost(CostModel(), 0.0, decode, todo).intake.fetch_from == "decode-1"
    todo = replace(todo, sources=(disk, memory, longer))
    assert local_cost(CostModel(), 0.0, decode, todo).intake.fetch_from == "decode-3"


def test_what_a_placement_evicts_costs_what_evicted_kv_has_cost() -> None:
    cost, worker = CostModel(), endpoint("decode-0")

    def evict_s(device: int) -> float:
        return local_cost(cost, 0.0, worker, work(1000, decode_0=on(device=device))).seconds.evict

    cost.on_placed(0.0, 5000)
    assert evict_s(0) == 0.0, "nothing had to be read back"
    for _ in range(1000):
        cost.on_placed(0.2, 10_000)  # 20 us a token
    assert evict_s(0) == pytest.approx(0.02, rel=0.01)
    assert evict_s(900) == pytest.approx(0.002, rel=0.01), "what is there already evicts nothing"
    for _ in range(1000):
        cost.on_placed(0.0, 10_000)
    assert evict_s(0) < 1e-4, "it is forgotten when nothing is read back any more"


def test_a_prompt_that_is_handed_over_evicts_on_both_workers() -> None:
    cost = CostModel()
    cost.on_placed(0.1, 10_000)
    prefill, decode = endpoint("prefill-0"), endpoint("decode-0")
    todo = work(1000, prefill_0=on(device=500))
    seconds = remote_cost(cost, decode, prefill, todo).seconds
    assert seconds.evict == pytest.approx((500 + 1000) * 1e-5)
