"""Recurrent layers on a GPU beside plain torch: interpreted where there is no GPU."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from tests.engine.model.paged import DEVICE

pytest.importorskip("triton")

from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.gpu.ops import TritonOps
from kvrelay.engine.model.gpu.recurrent import READS
from kvrelay.engine.model.recurrence import DeltaRows
from kvrelay.engine.model.state_layout import (
    GATED_DELTA_NET,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    SHORT_CONVOLUTION,
    Recurrent,
)
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.model.weights import RecurrentWeights
from kvrelay.engine.step import Step
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.gpu.triton_ranks import InterpretedRunner
from tests.engine.model.runners import model_runner, sections
from tests.engine.model.talks import Talk
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import MAX_LEN, VOCAB, make_checkpoint, scheduled, tokens_of

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
SIZE, NUM_BLOCKS = 4, 48  # tokens of a block, so that a few meet its end
LIMITS = Limits(NUM_BLOCKS, SIZE, MAX_LEN, 50, group_windows=(0, 2), num_state_groups=1)
# First position and tokens: decodes at a sequence's first token, within a block and at its first,
# prompts from a block's middle, over several, and of many tiles.
PARTS = ((0, 1), (6, 1), (8, 1), (3, 2), (5, 7), (0, 18), (5, 9))
# In blocks of more tokens than a chunk of the kernels: chunks that are cut by a block's end, by the
# prompt's and by its beginning.
LARGE = 40
LONG_PARTS = ((0, 1), (37, 50), (39, 2), (0, 90), (80, 41), (72, 8), (3, 29))


def shape_of(kind: str, groups: int = 2, keys: int = 24) -> Recurrent:
    if kind == SHORT_CONVOLUTION:
        return Recurrent(kind, 3, 140)
    return Recurrent(kind, 4, 2 * groups * keys + 2 * 18, False, 2, groups, keys, 18)


class Case:
    """A layer of `kind`, and what a step is given."""

    def __init__(
        self, kind: str, groups: int, dtype=torch.float32, parts=PARTS, decay=1.0, keys=24
    ) -> None:
        torch.manual_seed(3)
        self.chained = False  # the rule is given what the convolution gives, as in a model
        self.dtype, shape = dtype, shape_of(kind, groups, keys)
        self.config = config_of(heads=4, kv_heads=2)
        self.config = replace(self.config, recurrent=shape, layer_kinds=("attention", kind))
        self.layout, heads = self.config.state_layout, shape.num_heads
        decays = heads * (shape.key_dim if kind == KIMI_DELTA_ATTENTION else 1)
        self.weights = RecurrentWeights(
            project=None,
            conv=torch.randn(shape.conv_kernel, shape.conv_channels).to(DEVICE),
            conv_bias=torch.randn(shape.conv_channels).to(DEVICE) if groups > 1 else None,
            out=None,
            rate=-torch.rand(heads).to(DEVICE) * decay,
            decay_bias=torch.randn(decays).to(DEVICE),
            skip=torch.randn(heads).to(DEVICE) if kind == MAMBA2 else None,
        )
        sizes = (shape.conv_channels, heads, decays)
        rows = torch.randn(sum(count for _, count in parts), sum(sizes)) * 2
        self.parts = rows.to(DEVICE, dtype).split(sizes, dim=1)  # columns of wider rows
        floats = self.layout.num_units * self.layout.unit_size + 5 * self.layout.num_units
        self.size = SIZE if parts is PARTS else LARGE
        self.memory = torch.randn(NUM_BLOCKS, floats).to(DEVICE)

    def ops(self, kind: type) -> tuple[TorchOps | TritonOps, torch.Tensor]:
        """And the states that it changes, float32."""
        pool = torch.zeros(NUM_BLOCKS, 2, 2, 2, self.size, 16, dtype=self.dtype, device=DEVICE)
        ops = kind(self.config, pool, self.dtype, MAX_LEN)
        states = StatePool(self.memory.clone().view(torch.uint8), self.layout, {1: (0, 3)})
        ops.use_states(states)
        return ops, states.memory.view(torch.float32)

    def run(self, ops: TorchOps | TritonOps, batch: Batch, rows: slice = slice(None)) -> list:
        ops.begin(batch)
        qkv, beta, decay = (each[rows] for each in self.parts)
        if not self.config.recurrent.num_heads:
            return [ops.convolve(qkv, self.weights, 1, silu=False)]
        mixed = ops.convolve(qkv, self.weights, 1, silu=True)
        # The rule is given the same by both, so what is compared is not what a rounding did.
        given = mixed if self.chained else qkv
        return [mixed, ops.delta_rule(DeltaRows(given, decay, beta), self.weights, 1)]


def batch_of(parts=PARTS, size=SIZE) -> Batch:
    free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
    seqs = []
    for first, (start, count) in enumerate(parts):
        blocks = [next(free) for _ in range(2 * -(-(start + count) // size))]
        seqs.append(scheduled([1] * count, start, blocks, request_id=str(first)))
    return Batch.from_step(Step(0, seqs), replace(LIMITS, block_size=size), DEVICE)


KINDS = [
    (GATED_DELTA_NET, 2),
    (KIMI_DELTA_ATTENTION, 2),
    (MAMBA2, 2),
    (MAMBA2, 1),  # keys and queries that all heads share, which are stored more than once
    (SHORT_CONVOLUTION, 2),
]
CASES = [(*kind, torch.float32) for kind in KINDS]
CASES += [(GATED_DELTA_NET, 1, torch.float16), (SHORT_CONVOLUTION, 2, torch.float16)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "groups", "dtype"), CASES)
@pytest.mark.parametrize("parts", [PARTS, LONG_PARTS], ids=["short", "long"])
def test_kernels_equal_torch(kind, groups, dtype, parts):
    equals_torch(Case(kind, groups, dtype, parts), parts)


def equals_torch(case: Case, parts) -> None:
    batch, size, half = batch_of(parts, case.size), case.size, case.dtype == torch.float16
    (ours, mine), (theirs, expected) = case.ops(TritonOps), case.ops(TorchOps)
    close = {"rtol": 2e-3, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-4}
    for got, wanted in zip(case.run(ours, batch), case.run(theirs, batch), strict=True):
        torch.testing.assert_close(got, wanted, **close)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    changed = (expected != case.memory).any(1).sum().item()
    assert changed == sum((start + n - 1) // size - start // size + 1 for start, n in parts)


@pytest.mark.parametrize(
    ("kind", "keys"), [(GATED_DELTA_NET, 72), (KIMI_DELTA_ATTENTION, 128), (MAMBA2, 200)]
)
def test_heads_of_more_keys_than_products_take_at_once(kind, keys):
    parts = ((0, 33), (3, 20))
    equals_torch(Case(kind, 2, parts=parts, keys=keys), parts)


@pytest.mark.parametrize("kind", [GATED_DELTA_NET, KIMI_DELTA_ATTENTION, MAMBA2])
@pytest.mark.parametrize("decay", [0.0, 300.0])
def test_chunks_of_keys_that_are_alike_and_of_decays_that_leave_nothing(kind, decay):
    """What a chunk's system of equations and its quotients of decays are hard for."""
    parts = ((0, 64),)
    case = Case(kind, 2, parts=parts, decay=decay)
    qkv, beta, _ = case.parts
    keys = qkv[:, : 2 * 2 * 24]
    keys.copy_(1 + keys / 100)
    beta.fill_(4.0)
    equals_torch(case, parts)


