"""What the KV cache manager tells of the blocks that it seals, and which of them go first."""

from collections.abc import Iterator

from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.cache_manager import COPY_LAG, KVCacheManager
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.sequence import Sequence
from tests.engine.sequences import sequence

RETENTION = Retention(5.0)
SPARE = Retention(0.0, to_disk=False)


def compute(kv: KVCacheManager, tokens: list[int], retention: Retention = RETENTION) -> Sequence:
    seq = sequence(tokens, retention=retention)
    assert kv.admit(seq, headroom=0)
    seq.num_computed = len(tokens)
    kv.seal_computed(seq)
    return seq


def test_newly_sealed_blocks_are_collected_with_their_retention() -> None:
    kv = KVCacheManager(8, block_size=4)
    kv.collect_sealed = True
    seq = compute(kv, list(range(10)))
    assert kv.newly_sealed == [
        (block, name, RETENTION)
        for block, name in zip(seq.block_ids, seq.block_hashes, strict=False)
    ]


def test_a_block_whose_name_another_has_is_not_collected() -> None:
    kv = KVCacheManager(8, block_size=4)
    kv.collect_sealed = True
    first, second = sequence(list(range(4))), sequence(list(range(4)))
    for seq in (first, second):
        assert kv.admit(seq, headroom=0)
        seq.num_computed = 4
        kv.seal_computed(seq)
    assert [block for block, _, _ in kv.newly_sealed] == first.block_ids


def test_nothing_is_collected_where_nobody_takes_it() -> None:
    kv = KVCacheManager(8, block_size=4)
    compute(kv, list(range(10)))
    assert kv.newly_sealed == []


def test_blocks_that_are_not_worth_retaining_are_not_collected() -> None:
    kv = KVCacheManager(8, block_size=4)
    kv.collect_sealed = True
    compute(kv, list(range(10)), SPARE)
    assert kv.newly_sealed == []


def test_a_spare_copy_goes_first_but_what_was_here_before_it_keeps_its_place() -> None:
    """Two blocks were there; a request that need not be kept continues them by two."""
    kv = KVCacheManager(8, block_size=4)
    prompt = list(range(16))
    kv.release(compute(kv, prompt[:8]))
    kv.release(compute(kv, [50 + i for i in range(8)]))  # used later
    spare = compute(kv, prompt, SPARE)
    names = list(spare.block_hashes)
    assert spare.num_hits == 2
    kv.release(spare)
    kv.allocate(4)  # two are blank, two go
    assert [kv.pool.is_cached(name) for name in names] == [True, True, False, False]
    assert kv.pool.num_cached == 4
    kv.allocate(2)
    assert all(kv.pool.is_cached(name) for name in names[:2]), "they were used last"


def test_a_request_that_is_kept_saves_a_spare_copy_that_it_hits() -> None:
    kv = KVCacheManager(6, block_size=4)
    prompt = list(range(9))
    kv.release(compute(kv, prompt, SPARE))
    kv.release(compute(kv, [50 + i for i in range(8)]))
    kv.release(compute(kv, prompt))
    kv.allocate(4)
    assert kv.pool.lookup(sequence(prompt).block_hashes) != []
    assert kv.pool.num_cached == 2


def test_a_sequence_gives_back_what_it_was_given_whatever_its_table_says() -> None:
    kv = KVCacheManager(8, block_size=4)
    first, second = compute(kv, list(range(9))), compute(kv, [50 + i for i in range(9)])
    first.block_ids[1] = second.block_ids[1]
    kv.release(first)
    assert (kv.pool.num_free, kv.pool.num_references) == (5, 3)
    kv.release(second)
    kv.check_integrity()
    assert kv.pool.is_idle()


def decoded(windows: Windows, num_prompt_tokens: int) -> Iterator[tuple[int, int, int]]:
    """At each length up to 120 tokens: it, and of what is in the lower tiers then how many rows can
    be continued, and how many blocks there are, in a worker that copies at once."""
    kv = KVCacheManager(256, 4, windows)
    kv.collect_sealed = kv.collect_decoded = True
    chain = BlockChain(b"f", UNSALTED, 4, windows.count)
    seq = sequence(list(range(num_prompt_tokens)), retention=RETENTION, chain=chain)
    assert kv.admit(seq, headroom=0)
    below: set[bytes] = set()
    while (seq_len := len(seq.tokens)) < 120:
        seq.num_computed = seq_len
        kv.seal_computed(seq)
        kv.slide(seq)
        below |= {name for _, name, _ in kv.newly_sealed}
        below -= set(kv.newly_passed)
        kv.newly_sealed, kv.newly_passed = [], []
        has = [name in below for name in seq.block_hashes]
        yield seq_len, windows.reach(windows.full(seq_len), has.__getitem__), len(below)
        seq.append(seq_len, None)
        assert kv.grow(seq)


def test_windows_go_down_while_a_sequence_decodes_and_leave_when_it_has_gone_on() -> None:
    """One group whole, one with a window of 8 positions."""
    windows = Windows.of(4, (0, 8), chunk_blocks=8)
    for seq_len, reach, num_below in decoded(windows, 20):
        assert reach == windows.full(seq_len)
        prompt_end, window = 2, 2 + COPY_LAG
        assert num_below <= seq_len // 4 + prompt_end + window


def test_states_go_down_once_in_as_many_rows_as_there_are() -> None:
    """Four groups of states beside one that is whole."""
    windows = Windows.of(4, (0, 2, 2, 2, 2), chunk_blocks=8)
    for seq_len, reach, num_below in decoded(windows, 8):
        rows = seq_len // 4
        assert reach == windows.count * ((rows - 1) // 4 * 4 + 1)
        assert num_below <= rows + 4 * (1 + 3)
