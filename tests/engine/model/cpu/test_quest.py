"""Quest on a CPU: which pages the kernels choose, and that a token depends on nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.batch import Batch, Limits
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.quest import Quest
from kvrelay.engine.step import ScheduledSeq, Step
from tests.engine.model import tiny
from tests.engine.model.cpu.test_cpu_decode import World
from tests.engine.model.cpu.test_kernels import config_of
from tests.engine.model.talks import DRAWN, GREEDY, Talk, alone, drafting, step
from tests.engine.model.tiny import BLOCK_SIZE, make_checkpoint, scheduled, tokens_of

NUM_BLOCKS, LENGTH = 80, 640
BUDGET, LAYER = 0.3, 1
NUM_TOKENS = 40
BEST = replace(GREEDY, logprobs=3)
PROMPTS = tokens_of(150, seed=1), tokens_of(37, seed=2), tokens_of(208, seed=3)
BLOCKS = [list(range(at, at + 18)) for at in (0, 20, 40)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Contexts of a few pages are enough to choose."""
    monkeypatch.setattr("kvrelay.engine.model.quest.LEAST_TOKENS", 1)


def chosen_pages(query: torch.Tensor, keys: torch.Tensor, last: int) -> list[int]:
    """query: [heads, dim] of a KV head; keys: [pages, BLOCK_SIZE, dim], `last` the query's."""
    count = -(-int(BUDGET * (last * BLOCK_SIZE + BLOCK_SIZE)) // BLOCK_SIZE)
    low, high = keys[:last].amin(1), keys[:last].amax(1)
    best = torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1)  # [heads, pages]
    order = (best - best.amax(1, keepdim=True)).amax(0)
    order[[0, last - 1]] = torch.inf
    found = order.topk(min(max(count, 3), last + 1) - 1).indices.tolist()
    return sorted([*found, last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (4, 1)])
