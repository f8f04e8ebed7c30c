"""From logits to tokens.

Order: a grammar's mask, edits (`sampling.edits`), temperature, then top-k, top-p and min-p, then
one draw, here or in C (`cpu/kernels/sampling`) or Triton (`gpu.sampling`). It is a race: each
token's time is exponentially distributed at the rate of its weight, and the first one is
drawn. Their luck is a pure function of (seed, position, token), so a continuation on another worker
draws as this one would have. Two distributions that are alike mostly draw the same token (it is
the Gumbel-max draw): a last-bit difference in the logits decides no more than ties, and a good
drafter's tokens are those of its model.

A prompt also gives the log-probabilities of its tokens, and an embedding. It is computed in chunks;
each gives the outputs of its own tokens. Logits are taken for a few rows at a time: those of a
whole chunk, each as wide as the vocabulary, would be hundreds of MB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch

from kvrelay.engine.model.sampling.edits import edit
from kvrelay.engine.request import (
    DEFAULTS,
    NARROWING,
    PENALTIES,
    Pooling,
    PromptOutputs,
    SamplingParams,
    TokenLogprobs,
)
from kvrelay.engine.step import NO_TOKEN, Sampled, ScheduledSeq, Step

Draw = Callable[[torch.Tensor, list[ScheduledSeq]], list[int]]
Masks = Callable[[list[ScheduledSeq]], np.ndarray]  # see `Grammars.masks`

GREEDY_BELOW = 1e-5  # a temperature this low is greedy
CANDIDATES = 256  # sorted at first, more of the vocabulary only if top-p reaches further
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
LUCKLESS = 1.0 - 2.0**-24  # the largest float32 below 1

_narrowing, _columns = attrgetter(*NARROWING), attrgetter(*NARROWING, *PENALTIES)
_ALL = _narrowing(DEFAULTS)
DRAW = np.dtype(
    [
        ("temperature", np.float64),  # 0: greedy
        ("seed", np.int64),
        ("position", np.int64),  # where the token that is drawn comes
        ("mask", np.uint64),  # address of a bit for each token; 0: all may come
        ("counts", np.uint64),  # address of `COUNTS` of its context; 0: nothing is penalized
        *((name, type(getattr(DEFAULTS, name))) for name in (*NARROWING, *PENALTIES)),
    ]
)
"""How a row's token is drawn: the columns that C and Triton get."""

logger = logging.getLogger(__name__)


def key_of(seed: int, position: int) -> int:
    """64 bits from which the luck of all tokens at absolute `position` is made (splitmix64)."""
    return _mix(_mix(seed & _WORD) ^ ((position * 0x9E3779B97F4A7C15) & _WORD))


def luck(keys: Sequence[int], vocab: int, like: torch.Tensor) -> torch.Tensor:
    """Uniform in (0, 1): float32 [len(keys), vocab], on the device of `like`. 32 bits of a number
    are a hash of the token under both halves of the key."""
    ids = torch.arange(vocab, device=like.device) * 0x9E3779B1 & _HALF
    low, high = (
        torch.tensor([[key >> shift & _HALF] for key in keys], device=like.device)
        for shift in (0, 32)
    )
    word = ids ^ low
    word = (word ^ word >> 16) * 0x7FEB352D & _HALF
    word = ((word ^ word >> 15) + high) * 0x846CA68B & _HALF
    word ^= word >> 16
    return word.float().add_(0.5).mul_(2.0**-32).clamp_(max=LUCKLESS)


