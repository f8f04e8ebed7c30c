"""Decodes by the kernels, several passes in a row: the tokens of single steps sampled by torch."""

from dataclasses import replace

import pytest

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.sampling.sampler import draw
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from tests.engine.model import tiny
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import GREEDY, Talk, alone, drafting, step
from tests.engine.model.tiny import make_checkpoint, tokens_of

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
PROMPTS = tokens_of(37, seed=1), tokens_of(3, seed=2), tokens_of(16, seed=3)
BLOCKS = [9, 4, 17, 2], [3, 11], [7, 8]
NUM_TOKENS = 12


class World:
    """A model that is run by its runner."""

    def __init__(self, path, **options):
        options = {"dtype": "float32", "num_blocks": 24, "threads": 2, **options}
        kv_dtype = options.get("kv_dtype", options["dtype"])
        self._groups = range(read_config(path).kv_spec(16, kv_dtype).num_groups)
        self._num_blocks = options["num_blocks"]
        options["num_blocks"] *= len(self._groups)
        self.runner = model_runner(path, **options)

    def run(self, *seqs: ScheduledSeq, repeats: int = 1):
        done = self.runner.execute(Step(0, [*map(self._spread, seqs)], repeats=repeats))
        assert not done.failed
        return done.sampled

    def _spread(self, seq: ScheduledSeq) -> ScheduledSeq:
        """With a block of each group of layers where `seq` has one."""
        table = [b + g * self._num_blocks for b in seq.block_ids for g in self._groups]
        return replace(seq, block_ids=table)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """However slow the machine is, passes follow each other."""
    monkeypatch.setattr("kvrelay.engine.model.cpu.step.BURST_S", 60.0)


def talks(**changes) -> list[Talk]:
    sampling = GREEDY, DRAWN, replace(DRAWN, temperature=1.1, top_k=20, min_p=0.01)
    return [
        Talk(prompt, blocks, replace(each, **changes))
        for prompt, blocks, each in zip(PROMPTS, BLOCKS, sampling, strict=True)
    ]


def by_torch(world: World) -> list[list[int]]:
    """What single steps come to whose layers are called one by one, and torch samples."""
    return unfused(world, talks())


def unfused(world: World, talked: list[Talk]) -> list[list[int]]:
    runner = world.runner
    whole, runner._decode = runner._decode, None
    kernel, runner._draw = runner._draw, draw
    found = [alone(world, talk, NUM_TOKENS) for talk in talked]
    runner._decode, runner._draw = whole, kernel
    return found


