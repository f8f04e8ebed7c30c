"""Attention kernels against float64, on every kind of edge; interpreted where there is no GPU."""

import pytest
import torch

from tests.engine.model.paged import DEVICE, attention_case, expected, paged, split_early

pytest.importorskip("triton")

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.device_memory import MIN_KEYS, most_splits, split_bytes, splits_of
from kvrelay.engine.model.gpu import attention_decode as decode
from kvrelay.engine.model.gpu import attention_prefill as prefill
from kvrelay.engine.model.gpu import latent
from kvrelay.engine.model.gpu.attention_tile import Tiling
from kvrelay.engine.model.gpu.cache_pool import Pool
from kvrelay.engine.model.gpu.index_scores import index_scores

TILING = Tiling(16, 32, num_warps=4, num_stages=2)
ONES = [(1, 1), (1, 75)]
MIXED = [(5, 5), (1, 20), (9, 73)]
VARIANTS = {
    "plain": {},
    "window": {"window": 12},
    "sinks": {"window": 12, "num_sinks": 4},
    "softcap": {"softcap": 5.0},
    "chunk": {"window": -12},
    "learned": {"window": 12, "learned": True},
    "learned-whole": {"learned": True},
}
SHAPES = {  # num_heads, kv_heads, head_dim, block_size, dtype, FP8
    "groups": (4, 2, 32, 16, torch.float32, False),
    "odd": (6, 2, 24, 24, torch.float32, False),
    "half": (4, 1, 64, 64, torch.float16, False),
    "fp8": (4, 2, 32, 16, torch.float32, True),
}
CASES = [
    *(("groups", name) for name in VARIANTS),
    ("odd", "plain"),
    ("half", "plain"),
    ("fp8", "sinks"),
    ("fp8", "learned-whole"),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def attend(kernel, lengths, shape, variant, check_rows):
    """Runs `kernel(out, queries, case, options)` and compares the rows of check_rows(spans); the
    others must have stayed."""
    case, queries, out, options, answer = attention_case(
        lengths, *SHAPES[shape], scale=0.2, fill=7.0, **VARIANTS[variant]
    )
    kernel(out, queries, case, options)
    answer = answer.flatten(1)
    rows = check_rows(case.spans)
    answer[~rows] = 7.0
    # FP8 is multiplied in float16.
    tolerance = 5e-3 if shape in ("fp8", "half") else 1e-5
    torch.testing.assert_close(out.double().cpu(), answer, rtol=tolerance, atol=tolerance)


def rows_of(wanted):
    return lambda spans: torch.cat([torch.full((span[1],), wanted(span)) for span in spans])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "variant"), CASES)
def test_decode_attends_to_what_each_sequence_may_see(shape, variant, monkeypatch):
    split_early(monkeypatch, most=3 if shape == "groups" else 1)

    def kernel(out, queries, case, options):
        heads, width = options["num_heads"], case.pool.value_dim
        splits = case.splits(heads, width, TILING.block_n, options["window"])
        decode.decode_attention(
            out, queries, case.pool, 1, *case.of_decodes, splits=splits, tiling=TILING, **options
        )

    attend(kernel, [*ONES, (2, 9)], shape, variant, rows_of(lambda span: span[1] == 1))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "variant"), CASES)
def test_prefill_attends_to_what_each_token_may_see(shape, variant):
    def kernel(out, queries, case, options):
        tiles = prefill.prefill_tiles(case.spans, options["num_heads"], case.pool, TILING)
        prefill.prefill_attention(
            out, queries, case.pool, 1, torch.from_numpy(tiles).to(DEVICE), *case.tensors,
            tiling=TILING, **options,
        )  # fmt: skip

    attend(kernel, MIXED, shape, variant, rows_of(lambda span: span[1] > 1))


@pytest.mark.parametrize(
    ("heads", "rank", "rope_dim", "kv_fp8"), [(4, 64, 16, False), (9, 48, 8, True)]
)
def test_latent_attention_reads_keys_and_values_from_one_vector(
    heads, rank, rope_dim, kv_fp8, monkeypatch
):
    split_early(monkeypatch, most=1 if kv_fp8 else 3)
    case = paged(
        [(1, 1), (1, 100), (3, 70)],
        1,
        rank + rope_dim,
        dtype=torch.float32,
        kv_fp8=kv_fp8,
        planes=1,
    )
    queries = torch.randn(case.num_tokens, heads, rank + rope_dim, device=DEVICE)
    answer = expected(case, queries, heads, 0.1, softcap=8.0, value_dim=rank)
    tiles = torch.from_numpy(latent.latent_tiles(case.spans, heads, case.pool, TILING)).to(DEVICE)
    options = {"rank": rank, "scale": 0.1, "softcap": 8.0, "tiling": TILING}
    tolerance = 5e-3 if kv_fp8 else 1e-5
    out = torch.full((case.num_tokens, heads, rank), float("nan"), device=DEVICE)
    latent.latent_prefill(out, queries, case.pool, 1, tiles, *case.tensors, **options)
    assert out.isnan().flatten(1).all(1).sum() == 2  # the single tokens' rows
    splits = case.splits(heads, rank, TILING.block_n)
    latent.latent_decode(out, queries, case.pool, 1, *case.of_decodes, splits=splits, **options)
    torch.testing.assert_close(out.double().cpu(), answer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "dim", "kv_fp8"), [(4, 32, False), (40, 24, True)])