def draw_of(seq: ScheduledSeq) -> tuple[float, ...]:
    """Returns its row of `DRAW`, without a mask and counts."""
    s = seq.sampling
    heat, seed = 0.0 if is_greedy(s) else s.temperature, s.seed & _WORD
    return heat, seed - (seed >> 63 << 64), len(seq.context), 0, 0, *_columns(s)


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def draw(logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[int]:
    """One token per row of float32 [len(seqs), vocab_size], which is overwritten. NO_TOKEN where
    some of the row is NaN, or its largest is not finite."""
    best = logits.max(dim=-1)  # NaN if any is
    is_number = best.values.isfinite().tolist()
    tokens = [
        token if is_so else NO_TOKEN
        for token, is_so in zip(best.indices.tolist(), is_number, strict=True)
    ]
    random = [row for row, seq in enumerate(seqs) if is_number[row] and not is_greedy(seq.sampling)]
    if random:
        chosen = logits if len(random) == len(seqs) else logits[random]
        for row, token in zip(random, _draw(chosen, [seqs[r] for r in random]), strict=True):
            tokens[row] = token
    return tokens


def sample(
    logits: torch.Tensor,
    seqs: list[ScheduledSeq],
    window: int = 0,
    draw: Draw = draw,
    masks: np.ndarray | None = None,
) -> list[Sampled]:
    """One token per row, or why there is none. logits: float32 [len(seqs), vocab_size],
    overwritten. window: penalties count the last `window` tokens, all that such a model attends to;
    0: all. Otherwise an endless text would in the end have every token penalized. masks: as of
    `Grammars.masks`, a row each. An edit that fails is its own row's."""
    raw = {
        row: logits[row].clone()
        for row, seq in enumerate(seqs)
        if seq.sampling.logprobs is not None
    }
    if masks is not None:
        logits.masked_fill_(~allowed(masks, logits), -torch.inf)
    found: list[Sampled | None] = [None] * len(seqs)
    for row, seq in enumerate(seqs):
        try:
            if not is_plain(seq):
                edit(logits[row], seq, window)
        except Exception as error:
            logger.exception("%s: its logits cannot be edited", seq.request_id)
            found[row] = not_sampled(error)
    tokens = draw(logits, seqs) if seqs else []
    return [
        known or _sampled(token, raw.get(row), seqs[row])
        for row, (known, token) in enumerate(zip(found, tokens, strict=True))
    ]


def not_sampled(error: Exception | None = None) -> Sampled:
    """What stands in place of a token, and why."""
    if error is None:
        return Sampled(NO_TOKEN, error="some of its logits are NaN, or none is finite")
    return Sampled(NO_TOKEN, error=": ".join([type(error).__name__, *str(error).splitlines()[:1]]))


def _sampled(token: int, raw: torch.Tensor | None, seq: ScheduledSeq) -> Sampled:
    if token == NO_TOKEN:
        return not_sampled()
    if raw is None:
        return Sampled(token)
    count, ids = seq.sampling.logprobs or 0, seq.sampling.logprob_token_ids
    return Sampled(token, token_logprobs(raw.unsqueeze(0), [token], count, ids)[0])


def allowed(masks: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The bits of uint32 [rows, words] as booleans, of the shape and on the device of `like`."""
    octets = torch.from_numpy(masks.view(np.uint8)).to(like.device)
    bits = torch.arange(8, dtype=torch.uint8, device=like.device)
    return (octets.unsqueeze(-1) >> bits & 1).bool().flatten(1)[:, : like.shape[1]]


def is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def is_plain(seq: ScheduledSeq) -> bool:
    return seq.sampling.is_plain(len(seq.context) - seq.num_prompt_tokens)


def is_drawn(seq: ScheduledSeq) -> bool:
    return seq.sampling.is_drawn(len(seq.context) - seq.num_prompt_tokens)


def undrafted(seqs: Sequence[ScheduledSeq]) -> list[ScheduledSeq]:
    """Without the draft tokens of those that are not plain."""
    return [
        replace(seq, draft_tokens=[]) if seq.draft_tokens and not is_plain(seq) else seq
        for seq in seqs
    ]


def rows_of(seq: ScheduledSeq) -> list[ScheduledSeq]:
    """The sequence as it is at each of its input tokens."""
    drafts = seq.draft_tokens
    if not drafts:
        return [seq]
    return [
        replace(seq, context=[*seq.context, *drafts[:count]], draft_tokens=[])
        for count in range(len(drafts) + 1)
    ]


def verified(seq: ScheduledSeq, sampled: list[Sampled]) -> Sampled:
    """What was sampled at each of its input tokens, as far as they were right."""
    return seq.verify([each.token for each in sampled]) if seq.draft_tokens else sampled[0]


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], count: int, chosen_ids: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Takes a token for each row of float32 [len(tokens), vocab_size], and of the `count` best, or
    instead of these of `chosen_ids`, as far as the vocabulary has them, and the token itself."""
    if not len(tokens):
        return []
    raw = torch.log_softmax(logits, dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = raw.gather(1, ids).squeeze(1).tolist()
    known = [token for token in chosen_ids if 0 <= token < raw.shape[1]]
    if known:
        best, order = raw[:, known].sort(dim=-1, descending=True)
        best_ids = torch.tensor(known, device=logits.device)[order]
    elif count:
        best, best_ids = raw.topk(min(count, raw.shape[1]), dim=-1)
    else:
        return [TokenLogprobs(each) for each in chosen]
    found = []
    rows = zip(tokens, chosen, best_ids.tolist(), best.tolist(), strict=True)
    for token, logprob, *columns in rows:
        top = tuple(zip(*columns, strict=True))
        mine = () if not known or token in known else ((token, logprob),)
        found.append(TokenLogprobs(logprob, mine + top))
    return found


def _draw(logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[int]:
    """One token per row from softmax(logits / temperature), filtered. logits are overwritten."""
    params = [seq.sampling for seq in seqs]
    temperature = _column([p.temperature for p in params], logits)
    # Not normalized: the largest weight is 1, and only ratios matter from here on.
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
    if any(_narrowing(p) != _ALL for p in params):
        weights.masked_fill_(weights < _cut(weights, params), 0.0)
    keys = [key_of(seq.sampling.seed, len(seq.context)) for seq in seqs]
    times = luck(keys, weights.shape[1], weights).neg_().log1p_().neg_().div_(weights)
    drawn: list[int] = times.argmin(dim=-1).tolist()
    return drawn


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _cut(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """The smallest weight that each row keeps, [R, 1]: the strictest of its filters. Tokens that
    tie with the last one kept are kept."""
    cut = _column([min(p.min_p, 1.0) for p in params], weights)
    sorting = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if sorting:
        chosen = weights if len(sorting) == len(params) else weights[sorting]
        nucleus = _nucleus(chosen, [params[row] for row in sorting], CANDIDATES)
        cut[sorting] = torch.maximum(cut[sorting], nucleus)
    return cut


def _nucleus(weights: torch.Tensor, params: list[SamplingParams], candidates: int) -> torch.Tensor:
    """The weight of the last token that top-k and then top-p (of what top-k leaves) keep, [R, 1].
    Only the best `candidates` are sorted; rows whose top-p reaches further try again with more."""
    vocab = weights.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    count = min(vocab, max(candidates, *top_k))
    best = weights.topk(count, dim=-1).values  # [R, count], descending
    mass = best.double().cumsum(dim=-1)
    limited = torch.tensor([[k > 0] for k in top_k], device=weights.device)
    last = torch.tensor([[(k or count) - 1] for k in top_k], device=weights.device)
    total = torch.where(limited, mass.gather(1, last), weights.sum(dim=-1, keepdim=True).double())
    top_p = _column([min(max(p.top_p, 0.0), 1.0) for p in params], mass)
    kept = torch.searchsorted(mass, top_p * total)  # index of the last token kept
    cut = best.gather(1, torch.minimum(kept, last))
    if count < vocab:
        short = ((kept > last) & ~limited).flatten().nonzero().flatten().tolist()
        if short:
            rest = [params[row] for row in short]
            cut[short] = _nucleus(weights[short], rest, 16 * candidates)
    return cut


ROWS = 64  # whose logits are there at a time

ToLogits = Callable[[torch.Tensor], torch.Tensor]
Sample = Callable[[torch.Tensor, list[ScheduledSeq]], Sequence[Sampled]]


def read_prompts(
    step: Step, hidden: torch.Tensor, to_logits: ToLogits, sample: Sample
) -> tuple[list[Sampled | None], dict[int, PromptOutputs]]:
    """Tokens sampled, one entry per sequence, and the outputs of prompts by the index of theirs.

    hidden: after the last norm, [R, hidden_size], of the rows of `Batch.from_step(step)`.
    to_logits: of some of its rows, float32 [rows, vocab_size], valid until its next call. sample: a
    token for each row of logits."""
    hidden = hidden.clone()  # a buffer of the operations may hold it
    last_rows: list[int] = []
    outputs: dict[int, PromptOutputs] = {}
    at = 0
    for index, seq in enumerate(step.seqs):
        positions = seq.output_positions
        if seq.outputs_from is not None:
            states = hidden[at : at + len(positions)]
            logprobs = _prompt_logprobs(seq, states, to_logits)
            outputs[index] = PromptOutputs(logprobs, _pooled(seq, states))
        at += len(seq.read_positions)
        if seq.sample:
            last_rows.append(at - 1)
    asked = [seq for seq in step.seqs if seq.sample]
    tokens = iter(sample(to_logits(hidden[last_rows]), asked) if asked else ())
    return [next(tokens) if seq.sample else None for seq in step.seqs], outputs


def _prompt_logprobs(
    seq: ScheduledSeq, states: torch.Tensor, to_logits: ToLogits
) -> tuple[TokenLogprobs, ...]:
    """Takes the tokens after those whose `states` are given, as far as they are the prompt's."""
    if seq.sampling.prompt_logprobs is None:
        return ()
    first = seq.output_positions.start + 1
    targets = seq.context[first : min(first + len(states), seq.num_prompt_tokens)]
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), ROWS):
        chunk = targets[start : start + ROWS]
        logits = to_logits(states[start : start + len(chunk)])
        found += token_logprobs(logits, chunk, seq.sampling.prompt_logprobs)
    return tuple(found)


def _pooled(seq: ScheduledSeq, states: torch.Tensor) -> bytes:
    """The embedding, if the prompt ends in this step; else what the next one goes on from."""
    pooling, positions = seq.sampling.pooling, seq.output_positions
    is_last = positions.stop == seq.num_prompt_tokens
    if pooling is None or not positions:
        return seq.pooled
    if pooling is Pooling.CLS:
        return seq.pooled or _packed(states[0])
    if pooling is Pooling.LAST:
        return _packed(states[-1]) if is_last else b""
    total = states.float().sum(dim=0)
    if seq.pooled:
        total += torch.from_numpy(np.frombuffer(seq.pooled, np.float32).copy()).to(total.device)
    return _packed(total / seq.num_prompt_tokens if is_last else total)


def _packed(state: torch.Tensor) -> bytes:
    return state.float().cpu().numpy().tobytes()
