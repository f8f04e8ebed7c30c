"""Outputs that have to match a grammar: masks of the tokens that may come next, and the tokens that
have to (library: `llguidance`).

The state of an output's grammar is a function of the grammar and of the tokens so far, so any
worker can take over any output: a sequence that is not known here is replayed, in microseconds a
token.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from time import perf_counter, thread_time
from typing import Any

import llguidance
import numpy as np

from kvrelay.engine.model.sampling.vocabulary import GrammarError, read_vocabulary
from kvrelay.engine.step import NO_TOKEN, Sampled, ScheduledSeq

MAX_COMPILED = 128  # grammars that are kept, the last ones used
MAX_COMPILED_BYTES = 256 * 2**20  # grammars, estimated
# Memory that a grammar takes once it is compiled: by its text, and by how long that took, since
# both are spent on states: 76 MiB in 1.35 s, 31 MiB in 0.48 s.
BYTES_A_CHAR, BYTES_A_SECOND = 16, 64 * 2**20
MAX_OUTPUTS = 4096  # outputs whose state is kept; the others are replayed
COMPILE_TIMEOUT_S = 10.0  # a grammar that a request brings was compiled once before, in the API
BRIEF_WAIT_S = 0.005  # what a step waits for grammars that still compile; most take less
IDLE_WAIT_S = 0.05  # where it has nothing else to do
MASK_BUDGET_S = 0.05  # for what may follow one output in a step: all others wait for it
WORD_BITS = 32
ALL = np.uint32(0xFFFF_FFFF)

logger = logging.getLogger(__name__)

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms of building a lexer
    max_grammar_size=100_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    step_max_items=10_000,  # ways to go on that are looked at for one mask
    precompute_large_lexemes=False,  # a regular expression of a whole vocabulary would take seconds
    verbose_errors=False,
)


def compile_grammar(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """In its initial state. Raises GrammarError."""
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    check(matcher)
    return matcher


def check(matcher: llguidance.LLMatcher) -> None:
    """Raises GrammarError if the matcher has failed."""
    if matcher.is_error():
        raise GrammarError(matcher.get_error().partition("\n")[0][:300])


@contextmanager
def _own_fault() -> Iterator[None]:
    """Whatever fails within is a GrammarError: one output's fault, not its step's. A panic of the
    library is no `Exception`."""
    try:
        yield
    except (GrammarError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        logger.exception("a grammar failed")
        text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise GrammarError(text) from error


class _Output:
    """What one sequence's grammar has read so far."""

    def __init__(self, matcher: llguidance.LLMatcher, grammar: str) -> None:
        self.matcher, self.grammar = matcher, grammar
        self.num_taken = 0  # output tokens
        self.too_slow = ""  # what is told of one whose mask took longer than it may

    def take(self, tokens: Sequence[int]) -> None:
        """Raises GrammarError if one does not fit."""
        self.matcher.consume_tokens(list(tokens))
        check(self.matcher)
        self.num_taken += len(tokens)

    def check_time(self, elapsed_s: float) -> None:
        if elapsed_s > MASK_BUDGET_S:
            self.too_slow = (
                f"what may come next took {elapsed_s * 1e3:.0f} ms to find, at most"
                f" {MASK_BUDGET_S * 1e3:g}: the grammar has too many ways to read the output"
            )


