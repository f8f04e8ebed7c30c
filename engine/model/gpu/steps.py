"""Steps on a GPU, so that the device is kept busy, and the memory that they leave.

Life: the largest step is run once, before the KV pool is made of what is left. Every kernel is
compiled and decode passes are captured when `GpuSteps` is made; then `execute` is called once per
step, or, for decodes that the device can continue by itself, `launch`. A step of prompts or of both
kinds is one ragged batch: one copy in, one out. Decodes go through `DecodePasses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch, Guard, Limits, Table
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.device_memory import GRAPH_BYTES, DeviceMemory, all_graphs_bytes
from kvrelay.engine.model.gpu.decode import NO_SLOT, DecodePasses, Replay
from kvrelay.engine.model.gpu.penalties import NO_ROW, penalize
from kvrelay.engine.model.gpu.sampling import draw, draws_of
from kvrelay.engine.model.gpu.staging import stage, stage_arrays
from kvrelay.engine.model.sampling.sampler import (
    Masks,
    is_drawn,
    not_sampled,
    read_prompts,
    rows_of,
    sample,
    undrafted,
    verified,
)
from kvrelay.engine.model.states import NO_STATE, StateSpans
from kvrelay.engine.request import PromptOutputs, SamplingParams
from kvrelay.engine.step import NO_TOKEN, Sampled, ScheduledSeq, Step, StepDone

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.ops import Group


def after_a_step(device: torch.device, step: Callable[[], object]) -> DeviceMemory:
    """What is there when `step`, the largest that there will be, has been run; its memory is given
    back."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device), peak)


def measured_graphs(passes: DecodePasses, device: torch.device) -> int:
    """Bytes that graphs of such passes take of the device, by the first of them. These are
    forgotten: those that count hold addresses of the pool that is made with what is left."""
    if device.type != "cuda":
        return 0
    try:
        passes.capture(lambda _: None, most=TRIAL_GRAPHS)
    except RuntimeError:  # those that count will say why
        found = GRAPH_BYTES
    else:
        found = all_graphs_bytes(passes.graph_bytes, len(passes.sizes))
    passes.forget_graphs()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return found


TRIAL_GRAPHS = 3  # the first, in whose memory the others are, and two of these
WARM_UP = ((1,), (17,), (1, 33), (512,))  # query lengths of the steps that compile kernels


