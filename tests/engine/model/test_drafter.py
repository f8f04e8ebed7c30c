"""Drafters: what they propose is what their definition says, wherever KV comes from, and the tokens
are those without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from kvrelay.engine.model.batch import tables_of
from kvrelay.engine.model.checkpoint.drafters import read_drafter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from tests.engine.model.heads import DIM, HEADS, KV_HEADS, Straight, make_head
from tests.engine.model.runners import model_runner
from tests.engine.model.talks import Talk
from tests.engine.model.tiny import tokens_of

KINDS = ("own", "eagle", "eagle3", "medusa")
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
HOT = SamplingParams(temperature=1.0, top_k=40, min_p=0.01, seed=7)
PROMPTS = tokens_of(37, seed=1), tokens_of(3, seed=2), tokens_of(16, seed=3)
BLOCKS = [9, 4, 17, 2], [3, 11], [7, 8]
NUM_TOKENS = 12


class Drafting:
    """A runner, and what its drafter has proposed."""

    def __init__(self, path, drafter="", **options) -> None:
        options = {"dtype": "float32", "num_blocks": 24, "threads": 2, **options}
        self._groups = range(read_config(path).kv_spec(16, "float32").num_groups)
        self._num_blocks = options["num_blocks"]
        options["num_blocks"] *= len(self._groups)
        self.runner = model_runner(path, drafter=str(drafter), **options)
        self.proposed: list[list[int]] = []
        self.makes_slots, self.crosses = True, False
        if drafter:
            inner = self.runner._drafter.draft

            def draft(seqs, tables):
                found = inner(seqs, tables)
                self.proposed += found
                return found

            self.runner._drafter.draft = draft

    def blocks(self, of_first) -> list[int]:
        """Those of all groups, beside these of the first one."""
        return [block + group * self._num_blocks for block in of_first for group in self._groups]

    def step(self, *talks: Talk, counts=None, num_drafts=0, repeats=1) -> list:
        shares = [
            talk.next(count) for talk, count in zip(talks, counts or [None] * 9, strict=False)
        ]
        for talk, share in zip(talks, shares, strict=True):
            size = self.runner.kv_spec.block_size
            room = num_drafts if self.crosses else -len(talk.tokens) % size
            if share.sample and len(share.tokens) == 1 and talk.output:
                share.num_drafts = min(num_drafts, room)
        for share in shares:  # a block of each group of layers where it has one
            share.request_id = f"r{share.block_ids[0]}"
            share.block_ids = self.blocks(share.block_ids)
        step = Step(0, shares, repeats=repeats, makes_slots=self.makes_slots)
        done = self.runner.execute(step)
        assert not done.failed
        for talk, share, sampled in zip(talks, shares, done.sampled, strict=True):
            talk.take(share, sampled)
        return done.sampled


def talks(*samplings: SamplingParams) -> list[Talk]:
    return [Talk(*each) for each in zip(PROMPTS, BLOCKS, samplings, strict=True)]


def spoken(world: Drafting, several: list[Talk], num_drafts: int = 0) -> list[list[int]]:
    while min(len(talk.output) for talk in several) < NUM_TOKENS:
        world.step(*several, num_drafts=num_drafts)
    return [talk.output[:NUM_TOKENS] for talk in several]


@pytest.fixture(scope="module")
def llama8(checkpoint_of):
    return checkpoint_of("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def reference(llama8):
    return transformers.LlamaForCausalLM.from_pretrained(llama8, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(llama8) -> list[list[int]]:
    return spoken(Drafting(llama8), talks(GREEDY, DRAWN, HOT))


def test_what_an_eagle3_head_may_state_beside_is_computed(llama8, reference, tmp_path):
    """Other layers, biases, and a residual that begins normed."""
    width = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    biases = {
        f"midlayer.self_attn.{name}_proj.bias": torch.linspace(-2, 2, count)
        for name, count in width.items()
    }
    tensors = make_head(tmp_path, "eagle3", tensors=biases, norm_before_residual=True)
    world, straight = Drafting(llama8, tmp_path), Straight(reference, "eagle3", tensors)
    talk, differ = Talk(PROMPTS[0], BLOCKS[0]), 0
    world.step(talk)
    for _ in range(4):
        known = list(talk.tokens)
        world.step(talk, num_drafts=4)
        count = len(world.proposed[-1])
        straight.adds_normed = False
        differ += straight.drafts(known, count) != world.proposed[-1]
        straight.adds_normed = True
        assert world.proposed[-1] == straight.drafts(known, count)
    assert differ, "it shows in what is drafted"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_those_of_the_definition(kind, llama8, reference, tmp_path):
    tensors = make_head(tmp_path, kind)
    world, straight = Drafting(llama8, tmp_path), Straight(reference, kind, tensors)
    talk = Talk(PROMPTS[0], BLOCKS[0])
    world.step(talk, counts=[20])
    world.step(talk)
    for _ in range(6):
        known = list(talk.tokens)
        world.step(talk, num_drafts=4)
        assert world.proposed[-1] == straight.drafts(known, len(world.proposed[-1]))
    assert sum(map(len, world.proposed)) > 12


@pytest.mark.parametrize("kind", [*KINDS, "model"])
def test_tokens_are_those_without_a_drafter(kind, llama8, expected, tmp_path):
    if kind != "model":
        make_head(tmp_path, kind, seed=5)
    world = Drafting(llama8, llama8 if kind == "model" else tmp_path)
    several = talks(GREEDY, DRAWN, HOT)
    assert spoken(world, several, num_drafts=3) == expected
    assert any(world.proposed)
    if kind == "model":  # it is itself: all that it drafts is right, at any temperature
        assert sum(map(len, world.proposed)) > NUM_TOKENS
        told = {tuple(talk.tokens) for talk in several}
        assert all(any(_has(tokens, draft) for tokens in told) for draft in world.proposed)


def _has(tokens: tuple[int, ...], draft: list[int]) -> bool:
    return any(list(tokens[at : at + len(draft)]) == draft for at in range(len(tokens)))


@pytest.mark.parametrize("family", ["gemma3", "deepseek3", "deepseek32", "gemma4"])
def test_layers_in_groups_and_latents_have_one_too(family, checkpoint_of, tmp_path):
    path = checkpoint_of(family)
    make_head(tmp_path, "own")
    expected = spoken(Drafting(path), talks(GREEDY, DRAWN, HOT))
    world = Drafting(path, tmp_path)
    assert spoken(world, talks(GREEDY, DRAWN, HOT), num_drafts=3) == expected
    assert any(world.proposed)
    other, several = Drafting(path, tmp_path), talks(GREEDY, DRAWN, HOT)
    of_other_groups = other.runner.kv_pool[24:, other.runner.kv_spec.layer_bytes :]
    while min(len(talk.output) for talk in several) < NUM_TOKENS:
        of_other_groups.zero_()  # what the drafter keeps is in the first group's blocks
        other.step(*several, num_drafts=3)
    assert other.proposed == world.proposed


@pytest.mark.parametrize("kind", ["own", "eagle3", "model"])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3"])
def test_a_prefix_hit_goes_on_as_if_all_had_been_computed(kind, kv_dtype, llama8, tmp_path):
    """From the blocks alone, copied to other places as a hand-over, a tier or a migration does."""
    if kind != "model":
        make_head(tmp_path, kind)
    source = llama8 if kind == "model" else tmp_path
    options = {"dtype": "bfloat16", "kv_dtype": kv_dtype}
    cold, warm = Drafting(llama8, source, **options), Drafting(llama8, source, **options)
    assert cold.runner.kv_pool.dtype == torch.uint8
    check_that_it_goes_on(cold, warm, PROMPTS[0])


def check_that_it_goes_on(cold: Drafting, warm: Drafting, prompt: list[int]) -> None:
    """`warm` has the full blocks of `prompt` that `cold` has computed, in other places."""
    first = Talk(prompt, [*BLOCKS[0], 12, 13], DRAWN)
    while len(first.output) < 8:
        cold.step(first, num_drafts=3)
    size = cold.runner.kv_spec.block_size
    num_full = first.num_computed // size
    assert num_full
    pairs = list(zip(cold.blocks(BLOCKS[0][:num_full]), warm.blocks(range(num_full)), strict=True))
    for block, at in pairs:
        warm.runner.kv_pool[at] = cold.runner.kv_pool[block]
    second = Talk(first.tokens, [0, 1, 2, 3, 5, 6], DRAWN)
    second.prompt, second.num_computed, at = first.prompt, num_full * size, len(cold.proposed)
    warm.step(second, counts=[first.num_computed - second.num_computed])
    for _ in range(6):
        cold.step(first, num_drafts=3)
        warm.step(second, num_drafts=3)
    assert warm.proposed == cold.proposed[at:]
    assert any(warm.proposed)
    assert second.tokens == first.tokens


@pytest.mark.parametrize("kind", ["own", "eagle3", "medusa", "model"])
def test_a_drafter_that_was_left_out_is_asked_again_and_no_token_changes(
    kind, llama8, expected, tmp_path
):
    """Full blocks of that time have no slots; the last one is caught up."""
    if kind != "model":
        make_head(tmp_path, kind)
    world, several = (
        Drafting(llama8, llama8 if kind == "model" else tmp_path),
        talks(GREEDY, DRAWN, HOT),
    )
    world.makes_slots = False
    for _ in range(4):
        world.step(*several)
    world.makes_slots = True
    assert spoken(world, several, num_drafts=3) == expected
    assert any(world.proposed)


def test_drafts_of_any_lengths_take_as_many_passes_as_the_longest(llama8, tmp_path):
    make_head(tmp_path, "own")
    world = Drafting(llama8, tmp_path)
    several = talks(GREEDY, GREEDY, GREEDY)
    world.step(*several)
    whole, alone = world.runner._drafter._whole, []
    passes, execute = [], whole.execute
    whole.execute = lambda step, tables: passes.append(step.repeats) or execute(step, tables)
    shares = [talk.next() for talk in several]
    tables = tables_of(shares, world.runner._limits)
    for lengths in ((7, 2, 4), (7, 7, 7)):
        for share, length in zip(shares, lengths, strict=True):
            share.num_drafts = length
        alone.append(world.runner._drafter.draft(shares, tables))
    assert passes == [7, 7]
    short, long = alone
    assert [len(draft) for draft in short] == [7, 2, 4]
    assert short == [draft[:n] for draft, n in zip(long, (7, 2, 4), strict=True)]


def test_a_draft_goes_on_in_the_next_block(llama8, tmp_path):
    """Its own slots there, and of the block before, are those of the definition."""
    for kind in ("own", "model"):
        source = llama8 if kind == "model" else tmp_path
        if kind != "model":
            make_head(tmp_path, kind)
        world = Drafting(llama8, source)
        talk = Talk(PROMPTS[0][:29], BLOCKS[0])
        world.step(talk)
        world.crosses = True
        while len(talk.tokens) < 44:
            world.step(talk, num_drafts=5)
        plain = Talk(PROMPTS[0][:29], BLOCKS[0])
        other = Drafting(llama8)
        while len(plain.tokens) < len(talk.tokens):
            other.step(plain)
        assert talk.tokens == plain.tokens[: len(talk.tokens)]
        if kind == "model":
            assert [len(draft) for draft in world.proposed] == [5] * len(world.proposed)
            assert len(world.proposed) == 3, "all are right, in the next block too"


def test_passes_in_a_row_leave_what_single_ones_do(llama8, tmp_path, monkeypatch):
    monkeypatch.setattr("kvrelay.engine.model.cpu.step.BURST_S", 60.0)
    make_head(tmp_path, "eagle3")
    pools = []
    for repeats in (1, 5):
        world = Drafting(llama8, tmp_path)
        several = talks(GREEDY, DRAWN, HOT)
        world.step(*several)
        for _ in range(5 // repeats):
            world.step(*several, repeats=repeats)
        pools.append(world.runner.kv_pool[[*BLOCKS[0][:3], BLOCKS[1][0], *BLOCKS[2]]].clone())
    assert torch.equal(*pools)


def test_every_byte_of_a_drafter_is_in_the_checksum(llama8, tmp_path):
    from kvrelay.kvtransfer.checksum import checksum_blocks
    from kvrelay.kvtransfer.layout import BlockLayout, fingerprint
    from kvrelay.kvtransfer.movers.pool import block_bytes

    make_head(tmp_path, "own")
    world = Drafting(llama8, tmp_path)
    spoken(world, talks(GREEDY, DRAWN, HOT))
    spec = world.runner.kv_spec
    share = BlockLayout(spec).share(0, 1)
    pool = block_bytes(world.runner.kv_pool, share)
    good = checksum_blocks(pool, [9], share)
    random = np.random.default_rng(4)
    for at in random.integers(spec.layer_bytes, spec.bytes_per_block, 100):
        world.runner.kv_pool[9, at] ^= 1 << int(random.integers(8))
        assert checksum_blocks(pool, [9], share) != good
        good = checksum_blocks(pool, [9], share)
    names = {fingerprint(b"m", spec), fingerprint(b"m", replace(spec, drafter="x"))}
    plain = read_config(llama8).kv_spec(16, "float32")
    assert len(names | {fingerprint(b"m", plain)}) == 3


def test_a_head_that_is_known_in_part_only_is_refused_by_the_names_of_the_rest(llama8, tmp_path):
    config = read_config(llama8)
    make_head(tmp_path, "eagle3", tensors={"midlayer.mlp.up_proj.bias": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"midlayer\.mlp\.up_proj\.bias"):
        read_drafter(str(tmp_path), config)
    for field, value in (("norm_before_fc", True), ("hidden_act", "gelu")):
        make_head(tmp_path, "eagle3", **{field: value})
        with pytest.raises(ModelError, match=field):
            read_drafter(str(tmp_path), config)
    make_head(tmp_path, "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 8, 5]})
    assert read_drafter(str(tmp_path), config).captured == (2, 4, 7)
    make_head(tmp_path, "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 9]})
    with pytest.raises(ModelError, match="eagle_aux_hidden_state_layer_ids"):
        read_drafter(str(tmp_path), config)
    scaling = {"rope_type": "linear", "factor": 4.0}
    make_head(tmp_path, "eagle3", rope_scaling=scaling, norm_before_residual=True)
    found = read_drafter(str(tmp_path), config)
    assert found.adds_normed
    assert found.layers.ropes[0].scaling.factor == 4.0


def test_what_is_no_drafter_of_the_model_is_refused_with_what_is_wrong(llama8, tmp_path):
    config = read_config(llama8)
    with pytest.raises(ModelError, match="needed"):
        read_drafter(str(tmp_path), config)
    make_head(tmp_path / "narrow", "own", hidden_size=95)
    with pytest.raises(ModelError, match="95 numbers, the model's have 96"):
        read_drafter(str(tmp_path / "narrow"), config)
    make_head(tmp_path / "d2t", "eagle3", draft_vocab_size=63)
    with pytest.raises(ModelError, match="draft_vocab_size is 63"):
        read_drafter(str(tmp_path / "d2t"), config)
    make_head(tmp_path / "far", "eagle3", tensors={"d2t": torch.full((64,), 1000)})
    with pytest.raises(ModelError, match="vocabulary of 131"):
        Drafting(llama8, tmp_path / "far")