FAMILIES = (
    ("llama", {}),
    ("llama", {"dtype": "bfloat16"}),
    ("llama", {"quantization": "int8"}),
    ("llama", {"kv_dtype": "float8_e4m3"}),
    ("llama", {"window": 20, "sinks": 2}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi3", {}),
    ("mistral-window", {}),
    ("mixtral", {"dtype": "bfloat16"}),
    ("qwen3-moe", {"quantization": "int4"}),
    ("deepseek2", {"dtype": "bfloat16"}),
    ("deepseek3", {"kv_dtype": "float8_e4m3"}),
    ("gemma2", {}),
    ("gemma3", {"dtype": "bfloat16"}),
    ("falcon-h1-norm", {}),
    ("kimi-linear", {"dtype": "bfloat16"}),
    ("lfm2-bias", {"kv_dtype": "float8_e4m3"}),
    ("qwen3-next", {"quantization": "int8"}),
    ("qwen3.5", {}),
    ("gemma4", {}),
    ("gemma4", {"kv_dtype": "float8_e4m3"}),
)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_passes_in_a_row_give_the_tokens_of_single_steps(family, options, checkpoint_of):
    world = World(checkpoint_of(family), **options)
    expected = by_torch(world)
    several, steps = talks(), 0
    while len(several[0].output) < NUM_TOKENS:
        step(world, *several, repeats=NUM_TOKENS - len(several[0].output))
        steps += 1
    assert [talk.output for talk in several] == expected
    assert steps < NUM_TOKENS / 2


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_drafts_give_the_tokens_of_single_steps(family, options, checkpoint_of):
    world = World(checkpoint_of(family), **options)
    expected = by_torch(world)
    several = talks()
    assert drafting(world, several, expected) > 5
    assert [talk.output for talk in several] == expected


def test_long_contexts_are_met_in_stretches(tmp_path, monkeypatch):
    """After short ones: what the kernels plan with has to grow."""
    monkeypatch.setitem(tiny.SHAPE, "max_position_embeddings", 2048)
    make_checkpoint("llama", tmp_path)
    world = World(tmp_path, num_blocks=160)
    prompts = [tokens_of(count, seed=count) for count in (5, 507, 1300)]
    blocks = [list(range(at, at + 90)) for at in (0, 35, 70)]
    expected = [
        alone(world, Talk(prompt, table, replace(each, logprobs=0)), NUM_TOKENS)
        for prompt, table, each in zip(prompts, blocks, (GREEDY, DRAWN, GREEDY), strict=True)
    ]
    short, middle = Talk(prompts[0], blocks[0]), Talk(prompts[1], blocks[1], DRAWN)
    long = Talk(prompts[2], blocks[2])
    step(world, short)
    step(world, short, repeats=2)
    step(world, middle, long)
    while len(long.output) < NUM_TOKENS:
        step(world, long, short, middle, repeats=NUM_TOKENS - len(long.output))
    for talk, tokens in zip((short, middle, long), expected, strict=True):
        assert talk.output[:NUM_TOKENS] == tokens
    again = [Talk(*each) for each in zip(prompts, blocks, (GREEDY, DRAWN, GREEDY), strict=True)]
    assert drafting(world, again, expected) > 5
    assert [talk.output for talk in again] == expected


def test_no_pass_leaves_its_block_or_the_context_whatever_the_step_says(llama):
    world = World(llama, max_model_len=40)
    talk = Talk(PROMPTS[0], BLOCKS[0])
    step(world, talk)
    assert len(world.run(talk.next(), repeats=99)[0].more) == 40 - 37 - 1
    long, short = Talk(PROMPTS[2][:14], BLOCKS[2]), Talk(PROMPTS[1], BLOCKS[1])
    step(world, long, short)
    shares = long.next(), short.next()
    assert [len(each.more) for each in world.run(*shares, repeats=99)] == [1, 1]
    written = world.runner.kv_pool.flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert written == sorted([*BLOCKS[0][:3], 7, 3])


def test_passes_end_with_a_stop_token_for_all(llama):
    world = World(llama)
    expected = by_torch(world)
    stop = next(token for token in expected[1] if token not in expected[2])
    at = expected[1].index(stop)
    goes_on, ends, last = talks(stop_token_ids=(stop, 130))
    goes_on.sampling = GREEDY
    step(world, goes_on, ends, last)
    while len(ends.output) <= at:
        step(world, goes_on, ends, last, repeats=at + 9)
    assert ends.output == expected[1][: at + 1]
    assert last.output == expected[2][: at + 1]


def test_one_pass_at_a_time_where_more_would_take_too_long(llama, monkeypatch):
    monkeypatch.setattr("kvrelay.engine.model.cpu.step.BURST_S", 0.0)
    world = World(llama)
    talk = Talk(PROMPTS[1], BLOCKS[1])
    step(world, talk)
    assert world.run(talk.next(), repeats=5)[0].more == ()


def test_rows_that_come_go_and_change_places_keep_their_own_tables_and_draws(llama):
    world = World(llama)
    expected = by_torch(world)
    first, second, third = talks()
    step(world, first)
    step(world, second, first)
    step(world, first, second)
    step(world, third)
    step(world, third, second, first)
    step(world, first)
    moved = Talk(second.tokens, [5, 6], second.sampling)  # as after a preemption
    moved.prompt = second.prompt
    step(world, moved, counts=[len(moved.tokens) - 1])
    step(world, moved, third, first, repeats=2)
    step(world, third, moved)
    for talk, tokens in zip((first, moved, third), expected, strict=True):
        assert len(talk.output) > 3
        assert talk.output == tokens[: len(talk.output)]


def test_room_grows_with_the_batch_and_not_with_how_often_it_grew(llama):
    world = World(llama)
    for count in range(1, 25):
        world.run(*(Talk([1 + row], [row]).next() for row in range(count)))
    decode = world.runner._decode
    assert decode._capacity <= 2 * 24
    assert decode._splits <= 2 * 3 * 24


def test_stop_tokens_are_those_of_who_is_there(llama):
    """The third row's were laid out behind those of others."""
    world = World(llama)
    expected = by_torch(world)
    first, second, third = talks(stop_token_ids=tuple(range(131, 200)))
    at = next(i for i in range(3, 9) if expected[2][i] not in expected[2][:i])
    third.sampling = replace(third.sampling, stop_token_ids=(expected[2][at],))
    other = Talk(PROMPTS[1], [19])
    step(world, first, second, third, other)
    step(world, first, second, third)
    step(world, first, other)
    step(world, first, other, third, repeats=12)
    assert third.output == expected[2][: at + 1]
    assert len(first.output) == len(other.output) + 1 == at + 2


def test_nothing_follows_a_stop_token_in_a_draft_that_holds(llama):
    world = World(llama)
    expected = by_torch(world)
    talk = talks()[0]
    stop = next(at for at in range(2, 9) if expected[0][at] not in expected[0][:at])
    talk.sampling = replace(GREEDY, stop_token_ids=(expected[0][stop],))
    step(world, talk)
    sampled = world.run(talk.next(draft=expected[0][1:10]))[0]
    assert [sampled.token, *sampled.more] == expected[0][1 : stop + 1]


@pytest.mark.parametrize("changes", [{"logprobs": 0}, {"repetition_penalty": 1.3}], ids=str)
def test_drafts_are_of_the_plain_sequences_only(llama, changes):
    world = World(llama)
    (other,) = unfused(world, talks(**changes)[:1])
    expected = by_torch(world)
    plain, edited = talks()[1], talks(**changes)[0]
    step(world, edited, plain)
    shares = edited.next(draft=other[1:4]), plain.next(draft=expected[1][1:4])
    got = world.run(*shares)
    assert (got[0].token, got[0].more) == (other[1], ())
    assert (got[1].token, got[1].more) == (expected[1][1], tuple(expected[1][2:5]))
    assert (got[0].logprobs is not None) == ("logprobs" in changes)


def test_only_the_sequence_that_is_edited_is_sampled_after_the_pass(llama, monkeypatch):
    """Its logits are those of the one call that computes the pass, and draws for the others."""
    world = World(llama)
    expected = by_torch(world)
    plain, edited = talks()[1], Talk(PROMPTS[0], BLOCKS[0])
    edited.sampling = replace(GREEDY, logit_bias={expected[0][1]: -1000.0}, logprobs=1)
    step(world, plain, edited)
    monkeypatch.setattr(world.runner, "_decoder", None)  # no layer is called by itself
    got = world.run(plain.next(), edited.next(), repeats=5)
    assert [each.token for each in got] != [expected[1][1], expected[0][1]]
    assert got[0].token == expected[1][1]
    assert got[0].logprobs is None
    assert got[1].logprobs is not None
    assert got[0].more == got[1].more == ()


def test_a_row_is_drawn_as_soon_as_it_needs_nothing_else(llama):
    """Until `min_tokens` stop tokens are banned, by edits."""
    world, least = World(llama), 4
    banned = by_torch(world)[1][1]
    changes = {"min_tokens": least, "stop_token_ids": (banned,)}
    expected = unfused(world, talks(**changes)[:2])
    first, second = talks(**changes)[:2]
    while len(second.output) < least:
        step(world, first, second, repeats=5)
    assert len(second.output) == least
    step(world, first, second, repeats=3)
    assert len(second.output) > least + 1 or banned in second.output
    assert [first.output, second.output] == [tokens[: len(second.output)] for tokens in expected]


PENALIZED = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}