class GpuSteps:
    """Owned by a ModelRunner that is alone on its device, used from one thread at a time. When
    `execute` returns, nothing that was launched runs any more."""

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        device: torch.device,
        *,
        max_num_seqs: int,
        graphs: bool,
        progress: Callable[[str], None],
        group: Group | None = None,
        replay: Replay | None = None,
    ) -> None:
        """graphs: capture decode passes. Without a device to capture on, they are only run.
        group: of the ranks, each with such steps; what they answer counts on rank 0.
        replay: of operations with states; None: no draft tokens are verified by them."""
        self.notices: list[str] = []
        self._decoder, self._limits, self._device = decoder, limits, device
        with self._on_device():
            self._passes = DecodePasses(decoder, limits, device, max_num_seqs, group, replay)
            if device.type == "cuda":
                self._warm_up(progress)
                if graphs:
                    self._capture(progress)

    @property
    def graph_bytes(self) -> int:
        """That captured passes have taken of the device."""
        return sum(self._passes.graph_bytes)

    def execute(
        self,
        step: Step,
        tables: Sequence[Table] | None = None,
        masks_of: Masks | None = None,
    ) -> tuple[list[Sampled | None], dict[int, PromptOutputs]]:
        """Tokens sampled, and outputs of prompts. `tables`: the sequences' block tables, if they
        are checked. `masks_of`: as `Grammars.masks`, called while the device computes. Raises
        ValueError for a step that is not within the limits; nothing was written then."""
        decodes = all(
            len(seq.tokens) == 1 and seq.sample and seq.outputs_from is None for seq in step.seqs
        )
        with self._on_device():
            if decodes and self._passes.size_for(len(step.seqs)):
                return list(self._decode(step, tables, masks_of)), {}
            return self._ragged(step, tables, masks_of)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on the thread's device, and each thread has its own."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def launch(
        self, seqs: list[ScheduledSeq], tables: Sequence[Table], follows: Sequence[int]
    ) -> Callable[[], list[int]]:
        """Begin a pass over decodes whose tokens are drawn on the device, behind the pass before if
        that one still runs. `tables`, `follows`: as of `DecodePasses.load`. What is returned waits
        for a token of each; it may be called from another thread, and has to be before the next but
        one is launched."""
        with torch.inference_mode(), self._on_device():
            return self._passes.begin(seqs, tables, follows)

    def _decode(
        self, step: Step, tables: Sequence[Table] | None, masks_of: Masks | None
    ) -> list[Sampled]:
        """One pass, in which draft tokens are verified. Recurrent layers store no states of rows
        with drafts: when it is known which are right, they pass these again."""
        passes, seqs = self._passes, undrafted(step.seqs)
        if not passes.verifies(sum(len(seq.input_tokens) for seq in seqs)):
            seqs = [replace(seq, draft_tokens=[]) for seq in seqs]
        wait = passes.begin(seqs, tables)
        masks = masks_of(seqs) if masks_of else None
        rows = [row for seq in seqs for row in rows_of(seq)]
        sampled = iter(self._edited(wait(), passes.logits[: len(rows)], rows, masks))
        found = [verified(seq, [next(sampled) for _ in seq.input_tokens]) for seq in seqs]
        if self._limits.num_state_groups and len(rows) > len(seqs):
            counts: list[int] = []  # by row: those without drafts have stored their states
            for seq, each in zip(seqs, found, strict=True):
                drafts = len(seq.draft_tokens)
                counts += [1 + len(each.more) if drafts else 0, *[0] * drafts]
            passes.replay(len(rows), counts)
        return found

    def _ragged(
        self, step: Step, tables: Sequence[Table] | None, masks_of: Masks | None
    ) -> tuple[list[Sampled | None], dict[int, PromptOutputs]]:
        on_host = torch.device("cpu")
        host = Batch.from_step(step, self._limits, on_host, tables, with_states=False)
        batch = stage(host, self._device)

        def sampled_of(logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[Sampled]:
            logits = logits.contiguous()
            drawn = self._draw(logits, seqs)
            masks = masks_of(seqs) if masks_of else None  # while the device computes
            return self._edited(drawn.tolist(), logits, seqs, masks)

        if any(seq.outputs_from is not None for seq in step.seqs):
            hidden = self._decoder.hidden_states(batch)
            return read_prompts(step, hidden, self._decoder.logits, sampled_of)
        logits = self._decoder.forward(batch)
        asked = [seq for seq in step.seqs if seq.sample]
        if not asked and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        sampled = iter(sampled_of(logits, asked) if asked else ())
        return [next(sampled) if seq.sample else None for seq in step.seqs], {}

    def _draw(self, logits: torch.Tensor, seqs: list[ScheduledSeq]) -> torch.Tensor:
        """A token per row as if none was edited or masked; does not wait for them. Logits are
        changed where the device penalizes them."""
        counts = self._passes.counts
        rows = np.array(counts.rows_of(seqs, [len(seq.context) for seq in seqs]), np.int32)
        draws = stage_arrays(draws_of(seqs) | {"rows": rows}, self._device)
        if (rows != NO_ROW).any():
            penalize(logits, counts.times, draws["rows"], draws)
        out = torch.empty(len(seqs), dtype=torch.int64, device=self._device)
        draw(logits, draws, out)
        return out

    def _edited(
        self,
        tokens: list[int],
        logits: torch.Tensor,
        seqs: list[ScheduledSeq],
        masks: np.ndarray | None,
    ) -> list[Sampled]:
        """`tokens`, and by the host's sampler those of rows that are edited, told or masked."""
        sampled = [Sampled(token) for token in tokens]
        rows = [row for row, seq in enumerate(seqs) if not is_drawn(seq) or seq.sampling.is_masked]
        if rows:
            own = masks[rows] if masks is not None else None
            edited = [seqs[row] for row in rows]
            others = sample(logits[rows], edited, self._limits.window, masks=own)
            for row, other in zip(rows, others, strict=True):
                sampled[row] = other
        return sampled

    def _warm_up(self, progress: Callable[[str], None]) -> None:
        """Ragged steps that write no slot, and a draw: they compile kernels."""
        progress("compiling kernels")
        limits, device = self._limits, self._device
        logits = [
            self._decoder.forward(batch_of_nothing(lengths, limits, device)) for lengths in WARM_UP
        ]
        sampling = SamplingParams(repetition_penalty=1.1)
        self._draw(logits[0], [ScheduledSeq("", [0], 0, [0], True, sampling, [0], 1)])

    def _capture(self, progress: Callable[[str], None]) -> None:
        try:
            self._passes.capture(progress)
        except RuntimeError as error:
            self._passes.forget_graphs()
            torch.cuda.synchronize(self._device)
            reason = str(error).splitlines()[0]
            self.notices.append(f"decode steps are not captured as graphs (slower): {reason}")


class Launches:
    """Steps that are handed out before the tokens of the last are known: one runs, one waits behind
    it. A share says by index which sequence of the step before it continues; here that becomes the
    row of the pass whose token is taken.

    Owned by a runner, which lends its steps and its guard. `launch` is called from one thread, the
    one that executes steps; what it returns may be called from another, in their order."""

    def __init__(self, steps: GpuSteps, guard: Guard) -> None:
        self._steps, self._guard = steps, guard
        self._step_id = -1  # last launched step
        self._rows: dict[int, int] = {}  # its sequences' rows, by index

    def launch(self, step: Step) -> Callable[[], StepDone]:
        """Begin a step that may be followed; the call that is returned waits for its tokens. A
        sequence outside the pool or the vocabulary is left out, as by `ModelRunner.execute`."""
        failed, invalid, tables = self._guard.check(step)
        before = self._rows if self._step_id == step.step_id - 1 else {}
        checked = [i for i in range(len(step.seqs)) if i not in failed and i not in invalid]
        kept, kept_tables, follows = [], [], []
        for index, table in zip(checked, tables, strict=True):
            source = step.seqs[index].follows
            row = -1 if source is None else before.get(source)
            if row is None:
                failed[index] = f"request {step.seqs[index].request_id}: its last step left it out"
                continue
            kept.append(index)
            kept_tables.append(table)
            follows.append(row)
        self._step_id = step.step_id
        self._rows = {index: row for row, index in enumerate(kept)}
        seqs = [step.seqs[index] for index in kept]
        tokens = self._steps.launch(seqs, kept_tables, follows) if seqs else list[int]

        def done() -> StepDone:
            sampled: list[Sampled | None] = [None] * len(step.seqs)
            unsampled: dict[int, str] = {}
            for index, token in zip(kept, tokens(), strict=True):
                if token == NO_TOKEN:
                    unsampled[index] = not_sampled().error
                else:
                    sampled[index] = Sampled(token)
            return StepDone(
                step.step_id, sampled, failed=failed, invalid=invalid, unsampled=unsampled
            )

        return done


def batch_of_nothing(lengths: Sequence[int], limits: Limits, device: torch.device) -> Batch:
    """Prompts of these lengths, cut to the model's, that write no slot: a pool of one block is
    enough for it. Where torch computes states, each goes to that block."""
    lengths = [min(length, limits.max_model_len) for length in lengths]
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int32)
    counts = np.array(lengths, np.int32)
    widest, more = -(-max(lengths) // limits.block_size), limits.num_groups - 1
    no_slots = torch.full((more + 1, sum(lengths)), NO_SLOT, dtype=torch.int64)
    tables = torch.zeros((more + 1, len(lengths), widest), dtype=torch.int32)
    batch = Batch(
        tokens=torch.zeros(sum(lengths), dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        slots=no_slots[0],
        query_start=torch.from_numpy(starts),
        query_len=torch.from_numpy(counts),
        context_len=torch.from_numpy(counts.copy()),
        block_tables=tables[0],
        sample_rows=torch.from_numpy((starts + counts - 1).astype(np.int64)),
        spans=tuple(
            (int(start), length, length) for start, length in zip(starts, lengths, strict=True)
        ),
        more_slots=no_slots[1:] if more else None,
        more_tables=tables[1:] if more else None,
        states=(_states_of_nothing(starts, lengths),) * limits.num_state_groups,
    )
    return stage(batch, device)


def _states_of_nothing(starts: np.ndarray, lengths: Sequence[int]) -> StateSpans:
    rows = tuple((int(start), length) for start, length in zip(starts, lengths, strict=True))
    return StateSpans(rows, (NO_STATE,) * len(rows), (0,) * len(rows))
