from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.kvtransfer.layout import (
    LAYOUT_VERSION,
    BlockLayout,
    CopySpan,
    HeadShare,
    fingerprint,
    head_overlap,
)

SPEC = KVSpec(num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")


@st.composite
def specs_and_tp(draw: st.DrawFn) -> tuple[KVSpec, int]:
    tp_size = draw(st.integers(1, 4))
    spec = KVSpec(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=tp_size * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 8)),
        block_size=draw(st.integers(1, 8)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        num_planes=draw(st.integers(1, 2)),
    )
    return spec, tp_size


@given(specs_and_tp(), st.integers(1, 20))
def test_spans_of_blocks_tile_the_pool(spec_and_tp: tuple[KVSpec, int], num_blocks: int) -> None:
    layout = BlockLayout(spec_and_tp[0])
    end = 0
    for block_id in range(num_blocks):
        offset, length = layout.span(block_id)
        assert offset == end
        end = offset + length
    assert end == num_blocks * spec_and_tp[0].bytes_per_block


@st.composite
def two_shares(draw: st.DrawFn) -> tuple[KVSpec, HeadShare, HeadShare]:
    """Ranks of two tensor-parallel sizes of one model."""
    spec, _ = draw(specs_and_tp())
    sizes = [size for size in range(1, 13) if spec.num_kv_heads % size == 0]
    layout = BlockLayout(spec)
    shares = []
    for _ in range(2):
        size = draw(st.sampled_from(sizes))
        shares.append(layout.share(draw(st.integers(0, size - 1)), size))
    return spec, *shares


def blocks_of(spec: KVSpec, share: HeadShare) -> np.ndarray:
    """`[bytes]` of a rank's block: each byte says which byte of the whole model's block it is."""
    whole = np.arange(spec.bytes_per_block).reshape(
        spec.num_layers, spec.num_planes, spec.num_kv_heads, spec.bytes_per_head
    )
    return whole[:, :, share.heads.start : share.heads.stop].ravel()


@given(two_shares())
def test_overlap_copies_the_common_heads_and_nothing_else(
    case: tuple[KVSpec, HeadShare, HeadShare],
) -> None:
    spec, src, dst = case
    source, wanted = blocks_of(spec, src), blocks_of(spec, dst)
    assert len(source) == src.bytes_per_block
    copied = np.full(len(wanted), -1)
    for span in head_overlap(src, dst):
        copied[span.dst : span.dst + span.length] = source[span.src : span.src + span.length]
    assert np.array_equal(copied, np.where(np.isin(wanted, source), wanted, -1))


@given(two_shares())
def test_equal_shares_are_one_span_and_partial_ones_one_span_a_plane(
    case: tuple[KVSpec, HeadShare, HeadShare],
) -> None:
    spec, src, dst = case
    spans = head_overlap(src, dst)
    if src.heads == dst.heads:
        assert spans == (CopySpan(0, 0, src.bytes_per_block),)
    elif set(src.heads) & set(dst.heads):
        assert len(spans) == spec.num_planes * spec.num_layers
    else:
        assert spans == ()


STATES = replace(SPEC, windows=(0, 2), num_state_groups=1, num_units=4)
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (4, 4)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("src_size", "dst_size"), PAIRS)
def test_states_arrive_from_the_ranks_that_compute_them(
    num_kv_heads: int, src_size: int, dst_size: int
) -> None:
    """Ranks with the same KV heads have the same keys and values, and good states of a part."""
    spec = replace(STATES, num_kv_heads=num_kv_heads)
    whole, bad = np.arange(spec.bytes_per_block).reshape(spec.num_units, -1), -1
    sources = []
    for rank in range(src_size):
        share = BlockLayout(spec).share(rank, src_size)
        state = np.full((len(share.heads), whole.shape[1]), bad)
        first = share.own_heads.start - share.heads.start
        state[first : first + len(share.own_heads)] = whole[share.own_heads]
        sources.append((share, state.ravel()))
    assert sorted(u for share, _ in sources for u in share.own_heads) == [*range(spec.num_units)]
    for rank in range(dst_size):
        wanted = BlockLayout(spec).share(rank, dst_size)
        assert wanted.bytes_per_block == spec.bytes_per_block // min(dst_size, num_kv_heads)
        got = np.full(wanted.bytes_per_block, bad)
        for share, state in sources:
            for span in head_overlap(share, wanted):
                got[span.dst : span.dst + span.length] = state[span.src : span.src + span.length]
        assert np.array_equal(got, whole[wanted.heads].ravel())


@given(specs_and_tp())
def test_ranks_share_the_heads_without_gap_or_overlap(spec_and_tp: tuple[KVSpec, int]) -> None:
    spec, tp_size = spec_and_tp
    shares = [BlockLayout(spec).share(rank, tp_size) for rank in range(tp_size)]
    assert [head for share in shares for head in share.heads] == list(range(spec.num_kv_heads))
    assert sum(share.bytes_per_block for share in shares) == spec.bytes_per_block


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (2, 2), (-1, 2), (0, 0), (0, 6), (8, 8)])
def test_heads_that_cannot_be_shared_so_are_refused(rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        BlockLayout(SPEC).share(rank, size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("num_kv_heads", 8),
        ("head_dim", 16),
        ("block_size", 8),
        ("dtype", "float16"),
        ("dtype", "float8_e4m3"),
        ("num_planes", 1),
    ],
)
def test_fingerprint_tells_shapes_apart(field: str, value: object) -> None:
    other = replace(SPEC, **{field: value})
    assert fingerprint(b"model", other) != fingerprint(b"model", SPEC)


def test_scales_follow_the_numbers_of_each_head() -> None:
    spec = replace(SPEC, dtype="float8_e4m3")
    assert spec.bytes_per_head == 4 * 8 + 4
    half, whole = BlockLayout(spec).share(1, 2), BlockLayout(spec).share(0, 1)
    assert head_overlap(half, whole)[0] == CopySpan(src=0, dst=2 * 36, length=2 * 36)


def test_fingerprint_tells_models_and_versions_apart_and_nothing_else() -> None:
    assert fingerprint(b"model", SPEC) == fingerprint(b"model", replace(SPEC))
    assert fingerprint(b"other", SPEC) != fingerprint(b"model", SPEC)
    assert fingerprint(b"model", SPEC, LAYOUT_VERSION + 1) != fingerprint(b"model", SPEC)
