"""Speculative decoding: the same tokens, blocks and finish reasons as one token at a time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.engine.scheduling.selection import draft_rooms
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Sampled, Step, StepDone
from tests.engine.configs import worker_config
from tests.engine.sequences import sequence
from tests.engine.test_repeats import cached, ends
from tests.worker.world import BLOCK_SIZE, World, checksum, next_token

PROMPTS = {f"r{i}": [i + 1, *range(20, 23 + i)] * 3 for i in range(5)}
LENGTHS = {"r0": 60, "r1": 3, "r2": 37, "r3": 2, "r4": 52}

ROW_S = 2e-4  # that a row adds to a pass of 10 ms


def talked(tokens: list[int]) -> int:
    """The tiny model: it says what it said a while ago, and now and then something else."""
    usual, other = tokens[-5], next_token(tokens)
    return usual if other % 8 else other


def reference(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(talked(tokens))
    return tokens[len(prompt) :]


class Drafting(World):
    """Its decode worker verifies up to `max_drafts` draft tokens a step; `drafts`: how many it
    did, and how many were accepted, step by step. 0: one token at a time."""

    def __init__(self, max_drafts: int, **options: Any) -> None:
        self.drafts: list[tuple[int, int]] = []
        self.num_crossing = 0  # drafts that go on in the next block
        super().__init__(num_speculative_tokens=max_drafts, **{"num_blocks": 200, **options})

    def next_token(self, tokens: list[int]) -> int:
        return talked(tokens)

    def run(self, node: str, step: Step) -> StepDone:
        done = super().run(node, step)
        num_rows = sum(1 + seq.most_drafts for seq in step.seqs)
        done = replace(done, elapsed_s=0.01 + ROW_S * num_rows)
        for seq, sampled in zip(step.seqs, done.sampled, strict=True):
            if seq.draft_tokens:
                assert sampled is not None
                assert (step.repeats, len(seq.tokens), seq.sample) == (1, 1, True)
                last = seq.start + len(seq.draft_tokens)
                assert last // BLOCK_SIZE < len(seq.block_ids), "it leaves its blocks"
                self.num_crossing += last // BLOCK_SIZE > seq.start // BLOCK_SIZE
                num_output = len(seq.context) - seq.num_prompt_tokens
                assert 0 < num_output < seq.sampling.max_tokens - len(seq.draft_tokens)
                self.drafts.append((len(seq.draft_tokens), len(sampled.more)))
        return done

    def assert_checksums(self) -> None:
        """Sealed blocks hold what their checksums say."""
        kv, slots = self.decode.core.kv, self.slots["decode"]
        for name in kv.pool.block_hashes():
            block = kv.pool.lookup([name])[0]
            assert kv.checksums[block] == checksum(slots[block])


def serve(world: Drafting, *, remote: bool = False, **sampling: Any) -> Drafting:
    for name, prompt in PROMPTS.items():
        world.submit(name, prompt, LENGTHS[name], remote=remote, sampling=sampling)
        world.step()
    while world.step():
        world.assert_checksums()
    world.assert_idle()
    return world


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("max_drafts", [1, 2, 7])
def test_drafts_give_the_same_tokens_hashes_and_finish_reasons(
    remote: bool, max_drafts: int
) -> None:
    one, many = serve(Drafting(0), remote=remote), serve(Drafting(max_drafts), remote=remote)
    assert one.drafts == []
    drafted, accepted = (sum(column) for column in zip(*many.drafts, strict=True))
    assert 20 < accepted < drafted, "some are accepted, and some are not"
    for name, prompt in PROMPTS.items():
        assert many.output(name, prompt) == reference(prompt, LENGTHS[name])
    assert cached(many) == cached(one)
    assert ends(many) == ends(one) == dict.fromkeys(PROMPTS, FinishReason.LENGTH)
    counters = many.decode.core.counters
    assert counters["draft_tokens"] == drafted
    assert counters["draft_tokens_accepted"] == accepted
    assert 0 < counters["draft_seconds_spent"] < counters["draft_seconds_gained"]
    assert "drafter_tokens" not in counters
    reported = [d.drafts for m in many.to_router if isinstance(m, TokenDeltas) for d in m.deltas]
    assert [sum(each) for each in zip(*reported, strict=True)] == [accepted, drafted - accepted]
    assert counters["steps"] < one.decode.core.counters["steps"]


def test_what_a_full_draft_fills_is_sealed_with_its_checksum() -> None:
    world = serve(Drafting(BLOCK_SIZE - 1))
    assert (BLOCK_SIZE - 1, BLOCK_SIZE - 1) in world.drafts
    kv = world.decode.core.kv
    sealed = {kv.pool.lookup([name])[0] for name in kv.pool.block_hashes()}
    assert set(kv.checksums) == sealed, "and a block that was not filled has none"


def test_an_accepted_stop_token_is_the_last() -> None:
    stops = {"stop_token_ids": (21, 24)}
    one, many = serve(Drafting(0), **stops), serve(Drafting(7), **stops)
    assert FinishReason.STOP in ends(many).values()
    assert ends(many) == ends(one)
    for name, prompt in PROMPTS.items():
        assert many.output(name, prompt) == one.output(name, prompt)


def test_where_logits_are_edited_there_are_no_drafts() -> None:
    world = serve(Drafting(7), presence_penalty=0.5)
    assert world.drafts == []


def test_others_get_drafts_beside_a_request_whose_logits_are_edited() -> None:
    drafted: dict[str, int] = {}

    class Noting(Drafting):
        def run(self, node: str, step: Step) -> StepDone:
            for seq in step.seqs if len(step.seqs) > 1 else ():
                drafted[seq.request_id] = drafted.get(seq.request_id, 0) + len(seq.draft_tokens)
            return super().run(node, step)

    world = Noting(7)
    for index, prompt in enumerate(PROMPTS.values()):
        edited = {"presence_penalty": 0.5} if index == 0 else {}
        world.submit(f"r{index}", prompt, 60, remote=False, sampling=edited)
        world.step()
    while world.step():
        world.assert_checksums()
    for index, prompt in enumerate(PROMPTS.values()):
        assert world.output(f"r{index}", prompt) == reference(prompt, 60)
    assert drafted.pop("r0#0") == 0
    assert min(drafted.values()) > 10


def test_a_draft_goes_on_in_a_new_block_where_the_pool_has_one_to_spare() -> None:
    """And what it has filled has its checksum at once."""
    world = Drafting(7)
    prompt = [1, 20, 21, 22] * 3
    world.submit("r0", prompt, 52, remote=False)
    while world.step():
        world.assert_checksums()
    assert world.output("r0", prompt) == reference(prompt, 52)
    assert world.num_crossing > 2
    world.assert_idle()


def test_where_there_is_no_block_to_be_had_drafts_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, grow = list[int](), KVCacheManager.grow

    def denied(self: KVCacheManager, seq: Sequence, num_unknown: int = 0) -> bool:
        asked.append(num_unknown)
        return num_unknown == 0 and grow(self, seq, num_unknown)

    monkeypatch.setattr(KVCacheManager, "grow", denied)
    world = serve(Drafting(7))
    assert any(asked)
    assert world.drafts
    assert world.num_crossing == 0
    for name, prompt in PROMPTS.items():
        assert world.output(name, prompt) == reference(prompt, LENGTHS[name])


def test_with_states_drafts_stay_in_their_block() -> None:
    sizes = {"block_size": 16, "num_blocks": 40}
    sampling = SamplingParams(max_tokens=100)
    seqs = [sequence([1] * n, num_prompt_tokens=1, sampling=sampling) for n in (4, 13, 16, 99)]
    assert draft_rooms(seqs, worker_config(**sizes, has_states=True), 7) == [7, 3, 0, 1]
    assert draft_rooms(seqs, worker_config(**sizes), 7) == [7, 7, 7, 1]


def test_drafts_in_a_small_pool_are_preempted_and_finish_right() -> None:
    num_preemptions = 0
    for seed in range(6):
        rng = Random(seed)
        world = Drafting(rng.choice((1, 3)), num_blocks=18, prefill_blocks=10)
        prompts = {f"r{i}": [i + 1, 30, 31, 32, i + 2] for i in range(8)}
        for name, prompt in prompts.items():
            world.submit(name, prompt, 22, remote=rng.random() < 0.3)
            for _ in range(rng.randint(0, 6)):
                world.step()
        while world.step():
            world.assert_checksums()
        for name, prompt in prompts.items():
            assert world.output(name, prompt) == reference(prompt, 22)
        world.assert_idle()
        assert any(accepted for _, accepted in world.drafts)
        num_preemptions += world.decode.core.scheduler.num_preemptions
    assert num_preemptions > 0


def test_with_a_window_drafts_give_the_same_tokens() -> None:
    class Windowed(Drafting):
        def next_token(self, tokens: list[int]) -> int:
            return talked([*tokens[:2], *tokens[-9:]])

    one, many = (serve(Windowed(count, window=9, sinks=2)) for count in (0, 7))
    assert many.num_crossing > 3
    assert any(accepted for _, accepted in many.drafts)
    for name, prompt in PROMPTS.items():
        assert many.output(name, prompt) == one.output(name, prompt)


def test_a_worker_that_ignores_drafts_yields_a_token_a_step() -> None:
    class Ignoring(Drafting):
        def run(self, node: str, step: Step) -> StepDone:
            done = super().run(node, step)
            return replace(done, sampled=[each and Sampled(each.token) for each in done.sampled])

    world = serve(Ignoring(7))
    for name, prompt in PROMPTS.items():
        assert world.output(name, prompt) == reference(prompt, LENGTHS[name])
