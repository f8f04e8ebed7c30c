"""What the KV cache manager tells of the blocks that it seals."""

from engine.block_hash import UNSALTED, BlockChain
from engine.kv_cache_manager import KVCacheManager
from engine.request import SamplingParams
from engine.sequence import Sequence
from engine.tier import Retention

RETENTION = Retention(5.0)


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(
        request_id="r",
        attempt=0,
        router="router",
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=1),
        deadline=1.0,
        arrived_at=0.0,
        chain=BlockChain(b"f", UNSALTED, block_size=4),
        retention=RETENTION,
    )


def compute(kv: KVCacheManager, tokens: list[int]) -> Sequence:
    seq = sequence(tokens)
    assert kv.admit(seq, headroom=0)
    seq.num_computed = len(tokens)
    kv.seal_computed(seq)
    return seq


def test_newly_sealed_blocks_are_collected_with_their_retention() -> None:
    kv = KVCacheManager(8, block_size=4)
    kv.collect_sealed = True
    seq = compute(kv, list(range(10)))
    assert kv.newly_sealed == [
        (block, name, RETENTION) for block, name in zip(seq.block_ids, seq.names, strict=False)
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
