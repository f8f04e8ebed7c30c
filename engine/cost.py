"""What passes of the model cost, in seconds: fitted by a worker to its own steps, published, and
used by workers and routers alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from operator import mul
from typing import NamedTuple

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.stats import Role
from kvrelay.engine.step import ScheduledSeq, Step, StepDone

RATE_WEIGHT = 0.2  # what a new measurement counts in a moving average


def blocks_worth_loading(load_s: Iterable[float], compute_s: float) -> int:
    """How many blocks, from the first of a run on, to load rather than to compute.

    `load_s`: seconds that each takes to load; `compute_s`: seconds to compute any one of them. A
    slow block is loaded if the fast ones after it make up for it. 0: computing is faster.
    """
    best, best_saved, saved = 0, 0.0, 0.0
    for count, seconds in enumerate(load_s, start=1):
        saved += compute_s - seconds
        if saved > best_saved:
            best, best_saved = count, saved
    return best


@dataclass(slots=True)
class Rate:
    """Amount per unit, as a moving average in which large measurements count for more; 0 until
    something was measured."""

    _amount: float = 0.0
    _units: float = 0.0

    def add(self, amount: float, units: float) -> None:
        self._amount += amount - RATE_WEIGHT * self._amount
        self._units += units - RATE_WEIGHT * self._units

    @property
    def is_known(self) -> bool:
        return self._units > 0

    @property
    def value(self) -> float:
        return self._amount / self._units if self._units else 0.0


FORGET = 0.998  # factor on the weight of older samples, with each new one
LEAST_BLOCKS, LEAST_TOKENS = 4, 64  # prompts have in a step: the fewer, but a whole block
LONG_WAIT_S = 4.0  # after it steps may be as long as `WorkerConfig.itl_most_s`
LOW_CLASS_STEP_S = 0.1  # that prompts of low classes have in a step where nobody else is
SHORT_STEP_S = 0.02  # a step where nobody else is now, but may come: who does waits for its end
LATELY_S = 10.0  # after an interactive request the next one is expected
MOST_LENGTHENED = 0.2  # share of a step that low classes may add, where no time is aimed at
MAX_SLOWDOWN = 8.0
MOST_SAVED = 0.25  # share of a decode step that leaving decodes out of a pass saves
MIN_SAMPLES = 8  # before a fit is published
LEAST_RATED = 256  # prompt tokens in a pass that says how fast prompts are computed
TOKENS_UNIT = 4096.0  # prompt tokens count in these, so that features are of one size
SEQS_UNIT = 16.0
# What the parts of a pass usually are to each other. A pass of prompts takes as long as 64 of its
# tokens, attention over 4,096 tokens a fraction of what these take without it.
PROMPT_SHAPE = (64 / TOKENS_UNIT, 1.0, 0.15, 0.3)
# A decode reads the weights; sixteen sequences take half as much more, and so does a full pool.
DECODE_SHAPE = (1.0, 0.5, 0.4, 0.1)
ROW_SHAPE = (1.0, 0.5, 0.5, 0.5)
# A drafter is begun, passes once for each depth, and each of its tokens is a row of a small model.
DRAFT_SHAPE = (0.5, 1.0, 4.0)
PRIOR_SPREAD = 30.0  # a weight may well be so many times off its part of the shape
FIRST_SPREAD = 0.5  # relative error of a fit that was never compared
UNIT_WEIGHT = 0.05  # the latest sample's, in the speed and in the mean of errors
MOST_OFF = 1e4  # times that what was expected and what was measured may differ, to count
FAR_OFF, MANY_OFF = log(3.0), 6  # so far off, so many times in a row, and the machine has changed
SOLVED_EACH, SOLVED_EVERY = 64, 4  # the first samples one by one, then so many at a time
FORGET_FAR = 0.1  # factor on the weight of older samples then


class FittedCost:
    """Seconds as a weighted sum of features, fitted to measurements. Owned by what measures.

    Least squares over weights that are not negative, with a prior: that the weights are to each
    other as in `shape`, at the speed that was measured. So a few short passes say something
    sensible of a long one, and a feature that never varies does not make the others jump. Each
    measurement counts by its relation to what was expected, so that one that is 100 times too low
    or too high pulls as much as any other. Older ones are forgotten, and nearly all of them where
    the last ones are all on one side and far off: the machine is not what it was."""

    def __init__(self, shape: Sequence[float]) -> None:
        size = len(shape)
        self.weights = [0.0] * size
        self.num_samples = 0
        self._shape = tuple(shape)
        self._gram = [[0.0] * size for _ in shape]  # sums over samples, by FORGET
        self._pull = [0.0] * size
        self._num_kept = 0.0  # samples, likewise
        self._unit_s = 0.0  # seconds for what `shape` calls 1: the middle of what was measured
        self._squares = FIRST_SPREAD**2  # relative errors squared, on average
        self._num_off = 0  # samples in a row that were far off, all too low or all too high
        self.slowest_unit_s = self._fastest_unit_s = 0.0  # recently

    def add(self, features: Sequence[float], seconds: float) -> None:
        if not 0 < seconds < inf:
            return
        unit_s = seconds / sum(map(mul, self._shape, features))
        expected_s = sum(map(mul, self.weights, features)) or seconds
        miss = log(seconds / expected_s)
        self.num_samples += 1
        self._count_misses(miss)
        rate = max(1.0 / (1.0 + self._num_kept), UNIT_WEIGHT)
        self._unit_s = unit_s * exp((1.0 - rate) * log((self._unit_s or unit_s) / unit_s))
        self.slowest_unit_s = max(unit_s, self._unit_s, self.slowest_unit_s * FORGET)
        fastest_s = self._fastest_unit_s / FORGET or inf
        self._fastest_unit_s = min(unit_s, self._unit_s, fastest_s)
        expected_s = min(max(expected_s, seconds / MOST_OFF), seconds * MOST_OFF)
        scale = expected_s * seconds
        for i, feature in enumerate(features):
            self._pull[i] = self._pull[i] * FORGET + feature / expected_s
            row, factor = self._gram[i], feature / scale
            for j, other in enumerate(features):
                row[j] = row[j] * FORGET + factor * other
        self._num_kept = self._num_kept * FORGET + 1.0
        if self.num_samples <= SOLVED_EACH or self._num_off or not self.num_samples % SOLVED_EVERY:
            self._solve()

    def _count_misses(self, miss: float) -> None:
        """`miss`: logarithm of what a pass took, by what was expected."""
        self._squares += UNIT_WEIGHT * (min(miss * miss, 1.0) - self._squares)
        side = (miss > FAR_OFF) - (miss < -FAR_OFF)  # 0: it is not far off
        self._num_off = self._num_off + side if side * self._num_off > 0 else side
        if abs(self._num_off) >= MANY_OFF:
            self._pull = [value * FORGET_FAR for value in self._pull]
            self._gram = [[value * FORGET_FAR for value in row] for row in self._gram]
            self._num_kept *= FORGET_FAR

    def _with_prior(self) -> tuple[list[list[float]], list[float]]:
        """The equations of the weights: what was measured, and how much each weight counts in its
        deviation from the prior."""
        rows, right = [[*row] for row in self._gram], [*self._pull]
        for i, part in enumerate(self._shape):
            count = 1.0 / (PRIOR_SPREAD * part * self._unit_s) ** 2
            rows[i][i] += count
            right[i] += count * part * self._unit_s
        return rows, right

    def _solve(self) -> None:
        rows, right = self._with_prior()
        free = list(range(len(right)))
        while min(found := _solved(rows, right, free)) < 0.0:
            free.remove(free[found.index(min(found))])
        self.weights = [0.0] * len(right)
        for i, weight in zip(free, found, strict=True):
            self.weights[i] = weight

    def seconds(self, features: Sequence[float]) -> float:
        """What is expected, between the slowest and the fastest speed that were measured of late.
        So never 0 once something was: a fit may say that of what was not among the samples."""
        units: float = sum(map(mul, self._shape, features))
        most_s, least_s = self.slowest_unit_s * units, self._fastest_unit_s * units
        return max(least_s, min(fitted_s(self.weights, features), most_s))

    def spread(self, features: Sequence[float]) -> float:
        """Standard error of `seconds`, as a part of it: small where much like it was measured;
        infinite, before anything was."""
        expected_s = fitted_s(self.weights, features)
        if not self.num_samples or expected_s <= 0:
            return inf
        rows, _ = self._with_prior()
        towards = _solved(rows, features, range(len(rows)))
        return sqrt(self._squares * sum(map(mul, features, towards))) / expected_s

    def published(self) -> tuple[float, ...]:
        """The weights; empty before MIN_SAMPLES measurements."""
        return tuple(self.weights) if self.num_samples >= MIN_SAMPLES else ()


def _solved(
    rows: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float]:
    """Solves the symmetric, positive definite equations of the `chosen` unknowns alone."""
    left = [[rows[i][j] for j in chosen] + [right[i]] for i in chosen]
    size = len(left)
    for i in range(size):
        row, first = left[i], left[i][i]
        for other in left[i + 1 :]:
            factor = other[i] / first
            for j in range(i, size + 1):
                other[j] -= factor * row[j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(left[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (left[i][size] - rest) / left[i][i]
    return found


def prompt_features(num_new: int, start: int, budget: int) -> tuple[float, float, float, float]:
    """Describes the passes that compute `num_new` prompt tokens from position `start` on, `budget`
    tokens each: their number, tokens, squares of tokens, and tokens times the positions before
    them."""
    if num_new <= budget:
        scaled = num_new / TOKENS_UNIT
        return (1.0, scaled, scaled * scaled, scaled * start / TOKENS_UNIT)
    passes = -(-num_new // budget)
    full = passes - 1
    rest = num_new - full * budget
    squares = full * budget * budget + rest * rest
    before = budget * (full * start + budget * full * (full - 1) / 2)
    before += rest * (start + full * budget)
    unit = TOKENS_UNIT * TOKENS_UNIT
    return (float(passes), num_new / TOKENS_UNIT, squares / unit, before / unit)


def decode_features(num_seqs: float, used: float) -> tuple[float, float, float, float]:
    """Describes a decode step over `num_seqs` sequences, whose KV together is a fraction `used` of
    the pool."""
    return (1.0, num_seqs / SEQS_UNIT, used, used * used)


def row_features(rows: float, used: float, again: float) -> tuple[float, float, float, float]:
    """Describes a pass over so many rows of decodes, draft tokens among them. `used`: KV that
    sequences read, as a fraction of the pool; `again`: the KV that draft tokens read, likewise."""
    return (1.0, rows / SEQS_UNIT, used, again)


def fitted_s(weights: Sequence[float], features: Sequence[float]) -> float:
    return max(0.0, float(sum(map(mul, weights, features))))


def _one_pass(prompts: Sequence[ScheduledSeq]) -> tuple[float, float, float, float]:
    """`prompt_features` of a pass that computes these shares of prompts, as if they were one."""
    total = sum(len(share.tokens) for share in prompts)
    before = sum(len(share.tokens) * share.start for share in prompts)
    return prompt_features(total, before // total, total)


def order_of(compute_s: float, waited_s: float) -> float:
    """Prompts are computed in ascending order of this: shortest first, but one that has waited for
    long, in proportion to what it takes, counts as shorter."""
    if compute_s <= 0:
        return 0.0
    share = compute_s / (compute_s + waited_s)
    return compute_s * share * share


def draft_features(depth: int, num_tokens: int) -> tuple[float, float, float]:
    """Describes what a drafter does for a pass: as many passes of its own as the longest draft has
    tokens, in which all sequences take part, for so many tokens of all of them."""
    return (1.0, float(depth), num_tokens / SEQS_UNIT)


class DraftCosts(NamedTuple):
    """What draft tokens cost, as a worker has measured it; empty: it has not yet."""

    rows: tuple[float, ...] = ()  # seconds of passes, by `row_features`
    drafting: tuple[float, ...] = ()  # and those of the executor's drafter, by `draft_features`
    error: float = inf  # how exactly it is known what a row more takes: a standard error, relative


class StepTiming:
    """How fast a worker computes, measured from its own steps: rates are moving averages, fits
    give the cost of a pass by its contents. Owned by a worker's core."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.decode_step_s = Rate()
        self._tokens_per_s = Rate()  # prompts' tokens, in passes as long as they were of late
        self.prompt_cost = FittedCost(PROMPT_SHAPE)
        self._alone_cost = FittedCost(PROMPT_SHAPE)  # prompts in passes without decodes
        self._prompt_tokens = Rate()  # in a pass that has any; each token counts
        self._saved = Rate()  # seconds by a pass of both, for each of a step of decodes alone
        self._prompt_slowdown = Rate()  # seconds that prompts take now, for each that the fit says
        self.decode_cost = FittedCost(DECODE_SHAPE)  # decodes, a token each
        self.row_cost = FittedCost(ROW_SHAPE)  # passes, by their rows
        self.draft_cost = FittedCost(DRAFT_SHAPE)  # what the executor's drafter takes
        self._num_drafted = 0  # steps in which it was asked
        self._row_error = inf  # what `DraftCosts.error` is
        self._waited_s = 0.0  # by a prompt, as of the last step in which one was computed

    def on_step(
        self,
        step: Step,
        elapsed_s: float,
        repeats: int,
        num_accepted: int = 0,
        draft_s: float = 0.0,
    ) -> None:
        """`step` was run `repeats` times and took `elapsed_s`; `num_accepted` of its draft tokens
        were accepted; proposing those of the drafter took `draft_s` of it. Of a mixed step, the
        prompts' time is what a step of decodes alone would not have taken."""
        prompts = [share for share in step.seqs if len(share.tokens) > 1]
        if not prompts:
            self._waited_s = 0.0
            self.decode_step_s.add(elapsed_s, repeats)
            count, pool_tokens = len(step.seqs), self._config.num_blocks * self._config.block_size
            kv_tokens = sum([share.start for share in step.seqs]) + count * repeats / 2
            used = kv_tokens / pool_tokens
            token_s = elapsed_s / (repeats + num_accepted / count)
            self.decode_cost.add(decode_features(count, used), token_s)
            drafts = [(m, share.start) for share in step.seqs if (m := share.most_drafts)]
            if drafts and (depth := max(share.num_drafts for share in step.seqs)):
                self._num_drafted += 1
                if self._num_drafted > 1:  # the first one makes room for what it computes with
                    num_asked = sum(share.num_drafts for share in step.seqs)
                    self.draft_cost.add(draft_features(depth, num_asked), draft_s)
            rows = count + sum(more for more, _ in drafts)
            again = sum(more * start for more, start in drafts) / pool_tokens
            pass_s = (elapsed_s - draft_s) / repeats
            self.row_cost.add(row_features(rows, used, again), pass_s)
            if self.row_cost.num_samples % MIN_SAMPLES == 0:
                self._row_error = self.row_cost.spread((0.0, 1.0 / SEQS_UNIT, 0.0, used / count))
            return
        total, features = sum(len(share.tokens) for share in prompts), _one_pass(prompts)
        if len(prompts) == len(step.seqs):
            self._alone_cost.add(features, elapsed_s)
        else:
            self._compare(step, features, elapsed_s)
            elapsed_s = max(elapsed_s - self.decode_step_s.value, 0.1 * elapsed_s)
        self.on_prompts(total, features, elapsed_s)

    def on_prompts(
        self, total: int, features: tuple[float, float, float, float], elapsed_s: float
    ) -> None:
        """So many tokens of prompts, a pass of these `features`, took `elapsed_s`."""
        self._tokens_per_s.add(total, elapsed_s)
        self._prompt_tokens.add(total * total, total)
        if expected_s := self.prompt_cost.seconds(features):
            self._prompt_slowdown.add(elapsed_s, expected_s)
        self.prompt_cost.add(features, elapsed_s)

    def draft_costs(self) -> DraftCosts:
        asked = tuple(self.draft_cost.weights) if self.draft_cost.num_samples else ()
        return DraftCosts(self.row_cost.published(), asked, self._row_error)

    def draft_seconds(
        self, step: Step, done: StepDone, rows: float, num_accepted: int
    ) -> tuple[float, float]:
        """What draft tokens of a source took in a step: to draft them, and their part `rows` of
        what the rows of all drafts added to the pass; and what the tokens that were accepted would
        have taken without. Zeros before passes were measured."""
        pool_tokens = self._config.num_blocks * self._config.block_size
        used = sum(share.start for share in step.seqs) / pool_tokens
        weights, count = self.row_cost.published(), len(step.seqs)
        if not weights:
            return 0.0, 0.0
        plain_s = fitted_s(weights, row_features(count, used, 0.0))
        added_s = max(0.0, done.elapsed_s - done.draft_s - plain_s)
        return done.draft_s + rows * added_s, num_accepted / count * plain_s

    def _compare(self, step: Step, features: Sequence[float], elapsed_s: float) -> None:
        """What a pass of both has saved. `features`: of its prompts."""
        alone, decoding = self._alone_cost.published(), self.decode_cost.published()
        if not alone or not decoding:
            return
        starts = [share.start for share in step.seqs if len(share.tokens) == 1]
        used = sum(starts) / (self._config.num_blocks * self._config.block_size)
        decode_s = fitted_s(decoding, decode_features(len(starts), used))
        saved_s = fitted_s(alone, features) + decode_s - elapsed_s
        self._saved.add(min(max(saved_s, -decode_s), 2 * decode_s), decode_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts are computed of late. Where passes are short, it is how fast longer ones
        would be: short ones tell nothing of a long prompt. 0: not measured yet."""
        rate = self._tokens_per_s.value
        num_tokens = min(LEAST_RATED, self._config.max_num_batched_tokens)
        if rate == 0 or self._prompt_tokens.value >= num_tokens:
            return rate
        seconds = self.prompt_cost.seconds(prompt_features(num_tokens, 0, num_tokens))
        return max(rate, num_tokens / (seconds * self._slowdown))

    @property
    def _slowdown(self) -> float:
        return min(MAX_SLOWDOWN, max(1.0 / MAX_SLOWDOWN, self._prompt_slowdown.value or 1.0))

    @property
    def token_s(self) -> float:
        """What a prompt's token takes, its share of the passes included; 0: not measured yet."""
        rate = self.prefill_tokens_per_s
        return 1.0 / rate if rate > 0 else 0.0

    def expected_s(self, step: Step) -> float | None:
        """What `step` should take, at most; None: too little was measured."""
        prompts = [share for share in step.seqs if len(share.tokens) > 1]
        seconds = 0.0
        if len(prompts) < len(step.seqs):
            if self.decode_cost.num_samples < MIN_SAMPLES:
                return None
            seconds += self.decode_step_s.value * step.repeats
        if prompts:
            if self.prompt_cost.num_samples < MIN_SAMPLES:
                return None
            seconds += self.prompt_cost.seconds(_one_pass(prompts))
        return seconds

    def computes_apart(self, num_prompts: int, num_decodes: int) -> bool:
        """Whether the next step should compute prompts without the decodes that wait beside them,
        in seconds of all: prompts are spared what decodes add to their pass, decodes lose what a
        pass of both saves. As was measured of passes that came by themselves: one of both reads the
        weights once, but may not be what a device captured, or have room to overlap the two."""
        if self._config.role is not Role.PREFILL or not self._saved.is_known:
            return False  # elsewhere streams go before prompts
        saved = max(0.0, self._saved.value)
        return saved < MOST_SAVED and (1.0 - saved) * num_prompts > saved * num_decodes

    def prompt_budget(self, waited_s: float) -> int:
        """Prompt tokens that fit beside decodes into a step of `itl_target_s`, at measured rates;
        at least so many that the pass, whose fixed part decodes pay too, is worth it. The longer a
        prompt has waited, the nearer to `itl_most_s`: each pass reads the weights and computes the
        decodes, so short ones cost all prompts more than they spare the streams."""
        config = self._config
        target_s = config.itl_target_s
        if target_s == 0:
            return config.max_num_batched_tokens
        self._waited_s = waited_s
        more_s = max(0.0, config.itl_most_s - target_s)
        spare_s = target_s + more_s * min(1.0, waited_s / LONG_WAIT_S) - self.decode_step_s.value
        block_size = config.block_size
        least = max(block_size, min(LEAST_TOKENS, LEAST_BLOCKS * block_size))
        return max(least, int(spare_s * self._tokens_per_s.value))

    def low_class_room(
        self, num_seqs: int, num_tokens: int, num_low: int, low_tokens: int, quiet_s: float
    ) -> tuple[int, int]:
        """What a step over `num_seqs` interactive decodes has room for: how many of `num_low`
        decodes of low classes, and how many tokens of their prompts. `num_tokens`, `low_tokens`:
        positions that they read, all together. quiet_s: without interactive requests until now.

        Beside these it takes no longer than `itl_target_s`, or little longer than without low rows;
        nothing, before steps were measured. Alone, where interactive requests come, it is short, or
        little longer than one row takes."""
        weights = self.decode_cost.published()
        if not num_seqs and (quiet_s > LATELY_S or not weights):
            return num_low, self._tokens_in(LOW_CLASS_STEP_S)
        if not weights:
            return 0, 0
        pool_tokens = self._config.num_blocks * self._config.block_size
        each = low_tokens / max(1, num_low)

        def step_s(more: int) -> float:
            used = (num_tokens + more * each) / pool_tokens
            return fitted_s(weights, decode_features(num_seqs + more, used))

        most_s = (1.0 + MOST_LENGTHENED) * step_s(max(0, 1 - num_seqs))
        if num_seqs:
            most_s = self._config.itl_target_s or most_s
        elif num_low:
            most_s = max(SHORT_STEP_S, most_s)
        else:
            return 0, self._tokens_in(SHORT_STEP_S)
        count = bisect_right(range(1, num_low + 1), most_s, key=step_s)
        spare_s = max(0.0, most_s - step_s(count))
        return count, int(spare_s * self._tokens_per_s.value)

    def _tokens_in(self, seconds: float) -> int:
        """How many of prompts are computed in that time; all, before that was measured."""
        rate, most = self._tokens_per_s.value, self._config.max_num_batched_tokens
        return min(most, max(LEAST_TOKENS, int(seconds * rate))) if rate else most

    def present_prefill_rate(self, *, is_busy: bool) -> float:
        """Tokens per second that a prompt is computed at now: beside decodes, one budget a step."""
        rate, short = self.prefill_tokens_per_s, self._tokens_per_s.value
        if self._config.itl_target_s == 0 or rate == 0 or not is_busy:
            return rate
        budget = self.prompt_budget(self._waited_s)
        return min(rate, budget / (self.decode_step_s.value + budget / short))

    def present_slowdown(self, *, is_busy: bool) -> float:
        """By which prompts take longer now than by the fit: beside decodes, and judged by the last
        steps. The fit remembers hundreds of steps, and what shares the cores of a machine may be
        several times slower now than then."""
        slowdown, rate = self._slowdown, self.prefill_tokens_per_s
        return slowdown * rate / self.present_prefill_rate(is_busy=is_busy) if rate else slowdown
