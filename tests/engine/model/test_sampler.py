"""Which token comes out: greedy, filters, penalties, randomness, log-probabilities."""

import math

import numpy as np
import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.step import CpuDraw
from kvrelay.engine.model.sampling.edits import BANS, EDITS
from kvrelay.engine.model.sampling.sampler import DRAW, draw, draw_of, key_of, luck, sample
from kvrelay.engine.request import EDITING, PENALTIES, SamplingParams
from kvrelay.engine.step import NO_TOKEN
from tests.engine.model.tiny import scheduled

GREEDY = {"temperature": 0.0}
by = {"draw": draw}


@pytest.fixture(params=["torch", "kernel"], autouse=True)
def drawn_by(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setitem(by, "draw", CpuDraw(kernels.load(default_cache_dir()), 2))


def pick(logits, context=(0,), prompt=None, **params) -> int:
    return pick_all([logits], [context], prompt, **params)[0].token


def pick_all(rows, contexts, prompt=None, **params):
    seqs = [
        scheduled(
            [0],
            0,
            [0],
            context=list(context),
            num_prompt_tokens=len(context) if prompt is None else prompt,
            sampling=SamplingParams(**params),
        )
        for context in contexts
    ]
    return sample(torch.tensor(rows, dtype=torch.float32), seqs, **by)


def draw_many(logits, count=4000, **params) -> torch.Tensor:
    """Share of each token over `count` positions of one seed."""
    contexts = [[0] * (1 + position) for position in range(200)]
    tokens = []
    for seed in range(count // 200):
        done = pick_all([logits] * 200, contexts, seed=seed, **params)
        tokens += [sampled.token for sampled in done]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / len(tokens)


def test_greedy_takes_the_best_and_the_first_of_equals():
    assert pick([0.0, 3.0, 1.0], **GREEDY) == 1
    assert pick([2.0, 3.0, 3.0], **GREEDY) == 1
    assert pick([0.0, 3.0, 1.0], temperature=1e-7) == 1


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_strictest_filters_are_greedy(params):
    assert draw_many([0.1, 0.2, 0.3, 0.0], 200, temperature=1.0, **params)[2] == 1.0


def test_draws_follow_the_distribution():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    shares = draw_many(logits, temperature=1.0)
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)
    cooler = draw_many(logits, temperature=0.5)
    expected = torch.softmax(torch.tensor(logits) / 0.5, 0)
    assert torch.allclose(cooler, expected, atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 0.55}, {0, 2}),  # 0.5 is not enough, so one more is kept
        ({"top_p": 0.5}, {0}),
        ({"min_p": 0.29}, {0, 2, 1}),
        ({"min_p": 0.31}, {0, 2}),
        ({"top_k": 3, "top_p": 0.99}, {0, 2, 1}),
        ({"top_k": 3, "top_p": 0.6}, {0, 2}),  # among what top-k left: (0.5 + 0.3) / 0.95
        ({"top_k": 3, "min_p": 0.5}, {0, 2}),
    ],
    ids=str,
)
def test_filters_keep_exactly_the_right_tokens(params, kept):
    logits = [math.log(p) for p in (0.5, 0.15, 0.3, 0.05)]
    shares = draw_many(logits, 2000, temperature=1.0, **params)
    assert {token for token in range(4) if shares[token] > 0} == kept


def test_top_p_reaches_past_the_first_candidates():
    """4,000 equal tokens: 90 % of the mass needs more than are sorted at first."""
    logits = [-0.001 * (token / 4000) for token in range(4000)]
    top = [pick(logits, [0] * n, temperature=1.0, top_p=0.9, seed=3) for n in range(1, 120)]
    assert max(top) < 3610
    assert max(top) > 2000