@pytest.mark.parametrize("kind", [GATED_DELTA_NET, KIMI_DELTA_ATTENTION, MAMBA2])
def test_a_prompt_cut_at_the_ends_of_blocks_gives_the_bits_of_the_whole(kind):
    parts = ((0, 50), (35, 15))
    case = Case(kind, 2, parts=parts)
    (whole, expected), (cut, got) = case.ops(TritonOps), case.ops(TritonOps)
    batch = batch_of(parts, LARGE)
    outputs = case.run(whole, batch)
    tables = torch.stack((batch.tables_of(0), batch.tables_of(1)), dim=2).flatten(1).tolist()
    limits = replace(LIMITS, block_size=LARGE)
    for seq, first, start, count in (
        (0, 0, 0, 40),
        (0, 40, 40, 10),
        (1, 50, 35, 5),
        (1, 55, 40, 10),
    ):
        part = scheduled([1] * count, start, tables[seq], request_id="a")
        one = Batch.from_step(Step(0, [part]), limits, DEVICE)
        rows = slice(first, first + count)
        for each, wanted in zip(case.run(cut, one, rows), outputs, strict=True):
            assert torch.equal(each, wanted[rows])
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("kind", "groups"), [(KIMI_DELTA_ATTENTION, 2), (MAMBA2, 1)])
def test_tokens_one_by_one_give_what_the_whole_gives(kind, groups):
    case = Case(kind, groups)
    (whole, expected), (single, got) = case.ops(TritonOps), case.ops(TritonOps)
    both = batch_of([(0, 9)])
    outputs = case.run(whole, both, slice(0, 9))
    for at in range(9):
        one = Batch.from_step(
            Step(0, [scheduled([1], at, blocks_of(both), request_id="a")]), LIMITS, DEVICE
        )
        for each, wanted in zip(case.run(single, one, slice(at, at + 1)), outputs, strict=True):
            torch.testing.assert_close(each[0], wanted[at], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def blocks_of(batch: Batch) -> list[int]:
    both = torch.stack((batch.tables_of(0)[0], batch.tables_of(1)[0]), dim=1)
    return both.flatten().tolist()


@pytest.mark.parametrize(("kind", "groups"), [(GATED_DELTA_NET, 2), (MAMBA2, 1)])
def test_rows_that_only_fill_up_a_pass_change_no_state(kind, groups):
    case, batch = Case(kind, groups), batch_of([(4, 1), (0, 2)])
    filling = replace(batch, more_slots=torch.full_like(batch.more_slots, -1))
    ours, states = case.ops(TritonOps)
    assert all(each.isfinite().all() for each in case.run(ours, filling, slice(0, 3)))
    assert torch.equal(states, case.memory)


# First position, draft tokens, and how many rows are right: within a block, at its first token,
# with no right draft, without drafts, and at a sequence's first token.
DRAFTED = ((5, 2, 3), (8, 3, 2), (9, 2, 1), (2, 0, 1), (0, 1, 2))


def with_drafts(limits: Limits, tables: list[list[int]], order: tuple[int, ...]) -> Batch:
    """A pass over sequences in this order, as `DecodePasses` has it."""
    seqs, passed, slots = [], [], []
    for seq in order:
        start, drafts, _ = DRAFTED[seq]
        seqs += [
            scheduled([1], at, tables[seq], request_id=str(at))
            for at in range(start, start + drafts + 1)
        ]
        passed += [1 + drafts] + [0] * drafts
        slots += [READS if drafts else 0] * (1 + drafts)
    batch = Batch.from_step(Step(0, seqs), limits, DEVICE)
    kept = torch.tensor(slots).to(DEVICE)
    more = torch.where(kept < 0, kept, batch.more_slots[0])[None]
    return replace(
        batch, more_slots=more, passed=torch.tensor(passed, dtype=torch.int32).to(DEVICE)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "groups"),
    [(GATED_DELTA_NET, 1), (KIMI_DELTA_ATTENTION, 2), (MAMBA2, 1), (SHORT_CONVOLUTION, 2)],
)
def test_drafts_leave_the_states_that_there_are_without_them_in_any_order_of_rows(kind, groups):
    case = Case(kind, groups)
    case.chained = True
    tables = [[*range(6 * seq, 6 * seq + 6)] for seq in range(len(DRAFTED))]
    firsts = [sum(1 + drafts for _, drafts, _ in DRAFTED[:seq]) for seq in range(len(DRAFTED))]
    single, expected = case.ops(TritonOps)
    outputs = {}
    for seq, (start, _, right) in enumerate(DRAFTED):
        for at in range(right):
            one = scheduled([1], start + at, tables[seq], request_id="a")
            row = firsts[seq] + at
            batch = Batch.from_step(Step(0, [one]), LIMITS, DEVICE)
            outputs[row] = case.run(single, batch, slice(row, row + 1))
    for order in permutations(range(3)):
        order = (*order[:2], 3, order[2], 4)
        rows = [firsts[seq] + at for seq in order for at in range(1 + DRAFTED[seq][1])]
        ours, got = case.ops(TritonOps)
        batch = with_drafts(LIMITS, tables, order)
        found = case.run(ours, batch, rows)
        for seq in order:
            for at in range(DRAFTED[seq][2]):
                row = firsts[seq] + at
                for each, wanted in zip(found, outputs[row], strict=True):
                    assert torch.equal(each[rows.index(row)], wanted[0])
        counts = [
            DRAFTED[seq][2] if DRAFTED[seq][1] and at == 0 else 0
            for seq in order
            for at in range(1 + DRAFTED[seq][1])
        ]
        ours.replay(batch, torch.tensor(counts, dtype=torch.int32).to(DEVICE))
        assert torch.equal(got, expected)


