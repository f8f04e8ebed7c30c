from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import DTYPE_BYTES, KVSpec
from kvtransfer.layout import LAYOUT_VERSION, BlockLayout, fingerprint

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


@given(specs_and_tp(), st.data())
def test_spans_of_a_rank_are_its_heads_of_the_tensor(
    spec_and_tp: tuple[KVSpec, int], data: st.DataObject
) -> None:
    spec, tp_size = spec_and_tp
    rank = data.draw(st.integers(0, tp_size - 1))
    layout = BlockLayout(spec)
    heads = layout.heads(rank, tp_size)
    width = DTYPE_BYTES[spec.dtype]
    offsets = np.arange(layout.bytes_per_block).reshape(
        spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim, width
    )
    expected = offsets[:, :, heads.start : heads.stop].ravel().tolist()
    spans = layout.rank_spans(rank, tp_size)
    assert [i for offset, length in spans for i in range(offset, offset + length)] == expected
    assert len(spans) == 2 * spec.num_layers


@given(specs_and_tp())
def test_ranks_share_a_block_without_gap_or_overlap(spec_and_tp: tuple[KVSpec, int]) -> None:
    spec, tp_size = spec_and_tp
    layout = BlockLayout(spec)
    spans = sorted(span for rank in range(tp_size) for span in layout.rank_spans(rank, tp_size))
    end = 0
    for offset, length in spans:
        assert offset == end
        end += length
    assert end == layout.bytes_per_block


def test_heads_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(AssertionError):
        BlockLayout(SPEC).heads(0, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("num_kv_heads", 8),
        ("head_dim", 16),
        ("block_size", 8),
        ("dtype", "float16"),
    ],
)
def test_fingerprint_tells_shapes_apart(field: str, value: object) -> None:
    other = replace(SPEC, **{field: value})
    assert fingerprint(b"model", other) != fingerprint(b"model", SPEC)


def test_fingerprint_tells_models_and_versions_apart_and_nothing_else() -> None:
    assert fingerprint(b"model", SPEC) == fingerprint(b"model", replace(SPEC))
    assert fingerprint(b"other", SPEC) != fingerprint(b"model", SPEC)
    assert fingerprint(b"model", SPEC, LAYOUT_VERSION + 1) != fingerprint(b"model", SPEC)
