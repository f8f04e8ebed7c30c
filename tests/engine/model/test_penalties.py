"""How often tokens have come, kept from step to step, and penalties by C and Triton: as torch's."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.sampling import counts as module
from kvrelay.engine.model.sampling.counts import counts_of
from kvrelay.engine.model.sampling.sampler import DRAW, draw_of, sample
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq
from tests.engine.model.paged import DEVICE
from tests.engine.model.tiny import scheduled

VOCAB = 700


def naive(context: list[int], num_prompt: int, window: int) -> dict[int, int]:
    """How often each token that counts is in the output."""
    first = max(0, len(context) - window) if window else 0
    found = dict.fromkeys(context[first:], 0)
    for token in context[max(first, num_prompt) :]:
        found[token] += 1
    return found


def counted(seq: ScheduledSeq, window: int, vocab: int = VOCAB) -> dict[int, int]:
    ids, times = counts_of(seq, window).known(vocab)
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def talking(size: int, num_prompt: int, **changes) -> ScheduledSeq:
    context = random.Random(size).choices(range(40), k=size)
    return scheduled([0], 0, [0], context=context, num_prompt_tokens=num_prompt, **changes)


@pytest.mark.parametrize("window", [0, 5, 30])
def test_a_context_is_counted_as_it_grows(window) -> None:
    seq = talking(20, 12)
    draw = random.Random(2)
    for _ in range(300):
        assert counted(seq, window) == naive(seq.context, 12, window)
        seq.context.extend(draw.choices(range(60), k=draw.choice([0, 1, 1, 1, 7])))


@pytest.mark.parametrize("window", [0, 5, 30])
def test_the_kernels_count_their_own_tokens(window) -> None:
    library = kernels.load(default_cache_dir())
    seq, draw = talking(20, 12), random.Random(3)
    for _ in range(300):
        kept = counts_of(seq, window, room=4)
        for token in draw.choices(range(60), k=draw.randint(0, 4)):
            library.kvr_count(kept.address, token)
            seq.context.append(token)
        assert counted(seq, window) == naive(seq.context, 12, window)
        assert seq.kept[module.KEY] is kept


def test_a_context_is_looked_at_once(monkeypatch) -> None:
    """Whatever its length, and however many tokens follow."""
    calls = []
    unique = np.unique
    monkeypatch.setattr(module.np, "unique", lambda *a, **k: calls.append(a) or unique(*a, **k))
    seq = talking(5000, 4000)
    for token in range(600):
        counts_of(seq, 0, room=1)
        seq.context.append(token % 90)
    assert len(calls) == 1
    assert counted(seq, 0) == naive(seq.context, 4000, 0)


def test_what_is_no_longer_in_the_context_does_not_count() -> None:
    """Passes of a step that failed have counted tokens that nobody has taken."""
    seq = talking(20, 12)
    counted(seq, 0)
    del seq.context[-3:]
    assert counted(seq, 0) == naive(seq.context, 12, 0)
    other = replace(seq, context=[9, 9, *seq.context])
    assert counted(other, 0) == naive(other.context, 12, 0)
    assert counted(seq, 0) == naive(seq.context, 12, 0)
    assert counted(seq, 4) == naive(seq.context, 12, 4)


def test_tokens_that_the_vocabulary_has_not_are_left_out() -> None:
    seq = scheduled([0], 0, [0], context=[5, 699, 700, 3], num_prompt_tokens=3)
    assert counted(seq, 0) == {5: 0, 699: 0, 3: 1}


def by_c(logits: torch.Tensor, seqs: list[ScheduledSeq], window: int) -> list[int]:
    draws = np.array([draw_of(seq) for seq in seqs], DRAW)
    draws["counts"] = [counts_of(seq, window).address for seq in seqs]
    tokens = np.empty(len(seqs), np.int64)
    kernels.load(default_cache_dir()).kvr_draw(
        logits.data_ptr(), *logits.shape, draws.ctypes.data, tokens.ctypes.data, 2
    )
    return tokens.tolist()


def by_triton(logits: torch.Tensor, seqs: list[ScheduledSeq], window: int) -> list[int]:
    sampling = pytest.importorskip("kvrelay.engine.model.gpu.sampling")
    penalties = pytest.importorskip("kvrelay.engine.model.gpu.penalties")
    counts = penalties.DeviceCounts(len(seqs), logits.shape[1], window, DEVICE)
    draws = {name: torch.from_numpy(v).to(DEVICE) for name, v in sampling.draws_of(seqs).items()}
    rows = torch.tensor(counts.rows_of(seqs, [len(s.context) for s in seqs]), device=DEVICE)
    out, logits = torch.empty(len(seqs), dtype=torch.int64, device=DEVICE), logits.to(DEVICE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(penalties, "SPAN", 256)
        patched.setattr(penalties, "BLOCK", 64)
        penalties.penalize(logits, counts.times, rows, draws)
    sampling.draw(logits, draws, out)
    return out.tolist()


PENALTIES = [
    *({"repetition_penalty": by} for by in (0.5, 1.05, 3.0)),
    *({name: by} for name in ("presence_penalty", "frequency_penalty") for by in (-1.5, 0.7)),
    {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.15},
    {"repetition_penalty": 0.9, "presence_penalty": 1.1, "frequency_penalty": -0.2},
]
WAYS = [{"temperature": 0.0}, {"temperature": 1.1, "seed": 5}, {"top_p": 0.8, "top_k": 60}]


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("drawn_by", [by_c, by_triton])
def test_penalized_rows_are_drawn_as_torch_draws_them(drawn_by, window) -> None:
    torch.manual_seed(4)
    params = [SamplingParams(**{**p, **way}) for p in PENALTIES for way in WAYS]
    seqs = [talking(8 + 3 * row, 6 + row, sampling=sampling) for row, sampling in enumerate(params)]
    logits = torch.randn(len(seqs), VOCAB) * 1.5
    for row, seq in zip(logits, seqs, strict=True):
        row[seq.context[-9:]] += 4.0  # these would come next, were they not penalized
    plain = [replace(s, sampling=replace(s.sampling, **NEUTRAL)) for s in seqs]
    expected = [each.token for each in sample(logits.clone(), seqs, window)]
    assert drawn_by(logits.clone(), seqs, window) == expected
    alike = [each.token for each in sample(logits.clone(), plain, window)]
    assert sum(a != b for a, b in zip(expected, alike, strict=True)) > len(seqs) // 4


NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize("window", [0, 7])
def test_passes_count_the_token_that_they_are_given(window) -> None:
    """With a window the host sends which one has left it."""
    penalties = pytest.importorskip("kvrelay.engine.model.gpu.penalties")
    counts = penalties.DeviceCounts(3, VOCAB, window, DEVICE)
    seq = talking(9, 6, sampling=SamplingParams(repetition_penalty=1.2))
    for token in random.Random(1).choices(range(20), k=30):
        (row,) = counts.rows_of([seq], [len(seq.context)], ahead=1)
        seq.context.append(token)
        counts.times[row][token] += 1  # as a pass does
        found = {token: n % module.IN_PROMPT for token, n in enumerate(counts.times[row]) if n}
        assert found == naive(seq.context, 6, window)


def test_rows_of_the_device_go_to_who_needs_them() -> None:
    """They are as many as a step has sequences; who comes back is counted anew."""
    penalties = pytest.importorskip("kvrelay.engine.model.gpu.penalties")
    sampling = SamplingParams(repetition_penalty=1.2)
    counts = penalties.DeviceCounts(2, VOCAB, 0, DEVICE)
    seqs = [talking(10 + number, 6, sampling=sampling) for number in range(4)]

    def check(*asked: int) -> None:
        chosen = [seqs[number] for number in asked]
        rows = counts.rows_of(chosen, [len(seq.context) for seq in chosen])
        assert len(set(rows)) == len(rows)
        for seq, row in zip(chosen, rows, strict=True):
            times = counts.times[row].tolist()
            found = {token: n % module.IN_PROMPT for token, n in enumerate(times) if n}
            assert found == naive(seq.context, 6, 0)
            seq.context.append(row)

    for asked in ((0, 1), (1, 2), (0, 2), (3,), (2, 3), (0, 1), (1, 0)):
        check(*asked)
    plain = talking(9, 3)
    masked = talking(9, 3, sampling=replace(sampling, grammar="root ::= 'a'"))
    told = talking(9, 3, sampling=replace(sampling, logprobs=1))
    assert counts.rows_of([plain, masked, told], [9] * 3) == [penalties.NO_ROW] * 3
    least = talking(9, 3, sampling=replace(sampling, min_tokens=7))
    assert counts.rows_of([least], [9]) == [penalties.NO_ROW], "the host bans its stop tokens"
    assert counts.rows_of([least], [9], ahead=1) != [penalties.NO_ROW], "not of the one after it"