def test_one_batch_mixes_requests_without_mixing_their_tokens():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 300, generator=generator)
    params = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8, "seed": 1},
        {"temperature": 1.3, "seed": 2},
        {"temperature": 0.0, "logit_bias": {7: 50.0}},
        {"temperature": 1.0, "top_k": 40, "seed": 3, "presence_penalty": 1.0},
        {"temperature": 0.7, "min_p": 0.1, "seed": 4, "repetition_penalty": 1.2},
    ]
    seqs = [
        scheduled([0], 0, [0], context=[5] * 9, num_prompt_tokens=4, sampling=SamplingParams(**p))
        for p in params
    ]
    together = [sampled.token for sampled in sample(rows.clone(), seqs, **by)]
    alone = [sample(rows[i : i + 1].clone(), [seq], **by)[0].token for i, seq in enumerate(seqs)]
    assert together == alone
    assert together[3] == 7


def test_the_draw_depends_on_seed_and_position_only():
    logits = torch.zeros(1000).tolist()
    assert pick(logits, [1, 2, 3], seed=5) == pick(logits, [7, 8, 9], seed=5)
    drawn = {pick(logits, [0] * n, seed=seed) for n in range(1, 11) for seed in range(10)}
    assert len(drawn) > 80, "positions and seeds draw different tokens"


@pytest.mark.slow
@pytest.mark.parametrize("drawn_by", ["kernel"], indirect=True)
@pytest.mark.parametrize(
    ("params", "kept"), [({}, 40), ({"temperature": 0.6}, 40), ({"top_k": 9}, 9)], ids=str
)
def test_a_million_draws_follow_the_distribution(params, kept):
    """By a chi-square test; seeds and positions are fixed, and so is its result."""
    count, vocab = 1_000_000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(**params)
    draws = np.zeros(count, DRAW)
    draws[:] = draw_of(scheduled([0], 0, [0], sampling=sampling))
    draws["seed"], draws["position"] = np.arange(count) // 1000, np.arange(count) % 1000
    tokens = np.empty(count, np.int64)
    rows = logits.repeat(count, 1)
    kernels.load(default_cache_dir()).kvr_draw(
        rows.data_ptr(), count, vocab, draws.ctypes.data, tokens.ctypes.data, 2
    )
    scaled = logits / sampling.temperature
    wanted = torch.softmax(scaled.masked_fill(scaled < scaled.sort().values[-kept], -math.inf), 0)
    seen = torch.bincount(torch.from_numpy(tokens), minlength=vocab)
    assert (seen > 0).equal(wanted > 0)
    off = ((seen - wanted * count) ** 2 / (wanted * count))[wanted > 0].sum()
    assert torch.special.gammaincc(torch.tensor((kept - 1) / 2), off / 2) > 0.01


def test_distributions_that_are_alike_mostly_draw_the_same_token():
    """As often as is possible nearly: the overlap of two distributions bounds it. That is what
    drafts are accepted by."""
    torch.manual_seed(2)
    rows, seqs = torch.randn(600, 2000) * 2.5, []
    for row in range(len(rows)):
        seqs.append(scheduled([0], 0, [0], context=[0] * (1 + row), sampling=SamplingParams()))
    others = rows + torch.randn_like(rows) * 0.3
    overlap = torch.minimum(rows.softmax(-1), others.softmax(-1)).sum(-1).mean()
    ours, theirs = (by["draw"](each.clone(), seqs) for each in (rows, others))
    same = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(rows)
    assert overlap - 0.08 < same <= overlap + 0.03


def test_luck_is_uniform_and_never_zero_or_one():
    keys = [key_of(seed, n) for seed in (0, -1, 2**63) for n in range(300)]
    numbers = luck(keys, 500, torch.zeros(1))
    assert numbers.min() > 0.0
    assert numbers.max() < 1.0
    assert torch.histc(numbers, 10, 0, 1).sub(45_000).abs().max() < 900
    for pairs in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        flat = torch.stack([each.flatten() for each in pairs])
        assert torch.corrcoef(flat)[0, 1].abs() < 0.01, "of two tokens, and of two positions"
    assert key_of(1, 2) != key_of(2, 1)


