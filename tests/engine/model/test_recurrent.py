"""Recurrent layers: states that are cut, kept and shared, and kernels beside torch."""

from dataclasses import replace

import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.batch import Batch
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.linear import INT16
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    Recurrent,
)
from kvrelay.engine.model.states import NO_STATE, StatePool, StateSpans
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.model.weights import RecurrentWeights
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.tiny import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_SLOTS,
    Driver,
    make_checkpoint,
    make_pool,
    make_states,
    tokens_of,
)

LONG, SHORT = tokens_of(90, seed=1), tokens_of(21, seed=2)


KINDS = ("falcon-h1-norm", "kimi-linear", "lfm2-bias", "nemotron-h", "qwen3-next")


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    return path


@pytest.fixture(scope="module")
def whole(path):
    """(logits after LONG, its state), by the kernels and at once."""
    driver = Driver(path, "cpu")
    return driver.feed(("a", LONG))[0], driver.state_pool.memory[0].clone()


@pytest.mark.parametrize("length", [1, 7, 64])
def test_chunks_of_any_length_give_the_bits_of_the_whole(path, whole, length):
    driver = Driver(path, "cpu")
    for first in range(0, len(LONG), length):
        logits = driver.feed(("a", LONG[first : first + length]))[0]
    assert torch.equal(logits, whole[0])
    assert torch.equal(driver.state_pool.memory[0], whole[1])


# In pairs of bfloat16 the product behind a gate takes rounded numbers at once, which are others.
IN_INT16 = {"dtype": torch.bfloat16, "low_precision": INT16}


@pytest.mark.parametrize("options", [{}, IN_INT16, {"quantization": "int8"}])
def test_layers_at_once_give_the_bits_of_one_call_after_the_other(path, options, monkeypatch):
    steps = (("a", LONG), ("b", SHORT[:9])), (("b", SHORT[9:10]), ("c", SHORT), ("a", [5]))
    at_once, one_by_one = (Driver(path, "cpu", **options) for _ in range(2))
    if at_once.config.is_layerwise:
        pytest.skip("its layers always are called one after the other")
    logits = [at_once.feed(*parts, mute=("b",)) for parts in steps]
    monkeypatch.setattr(ModelConfig, "is_layerwise", True)
    assert all(map(torch.equal, logits, [one_by_one.feed(*p, mute=("b",)) for p in steps]))
    assert torch.equal(at_once.state_pool.memory, one_by_one.state_pool.memory)


@pytest.mark.parametrize("threads", [1, 5])
def test_any_number_of_threads_gives_the_same_bits(path, whole, threads):
    driver = Driver(path, "cpu", threads=threads)
    assert torch.equal(driver.feed(("a", LONG))[0], whole[0])
    assert torch.equal(driver.state_pool.memory[0], whole[1])


def test_a_batch_gives_each_sequence_the_bits_that_it_has_alone(path, whole):
    alone, driver = Driver(path, "cpu"), Driver(path, "cpu")
    driver.feed(("a", LONG[:70]), ("b", SHORT[:9]))
    driver.feed(("b", SHORT[9:10]), ("a", LONG[70:89]), ("c", SHORT[:20]))
    logits = driver.feed(("c", SHORT[20:]), ("b", SHORT[10:]), ("a", LONG[89:]))
    short = alone.feed(("a", SHORT))[0]
    assert all(map(torch.equal, logits, (short, short, whole[0])))
    slots = [driver.states[name] for name in "bac"]
    states = driver.state_pool.memory[slots]
    assert torch.equal(states[0], states[2])
    assert torch.equal(states[1], whole[1])


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_a_chunk_leaves_states_where_it_is_cut_and_begins_from_one_that_is_shared(path, kind):
    driver, plain = Driver(path, kind), Driver(path, kind)
    cut = 2 * BLOCK_SIZE
    plain.feed(("a", LONG[:cut]))
    driver.feed(
        ("a", LONG[:cut] + SHORT),
        states=StateSpans(((0, 5), (5, cut - 5), (cut, len(SHORT))), (NO_STATE, 6, 2), (6, 2, 0)),
    )
    memory = driver.state_pool.memory
    kept = memory[2].clone()
    assert_near(kept, plain.state_pool.memory[0])
    for name in "bc":  # two others go on from the beginning, in one step
        driver._blocks[name] = driver._blocks["a"][: cut // BLOCK_SIZE]
        driver._start[name] = cut
    spans = StateSpans(((0, len(SHORT)), (len(SHORT), 30)), (2, 2), (3, 4))
    logits = driver.feed(("b", SHORT), ("c", LONG[cut:][:30]), states=spans)
    assert torch.equal(memory[2], kept)
    others = plain.feed(("a", LONG[cut:][:30]))
    torch.testing.assert_close(logits[1], others[0], rtol=0.0, atol=1e-4)
    assert_near(memory[3], memory[0])
    if kind == "cpu":
        assert torch.equal(logits[1], others[0])
        assert torch.equal(memory[3], memory[0])


def assert_near(state: torch.Tensor, other: torch.Tensor) -> None:
    """Products by torch depend on how many rows there are."""
    both = (each.view(torch.float32) for each in (state, other))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


def ops_with_states(config, threads=2):
    """Both sets, with states of the same numbers, and their pools."""
    pool, made = make_pool(config, torch.float32), []
    states = make_states(config)
    library = kernels.load(default_cache_dir())
    for ops in (
        CpuOps(config, pool, torch.float32, MAX_LEN, library, threads),
        TorchOps(config, pool, torch.float32, MAX_LEN),
    ):
        memory = StatePool(states.memory.clone(), states.layout, states.places)
        ops.use_states(memory)
        made.append((ops, memory))
    return made


SPANS = StateSpans(
    rows=((0, 1), (1, 2), (3, 17), (20, 40)), load=(0, NO_STATE, 2, 5), store=(0, 2, 3, 4)
)


@pytest.mark.parametrize("sizes", [(1, 1, 8, 8), (2, 4, 24, 40), (2, 2, 128, 128), (1, 3, 65, 131)])
@pytest.mark.parametrize(
    ("kind", "threads"), [(GATED_DELTA_NET, 1), (KIMI_DELTA_ATTENTION, 2), (MAMBA2, 3)]
)
def test_kernels_equal_torch(sizes, kind, threads):
    key_heads, heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    shape = Recurrent(kind, 4, channels, False, heads, key_heads, key_dim, value_dim)
    config = replace(config_of(), recurrent=shape, layer_kinds=(kind, "attention"))
    config = replace(config, num_heads=heads, num_kv_heads=heads)
    torch.manual_seed(3)
    num_decays = heads * key_dim if kind == KIMI_DELTA_ATTENTION else heads
    weights = RecurrentWeights(
        project=None,
        conv=torch.randn(4, channels),
        conv_bias=torch.randn(channels),
        out=None,
        rate=-torch.rand(heads),
        decay_bias=torch.randn(num_decays),
        norm=torch.randn(heads * value_dim if kind == MAMBA2 else value_dim),
        skip=torch.randn(heads) if kind == MAMBA2 else None,
    )
    num_rows = sum(count for _, count in SPANS.rows)
    sizes = (channels, heads * value_dim, heads, num_decays)
    parts = torch.randn(num_rows, sum(sizes)).split(sizes, dim=1)
    results = []
    for ops, pool in ops_with_states(config, threads):
        ops._batch = batch = batch_of(num_rows)
        if isinstance(ops, CpuOps):
            ops._recurrent.begin(batch)
        mixed = ops.convolve(parts[0], weights, 0, silu=True).clone()
        said = ops.delta_rule(DeltaRows(mixed, parts[3], parts[2]), weights, 0).clone()
        normed = ops.gated_norm(said.clone(), parts[1], weights.norm)
        opened = ops.gate(mixed.clone(), parts[2][:, :1])
        results.append((mixed, said, normed, opened, pool.memory.view(torch.float32)))
    for ours, theirs in zip(*results, strict=True):
        most = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * most)