def test_positions_score_as_in_the_reference(heads, dim, kv_fp8):
    """A decode and a chunk have their scores; past the token they are -inf."""
    case = paged([(1, 100), (3, 70)], 1, dim, dtype=torch.float32, kv_fp8=kv_fp8, planes=1)
    queries = torch.randn(case.num_tokens, heads * dim, device=DEVICE)
    weights = torch.randn(case.num_tokens, heads, device=DEVICE)
    pool = Pool(case.pool.data[:, 1:], dim)
    positions = torch.tensor([99, 67, 68, 69], device=DEVICE)
    sequences = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    got = index_scores(queries, weights, pool, positions, sequences, case.tensors[3], 100)
    tolerance = 2e-3 if kv_fp8 else 1e-5
    for row, (seq, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        keys = case.kv[seq][0][0, : position + 1]
        found = (queries[row].view(heads, dim).cpu().double() @ keys.T).relu()
        expected = weights[row].cpu().double() @ found
        size = float(expected.abs().max())
        assert (got[row, : position + 1].cpu() - expected).abs().max() < tolerance * size
        assert (got[row, position + 1 :] == -torch.inf).all()


@pytest.mark.parametrize(("splits", "kv_fp8"), [(1, True), (3, False)])
def test_latents_of_selected_positions_are_a_context(splits, kv_fp8, monkeypatch):
    split_early(monkeypatch, most=splits)
    heads, rank, rope_dim, topk = 5, 48, 8, 70
    case = paged(
        [(1, 100), (2, 90)], 1, rank + rope_dim, dtype=torch.float32, kv_fp8=kv_fp8, planes=1
    )
    queries = torch.randn(case.num_tokens, heads, rank + rope_dim, device=DEVICE)
    order = torch.Generator().manual_seed(4)
    lengths = (topk, 40, topk)
    chosen = [torch.randperm(88, generator=order)[:topk].sort().values for _ in lengths]
    ints = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ((0, 1, 1), lengths)]
    rows = torch.arange(3, dtype=torch.int32, device=DEVICE)
    selected = latent.Selected(
        torch.stack(chosen).int().to(DEVICE), ints[0], rows, torch.ones_like(rows), ints[1]
    )
    out = torch.full((3, heads, rank), float("nan"), device=DEVICE)
    lists = decode.list_splits(
        selected.query_len, selected.context_len, [topk] * 3, heads, rank, TILING.block_n
    )
    latent.latent_decode(
        out, queries, case.pool, 1, rows, selected.context_len, case.block_tables, rank=rank,
        scale=0.1, splits=lists, tiling=TILING, selected=selected,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        keys = case.kv[min(row, 1)][0][0, chosen[row][:length]]
        scores = queries[row].cpu().double() @ keys.T * 0.1
        expected = scores.softmax(-1) @ keys[:, :rank]
        torch.testing.assert_close(out[row].cpu().double(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("most", [1, 3])
def test_padding_of_a_captured_step_is_not_computed(most, monkeypatch):
    split_early(monkeypatch, most=most)
    case = paged(ONES, 1, 32, dtype=torch.float32)
    queries = torch.randn(len(ONES), 2 * 32, device=DEVICE)
    out = torch.full_like(queries, 7.0)
    case.query_len[1] = case.context_len[1] = 0
    splits = case.splits(2, 32, TILING.block_n)
    decode.decode_attention(
        out, queries, case.pool, 1, *case.of_decodes, num_heads=2, scale=1.0, splits=splits,
        tiling=TILING,
    )  # fmt: skip
    assert (out[1] == 7.0).all()
    assert not out.isnan().any()


def test_prefill_tiles_cover_every_row_once_and_the_longest_come_first():
    spans = [(0, 5, 5), (5, 1, 900), (6, 40, 700)]
    tiles = prefill.list_tiles(spans, 3, 16).tolist()
    assert tiles[0] == [2, 112]
    assert sorted(tiles) == [[0, 0], *([2, row] for row in range(0, 120, 16))]
    assert len(prefill.list_tiles([(0, 1, 9)], 3, 16)) == 0


MIXES = {
    "one": [(1, 1)],
    "short": [(1, context) for context in (31, 32, 33, 64, 65)],
    "one long among short": [(1, 7), (1, 500), *[(1, 20 + i) for i in range(9)]],
    "long ones first": [(1, 400), (1, 399), (1, 65), (1, 1)],
    "prompts between": [(3, 300), (1, 300), (5, 5), (1, 2)],
    "only prompts": [(3, 300)],
}


@pytest.mark.parametrize("window", [0, 40, -40])
@pytest.mark.parametrize("mix", MIXES)
def test_a_list_has_each_split_once_and_long_contexts_first(mix, window, monkeypatch):
    split_early(monkeypatch, most=4)
    case, block_n = paged(MIXES[mix], 1, 16, dtype=torch.float32), TILING.block_n
    splits = case.splits(2, 16, block_n, window)
    if mix == "only prompts":
        assert splits is None
        return
    wanted, sizes = [], []
    for seq, (count, context) in enumerate(MIXES[mix]):
        low = 0 if not window else max(context - window, 0)
        if window < 0:
            low = (context - 1) // -window * -window
        keys = context - low // block_n * block_n
        each = -(-max(-(-keys // 4), 32) // block_n) * block_n
        splits_here = -(-keys // each) if count == 1 else 0
        assert int(splits.count[seq]) == splits_here
        wanted += [[seq, split] for split in range(splits_here)]
        sizes.append(each)
    found = splits.items[: int(splits.total)].tolist()
    assert sorted(found) == wanted
    assert len(wanted) <= len(splits.items)
    is_long = [sizes[seq] > 32 for seq, _ in found]
    assert is_long == sorted(is_long, reverse=True)
    for seq, first in enumerate(splits.first.tolist()):
        own = found[first : first + int(splits.count[seq])]
        assert own == [[seq, split] for split in range(len(own))]


@pytest.mark.parametrize("is_latent", [False, True])
def test_a_sequence_has_the_same_numbers_in_any_batch(is_latent, monkeypatch):
    """To the bit, beside long ones, short ones, and alone."""
    split_early(monkeypatch, most=4)
    planes, dim, rank = (1, 40, 32) if is_latent else (2, 32, 32)
    lengths = [(1, 9), (1, 300), (1, 33), (1, 100), (1, 64), (1, 220)]
    case = paged(lengths, 1, dim, dtype=torch.float32, planes=planes)
    queries = torch.randn(len(lengths), 2, dim, device=DEVICE)

    def run(chosen):
        own = torch.tensor(chosen, device=DEVICE)
        ones = torch.ones_like(own, dtype=torch.int32)
        contexts, tables = case.context_len[own], case.block_tables[own]
        sizes = [lengths[each][1] for each in chosen]
        splits = decode.list_splits(ones, contexts, sizes, 2, rank, TILING.block_n)
        start = torch.arange(len(chosen), dtype=torch.int32, device=DEVICE)
        out = torch.zeros(len(chosen), 2, rank, device=DEVICE)
        where = case.pool, 1, start, contexts, tables
        options = {"scale": 0.2, "splits": splits, "tiling": TILING}
        if is_latent:
            latent.latent_decode(out, queries[own], *where, rank=rank, **options)
        else:
            rows = queries[own].flatten(1)
            decode.decode_attention(out.view(len(chosen), -1), rows, *where, num_heads=2, **options)
        return out

    together = run(range(6))
    for chosen in ([1], [5, 2, 0]):
        assert torch.equal(run(chosen), together[chosen])


def test_results_of_splits_have_a_bound():
    assert most_splits(32, 128) == 64
    assert most_splits(128, 512) == 7, "heads of DeepSeek V3 in one rank"
    assert most_splits(100_000, 512) == 1
    assert splits_of(256, 64) == 1
    assert splits_of(257, 64) == 2
    assert splits_of(1_000_000, 64) == 64
    assert splits_of(1_000_000, 64, window=1024) == 5


def test_results_of_splits_are_counted_beside_the_pool(path):
    config, longest = read_config(path), 131_072
    each = splits_of(longest, most_splits(config.num_heads, config.head_dim))
    size = 4 * config.num_heads * (config.head_dim + 1) * each
    assert split_bytes(config, 3, longest) == 3 * size > 0
    assert split_bytes(config, 3, MIN_KEYS) == 0, "all are whole"
