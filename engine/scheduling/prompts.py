"""Which prompts are admitted, which are computed in the next step, and how much of each; and which
wait for blocks that are computed or loaded for another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvrelay.engine.cost import TOKENS_UNIT, FittedCost, order_of
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.sequence import SeqState, Sequence

Order = tuple[bool, float]


def order(seq: Sequence, now: float, token_s: float) -> Order:
    """Ascending: first streams, which are silent until they are computed here. Then the shortest,
    which is best for the mean latency; but one that has waited counts as shorter, so that a long
    one does not starve. token_s: as it is measured; what a fit says of one token may be nothing,
    where all passes have equally many."""
    compute_s = max(0.0, seq.num_to_compute * token_s)
    return not seq.is_stream, order_of(compute_s, now - seq.arrived_at)


def may_be_admitted(
    waiting: Iterable[Sequence],
    running: Iterable[Sequence],
    now: float,
    token_s: float,
    budget: int,
) -> Iterator[Sequence]:
    """Those that have use for blocks now, most urgent first: streams, then those whose KV another
    worker has begun to compute, then prompts that may be in the next step, of at most `budget`
    tokens. The others would keep others out of the memory, and stay where they are. The caller may
    set those that it gets RUNNING."""
    prompts: list[tuple[Order, Sequence]] = []
    arriving: list[Sequence] = []
    for seq in waiting:
        if seq.awaits_producer:
            continue
        if seq.is_stream:
            yield seq
        elif seq.is_remote:
            arriving.append(seq)
        else:
            prompts.append((order(seq, now, token_s), seq))
    yield from arriving
    if not prompts:
        return
    ahead = [(order(s, now, token_s), s.num_missing) for s in running if s.num_missing > 1]
    for key, seq in sorted(prompts, key=lambda each: each[0]):
        if sum(count for other, count in ahead if other <= key) >= budget:
            return
        yield seq
        if seq.state is SeqState.RUNNING:
            ahead.append((key, seq.num_missing))


def waited_s(waiting: Iterable[Sequence], running: Iterable[Sequence], now: float) -> float:
    """The longest that a prompt has waited to be computed here."""
    prompts = [seq for seq in waiting if not seq.is_remote]
    prompts += [seq for seq in running if seq.num_missing > 1]
    return max((now - seq.arrived_at for seq in prompts if not seq.is_stream), default=0.0)


def choose_prompts(
    running: Iterable[Sequence],
    now: float,
    budget: int,
    token_s: float,
    cost: FittedCost,
    decode_s: float,
    kv: KVCacheManager,
) -> list[tuple[Sequence, int]]:
    """Which prompts get how many of `budget` tokens, by `order`. Another prompt joins the pass if
    the passes that are saved, each with its decodes, are worth the delay of those in it.

    token_s: of a token, all in all; what a pass and a token more cost is in `cost`. decode_s: of a
    step of the decodes beside them. kv: holds their block tables."""
    pass_s, more_s = cost.weights[0] + decode_s, cost.weights[1] / TOKENS_UNIT
    prompts = sorted(
        (seq for seq in running if seq.num_missing > 1), key=lambda seq: order(seq, now, token_s)
    )
    chosen: list[tuple[Sequence, int]] = []
    for seq in prompts:
        count = min(seq.num_missing, budget, kv.num_covered(seq) - seq.num_computed)
        if count <= 0:
            break
        saved_s = pass_s * (len(prompts) - len(chosen))
        if chosen and more_s > 0 and saved_s < count * more_s * len(chosen):
            break
        chosen.append((seq, count))
        budget -= count
    return chosen


def first_missing(seq: Sequence, kv: KVCacheManager) -> bytes | None:
    """Hash of the first block of a waiting sequence that is no cache hit; None: all are."""
    block_hashes, count = kv.usable_hashes(seq), kv.num_cached(seq)
    return block_hashes[count] if count < len(block_hashes) else None


def hashes_under_way(
    running: Iterable[Sequence], remote: Iterable[Sequence], kv: KVCacheManager
) -> set[bytes]:
    """Hashes of blocks that will be cache hits once a prompt is computed or a load is done."""
    block_hashes = {
        each
        for seq in running
        if seq.num_missing > 1
        for each in kv.usable_hashes(seq)[seq.num_sealed :]
    }
    for seq in remote:
        block_hashes.update(seq.block_hashes[seq.num_sealed : seq.num_arriving])
    return block_hashes
