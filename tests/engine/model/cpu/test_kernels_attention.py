"""Attention, rotary positions and the KV write on a CPU against a plain reading of what they mean:
windows, sinks, softcap, several ropes, FP8 and latent KV, over ragged batches."""

from dataclasses import replace

import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model import fp8
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.config import Latent, ModelConfig, Rope, RopeScaling
from kvrelay.engine.model.cpu import attention as cpu_attention
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.ops import rope_tables
from kvrelay.engine.step import Step
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.tiny import low_precision_kind, scheduled

LENGTH = 1024
SEQUENCES = [(1, 0), (1, 600), (37, 0), (64, 5), (1, 255), (1, 256), (130, 70), (2, 63), (9, 700)]
SEQUENCES += [(7, 509), (16, 520)]  # as drafts are: met in several splits, or not
KV_DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
LOW_PRECISION = ("bf16_pairs", "fp16", "amx", "int16")
ARITHMETIC = [(dtype, "none") for dtype in KV_DTYPES]
ARITHMETIC += [(torch.bfloat16, low_precision) for low_precision in LOW_PRECISION]


@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torch():
    """The references are small: its helpers would only take the cores from the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def items_of_several_tiles(monkeypatch):
    """Cuts the longest sequences in pieces, as prompts have them."""
    monkeypatch.setattr(cpu_attention, "_ITEMS", 1)


class Bench:
    """One batch, a pool of random KV, and the kernels over them."""

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        block_size: int,
        low_precision: str = "none",
    ) -> None:
        torch.manual_seed(0)
        library = kernels.load(default_cache_dir())
        self.config, self.block_size = config, block_size
        dims = config.head_dim | (config.latent.rank if config.latent else 0)
        whole = dims % (2 * library.kvr_vector_width()) == 0
        self.low_precision = low_precision if whole else "none"
        spec = config.kv_spec(block_size, "float32")
        groups, self.places = spec.num_groups, config.kv_places()
        counts = [groups * -(-(length + start) // block_size) for length, start in SEQUENCES]
        order = iter(torch.randperm(sum(counts)).tolist())
        seqs = [
            scheduled([1] * length, start, [next(order) for _ in range(count)])
            for (length, start), count in zip(SEQUENCES, counts, strict=True)
        ]
        self.tables = [[*seq.block_ids] for seq in seqs]
        limits = Limits(
            sum(counts),
            block_size,
            LENGTH,
            50,
            num_sinks=config.num_sinks,
            group_windows=spec.windows,
        )
        self.batch = Batch.from_step(Step(0, seqs), limits, torch.device("cpu"))
        heads = (sum(counts), spec.num_layers, spec.num_planes, config.num_kv_heads)
        kv = torch.randn(*heads, block_size, config.head_dim)
        self.pool = kv.to(kv_dtype)
        if kv_dtype == torch.uint8:
            numbers, scales = fp8.encode(kv * torch.logspace(-3, 1, config.head_dim))
            self.pool = torch.cat((numbers.flatten(4), scales), dim=-1)
        worst = 0xFF if self.is_fp8 else torch.nan  # where a table's -1 would lead
        self.pool = torch.cat((torch.full_like(self.pool[:1], worst), self.pool))[1:]
        self.ops = CpuOps(
            config,
            self.pool,
            torch.float32,
            LENGTH,
            library,
            2,
            low_precision=low_precision_kind(low_precision),
        )
        self.ops.begin(self.batch)

    def give_back(self) -> None:
        """Blocks that no query reads any more leave the tables, and hold what must not be met."""
        size, sinks = self.block_size, self.config.num_sinks
        windows = self.config.kv_spec(size, "float32").windows
        for group, window in enumerate(windows):
            tables = self.batch.tables_of(group)
            for row, (_, count, context) in enumerate(self.batch.spans):
                first = context - count - window + 1 if window else 0
                for block in range(-(-sinks // size), max(first, 0) // size):
                    given = self.tables[row][block * len(windows) + group]
                    self.pool[given] = 0xFF if self.is_fp8 else torch.nan
                    tables[row, block] = -1

    @property
    def is_fp8(self) -> bool:
        return self.pool.dtype == torch.uint8

    def kv(self, row: int, layer: int) -> torch.Tensor:
        """[num_planes, num_kv_heads, context, head_dim] of a sequence; zeros where given back."""
        group, place = self.places[layer]
        table = self.batch.tables_of(group)[row].long()
        blocks = self.pool[table.clamp(min=0), place]
        if self.is_fp8:
            wide = fp8.decode(*fp8.parts(blocks, self.config.head_dim), torch.float32)
        else:
            wide = blocks.float()
        wide[table < 0] = 0
        return wide.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.batch.spans[row][2]]

    def turned(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """As queries are left in place."""
        rotated = self.rotated(x, layer, positions)
        if self.is_fp8 and self.config.latent is None:
            return fp8.hadamard(rotated, self.config.rotated_half(layer))
        return rotated

    def rotated(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """x [N, heads, n]: leading dimensions, or with latents trailing ones, are rotated."""
        rope = self.config.rope(layer)
        if rope is None:
            return x
        cos, sin = (t[positions].unsqueeze(1) for t in rope_tables(rope, LENGTH, x.device))
        at = x.shape[-1] - rope.dim if self.config.latent else 0
        x1, x2 = x[..., at : at + rope.dim].chunk(2, dim=-1)
        turned = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        return torch.cat((x[..., :at], *turned, x[..., at + rope.dim :]), dim=-1)

    def met(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """As queries meet the keys of the pool."""
        turned, scale = self.turned(x, layer, positions), self.config.score_scale
        if self.low_precision in ("none", "fp16", "int16"):
            return turned
        return (turned * scale).bfloat16().float() / scale

    def close(self, expected: torch.Tensor) -> dict[str, float]:
        """What the kernels may be off by: weights are rounded to 8 bits or to 11, or nothing is. In
        FP8 scores are larger, and so is what float32 makes of their differences."""
        most = expected.abs().max().item()
        exact = 8e-5 if self.is_fp8 else 2e-5
        off = max(2e-5, exact * most) if self.low_precision == "none" else 2.0**-8 * most
        return {"rtol": 0, "atol": off}

    def only(self, row: int, first: int, count: int) -> Batch:
        """The batch of `count` of a sequence's tokens from its `first` on."""
        start, fed, context = self.batch.spans[row]
        more_slots, more_tables = self.batch.more_slots, self.batch.more_tables
        span, ends = slice(start + first, start + first + count), context - fed + first + count
        return replace(
            self.batch,
            tokens=self.batch.tokens[span],
            positions=self.batch.positions[span],
            slots=self.batch.slots[span],
            query_start=torch.zeros(1, dtype=torch.int32),
            query_len=torch.full((1,), count, dtype=torch.int32),
            context_len=torch.full((1,), ends, dtype=torch.int32),
            block_tables=self.batch.block_tables[row : row + 1],
            spans=((0, count, ends),),
            more_slots=None if more_slots is None else more_slots[:, span].contiguous(),
            more_tables=None if more_tables is None else more_tables[:, row : row + 1].contiguous(),
        )

    def attended(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """queries [N, num_heads, head_dim], not rotated -> [N, num_heads * value_dim]."""
        c, out = self.config, []
        window, sinks = c.window(layer), c.num_sinks if c.window(layer) else 0
        width = c.latent.rank if c.latent else c.head_dim
        for row, (first, count, context) in enumerate(self.batch.spans):
            kv = self.kv(row, layer).repeat_interleave(c.num_heads // c.num_kv_heads, dim=1)
            mine, pos = queries[first : first + count], torch.arange(context - count, context)
            key = torch.arange(context)
            near = self.met(mine, layer, pos)
            scores = torch.einsum("nhd,hkd->hnk", near, kv[0])
            visible = key <= pos[:, None]
            if window:
                far = self.met(mine, layer, pos.clamp(max=window + sinks - 1))
                scores[..., :sinks] = torch.einsum("nhd,hkd->hnk", far, kv[0, :, :sinks])
                visible &= (key > pos[:, None] - window) | (key < sinks)
            if chunk := c.chunk(layer):
                visible &= key >= pos[:, None] // chunk * chunk
            scores *= c.score_scale
            if c.attention_softcap:
                scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out.append(torch.einsum("hnk,hkd->nhd", weights, kv[-1][..., :width]).flatten(1))
        return torch.cat(out)


def layered(config: ModelConfig, **changes) -> ModelConfig:
    return replace(config, max_position_embeddings=LENGTH, **changes)


CASES = {
    "plain": (config_of(9, 3, 64), 16),
    "one window": (layered(config_of(9, 3, 64), windows=(40, 40)), 16),
    "long window, odd blocks": (layered(config_of(4, 4, 16), windows=(0, 300)), 7),
    "full and windowed": (layered(config_of(14, 2, 64), windows=(20, 0)), 24),
    "sinks": (layered(config_of(9, 3, 64), windows=(70, 50), num_sinks=4), 16),
    "many sinks": (layered(config_of(4, 2, 32), windows=(300, 65), num_sinks=270), 13),
    "a window that begins with a block": (
        layered(config_of(6, 2, 32), windows=(25, 25), num_sinks=2),
        7,
    ),
    "softcap and scale": (
        layered(
            config_of(8, 4, 16),
            windows=(33, 0),
            attention_softcap=5.0,
            attention_scale=0.4,
        ),
        16,
    ),
    "ropes": (
        layered(
            config_of(6, 2, 64),
            ropes=(Rope(1e4, 24), Rope(1e6, 64, RopeScaling("linear", 4.0))),
            layer_ropes=(1, 0),
            windows=(0, 90),
            num_sinks=2,
        ),
        16,
    ),
    "no rope": (
        layered(config_of(6, 2, 32), layer_ropes=(0, -1), windows=(64, 64), num_sinks=3),
        16,
    ),
    "chunks": (layered(config_of(9, 3, 64), layer_ropes=(0, -1), attention_chunk=40), 16),
    "long chunks, odd blocks": (layered(config_of(4, 2, 32), attention_chunk=300), 7),
    "a large group": (config_of(40, 1, 16), 16),
    "one group of wide heads": (config_of(8, 1, 128), 32),
    "no groups, heads that fill no vector": (config_of(5, 5, 80), 24),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "low_precision"), ARITHMETIC, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention_reads_what_its_layer_may_see(case, kv_dtype, low_precision):
    config, block_size = CASES[case]
    bench = Bench(config, kv_dtype, block_size, low_precision)
    heads = config.num_heads + 2 * config.num_kv_heads
    fed = torch.randn(len(bench.batch.tokens), heads, config.head_dim)
    bench.give_back()
    for layer in range(config.num_layers):
        qkv = fed.flatten(1).clone()
        bench.ops.rope_write(qkv, layer, None, None)
        turned = bench.turned(fed, layer, bench.batch.positions)
        queries = config.num_heads * config.head_dim
        close = {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(qkv[:, :queries], turned.flatten(1)[:, :queries], **close)
        got = bench.ops.attention(qkv, layer)
        expected = bench.attended(fed[:, : config.num_heads], layer)
        torch.testing.assert_close(got, expected, **bench.close(expected))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_written_kv_is_what_torch_would_store(kv_dtype):
    config = layered(config_of(4, 2, 32), layer_ropes=(-1, 0))
    bench = Bench(config, kv_dtype, 13)
    tokens = len(bench.batch.tokens)
    kv = torch.randn(tokens, 4, 32) * torch.logspace(-30, 30, 32)[torch.randperm(32)]
    kv[::3] *= torch.logspace(-8, 0, tokens)[::3, None, None]
    kv[1::3] = torch.randn(kv[1::3].shape)
    kv[5], kv[6, :, 0], kv[7], kv[8] = 0, 448.0, 1e-42, 449.0
    qkv = torch.cat((torch.randn(tokens, 4, 32), kv), dim=1).flatten(1)
    bench.ops.rope_write(qkv, 0, None, None)
    size = bench.block_size
    block, offset = bench.batch.slots // size, bench.batch.slots % size
    for plane, vectors in enumerate((kv[:, :2], kv[:, 2:])):
        stored = bench.pool[:, 0, plane]
        if kv_dtype == torch.uint8:
            numbers, scales = fp8.parts(stored, 32)
            kept = fp8.hadamard_inverse(vectors, 16) if plane == 0 else vectors
            expected, expected_scales = fp8.encode(kept)
            assert torch.equal(scales[block, :, offset], expected_scales)
            assert torch.equal(numbers[block, :, offset], expected)
        else:
            assert torch.equal(stored[block, :, offset], vectors.to(kv_dtype))


def test_every_fp8_number_is_read_as_torch_reads_it():
    """One query that weighs all values alike, over keys of zeros: the values' mean."""
    config = config_of(2, 1, 256)
    bench = Bench(config, torch.uint8, 8)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    every[every & 0x7F == 0x7F] = 0  # not a number
    numbers, scales = fp8.parts(bench.pool, 256)
    numbers[:, :, 0], numbers[:, :, 1] = 0, every
    scales[:, :, 1] = torch.arange(8, dtype=torch.int32).to(torch.uint8) * 5 + 100
    context = bench.batch.spans[1][2]
    got = bench.ops.attention(torch.zeros(len(bench.batch.tokens), 4 * 256), 0)[1, :256]
    expected = bench.kv(1, 0)[1, 0].double().mean(0)
    assert bench.kv(1, 0).shape[2] == context
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kv_dtype", "low_precision"), ARITHMETIC, ids=str)
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(48, 64, 16), (6, 512, 64), (5, 32, 16)])
def test_latent_attention_is_one_kv_head_for_all(heads, rank, rope_dim, kv_dtype, low_precision):
    dim = rank + rope_dim
    config = layered(
        config_of(heads, 1, dim),
        latent=Latent(rank, None, 24, rope_dim, 24),
        ropes=(Rope(1e4, rope_dim, RopeScaling("linear", 2.0)),),
        attention_scale=dim**-0.5,
        windows=(0, 80),
        num_sinks=2,
    )
    bench = Bench(config, kv_dtype, 9, low_precision)
    tokens = len(bench.batch.tokens)
    fed, latent = torch.randn(tokens, heads, dim), torch.randn(tokens, 3 + dim)
    for layer in range(2):
        queries, wide = fed.clone(), latent.clone()
        bench.ops.latent_write(queries[..., rank:], wide[:, 3:], layer)
        positions = bench.batch.positions
        expected = bench.rotated(fed, layer, positions)
        torch.testing.assert_close(queries, expected, rtol=0, atol=1e-5)
        kept = bench.rotated(latent[:, None, 3:], layer, positions)[:, 0]
        torch.testing.assert_close(wide[:, 3:], kept, rtol=0, atol=1e-5)
        first, _, context = bench.batch.spans[2]
        written = bench.kv(2, layer)[0, 0]
        exact = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.uint8: 0.2}[kv_dtype]
        torch.testing.assert_close(written, kept[first : first + context], rtol=exact, atol=exact)
        got = bench.ops.latent_attention(queries, layer).flatten(1)
        expected = bench.attended(fed, layer)
        torch.testing.assert_close(got, expected, **bench.close(expected))


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize(("kv_dtype", "low_precision"), ARITHMETIC, ids=str)
def test_a_token_is_the_same_fed_alone_or_with_its_prompt(kv_dtype, low_precision, sinks):
    """Bit for bit: what is computed again after a failure goes on with the same tokens."""
    config = layered(config_of(9, 3, 64), windows=(0, 60), num_sinks=sinks)
    bench = Bench(config, kv_dtype, 16, low_precision)
    qkv = torch.randn(len(bench.batch.tokens), 15 * 64) * 2
    together = [bench.ops.attention(qkv, layer).clone() for layer in range(2)]
    for row, spans in enumerate(bench.batch.spans):
        for first, count in ((0, 1), (0, 2), (spans[1] // 2, 8), (spans[1] - 1, 1)):
            count = min(count, spans[1] - first)
            bench.ops.begin(bench.only(row, first, count))
            fed = slice(spans[0] + first, spans[0] + first + count)
            for layer in range(2):
                alone = bench.ops.attention(qkv[fed].clone(), layer)
                assert torch.equal(alone, together[layer][fed])


def test_a_result_does_not_depend_on_who_else_is_in_the_batch():
    """Bit for bit, and for any number of threads."""
    config = layered(config_of(9, 3, 64), windows=(0, 260), num_sinks=4)
    bench = Bench(config, torch.bfloat16, 16)
    qkv = torch.randn(len(bench.batch.tokens), 15 * 64)
    together = [bench.ops.attention(qkv, layer).clone() for layer in range(2)]
    for row, (first, count, _) in enumerate(bench.batch.spans):
        bench.ops.begin(bench.only(row, 0, count))
        span = slice(first, first + count)
        for layer in range(2):
            assert torch.equal(bench.ops.attention(qkv[span], layer), together[layer][span])
