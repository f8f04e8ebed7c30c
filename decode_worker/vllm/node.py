"""The node of a worker that computes with vLLM: messages of routers in, tokens of vLLM out.

It is a worker like ours, whose device memory is host memory: sequences have blocks there, and
tiers, sessions and other workers see no others. What vLLM computes is copied to these blocks, and
what is in them already it does not compute.

Life of a request: as in `worker.node` until its KV has come, as far as it does -> begun (vLLM
batches and computes it by itself) -> tokens and blocks come, a step at a time -> ended there, and
only then are its blocks free. It is another attempt's continuation where it has output: vLLM gets
that as part of the prompt. Where the next token depends on which tokens are output, it gets the
prompt alone and generates them once more: it is held to them, and goes on from the same
distribution. Where logits cannot be edited, they have to come out the same by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.decode_worker.vllm.expansions import Expansions
from kvrelay.decode_worker.vllm.held import HeldBlocks, salt_of
from kvrelay.decode_worker.vllm.messages import (
    Begin,
    Copied,
    Damaged,
    EngineLost,
    Extend,
    Found,
    Generated,
    Held,
    Hold,
    NotBegun,
    Stepped,
    Stop,
    Stopped,
)
from kvrelay.decode_worker.vllm.parameters import depends_on_output, options, unsupported
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import decode_features, prompt_features
from kvrelay.engine.images import with_output
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.kv.events import KVPublisher
from kvrelay.engine.messages import Probe, WorkRequest
from kvrelay.engine.node import Effect, Exit, Note, Send
from kvrelay.engine.request import (
    FinishReason,
    PromptOutputs,
    Refusal,
    SamplingParams,
    TokenLogprobs,
)
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.stats import WorkerStats
from kvrelay.engine.support import Trait
from kvrelay.kvtransfer.messages import KVConnect, KVConnected
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.worker.node import RoleHandler, Worker
from kvrelay.worker.weights import weight_updates

NO_COPIES = "KV of this model stays in vLLM's memory"
NO_WEIGHTS = "the model has no *.safetensors, of which versions are made"


@dataclass(slots=True, eq=False)
class Run:
    """A sequence at vLLM. Invariant: of the `num_known` tokens of output that it came with, the
    first `num_repeated` are in the prompt that vLLM got, or have come again."""

    seq: Sequence
    num_known: int
    num_repeated: int
    num_given: int  # tokens that vLLM has begun from
    num_sent: int  # entries of the block table that vLLM has
    has_begun: bool = False  # tokens have come of it
    is_stopped: bool = False
    gives_way: bool = False  # to one of a higher class: it goes on when there is room again
    early: list[Copied] = field(default_factory=list)  # whose tokens have not all come


class VllmWorker(Worker):
    """Node. Invariant: `_runs` has those that vLLM has, and no others, as soon as the effects so
    far are performed; each counts as a step in flight of its sequence."""

    def __init__(
        self,
        config: WorkerConfig,
        roles: Iterable[type[RoleHandler]],
        records: StoreRecords | None = None,
        *,
        copies: bool = True,
        edits: bool = True,
        drafts: bool = False,
        pools: str = "",
    ) -> None:
        """`copies`: vLLM's KV is copied to this worker's blocks. If not, routers know what vLLM
        holds by its own events. `edits`: vLLM lets this worker edit logits. `drafts`: vLLM
        proposes draft tokens of its own. `pools`: as for `unsupported`."""
        super().__init__(config, roles, records)
        self.core.scheduler.may_preempt = False
        self._copies, self._edits, self._drafts = copies, edits, drafts
        self._pools = pools
        self._expansions = Expansions(self.core)
        self.plugs.append(self._expansions)
        self._updates = weight_updates(self.plugs)
        self._updates.why_fixed = "" if config.base_weights else NO_WEIGHTS
        self._updates.traits |= {Trait.VLLM}
        self._updates.is_settled = lambda: not self._runs
        self._held = HeldBlocks(config.kv_root, config.block_size)
        if not copies:
            self.core.publisher = KVPublisher(config, self._held)
        self._handlers = self._make_handlers()
        self._runs: dict[str, Run] = {}
        self._last = Stepped(())
        self._prompts_s = 0.0  # that steps took with prompts that have no token yet
        self._is_stepping = False
        self._holds = False  # vLLM runs no step, by order
        self._handlers |= {
            Held: lambda now, _: self._step_ended(now),
            Stepped: self._on_stepped,
            Copied: lambda now, copied: self._on_copied(copied),
            Damaged: lambda now, damaged: self._damage(damaged),
            Found: lambda now, found: [self._lay_out(found)],
            Stopped: lambda now, stopped: self._settle(stopped.key),
            NotBegun: lambda now, said: self._on_not_begun(said),
            EngineLost: lambda now, lost: self._on_lost(lost.why),
            Probe: lambda now, probe: self._answer(probe),
        }
        if not copies:
            self._handlers[KVConnect] = lambda now, asked: [self._keep_kv(asked)]

    def _begin(self, role: RoleHandler, now: float, request: WorkRequest) -> list[Effect]:
        can = {"edits": self._edits, "drafts": self._drafts}
        if why := unsupported(request.sampling, **can, pools=self._pools):
            return [Send(request.router, self._refusal(request, Refusal.UNSUPPORTED, why))]
        if not self._copies:
            if getattr(request, "prefill_from", None) or getattr(request, "decode_to", None):
                why = f"{self.node_id} hands no KV over: {NO_COPIES}"
                return [Send(request.router, self._refusal(request, Refusal.WORKER_FAILED, why))]
            request = replace(request, fetch_from=None)  # it computes that itself
        if request.sampling.expands:
            return self._expansions.begin(request)
        return super()._begin(role, now, request)

    def _answer(self, probe: Probe) -> list[Effect]:
        answer = self._expansions.alive(probe.request_id, probe.attempt)
        return [self.core.answer_probe(probe)] if answer is None else answer

    def _schedule(self, now: float) -> list[Effect]:
        scheduler = self.core.scheduler
        effects = self._admit(now)
        gone = scheduler.gives_way
        run = None if gone is None else self._runs.get(_name(gone))
        if run is not None and run.seq.reserve_growth and not run.is_stopped:
            run.is_stopped = run.gives_way = True
            effects.append(Stop(_name(run.seq)))
        if self._updates.stops_requests:  # each goes on with the new weights
            for name, each in self._runs.items():
                if not each.is_stopped:
                    each.is_stopped = each.gives_way = True
                    effects.append(Stop(name))
        if scheduler.is_paused is not self._holds:
            self._holds = scheduler.is_paused
            effects.append(Hold(self._holds))
        for seq in () if self._holds else scheduler.running:
            if _name(seq) not in self._runs:
                effects.append(self._start(seq))
        for name, each in self._runs.items():
            if each.seq.state is SeqState.DEAD and not each.is_stopped:
                each.is_stopped = True
                effects.append(Stop(name))
        effects += self._report_preempted(scheduler.take_preempted())
        if self._runs and not (self._is_stepping or self._holds):
            self._is_stepping = True
            self.core.watch.begin(now, 0.0 if self.core.watch.num_done else None)
        return effects

    def _start(self, seq: Sequence) -> Begin:
        again = seq.num_output_tokens > 0 and depends_on_output(seq.sampling)
        num_given = seq.num_prompt_tokens if again else len(seq.tokens)
        num_known = seq.num_output_tokens
        run = Run(
            seq,
            num_known,
            num_repeated=0 if again else num_known,
            num_given=num_given,
            num_sent=seq.num_covered,
        )
        self._runs[_name(seq)] = run
        seq.num_steps += 1
        output = tuple(seq.tokens[seq.num_prompt_tokens :])
        both = ((), output) if again else (output, ())
        given = options(seq.sampling, *both, sent=num_known > 0, edits=self._edits)
        if not seq.reserve_growth:
            given |= {"max_tokens": 1, "min_tokens": min(1, given["min_tokens"])}
        checksums = self.core.kv.checksums
        sealed = seq.block_ids[: seq.num_sealed]
        tokens, images = tuple(seq.tokens[:num_given]), seq.spec.images
        if images is not None:
            tokens = with_output(images, tokens[seq.num_prompt_tokens :])
        return Begin(
            _name(seq),
            tokens,
            salt_of(seq.chain.scope),
            given,
            tuple(seq.block_ids) if self._copies else (),
            tuple(0 if block == NO_BLOCK else checksums[block] for block in sealed),
            seq.num_covered,
            saves_tail=not seq.reserve_growth,
            images=images,
            priority=seq.service_class.priority,
            need=seq.need,
        )

    def _on_stepped(self, now: float, step: Stepped) -> list[Effect]:
        core = self.core
        self._step_ended(now)
        self._last = step
        core.count("steps")
        self._measure(step)
        self._held.fingerprint = core.fingerprint
        self._held.take(step.events)
        effects: list[Effect] = []
        for generated in step.generated:
            run = self._runs.get(generated.key)
            if generated.finish:
                self._settle(generated.key)
            if run is not None and run.seq.state is not SeqState.DEAD:
                effects += self._take(run, generated)
                early, run.early = run.early, []
                for each in early:
                    effects += self._on_copied(each)
        return effects

    def _step_ended(self, now: float) -> list[Effect]:
        if self._is_stepping:
            self._is_stepping = False
            self.core.watch.end(now, None)
        return []

    def _on_copied(self, copied: Copied) -> list[Effect]:
        """A block may be there before the tokens of the step that has filled it, and where vLLM
        schedules steps ahead, before its own last one."""
        run = self._runs.get(copied.key)
        if run is None or run.seq.state is SeqState.DEAD:
            return []
        num_tokens = self.core.kv.windows.tokens(copied.first + len(copied.checksums))
        if run.seq.reserve_growth and num_tokens >= len(run.seq.tokens):
            run.early.append(copied)
            return []
        return self._copied(run, copied)

    def _copied(self, run: Run, copied: Copied) -> list[Effect]:
        """Blocks of `run` are in this worker's memory: they are announced, and can be read. Those
        that windows have left are freed: vLLM's thread has done with them when it reports what
        comes after them."""
        seq, kv = run.seq, self.core.kv
        end = copied.first + len(copied.checksums)
        blocks = seq.block_ids[copied.first : end]
        for block, checksum in zip(blocks, copied.checksums, strict=True):
            if checksum is not None:
                kv.checksums[block] = checksum
        num_computed = seq.num_computed
        seq.num_computed = min(kv.windows.tokens(end), len(seq.tokens) - 1)
        kv.seal_computed(seq)
        kv.slide(seq)
        more = self._grow(run, self.config.block_size if run.has_begun else 0)
        if run.has_begun:
            seq.num_computed = num_computed
            return more
        return more if seq.reserve_growth else [*more, *self._role_of(seq).on_computed(seq)]

    def _grow(self, run: Run, num_unknown: int) -> list[Effect]:
        """What its table has more than vLLM's thread knows, for so many tokens that will follow."""
        seq, kv = run.seq, self.core.kv
        if not kv.grow(seq, num_unknown) and kv.windows.any:
            return [Extend(_name(seq), run.num_sent, (), run.num_sent, ends=True)]
        first, run.num_sent = run.num_sent, seq.num_covered
        if first == run.num_sent:
            return []
        blocks = tuple(seq.block_ids[first : run.num_sent])
        return [Extend(_name(seq), first, blocks, run.num_sent)]

    def _lay_out(self, found: Found) -> Extend:
        """vLLM goes on after what it has kept itself: so does the table, or nothing is copied."""
        run, kv = self._runs.get(found.key), self.core.kv
        if (
            run is None
            or run.seq.state is SeqState.DEAD
            or not kv.expect(run.seq, found.num_entries)
        ):
            return Extend(found.key, 0, (), 0, ends=True)
        run.num_sent = run.seq.num_covered
        return Extend(found.key, 0, tuple(run.seq.block_ids), run.num_sent)

    def _damage(self, damaged: Damaged) -> list[Effect]:
        """vLLM computes what was damaged and what follows. Nobody is to find these blocks again,
        but they stay in the table: what is read of them does not fit its checksum."""
        kv, run = self.core.kv, self._runs.get(damaged.key)
        for block, checksum in damaged.blocks:
            if kv.checksums.get(block) == checksum:  # else it has become another one meanwhile
                kv.pool.forget(block)
        self.core.count("kv_blocks_damaged", len(damaged.blocks))
        text = (
            f"{len(damaged.blocks)} blocks of {damaged.key} do not have the bytes that were stored"
            f" in {self.node_id}'s memory; what they held is computed again"
        )
        note = Note("error", "kv_checksum_mismatch", text)
        if run is None or run.seq.reserve_growth or run.seq.state is SeqState.DEAD:
            return [note]
        return [note, *self._fail(run.seq, Refusal.WORKER_FAILED, text)]

    def _take(self, run: Run, generated: Generated) -> list[Effect]:
        """The tokens of `generated` go into the next frame, but for those that the router has."""
        seq, is_first, run.has_begun = run.seq, not run.has_begun, True
        if is_first:
            self._take_first(run, generated)
        finish: FinishReason | None = None
        logprobs = generated.logprobs or (None,) * len(generated.tokens)
        for token, about in zip(generated.tokens, logprobs, strict=True):
            if run.num_repeated < run.num_known:
                at = seq.num_prompt_tokens + run.num_repeated
                if seq.tokens[at] != token:
                    why = f"token {at} is {token}, and was {seq.tokens[at]} elsewhere"
                    return self._fail(seq, Refusal.EXECUTION, f"it cannot go on: {why}")
                run.num_repeated += 1
                continue
            if not seq.reserve_growth and depends_on_output(seq.sampling):
                break  # who decodes it samples this token
            top = None if about is None else _reported(about, seq.sampling)
            seq.append(token, top)
            finish = seq.finish_reason(self.config.max_model_len)
            if finish is not None:
                break
        seq.num_computed = len(seq.tokens) - (1 if run.num_repeated >= run.num_known else 0)
        return self._go_on(run, generated, finish)

    def _take_first(self, run: Run, generated: Generated) -> None:
        seq = run.seq
        more = generated.num_cached - seq.num_cached
        if more > 0:  # vLLM has kept what this worker's memory has not
            device = seq.cached_by_source.get("device", 0)
            seq.cached_by_source["device"] = device + more
        elif more < 0:
            seq.cached_by_source = {"device": generated.num_cached}
        if generated.prompt_logprobs or generated.embedding:
            count = seq.sampling.prompt_logprobs or 0
            best = tuple(_best(each, count) for each in generated.prompt_logprobs)
            outputs = PromptOutputs(best, generated.embedding)
            seq.take_outputs(outputs, seq.num_prompt_tokens)

    def _go_on(self, run: Run, generated: Generated, finish: FinishReason | None) -> list[Effect]:
        seq, role = run.seq, self._role_of(run.seq)
        if not seq.reserve_growth:
            checksums = self.core.kv.checksums
            lacks = any(block not in checksums for block in seq.block_ids if block != NO_BLOCK)
            if finish is None and lacks:
                return self._fail(seq, Refusal.WORKER_FAILED, "vLLM has not given all of its KV")
            if len(seq.tokens) == run.num_given:
                return role.on_prompt_computed(seq)
            return role.on_computed(seq)
        ended = generated.finish and finish is None
        if ended or (finish is not None and run.num_repeated < run.num_known):
            return self._fail(seq, Refusal.EXECUTION, f"vLLM has ended it: {generated.finish}")
        if finish is None and self._copies:
            return [*role.on_computed(seq), *self._grow(run, self.config.block_size)]
        return role.on_computed(seq)

    def _settle(self, name: str) -> list[Effect]:
        """vLLM neither reads nor writes the blocks of this one any more."""
        run = self._runs.pop(name, None)
        if run is not None:
            run.seq.num_steps -= 1
            if run.seq.state is SeqState.DEAD:
                self.core.scheduler.release_if_settled(run.seq)
            elif run.gives_way:
                self.core.scheduler.preempt(run.seq)
        return []

    def _on_not_begun(self, said: NotBegun) -> list[Effect]:
        run = self._runs.get(said.key)
        self._settle(said.key)
        if run is None or run.seq.state is SeqState.DEAD:
            return []
        is_its_own = said.reason is Refusal.UNSUPPORTED
        why = f"vLLM does not take it: {said.why}" if is_its_own else said.why
        return self._fail(run.seq, said.reason, why)

    def _fail(self, seq: Sequence, reason: Refusal, why: str) -> list[Effect]:
        return [*self.exchange.end(seq), Send(seq.router, self._refusal(seq, reason, why))]

    def _refusal(self, asked: Sequence | WorkRequest, reason: Refusal, why: str) -> Any:
        return self.core.refusal(asked.request_id, asked.attempt, reason, why)

    def _on_lost(self, why: str) -> list[Effect]:
        """The routers try its requests elsewhere, and need not wait until they hear of its end."""
        self._has_ended = True
        note = Note("error", "worker_gives_up", why)
        return [*self.core.give_up(why), note, Exit(why, hangs=False)]

    def _keep_kv(self, asked: KVConnect) -> Send:
        """Nobody can read it. Who asks compares what both say of it, for a line in its log."""
        config = self.config
        about = tuple((name, NO_COPIES) for name, _ in config.compatibility)
        answer = KVConnected(config.node_id, config.epoch, b"", config.num_blocks, b"", about)
        return Send(asked.consumer, answer)

    def _measure(self, step: Stepped) -> None:
        timing = self.core.timing
        awaiting = [run for run in self._runs.values() if not run.has_begun]
        if len(awaiting) <= step.num_waiting or not awaiting:
            if step.generated:
                timing.decode_step_s.add(step.elapsed_s, 1)
                features = decode_features(len(step.generated), step.used)
                timing.decode_cost.add(features, step.elapsed_s)
            return
        share_s = timing.decode_step_s.value if step.num_running > len(awaiting) else 0.0
        self._prompts_s += max(step.elapsed_s - share_s, 0.1 * step.elapsed_s)
        first = [(self._runs.get(each.key), each) for each in step.generated]
        num_new = sum(
            max(1, run.num_given - each.num_cached)
            for run, each in first
            if run is not None and not run.has_begun
        )
        if num_new:
            features = prompt_features(num_new, 0, self.config.max_num_batched_tokens)
            timing.on_prompts(num_new, features, self._prompts_s)
            self._prompts_s = 0.0

    def _stats(self) -> WorkerStats:
        preempted = self._last.num_preempted
        stats = super()._stats()
        return replace(stats, counters=stats.counters | {"preemptions": preempted})

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        left = [f"request {name} is at vLLM" for name in self._runs]
        if self._last.num_running + self._last.num_waiting:
            left.append(f"vLLM has {self._last.num_running} running, {self._last.num_waiting} wait")
        if self._last.used:
            left.append(f"{self._last.used:.1%} of vLLM's blocks are in use")
        return left + self._expansions.check_idle() + super().check_idle()


def _name(seq: Sequence) -> str:
    """The key that vLLM knows it by, another one each time that it begins there."""
    again = f"/{seq.num_preemptions}" if seq.num_preemptions else ""
    return f"{seq.request_id}/{seq.attempt}{again}"


def _reported(known: TokenLogprobs, sampling: SamplingParams) -> TokenLogprobs:
    """Chosen tokens come as from our engine: the best first, before them a token that is none."""
    ids = sampling.logprob_token_ids
    if not ids:
        return _best(known, sampling.logprobs or 0)
    return replace(known, top=tuple(sorted(known.top, key=lambda each: (each[0] in ids, -each[1]))))


def _best(known: TokenLogprobs, count: int) -> TokenLogprobs:
    """vLLM adds the token itself to the best ones where it is none of them."""
    return replace(known, top=known.top[:count])