LONG = [  # PYTHONPATH=. pytest -m long tests/engine/model/gpu/test_triton_recurrent.py
    pytest.param(family, marks=pytest.mark.long)
    for family in ("qwen3-next", "kimi-linear", "falcon-h1-norm")
]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a runner of its own on a GPU")
@pytest.mark.parametrize("family", ["lfm2-bias", *LONG])
def test_a_model_gives_the_tokens_that_the_cpu_gives(family, tmp_path):
    """A prompt, and decodes by the passes that graphs hold."""
    make_checkpoint(family, tmp_path)
    options = {"num_blocks": 60, "dtype": "float32", "max_num_seqs": 4, "max_model_len": 256}
    model, engine = sections(options | {"device": "cpu"})
    ours, theirs = InterpretedRunner(tmp_path, model, engine), model_runner(tmp_path, **options)
    assert ours._steps is not None
    prompt, blocks = tokens_of(6, seed=4), list(range(ours.kv_spec.num_groups))
    expected = generate(theirs, prompt, blocks, 4, temperature=0.0)
    assert generate(ours, prompt, blocks, 4, temperature=0.0) == expected
    assert len({*expected}) > 1
    alone = ours.kv_pool.clone()
    ours.kv_pool.zero_()
    talk, accepted = Talk(prompt, blocks), 0
    while len(talk.output) < len(expected):
        left = expected[len(talk.output) :] if talk.output else []
        share = talk.next(draft=[*left[:1], (left[1] + 1) % VOCAB] if len(left) > 1 else [])
        [sampled] = ours.execute(Step(0, [share])).sampled
        talk.take(share, sampled)
        accepted += len(sampled.more)
    assert (talk.output, accepted) == (expected, 1)
    assert len(talk.tokens) <= ours.kv_spec.block_size
    states = blocks[-ours.kv_spec.num_state_groups :]
    torch.testing.assert_close(ours.kv_pool[states], alone[states], rtol=1e-4, atol=1e-4)
    assert ours._steps is not None
    ours._steps._passes._replay = None  # as with ranks: a draft that comes all the same
    talk = Talk([*prompt, *expected[:1]], blocks)
    for draft in ([], expected[2:3]):
        share = talk.next(draft=draft)
        [sampled] = ours.execute(Step(0, [share])).sampled
        talk.take(share, sampled)
    assert talk.output == expected[1:3]