class Grammars:
    """The grammars of a worker's outputs. Made with its model; `prepare` may be called from any
    thread, the others from the one that runs steps."""

    def __init__(
        self, model_dir: Path, eos_token_ids: Sequence[int], vocab_size: int, num_threads: int
    ) -> None:
        """vocab_size: the width of logits, which may exceed the tokenizer's, or be less."""
        self._vocab_size = vocab_size
        self._source = (model_dir, tuple(eos_token_ids), vocab_size)
        self._executor = llguidance.LLExecutor(num_threads=num_threads)
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._vocabulary: Future[llguidance.LLTokenizer] | None = None
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._sizes: dict[str, int] = {}  # bytes of those that have compiled
        self._has_evicted = False
        self._lock = Lock()  # guards all above
        self._outputs: OrderedDict[str, _Output] = OrderedDict()
        self._faults: dict[str, str] = {}  # outputs whose mask could not be computed
        self._waits: OrderedDict[str, float] = OrderedDict()  # request -> since when

    def warm_up(self, known: llguidance.LLTokenizer | None = None) -> None:
        """Take the vocabulary, if it is `known`, or begin to read it: that holds Python's lock for
        seconds, which streams would wait for later."""
        with self._lock:
            if known is not None:
                self._vocabulary = Future()
                self._vocabulary.set_result(known)
            self._vocabulary_under_way()

    def vocabulary(self) -> llguidance.LLTokenizer | None:
        """Waits until it is read; None: this model has none for grammars."""
        with self._lock:
            under_way = self._vocabulary_under_way()
        return None if under_way.exception() else under_way.result()

    def _vocabulary_under_way(self) -> Future[llguidance.LLTokenizer]:
        if self._vocabulary is None:
            self._vocabulary = self._thread.submit(read_vocabulary, *self._source)
        return self._vocabulary

    def prepare(self, grammar: str) -> Future[llguidance.LLMatcher]:
        """Begin to compile, so that a step does not have to wait for it."""
        with self._lock:
            vocabulary = self._vocabulary_under_way()
            found = self._compiled.get(grammar)
            if found is None:
                found = self._thread.submit(self._compile, vocabulary, grammar)
                self._compiled[grammar] = found
                self._evict()
            self._compiled.move_to_end(grammar)
            return found

    def _compile(
        self, vocabulary: Future[llguidance.LLTokenizer], grammar: str
    ) -> llguidance.LLMatcher:
        """Raises GrammarError if it does not compile."""
        known, began = vocabulary.result(), thread_time()
        matcher = compile_grammar(known, grammar)
        elapsed_s = thread_time() - began
        with self._lock:
            if grammar in self._compiled:
                cost = BYTES_A_CHAR * len(grammar) + int(BYTES_A_SECOND * elapsed_s)
                self._sizes[grammar] = cost
                self._evict()
        return matcher

    def _evict(self) -> None:
        """Those that were not used for the longest, with the lock held."""
        while len(self._compiled) > MAX_COMPILED or (
            len(self._compiled) > 1 and sum(self._sizes.values()) > MAX_COMPILED_BYTES
        ):
            grammar, _ = self._compiled.popitem(last=False)
            self._sizes.pop(grammar, None)
            self._has_evicted = True

    def not_ready(self, seqs: Sequence[ScheduledSeq]) -> set[int]:
        """Index of those of `seqs` whose grammar still compiles: the others need not wait for it.
        It is empty where that has taken too long."""
        futures: dict[int, Future[llguidance.LLMatcher]] = {}
        for index, seq in enumerate(seqs):
            if seq.sample and seq.sampling.grammar and self._output(seq) is None:
                future = self.prepare(seq.sampling.grammar)
                if not future.done() and not self._has_waited(seq.request_id):
                    futures[index] = future
        if futures:
            assert self._vocabulary is not None
            self._vocabulary.exception(COMPILE_TIMEOUT_S)  # only a worker's first steps wait for it
            if len(futures) == len(seqs):
                wait(futures.values(), IDLE_WAIT_S, FIRST_COMPLETED)
            else:
                wait(futures.values(), BRIEF_WAIT_S)
        return {index for index, future in futures.items() if not future.done()}

    def _has_waited(self, request_id: str) -> bool:
        """Whether it has waited for as long as it may."""
        since = self._waits.setdefault(request_id, perf_counter())
        while len(self._waits) > MAX_OUTPUTS:
            self._waits.popitem(last=False)
        return perf_counter() - since > COMPILE_TIMEOUT_S

    def follow(self, seqs: Sequence[ScheduledSeq], waiting: Collection[int] = ()) -> dict[int, str]:
        """Bring the grammars of those of `seqs` that sample up to their last tokens, but for those
        at `waiting`. Returns the index of those that cannot go on, and why."""
        failed: dict[int, str] = {}
        self._forget_evicted({seq.request_id for seq in seqs})
        for index, seq in enumerate(seqs):
            if seq.sample and seq.sampling.grammar and index not in waiting:
                try:
                    with _own_fault():
                        self._follow(seq)
                except GrammarError as error:
                    failed[index] = str(error)
        return failed

    def fitting(self, seq: ScheduledSeq, draft: list[int]) -> list[int]:
        """The first tokens of `draft` that may follow `seq`, which has been followed."""
        output = self._outputs.get(seq.request_id) if seq.sampling.grammar else None
        if output is None or not draft:
            return draft
        try:
            with _own_fault():
                return draft[: output.matcher.validate_tokens(draft)]
        except GrammarError:  # `masks` says so
            return []

    def masks(self, seqs: Sequence[ScheduledSeq]) -> np.ndarray:
        """Bits of the tokens that may follow each input token of `seqs`, which sample and have been
        followed, as uint32 [rows, words]: at least as wide as logits. Those without a grammar or a
        budget may have any; those whose mask cannot be computed too, and `advance` says so."""
        self._faults.clear()
        single: list[tuple[Any, ...]] = []
        drafted: list[tuple[Any, ...]] = []
        names: dict[int, str] = {}  # by row
        row = 0
        for seq in seqs:
            if seq.sampling.grammar:
                matcher = self._outputs[seq.request_id].matcher
                names[row] = seq.request_id
                if seq.draft_tokens:
                    drafted.append((matcher, row, seq.draft_tokens))
                else:
                    single.append((matcher, row))
            row += 1 + len(seq.draft_tokens)
        masks = np.full((row, -(-self._width() // WORD_BITS)), ALL)
        place = masks.ctypes.data, masks.strides[0], row
        executor, began = self._executor, perf_counter()
        for asked, compute in (
            (single, executor.unsafe_compute_mask_ptr),
            (drafted, executor.unsafe_compute_mask_ptr_with_draft_token),
        ):
            if asked:
                self._compute(compute, asked, place, names)
        if perf_counter() - began > MASK_BUDGET_S:
            self._find_slow(seqs)
        self._end_reasoning(seqs, masks)
        return masks

    def _width(self) -> int:
        """Returns how many tokens a mask has."""
        vocabulary = self._vocabulary
        if vocabulary is None or not vocabulary.done() or vocabulary.exception():
            return self._vocab_size  # reasoning budgets need no more
        return max(self._vocab_size, vocabulary.result().vocab_size)

    def _compute(
        self,
        compute: Callable[..., object],
        asked: list[tuple[Any, ...]],
        place: tuple[int, ...],
        names: dict[int, str],
    ) -> None:
        """Masks of the rows that are asked for, all at once; one by one if that fails."""
        try:
            with _own_fault():
                compute(asked, *place)
        except GrammarError as error:
            if len(asked) == 1:
                self._faults[names[asked[0][1]]] = str(error)
                return
            for each in asked:
                self._compute(compute, [each], place, names)

    def _find_slow(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Which of `seqs` made the masks of a step take too long: each is computed again, in this
        thread, so that what else the machine does counts for nothing."""
        for seq in seqs:
            if seq.sampling.grammar and seq.request_id not in self._faults:
                output, began = self._outputs[seq.request_id], thread_time()
                output.matcher.compute_bitmask()
                output.check_time(thread_time() - began)

    def _forget_evicted(self, in_step: Collection[str]) -> None:
        """Outputs hold their grammar: those that are not in the step go with it."""
        with self._lock:
            if not self._has_evicted:
                return
            self._has_evicted = False
            kept = set(self._compiled)
        for request_id, output in [*self._outputs.items()]:
            if output.grammar not in kept and request_id not in in_step:
                del self._outputs[request_id]

    def _end_reasoning(self, seqs: Sequence[ScheduledSeq], masks: np.ndarray) -> None:
        """Where a budget is used up, leave the token that ends it, unless the grammar forbids
        that."""
        row = 0
        for seq in seqs:
            budget = seq.sampling.reasoning
            if budget is not None:
                output = [*seq.context[seq.num_prompt_tokens :], *seq.draft_tokens]
                count = len(output) - len(seq.draft_tokens)
                word, bit = budget.end // WORD_BITS, np.uint32(1 << budget.end % WORD_BITS)
                for number in range(len(seq.draft_tokens) + 1):
                    mask = masks[row + number]
                    if budget.is_used_up(output[: count + number]) and mask[word] & bit:
                        mask[:] = 0
                        mask[word] = bit
            row += 1 + len(seq.draft_tokens)

    def advance(
        self, seqs: Sequence[ScheduledSeq], sampled: Sequence[Sampled | None]
    ) -> tuple[list[Sampled | None], dict[int, str]]:
        """`sampled` after `seqs`, with the tokens that have to follow; and as `failed` those whose
        grammar could not say what may follow."""
        advanced = list(sampled)
        failed: dict[int, str] = {}
        for index, (seq, each) in enumerate(zip(seqs, sampled, strict=True)):
            if each is not None and seq.sampling.grammar:
                try:
                    with _own_fault():
                        advanced[index] = self._advanced(seq, each)
                except GrammarError as error:
                    advanced[index], failed[index] = None, str(error)
        return advanced, failed

    def _advanced(self, seq: ScheduledSeq, sampled: Sampled) -> Sampled:
        """Raises GrammarError if a token does not fit."""
        output = self._outputs[seq.request_id]
        if seq.request_id in self._faults:
            raise GrammarError(self._faults[seq.request_id])
        check(output.matcher)
        if output.too_slow:
            raise GrammarError(output.too_slow)
        if sampled.token == NO_TOKEN:
            return sampled
        tokens = (sampled.token, *sampled.more)
        if tokens[-1] in seq.sampling.stop_token_ids:
            return sampled
        began = thread_time()
        output.take(tokens)
        forced = tuple(output.matcher.compute_ff_tokens())
        output.check_time(thread_time() - began)
        return replace(sampled, forced=forced)

    def _output(self, seq: ScheduledSeq) -> _Output | None:
        """None: it begins, was replaced by others, or went further in an earlier attempt."""
        output = self._outputs.get(seq.request_id)
        num_output = len(seq.context) - seq.num_prompt_tokens
        return None if output is None or output.num_taken > num_output else output

    def _follow(self, seq: ScheduledSeq) -> None:
        """Raises GrammarError if a token does not fit."""
        output = self._output(seq)
        if output is None:
            grammar = seq.sampling.grammar
            left_s = 0.0 if seq.request_id in self._waits else COMPILE_TIMEOUT_S
            try:
                compiled = self.prepare(grammar).result(left_s)
            except TimeoutError:
                raise GrammarError(f"not compiled within {COMPILE_TIMEOUT_S:g} s") from None
            self._waits.pop(seq.request_id, None)
            output = self._outputs[seq.request_id] = _Output(compiled.deep_copy(), grammar)
            while len(self._outputs) > MAX_OUTPUTS:
                self._outputs.popitem(last=False)
        self._outputs.move_to_end(seq.request_id)
        output.take(seq.context[seq.num_prompt_tokens + output.num_taken :])
