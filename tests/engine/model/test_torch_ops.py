"""The reference itself: windows with sinks by their definition, blocks given back, FP8 pools."""

from dataclasses import replace

import pytest
import torch

from kvrelay.engine.model import fp8
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import with_window
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import rope_tables
from kvrelay.engine.model.torch_ops import TorchOps
from tests.engine.model.tiny import MAX_LEN, Driver, make_pool, tokens_of

WINDOW, SINKS, LENGTH, SIZE = 10, 3, 37, 16
LONG = tokens_of(150, seed=8)


def turned(x: torch.Tensor, position: int, tables) -> torch.Tensor:
    cos, sin = (table[position] for table in tables)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def test_a_window_with_sinks_is_what_streaming_llm_defines(llama):
    """Query by query, key by key: the distance to a sink never exceeds window and sinks."""
    plain = read_config(llama)
    config = with_window(plain, WINDOW, SINKS)
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    tables = rope_tables(config.ropes[0], MAX_LEN, torch.device("cpu"))
    qkv = torch.randn(LENGTH, (config.num_heads + 2 * config.num_kv_heads) * dim)
    heads = qkv.view(LENGTH, -1, dim).clone()
    queries, keys, values = heads.split([config.num_heads, *[config.num_kv_heads] * 2], dim=1)
    expected = torch.empty(LENGTH, config.num_heads, dim)
    for p in range(LENGTH):
        sinks = set(range(min(SINKS, p + 1)))
        seen = sorted(sinks | set(range(max(0, p - WINDOW + 1), p + 1)))
        for head in range(config.num_heads):
            scores = []
            for j in seen:
                at = min(p, WINDOW + SINKS - 1) if j in sinks else p
                query = turned(queries[p, head], at, tables)
                scores.append(query @ turned(keys[j, head // group], j, tables) * dim**-0.5)
            weights = torch.stack(scores).softmax(0)
            expected[p, head] = weights @ values[seen, head // group]
    ops = TorchOps(config, make_pool(config, torch.float32), torch.float32, MAX_LEN)
    got, first = [], 0
    for count in (20, 1, 9, 1, 6):
        ops.begin(batch_of(first, count))
        part = qkv[first : first + count].clone()
        ops.rope_write(part, 1, None, None)
        got.append(ops.attention(part, 1))
        first += count
    torch.testing.assert_close(torch.cat(got), expected.flatten(1), rtol=0, atol=1e-5)


def batch_of(start: int, count: int) -> Batch:
    """One sequence whose blocks are 0, 1, 2, ..."""
    at, end = torch.arange(start, start + count), start + count
    blocks = torch.arange(-(-end // SIZE), dtype=torch.int32).unsqueeze(0)
    none = torch.empty(0, dtype=torch.int64)
    lengths = [torch.tensor([each], dtype=torch.int32) for each in (0, count, end)]
    return Batch(at, at, at, *lengths, blocks, none, ((0, count, end),))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 20])
@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_chunks_and_decode_see_the_same_window_and_sinks(checkpoint_of, family, sinks):
    path = checkpoint_of(family)
    config = with_window(read_config(path), WINDOW, sinks)
    whole, parts = Driver(path, "torch", config), Driver(path, "torch", config)
    expected = whole.feed(("a", LONG[:40]), ("b", LONG[50:53]))
    for first, end in ((0, 1), (1, 18), (18, 37), (37, 38), (38, 39)):
        parts.feed(("a", LONG[first:end]))
    parts.feed(("b", LONG[50:52]))
    got = parts.feed(("a", LONG[39:40]), ("b", LONG[52:53]))  # a pure decode batch, padded
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    full = Driver(path, "torch").feed(("a", LONG[:40]))
    assert (full[0] - expected[0]).abs().max() > 0.1, "the window hides something"


def test_blocks_that_a_window_has_left_are_not_read(llama):
    config = with_window(read_config(llama), WINDOW, SINKS)
    kept, given_back = Driver(llama, "torch", config), Driver(llama, "torch", config)
    for driver in (kept, given_back):
        driver.feed(("a", LONG[:90]), ("b", LONG[:12]))
    given_back.give_back("a", 1, 5)  # 90 - 10 = 80 = 5 blocks; the first holds the sinks
    parts = (("a", LONG[90:91]), ("b", LONG[12:13]))
    torch.testing.assert_close(given_back.feed(*parts), kept.feed(*parts), rtol=0, atol=0)
    parts = (("a", LONG[91:100]), ("b", LONG[13:14]))
    torch.testing.assert_close(given_back.feed(*parts), kept.feed(*parts), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek2"])
def test_an_fp8_pool_computes_with_rounded_keys_and_values_however_it_was_filled(
    checkpoint_of, family, monkeypatch
):
    path = checkpoint_of(family)
    exact = Driver(path, "torch").feed(("a", LONG[:60]))
    whole, parts = (Driver(path, "torch", fp8=True) for _ in range(2))
    got = whole.feed(("a", LONG[:60]))
    assert (got - exact).abs().mean() > 0.01
    for first, end in ((0, 7), (7, 33), (33, 59)):
        parts.feed(("a", LONG[first:end]))
    torch.testing.assert_close(parts.feed(("a", LONG[59:60])), got, rtol=0, atol=1e-3)
    write, config = TorchOps._write, read_config(path)

    def rounded(ops: TorchOps, layer: int, plane: int, heads: torch.Tensor) -> None:
        half = config.rotated_half(layer)
        is_key = plane == 0 and config.latent is None
        if is_key:
            heads = fp8.hadamard_inverse(heads, half)
        heads = fp8.decode(*fp8.encode(heads), torch.float32)
        write(ops, layer, plane, fp8.hadamard(heads, half) if is_key else heads)

    monkeypatch.setattr(TorchOps, "_write", rounded)
    expected = Driver(path, "torch").feed(("a", LONG[:60]))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)


def test_fp8_numbers_are_the_nearest_and_scales_the_smallest():
    x = torch.randn(200, 16) * torch.logspace(-30, 30, 200)[:, None]
    x[0], x[1], x[2], x[3] = 0.0, 448.0, 449.0, -1e-44
    numbers, scales = fp8.encode(x)
    assert scales[:4].tolist() == [127, 127, 128, 1]
    largest = x.double().abs().amax(-1)
    unit = 2.0 ** (scales.double() - 127)
    assert (largest <= 448 * unit).all()
    assert (largest[4:] > 224 * unit[4:]).all(), "half the scale would not do"
    back = fp8.decode(numbers, scales, torch.float64)
    step = torch.maximum(x.double().abs() / 16, unit[:, None] * 2.0**-10)  # half of one, at least
    assert ((back - x.double()).abs() <= step).all()


@pytest.mark.parametrize(("window", "sinks"), [(-1, 0), (0, 4), (8, -1)])
def test_impossible_windows_are_refused(llama, window, sinks):
    with pytest.raises(ModelError, match=f"a window of {window} positions and {sinks} sinks"):
        with_window(read_config(llama), window, sinks)


def test_a_window_narrows_those_that_the_model_has(llama):
    model = replace(read_config(llama), windows=(4, 0, 64))
    assert with_window(model, 10, 2).windows == (4, 10, 10)
    assert with_window(model, 10, 2).max_window == 10
    assert model.max_window == 0
    assert with_window(model, 0, 0) is model
    with pytest.raises(ModelError, match="a window of 10 positions is not possible with attention"):
        with_window(replace(model, attention_chunk=64), 10, 0)