@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": 2}], ids=str)
def test_penalized_sequences_are_drawn_in_passes_in_a_row(llama, options, monkeypatch):
    """The tokens of torch, which counts each context anew in every step. Sequences come, go, and
    come back after they have lost their blocks; one has another temperature and no penalty."""
    world = World(llama, **options)
    changes = [PENALIZED, {"repetition_penalty": 0.8}, {}]
    mixed = [talks(**each)[row] for row, each in enumerate(changes)]
    expected = unfused(world, [talks(**each)[row] for row, each in enumerate(changes)])
    assert expected[0] != by_torch(world)[0]
    first, second, third = mixed
    step(world, first, second)
    step(world, third)
    monkeypatch.setattr(world.runner, "_decoder", None)
    step(world, first, second, third, repeats=4)
    assert len(first.output) == 5
    step(world, third, first)
    step(world, second, first, repeats=2)
    monkeypatch.undo()
    moved = Talk(first.tokens, [5, 6, 10, 12], first.sampling)  # as after a preemption
    moved.prompt = first.prompt
    step(world, moved, counts=[len(moved.tokens) - 1])
    step(world, second, moved, third, repeats=3)
    for talk, tokens in zip((moved, second, third), expected, strict=True):
        assert len(talk.output) > 7
        assert talk.output == tokens[: len(talk.output)]


def test_what_a_failed_step_has_counted_is_counted_anew(llama):
    world = World(llama)
    (expected,) = unfused(world, talks(**PENALIZED)[:1])
    talk = talks(**PENALIZED)[0]
    step(world, talk)
    world.run(talk.next(), repeats=6)  # nobody takes its tokens
    while len(talk.output) < NUM_TOKENS:
        step(world, talk)
    assert talk.output == expected
