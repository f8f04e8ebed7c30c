"""Tensor parallelism: ranks that share a model compute what one process computes alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine.adapters import Adapter, AdapterError, read_adapter
from kvrelay.engine.kv.spec import KVHeads, KVSpec
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import Experts
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.ops import Group, Meeting, Member, ParallelOps
from kvrelay.engine.model.parallel.shard import Shard, check_divides
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.stacked import Packed
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.checkpoint.test_quantized import fp8_config, in_fp8_blocks, in_mxfp4, write
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import GREEDY, Talk
from tests.engine.model.tiny import FAMILIES, VOCAB, make_checkpoint, scheduled, tokens_of
from tests.support.adapters import linear_modules, write_adapter

OPTIONS = {"num_blocks": 48, "dtype": "float32", "device": "cpu", "threads": 1}
EVERY_LOGPROB = SamplingParams(temperature=0.0, logprobs=VOCAB)
CPU = torch.device("cpu")
LONG, SHORT = tokens_of(75, seed=1), tokens_of(9, seed=2)
BLOCKS = {"a": [5, 3, 1, 7, 9], "b": [2]}
CHOSEN = (
    *("llama", "linear", "qwen2", "gemma3", "mixtral", "qwen3-moe", "deepseek2", "deepseek3"),
    *("deepseek32", "glm5-shared"),
    *("minimax-m2", "mistral4"),
    *("falcon-h1-norm", "kimi-linear", "lfm2-bias", "qwen3-next"),
)


ADAPTED = (
    *("llama", "qwen3.5"),
    *(
        pytest.param(family, marks=pytest.mark.long)
        for family in ("qwen2", "gemma3", "phi3", "deepseek3", "falcon-h1-norm", "mixtral")
    ),
)


class Ranks:
    """The ranks of one worker as threads of this process."""

    def __init__(self, path: Path, size: int, meeting: Path) -> None:
        self._threads = ThreadPoolExecutor(size)

        def build(rank: int) -> ModelRunner:
            group = Group(Shard(rank, size), Meeting(str(meeting)), CPU)
            return model_runner(path, member=Member(group), **OPTIONS)

        self.runners = list(self._threads.map(build, range(size)))

    def execute(self, step: Step):
        """What rank 0 answers, when all have run the step."""
        first, *_ = self._threads.map(lambda runner: runner.execute(step), self.runners)
        return first


def logprobs(
    execute: Callable, num_groups: int, *parts: tuple[str, list[int], int]
) -> torch.Tensor:
    """One step over (name, tokens, start) parts: log probabilities [len(parts), VOCAB]."""
    tables = {n: [b + 12 * g for b in BLOCKS[n] for g in range(num_groups)] for n in BLOCKS}
    seqs = [scheduled(t, s, tables[n], sampling=EVERY_LOGPROB) for n, t, s in parts]
    rows = []
    for sampled in execute(Step(0, seqs)).sampled:
        row = torch.empty(VOCAB)
        for token, value in sampled.logprobs.top:
            row[token] = value
        rows.append(row)
    return torch.stack(rows)


def compare(path: Path, ranks: Ranks) -> None:
    alone = model_runner(path, **OPTIONS)
    steps = [
        (("a", LONG[:40], 0), ("b", SHORT[:5], 0)),
        (("a", LONG[40:74], 40), ("b", SHORT[5:6], 5)),
        (("a", LONG[74:], 74), ("b", SHORT[6:7], 6)),
    ]
    for parts in steps:
        expected = logprobs(alone.execute, alone.kv_spec.num_groups, *parts)
        assert expected.std() > 0.5, "probabilities this even would prove nothing"
        got = logprobs(ranks.execute, alone.kv_spec.num_groups, *parts)
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4)
    num_heads, size = alone.config.num_kv_heads, len(ranks.runners)
    if alone.config.recurrent is not None:
        compare_units(alone, ranks)
        return
    for rank, runner in enumerate(ranks.runners):  # every rank has its heads of all blocks
        heads = Shard(rank, size).kv_heads(num_heads)
        expected = alone.kv_pool[:, :, :, heads.start : heads.stop]
        torch.testing.assert_close(runner.kv_pool, expected, rtol=0.0, atol=1e-4)


def compare_units(alone: ModelRunner, ranks: Ranks) -> None:
    """Every rank has its part of all blocks, of keys and values and of states."""
    config, size, num_blocks = alone.config, len(ranks.runners), len(alone.kv_pool)
    whole = alone.kv_pool.view(num_blocks, config.num_state_units, -1)
    for rank, runner in enumerate(ranks.runners):
        shard = Shard(rank, size)
        own = range(config.num_state_units)[shard.part(config.num_state_units)]
        stored = shard.stored_units(config)
        got = runner.kv_pool.view(num_blocks, len(stored), -1)[:, own.start - stored.start :]
        expected = whole[:, own.start : own.stop]
        assert expected.abs().amax((1, 2)).count_nonzero() > alone.kv_spec.num_groups
        torch.testing.assert_close(got[:, : len(own)], expected, rtol=1e-4, atol=1e-4)


def compare_adapted(path: Path, ranks: Ranks, folders: list[Path]) -> None:
    """Prompts with two adapters and without, in the same steps."""
    alone = model_runner(path, **OPTIONS)
    adapters = [None, *(Adapter(read_adapter(folder).digest, str(folder)) for folder in folders)]
    groups = alone.kv_spec.num_groups
    tables = [[b + 12 * g for b in blocks for g in range(groups)] for blocks in ([5, 3], [2], [7])]

    def run(execute: Callable, start: int, end: int) -> torch.Tensor:
        seqs = [
            scheduled(LONG[start:end], start, table, sampling=EVERY_LOGPROB, need=adapter)
            for table, adapter in zip(tables, adapters, strict=True)
        ]
        rows: list[torch.Tensor | None] = [None] * len(seqs)
        while any(row is None for row in rows):  # an adapter that is not there yet comes again
            done = execute(Step(0, seqs))
            assert not done.unloaded
            for index, sampled in enumerate(done.sampled):
                if sampled is not None and rows[index] is None:
                    row = rows[index] = torch.empty(VOCAB)
                    for token, value in sampled.logprobs.top:
                        row[token] = value
        return torch.stack([row for row in rows if row is not None])

    for start, end in ((0, 11), (11, 12), (12, 13)):
        expected = run(alone.execute, start, end)
        assert (expected[1:] - expected[0]).abs().amax(1).min() > 0.1, "they change something"
        torch.testing.assert_close(run(ranks.execute, start, end), expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("family", ADAPTED)
def test_two_ranks_compute_adapters_as_one_process_does(family, checkpoint_of, tmp_path):
    path = checkpoint_of(family)
    modules = linear_modules(path)
    folders = [
        write_adapter(tmp_path / f"{rank}", path, seed=rank, rank=rank, modules=modules)
        for rank in (3, 16)
    ]
    ranks = Ranks(path, 2, tmp_path / "meeting")
    compare_adapted(path, ranks, folders)
    sizes = [each.loads._entries for each in ranks.runners]
    assert len({tuple(e.nbytes for e in entries.values()) for entries in sizes}) == 1


def test_an_adapter_that_one_rank_cannot_load_is_refused_by_all(checkpoint_of, tmp_path):
    path = checkpoint_of("llama")
    folder = write_adapter(tmp_path / "a", path)
    adapter = Adapter(read_adapter(folder).digest, str(folder))
    ranks = Ranks(path, 2, tmp_path / "meeting")

    def broken(*_: object) -> None:
        raise AdapterError("no such folder here")

    ranks.runners[1].loads._load_one = broken
    seqs = [scheduled(SHORT, 0, [1], need=adapter), scheduled(SHORT, 0, [2])]
    while not (done := ranks.execute(Step(0, seqs))).unloaded:
        assert 0 in done.waiting
    assert "another rank of this worker" in done.unloaded[0]
    assert done.sampled[1] is not None


DRAFTED = [
    ("llama", 2),
    ("qwen3.5", 2),
    *(
        pytest.param(family, size, marks=pytest.mark.slow)
        for family, size in (
            *(("llama", 3), ("gemma3", 2), ("deepseek32", 2), ("mixtral", 2), ("minimax-m2", 2)),
            *(("falcon-h1-norm", 2), ("kimi-linear", 2), ("lfm2-bias", 2), ("qwen3-next", 2)),
        )
    ),
    pytest.param("wide", 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "size"), DRAFTED)
def test_draft_tokens_are_verified_by_ranks(family, size, checkpoint_of, tmp_path):
    path, changes = tmp_path / "wide", {"num_attention_heads": 8, "num_key_value_heads": 4}
    if family == "wide":
        path.mkdir()
        make_checkpoint("llama", path, {**changes, "head_dim": 16})
    else:
        path = checkpoint_of(family)
    plain, drafted = (Ranks(path, size, tmp_path / name) for name in ("plain", "drafted"))
    compare_drafts(plain.execute, drafted.execute, plain.runners[0].kv_spec)


@pytest.mark.parametrize("family", ["minimax-m2", "nemotron-h", "gemma4"])
def test_they_are_by_layers_that_run_one_by_one(family, checkpoint_of):
    plain, drafted = (model_runner(checkpoint_of(family), **OPTIONS) for _ in range(2))
    assert drafted.config.is_layerwise or family == "gemma4"
    compare_drafts(plain.execute, drafted.execute, plain.kv_spec)


def compare_drafts(plain: Callable, drafted: Callable, spec: KVSpec, count: int = 20) -> None:
    """`drafted` gets drafts that are right, wrong somewhere, and none, in turns."""
    samplings = GREEDY, SamplingParams(temperature=1.0, seed=11), GREEDY
    prompts, blocks = (LONG[:21], SHORT, LONG[40:59]), ([5, 3, 1, 7], [2, 4, 6], [8, 10, 9])
    of = [Talk(*each) for each in zip(prompts, blocks, samplings, strict=True)]
    others, chance, accepted = deepcopy(of), Random(1), 0
    while min(len(talk.output) for talk in of) < count + 8:
        step_of(plain, spec, of)
    while live := [pair for pair in zip(others, of, strict=True) if len(pair[0].output) < count]:
        drafts = []
        for talk, known in live:
            ahead = known.tokens[len(talk.tokens) :]
            room = min(chance.randrange(6), -len(talk.tokens) % spec.block_size)
            draft = ahead[: room if talk.output else 0]
            if draft and chance.random() < 0.5:
                at = chance.randrange(len(draft))
                draft[at] = (draft[at] + 1) % VOCAB
            drafts.append(draft)
        for sampled in step_of(drafted, spec, [talk for talk, _ in live], drafts).sampled:
            accepted += len(sampled.more)
    assert accepted > count
    for talk, known in zip(others, of, strict=True):
        assert talk.tokens == known.tokens[: len(talk.tokens)]


def step_of(execute: Callable, spec: KVSpec, talks: list[Talk], drafts=None):
    groups = range(spec.num_groups)
    shares = [t.next(draft=d) for t, d in zip(talks, drafts or [[]] * len(talks), strict=True)]
    for share in shares:
        share.block_ids = [block + 12 * group for block in share.block_ids for group in groups]
    done = execute(Step(0, shares))
    for talk, share, sampled in zip(talks, shares, done.sampled, strict=True):
        talk.take(share, sampled)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("family", CHOSEN)
def test_two_ranks_compute_what_one_process_does(family, checkpoint_of, tmp_path):
    path = checkpoint_of(family)
    compare(path, Ranks(path, 2, tmp_path / "meeting"))


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "mixtral", "deepseek3", "gpt-oss", "llama4", "mimo-v2"),
        *("gemma4-sparse", "falcon-h1-norm", "nemotron-h"),
    ],
)
def test_without_kernels_too(family, checkpoint_of, tmp_path, monkeypatch):
    def unavailable(_folder: Path) -> None:
        raise kernels.KernelsUnavailable("no compiler")

    monkeypatch.setattr(kernels, "load", unavailable)
    path = checkpoint_of(family)
    compare(path, Ranks(path, 2, tmp_path / "meeting"))


PACKED = {  # tensors and configuration of a tiny checkpoint, columns of `downs` by rank
    # A rank's 80 of 160 columns are no whole groups of 32: it has 96, the last with zeros.
    "gpt-oss": (in_mxfp4, {"quant_method": "mxfp4"}, {160, 96}),
    "qwen3-moe": (partial(in_fp8_blocks, block=(16, 16)), fp8_config((16, 16)), {32, 16}),
}


@pytest.mark.parametrize("family", PACKED)
def test_packed_experts_are_cut_between_what_shares_scales(
    family, checkpoint_of, tmp_path, monkeypatch
):
    source, path, (packed, config, widths) = (
        checkpoint_of(family),
        tmp_path / "model",
        PACKED[family],
    )
    write(source, path, packed(source)[0], config)
    cut, plain = [], TorchOps.experts

    def experts(ops, gate_ups, downs):
        cut.append((gate_ups, downs))
        return plain(ops, gate_ups, downs)

    def unavailable(_folder: Path) -> None:
        raise kernels.KernelsUnavailable("no compiler")

    monkeypatch.setattr(kernels, "load", unavailable)
    monkeypatch.setattr(TorchOps, "experts", experts)
    compare(path, Ranks(path, 2, tmp_path / "meeting"))
    assert all(isinstance(each, Packed) for both in cut for each in both)
    assert {downs.shape[2] for _, downs in cut} == widths


@pytest.mark.parametrize("family", ["qwen2", "minimax-m2"])
def test_more_ranks_than_kv_heads_have_copies_of_them(family, tmp_path, monkeypatch):
    kind, changes = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, (kind, changes | {"num_attention_heads": 4}))
    make_checkpoint(family, tmp_path)
    compare(tmp_path, Ranks(tmp_path, 4, tmp_path / "meeting"))


def test_ranks_with_copies_of_kv_heads_have_states_of_their_own(tmp_path):
    make_checkpoint("qwen3.5", tmp_path, {"num_key_value_heads": 1})
    config = read_config(tmp_path)
    assert (config.num_state_units, len(Shard(1, 2).stored_units(config))) == (2, 2)
    compare(tmp_path, Ranks(tmp_path, 2, tmp_path / "meeting"))


def test_sizes_that_do_not_divide_the_model_are_refused_with_those_that_do(llama):
    model = read_config(llama)
    assert (model.num_heads, model.num_kv_heads, model.intermediate_size) == (6, 2, 160)
    check_divides(model, 2)
    with pytest.raises(ModelError, match=r"= 4 does not divide .* heads \(6\); possible: 1, 2$"):
        check_divides(model, 4)
    with pytest.raises(ModelError, match=r"= 3 does not divide .* intermediate_size \(160\)"):
        check_divides(model, 3)
    nine = replace(model, num_heads=9, num_kv_heads=3, intermediate_size=1536 * 9)
    with pytest.raises(ModelError, match=r"heads \(9\); possible: 1, 3, 9$"):
        check_divides(nine, 2)
    six = replace(model, num_heads=12, num_kv_heads=4, intermediate_size=1536)
    with pytest.raises(ModelError, match=r"KV heads \(4\); possible: 1, 2, 4, 12$"):
        check_divides(six, 6)
    kinds = tuple(KVHeads(heads, 16, 16) for heads in (2, 4, 4))
    two = replace(model, num_heads=12, num_kv_heads=2, layer_heads=kinds, intermediate_size=1536)
    with pytest.raises(ModelError, match=r"KV heads, which are 2 or 4 by layer; possible: 1, 2$"):
        check_divides(two, 4)
    experts = Experts(num_experts=4, num_per_token=2, intermediate_size=33, normalize=True)
    with pytest.raises(ModelError, match=r"size of an expert \(33\); possible: 1$"):
        check_divides(replace(model, experts=experts), 2)


def test_ranks_have_every_head_once_or_evenly_often():
    for size, count in ((1, 3), (3, 3), (2, 8), (8, 2), (4, 1)):
        heads = [h for rank in range(size) for h in Shard(rank, size).kv_heads(count)]
        assert heads == sorted(list(range(count)) * max(1, size // count))


def test_a_rank_that_has_read_its_weights_waits_for_the_slowest(tmp_path):
    with ThreadPoolExecutor(2) as threads:
        meeting = Meeting(str(tmp_path / "meeting"))
        groups = threads.map(lambda rank: Group(Shard(rank, 2), meeting, CPU), range(2))
        first, second = groups
        waiting = threads.submit(first.wait_for_all)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        second.wait_for_all()
        waiting.result(10.0)


def test_ranks_stack_only_their_part_of_each_expert(checkpoint_of, tmp_path, monkeypatch):
    """A whole layer of a large model is tens of gigabytes."""
    path, stacked, plain = checkpoint_of("qwen3-moe"), [], ParallelOps.experts

    def experts(ops, gate_ups, downs):
        stacked.append((gate_ups.shape, downs.shape))
        return plain(ops, gate_ups, downs)

    monkeypatch.setattr(ParallelOps, "experts", experts)
    compare(path, Ranks(path, 2, tmp_path / "meeting"))
    config = read_config(path)
    number, width = config.experts.num_experts, config.experts.intermediate_size // 2
    sizes = (number, 2 * width, config.hidden_size), (number, config.hidden_size, width)
    assert set(stacked) == {sizes}


class Calls(TorchDispatchMode):
    """Names of torch's operations, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_what_ranks_sum_is_multiplied_and_added_with_nothing_between(checkpoint_of, tmp_path):
    """A GPU launches each of these for every layer and matrix."""
    config = read_config(checkpoint_of("llama"))
    spec = config.kv_spec(16, "float32")
    shape = (2, spec.num_layers, spec.num_planes, spec.num_kv_heads, 16, spec.head_dim)
    inner = TorchOps(config, torch.zeros(shape), torch.float32, 64)
    group = Group(Shard(0, 1), Meeting(str(tmp_path / "meeting")), CPU)
    ops = ParallelOps(inner, group, config)
    weight, x = torch.randn(config.hidden_size, 48), torch.randn(3, 48)
    matrix, hidden = ops.matrix(weight, None, "out"), torch.randn(3, config.hidden_size)
    expected = hidden + x @ weight.T
    with Calls() as calls:
        ops.add_linear(hidden, x, matrix)
    torch.testing.assert_close(hidden, expected)
    computing = ("mm", "addmm", "addmm_", "add", "add_", "zeros_like")
    assert [name for name in calls.names if name in computing] == ["mm", "add_"]