def test_penalties_count_what_openai_counts():
    context, prompt = [1, 1, 2, 3, 3], 3  # prompt: 1 1 2, output: 3 3
    logits = [0.0, 2.0, 2.1, 2.2]
    params = GREEDY | {"context": context, "prompt": prompt}
    assert pick(logits, **params) == 3
    assert pick(logits, presence_penalty=0.15, **params) == 2, "presence: output tokens only"
    assert pick(logits, frequency_penalty=0.06, **params) == 2, "frequency: twice 0.06"
    assert pick(logits, frequency_penalty=-1.0, presence_penalty=1.9, **params) == 3
    assert pick([0.9, 2.0, 2.1, 2.2], repetition_penalty=3.0, **params) == 0, "divided"
    assert pick([0.7, 2.0, 2.1, 2.2], repetition_penalty=3.0, **params) == 3, "all alike"
    assert pick([0.0, -2.0, -2.0, -2.0], repetition_penalty=2.0, **params) == 0
    assert pick([-3.0, -2.0, -2.0, -2.0], repetition_penalty=2.0, **params) == 0, "multiplied"


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}]
)
def test_penalties_of_a_model_with_a_window_count_what_it_sees(penalty):
    params = SamplingParams(**GREEDY, **penalty)
    seq = scheduled([0], 0, [0], context=[3, 3, 1, 2, 1], num_prompt_tokens=1, sampling=params)
    picked = {
        window: sample(torch.tensor([[2.0, 1.9, 2.0, 2.3]]), [seq], window)[0].token
        for window in (0, 4, 3)
    }
    assert picked == {0: 0, 4: 0, 3: 3}  # the last three tokens are no 3


def test_logit_bias_moves_and_ignores_unknown_tokens():
    assert pick([1.0, 0.0], logit_bias={1: 2.0, 99: 100.0, -1: 100.0}, **GREEDY) == 1
    assert pick([1.0, 0.0], logit_bias={0: -100.0}, temperature=1.0) == 1


def test_stop_tokens_are_banned_until_min_tokens():
    params = GREEDY | {"stop_token_ids": (0, 500), "min_tokens": 2}
    logits = [5.0, 1.0]
    assert pick(logits, [7, 7], prompt=2, **params) == 1
    assert pick(logits, [7, 7, 1], prompt=2, **params) == 1
    assert pick(logits, [7, 7, 1, 1], prompt=2, **params) == 0


def test_no_token_but_those_allowed_is_drawn():
    logits = [0.1, 0.2, 0.3, 0.0]
    shares = draw_many(logits, 400, temperature=1.0, allowed_token_ids=(0, 3, 99))
    assert {token for token in range(4) if shares[token] > 0} == {0, 3}
    assert pick(logits, allowed_token_ids=(1,), top_k=2, **GREEDY) == 1


def test_the_last_token_of_a_bad_word_is_banned_after_its_others():
    logits = [0.0, 3.0, 2.0, 1.0]
    words = {"bad_words": ((1,), (5, 6, 2), (99,)), **GREEDY}
    assert pick(logits, [0], **words) == 2
    assert pick(logits, [0, 5, 6], prompt=1, **words) == 3
    assert pick(logits, [0, 6, 5], prompt=1, **words) == 2
    assert pick(logits, [0, 5, 6], prompt=2, **words) == 2  # words are of the output


def test_where_nothing_is_left_the_output_ends_if_it_can():
    nothing = {"allowed_token_ids": (1,), "bad_words": ((1,),), **GREEDY}
    assert pick([3.0, 2.0, 1.0], stop_token_ids=(2,), **nothing) == 2
    assert pick([3.0, 2.0, 1.0], stop_token_ids=(2,), min_tokens=5, **nothing) == 2
    assert pick([3.0, 2.0, 1.0], **nothing) == 1
    drawn = {**nothing, "temperature": 1.0}
    assert pick([3.0, 2.0, 1.0], **drawn) == 1