def test_pages_are_those_whose_bounds_allow_most(dtype, heads):
    """The plain reading of Quest, a query at the end of a page, so that a share is whole pages."""
    torch.manual_seed(0)
    config = config_of(*heads, head_dim=32)
    pool = torch.randn(NUM_BLOCKS, 2, 2, heads[1], BLOCK_SIZE, 32).to(dtype)
    library = kernels.load(default_cache_dir())
    quest = Quest(BUDGET, dense_layers=1)
    ops = CpuOps(config, pool, torch.float32, LENGTH, library, 2, low_precision=0, quest=quest)
    lengths, tables = (LENGTH, 400, 48), torch.randperm(NUM_BLOCKS).tolist()
    seqs = [
        scheduled([1], length - 1, tables[: length // 16], num_prompt_tokens=1, reads_pages=True)
        for length in lengths
    ]
    limits = Limits(NUM_BLOCKS, BLOCK_SIZE, LENGTH, 50)
    ops.begin(Batch.from_step(Step(0, seqs), limits, torch.device("cpu")))
    qkv = torch.randn(len(seqs), (heads[0] + 2 * heads[1]) * 32)
    got = ops.attention(qkv, LAYER).view(len(seqs), heads[1], -1, 32)
    queries = qkv[:, : heads[0] * 32].view(len(seqs), heads[1], -1, 32)
    for row, length in enumerate(lengths):
        kv = pool[tables[: length // 16], LAYER].float()  # [pages, 2, heads, BLOCK_SIZE, dim]
        for head in range(heads[1]):
            query, keys = queries[row, head], kv[:, 0, head]
            pages = chosen_pages(query, keys, length // 16 - 1)
            assert len(pages) < length // 16 or length == 48
            weights = (query @ keys[pages].flatten(0, 1).T * 32**-0.5).softmax(-1)
            expected = weights @ kv[pages, 1, head].flatten(0, 1)
            torch.testing.assert_close(got[row, head], expected, rtol=2e-4, atol=2e-4)


class QuestTalk(Talk):
    def next(self, *args, **changes) -> ScheduledSeq:
        return replace(super().next(*args, **changes), reads_pages=True)


def talks() -> list[Talk]:
    return [QuestTalk(*each, DRAWN) for each in zip(PROMPTS, BLOCKS, strict=True)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, changes={"num_hidden_layers": 7})
    return path


def world_of(path: Path, budget: float = BUDGET, **options) -> World:
    options = {"quest_budget": budget, "quest_dense_layers": 0, "num_blocks": 64, **options}
    return World(path, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_budget_of_all_pages_gives_the_exact_bits(path, dtype):
    found = []
    for budget in (0.0, 0.999):
        world, talk = world_of(path, budget, dtype=dtype), QuestTalk(PROMPTS[0], BLOCKS[0], BEST)
        step(world, talk)
        for _ in range(6):
            (sampled,) = world.run(share := talk.next())
            talk.take(share, sampled)
            found.append(sampled)
    assert found[:6] == found[6:]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_passes_drafts_and_batches_give_the_tokens_of_single_steps(path, options):
    world = world_of(path, **options)
    expected = [alone(world, talk, NUM_TOKENS) for talk in talks()]
    plain = alone(world, Talk(PROMPTS[0], BLOCKS[0], DRAWN), NUM_TOKENS)
    assert expected[0] != plain, "what is chosen would not matter"
    several = talks()
    while len(several[0].output) < NUM_TOKENS:
        step(world, *several, repeats=NUM_TOKENS - len(several[0].output))
    assert [talk.output[:NUM_TOKENS] for talk in several] == expected
    again = talks()
    assert drafting(world, again, expected) > 5
    assert [talk.output for talk in again] == expected


def test_exact_sequences_beside_it_stay_exact(path):
    world = world_of(path)
    first, second = QuestTalk(PROMPTS[0], BLOCKS[0]), Talk(PROMPTS[1], BLOCKS[1])
    expected = alone(world, Talk(PROMPTS[1], BLOCKS[1]), 12)
    others = alone(world, QuestTalk(PROMPTS[0], BLOCKS[0]), 12)
    while len(first.output) < 12:
        step(world, first, second)
    assert (second.output, first.output) == (expected, others)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_outputs_computed_again_in_chunks_leave_what_decodes_left(path, chunk):
    """As after a preemption, or on another worker: the prompt by itself, then outputs."""
    world = world_of(path)
    first = QuestTalk(PROMPTS[0], BLOCKS[0], BEST)
    step(world, first)
    while len(first.output) < NUM_TOKENS:
        (sampled,) = world.run(share := first.next())
        first.take(share, sampled)
    other = QuestTalk(PROMPTS[0], BLOCKS[1], first.sampling)
    other.tokens, found = first.tokens[:-1], None
    while found is None:
        until = other.prompt if other.num_computed < other.prompt else len(first.tokens) - 1
        (found,) = world.run(share := other.next(min(chunk, until - other.num_computed)))
        other.take(share, found)
    assert found == sampled


def test_blocks_that_others_had_before_get_new_bounds(path):
    world = world_of(path)
    expected = alone(world, QuestTalk(PROMPTS[2], BLOCKS[0]), NUM_TOKENS)
    for prompt in (PROMPTS[0], PROMPTS[2]):
        talk = QuestTalk(prompt, BLOCKS[0])
        output = alone(world, talk, NUM_TOKENS)
    assert output == expected


def test_layers_with_windows_and_the_first_read_all():
    quest = Quest(0.1, dense_layers=1)
    assert [quest.has(layer, window) for layer, window in ((0, 0), (1, 0), (1, 32))] == [
        False,
        True,
        False,
    ]
    assert (quest.share, Quest(2048, 0).share, Quest(2048, 0).least_tokens) == (0.1, 0.0, 2048)


assert max(map(len, PROMPTS)) + NUM_TOKENS < tiny.MAX_LEN