def batch_of(num_rows: int) -> Batch:
    nothing = torch.zeros(num_rows, dtype=torch.int64)
    return Batch(*(nothing,) * 8, spans=(), states=(SPANS,))


def test_segments_of_one_sequence_are_one_chain():
    assert SPANS.chains() == [range(1), range(1, 3), range(3, 4)]


def test_a_block_holds_the_states_of_as_many_layers_as_fit(path):
    config = read_config(path)
    layout = config.state_layout
    for block_size in (16, 48):
        spec, plain = (
            make(block_size, "float32") for make in (config.kv_spec, config.attention_spec)
        )
        places, size = config.state_places(spec), layout.unit_size
        unit = spec.bytes_per_block // layout.num_units
        assert spec.bytes_per_block % (16 * layout.num_units) == 0
        assert spec.num_units == layout.num_units
        assert spec.block_size % block_size == 0
        assert spec.windows == (*plain.windows, *(2,) * spec.num_state_groups)
        assert [*places] == config.recurrent_layers
        assert {group for group, _ in places.values()} == {*range(spec.num_state_groups)}
        for group, first in places.values():
            others = [at for other, at in places.values() if other == group and at != first]
            assert all(abs(at - first) >= size for at in others)
            assert 4 * (first + size) <= unit
        smaller = plain.bytes_per_block * (spec.block_size // block_size - 1)
        too_small = smaller < 4 * size * layout.num_units
        assert too_small or smaller % (16 * layout.num_units)


def test_what_a_state_has_lies_in_units_that_ranks_have_runs_of(path):
    """Whatever is stored comes back; a rank finds its heads where the whole model put them."""
    whole = read_config(path)
    states, (layer, *_) = make_states(whole, torch.nan), whole.recurrent_layers
    channels, heads = whole.recurrent.conv_channels, whole.recurrent.num_heads
    conv = torch.randn(states.layout.conv_rows, channels)
    states.store_conv(layer, 3, conv)
    assert torch.equal(states.load_conv(layer, 3), conv)
    if heads:
        memory = torch.randn(heads, whole.recurrent.key_dim, whole.recurrent.value_dim)
        states.store_memory(layer, 3, memory)
        assert torch.equal(states.load_memory(layer, 3), memory)
    size = whole.num_state_units
    for rank in range(size):
        shard, units = Shard(rank, size), states.memory.view(NUM_SLOTS, size, -1)
        own = units[:, rank : rank + 1].flatten(1).contiguous()
        part = StatePool(own, shard.state_layout(whole), states.places)
        mine = torch.cat(
            [conv[:, each.start : each.stop] for each in shard.channels(whole.recurrent)], 1
        )
        assert torch.equal(part.load_conv(layer, 3), mine)
        if heads:
            assert torch.equal(part.load_memory(layer, 3), memory[shard.part(heads)])