def test_logprobs_of_token_ids_instead_of_the_best():
    """The row is longer than the tokenizer's vocabulary, as that of a padded embedding."""
    logits = [1.0, 4.0, 2.0, 3.0, *[0.0] * 31]
    (done,) = pick_all([logits], [[0]], logprobs=2, logprob_token_ids=(0, 3, 400), **GREEDY)
    expected = torch.log_softmax(torch.tensor(logits), 0)
    # The token itself comes first, as in vLLM.
    assert [token for token, _ in done.logprobs.top] == [1, 3, 0]
    assert done.logprobs.logprob == pytest.approx(expected[1].item(), abs=1e-5)
    assert [p for _, p in done.logprobs.top] == pytest.approx(
        [expected[each].item() for each in (1, 3, 0)], abs=1e-5
    )
    (done,) = pick_all([logits], [[0]], logprobs=2, logprob_token_ids=(0, 1), **GREEDY)
    assert [token for token, _ in done.logprobs.top] == [1, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = [1.0, 3.0, 2.0, -1.0]
    raw = torch.log_softmax(torch.tensor(logits), 0).tolist()
    done = pick_all([logits], [[0]], logprobs=2, logit_bias={0: 50.0}, **GREEDY)[0]
    assert done.token == 0
    assert done.logprobs.logprob == pytest.approx(raw[0])
    assert [token for token, _ in done.logprobs.top] == [1, 2]
    assert [value for _, value in done.logprobs.top] == pytest.approx([raw[1], raw[2]])
    assert pick_all([logits], [[0]], logprobs=0, **GREEDY)[0].logprobs.top == ()
    assert len(pick_all([logits], [[0]], logprobs=20, **GREEDY)[0].logprobs.top) == 4
    assert pick_all([logits], [[0]], **GREEDY)[0].logprobs is None


@pytest.mark.slow
@pytest.mark.parametrize("drawn_by", ["torch"], indirect=True)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"top_k": 300, "top_p": 0.7, "min_p": 0.01, "temperature": 1.3},
    ],
    ids=str,
)
def test_the_kernel_draws_as_torch_does(params):
    """Weights are rounded differently, so two tokens that tie may change places."""
    torch.manual_seed(0)
    for vocab in (17, 4099, 49152, 49153, 49183, 49216, 49419):  # and longer, as padded ones are
        logits = torch.randn(64, vocab) * 3
        sampling = SamplingParams(seed=7, **params)
        seqs = [
            scheduled([0], 0, [0], context=[0] * (1 + i), num_prompt_tokens=1, sampling=sampling)
            for i in range(len(logits))
        ]
        kernel = CpuDraw(kernels.load(default_cache_dir()), 2)
        ours, theirs = kernel(logits.clone(), seqs), draw(logits.clone(), seqs)
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_have_no_token_and_the_others_theirs(temperature):
    lost = torch.full((40,), 0.5)
    lost[17] = torch.nan
    sound = torch.arange(40.0) * 3
    rows = [[-torch.inf] * 40, [torch.nan] * 40, [torch.inf] + [0.0] * 39, lost, sound]
    logits = torch.stack([torch.as_tensor(row) for row in rows])
    seqs = [
        scheduled([0], 0, [0], sampling=SamplingParams(temperature=temperature, top_p=0.9))
        for _ in rows
    ]
    sampled = sample(logits, seqs, **by)
    assert [each.token for each in sampled] == [NO_TOKEN] * 4 + [39]
    assert all("NaN" in each.error for each in sampled[:4])


def test_what_edits_logits_has_an_edit():
    edited = [name for each in (*EDITS, *BANS) for name in each.parameters]
    assert sorted(edited) == sorted(
        [*EDITING, *PENALTIES, "min_tokens"]
    )  # which bans for a while only


def test_an_edit_that_fails_is_its_own_rows():
    good = scheduled([0], 0, [0], sampling=SamplingParams(temperature=0))
    bias = {1: "much"}
    bad = scheduled([0], 0, [0], sampling=SamplingParams(logit_bias=bias))
    sampled = sample(torch.eye(3, 40), [good, bad, good], **by)
    assert [each.token for each in sampled] == [0, NO_TOKEN, 2]
    assert sampled[1].error
