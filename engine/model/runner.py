"""Runs steps: the executor behind `engine.step.Execute`.

Life: config and weights are loaded, the KV pool is mapped (on a CPU its first pages are committed
in the background, the others as blocks are first written), then `execute` is called once per step,
from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.batch import Batch, Guard, Limits, Table
from kvrelay.engine.model.checkpoint.adapter import AdapterLoader
from kvrelay.engine.model.checkpoint.drafters import check_drafter, read_drafter
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.config import ModelConfig, with_window
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.huge_pages import HugePages, make_real
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.cpu.step import CpuDraw
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.device import find_device, is_bf16_faster
from kvrelay.engine.model.device_memory import GIB, split_bytes, spread
from kvrelay.engine.model.draft_config import DraftConfig
from kvrelay.engine.model.draft_slots import Slots, computed_tokens
from kvrelay.engine.model.drafter import Drafter, Served, open_drafter
from kvrelay.engine.model.errors import ModelError, check_one_of
from kvrelay.engine.model.kept_weights import Kept, WeightsIdentity, find_kept, keep
from kvrelay.engine.model.loads import ALONE, Loads
from kvrelay.engine.model.ops import TORCH_DTYPES, Ops, pool_view
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.quantize import QUANTIZATIONS
from kvrelay.engine.model.quest import Quest, keep_bounds
from kvrelay.engine.model.running import Abandoned, Running
from kvrelay.engine.model.sampling.grammar import Grammars
from kvrelay.engine.model.sampling.sampler import (
    Draw,
    Masks,
    draw,
    not_sampled,
    read_prompts,
    sample,
    undrafted,
)
from kvrelay.engine.model.states import StatePool
from kvrelay.engine.model.terms import RowTerms, by_need
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.model.verify import has_drafts, verify
from kvrelay.engine.model.vision.pictures import why_no_pillow
from kvrelay.engine.model.vision.steps import (
    Prepared,
    StepImages,
    has_images,
    image_rows,
    images_left_out,
    shifts_of,
)
from kvrelay.engine.model.weights import Weights
from kvrelay.engine.request import PromptOutputs, SamplingParams
from kvrelay.engine.step import NO_TOKEN, Launch, Sampled, ScheduledSeq, Step, StepDone
from kvrelay.engine.support import (
    Capability,
    Trait,
    drafts_of,
    engine_traits,
    kv_traits,
    model_traits,
    no_to,
    refusal_of,
)

if TYPE_CHECKING:
    from kvrelay.engine.model.gpu.steps import GpuSteps
    from kvrelay.engine.model.parallel.ops import Member

GREEDY = SamplingParams(temperature=0.0)


class ModelRunner:
    """Owns the weights and the KV pool of one worker. `kv_pool` is one contiguous tensor,
    `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, or with FP8 KV
    bytes, `[num_blocks, num_layers, num_planes, num_kv_heads, bytes_per_head]`, and with states,
    KV heads come first (as in `KVSpec`); with a drafter bytes, `[num_blocks, bytes_per_block]`.
    Others may read blocks that no step writes."""

    def __init__(
        self,
        model_dir: Path,
        model: ModelSection,
        engine: EngineSection,
        *,
        kv_pool: torch.Tensor | None = None,
        progress: Callable[[str], None] = lambda _: None,
        member: Member | None = None,
        keep_as: str = "",
        read: Callable[[ModelRunner], Weights] | None = None,
    ) -> None:
        """engine: sized (`EngineSection.sized`), with `num_blocks`; 0: on a GPU, as many as
        `gpu_memory_utilization` of it leaves beside weights and a step.
        kv_pool: memory to use instead of allocating it; zeroed, of the shape above or flat bytes.
        member: this process as a rank of tensor parallelism; None: it is alone.
        keep_as: a name for weights and vocabulary, for processes that are forked from this one
        (`kept_weights`); "": they are its own.
        read: the weights, in place of those in `model_dir`.
        Raises ModelError."""
        self.notices: list[str] = []
        self.graph_bytes = 0  # that captured passes have taken of a GPU
        self.no_images = ""  # why it reads none; "": it does
        self.device = find_device(model.device) if member is None else member.group.device
        self.dtype = self.default_dtype(self.device.type) if model.dtype == "auto" else model.dtype
        check_one_of("quantization", model.quantization, QUANTIZATIONS[self.device.type])
        if engine.threads:
            torch.set_num_threads(engine.threads)
        self.config = with_window(read_config(model_dir), engine.window, engine.sinks)
        self.cache_dir = Path(model.cache_dir) if model.cache_dir else default_cache_dir()
        self._member, self._quantization, self._engine = member, model.quantization, engine
        self._own = self.config if member is None else member.config(self.config)  # its part
        kv_dtype = self.dtype if engine.kv_dtype == "auto" else engine.kv_dtype
        spec = self.config.kv_spec(engine.block_size, kv_dtype)
        self._draft_config = self._read_drafter(engine.drafter)
        if self._draft_config is not None:
            spec = self._draft_config.added_to(spec)
        self._whole_spec, self.kv_spec = spec, replace(spec, num_kv_heads=self._own.num_kv_heads)
        self.max_model_len = _most_positions(self.config, engine.max_model_len)
        self.kv_pool = self._pool(engine.num_blocks or 1, kv_pool)
        threads = engine.threads or torch.get_num_threads()
        self._limits = self._limits_of(engine)
        identity = self._identity(model_dir)
        self.grammars = self._grammars(model_dir, threads, identity)
        self._draw: Draw = draw
        self._drafter: Drafter | None = None
        self._slots: Slots | None = None
        self._draft_s = 0.0  # that the drafter has taken of the step
        with torch.inference_mode():
            own = self.own_ops = self._ops(threads)
            self._use_states()
            ops = own if member is None else member.ops(own, self.config)
            self.model_dir, self.ops = model_dir, ops
            self._install(read(self) if read else self._weights(ops, identity, progress, keep_as))
            if member is not None:
                member.group.wait_for_all()
            with self._first_launches():
                if not engine.num_blocks:
                    self._fit_pool(ops)
                self._steps = self._gpu_steps(own, progress)
        self._guard = Guard(self._limits)
        self._running = Running(ops if isinstance(ops, CpuOps) and self._may_abandon else None)
        self.launch = self._launches()
        if self.device.type == "cpu":
            make_real(self.kv_pool)

    @property
    def traits(self) -> frozenset[Trait]:
        """What decides which capabilities it has."""
        torch_only = isinstance(self.own_ops, TorchOps)
        own = kv_traits(self.kv_spec) | ({Trait.TORCH} if torch_only else set())
        return self._first_traits | own

    @property
    def drafts(self) -> list[Capability]:
        """Those that its settings ask for."""
        config = self._draft_config
        return drafts_of(self._engine, "" if config is None else config.kind)

    @property
    def _first_traits(self) -> frozenset[Trait]:
        """Those that are known before weights and KV are there."""
        engine = engine_traits(self._engine, on_gpu=self.device.type == "cuda")
        ranks = set[Trait]() if self._member is None else {Trait.RANKS}
        return engine | ranks | model_traits(self.config)

    @property
    def _quest(self) -> Quest | None:
        """None: nothing reads some pages alone."""
        asked, traits = self._engine, self._first_traits | kv_traits(self.kv_spec)
        if not asked.quest_budget or no_to(Capability.QUEST, traits):
            return None
        return Quest(asked.quest_budget, asked.quest_dense_layers)

    def _read_drafter(self, name: str) -> DraftConfig | None:
        if not name:
            return None
        check_drafter(name, self._first_traits)
        return read_drafter(name, self.config)

    def _open_drafter(self, config: DraftConfig, weights: Weights, own: Ops) -> Drafter:
        model = Served(self.model_dir, self.config, weights, own, self._limits)
        kind, threads = TORCH_DTYPES[self.dtype], self._engine.threads or torch.get_num_threads()

        def ops_over(layers: ModelConfig, pool: torch.Tensor) -> Ops:
            if not isinstance(own, CpuOps):
                return TorchOps(layers, pool, kind, self.max_model_len, self._quantization)
            library = kernels.load(default_cache_dir())
            most = self.max_model_len
            return CpuOps(layers, pool, kind, most, library, threads, self._quantization)

        try:
            return open_drafter(config, self.kv_spec, self.kv_pool, model, self._draw, ops_over)
        except kernels.KernelsUnavailable as error:
            raise ModelError(f"engine.drafter {config.path}: {error}") from error

    def _with_drafts(self, step: Step, tables: list[Table]) -> tuple[Step, list[int]]:
        """`step` with what is drafted for it, and how many tokens each sequence got."""
        seqs, began, counts = [*step.seqs], perf_counter(), [0] * len(step.seqs)
        self._draft_s = 0.0
        if not any(seq.num_drafts for seq in seqs):
            return step, counts
        asked = [index for index, seq in enumerate(seqs) if seq.num_drafts]
        drafts: list[list[int]] = [[] for _ in asked]
        if self._drafter is not None and self._slots is not None:
            of_asked = [seqs[index] for index in asked], [tables[index] for index in asked]
            with torch.inference_mode():
                self._slots.catch_up(*of_asked)
                drafts = self._drafter.draft(*of_asked)
        for index, draft in zip(asked, drafts, strict=True):
            draft = self.grammars.fitting(seqs[index], draft)
            seqs[index] = replace(seqs[index], draft_tokens=draft, num_drafts=0)
            counts[index] = len(draft)
        self._draft_s = perf_counter() - began
        return replace(step, seqs=seqs), counts

    def _keep_drafter(
        self,
        step: Step,
        tables: list[Table],
        sampled: Sequence[Sampled | None],
        outputs: torch.Tensor | None,
    ) -> None:
        """outputs: [captured, N, hidden_size], of the rows that were computed, and not rejected."""
        assert self._slots is not None
        began = perf_counter()
        if outputs is None:
            rows = sum(map(len, map(computed_tokens, step.seqs, sampled)))
            outputs = torch.empty(0, rows, 0)
        self._slots.after(step.seqs, sampled, tables, outputs, fills=step.makes_slots)
        self._draft_s += perf_counter() - began

    def _install(self, weights: Weights) -> None:
        """Steps compute with `weights` from now on."""
        ops = self.ops
        self._decoder = Decoder(self._own, weights, ops)
        if self._draft_config is not None:
            self._drafter = self._open_drafter(self._draft_config, weights, ops)
            region = self.kv_pool.numpy()[:, self.kv_spec.layer_bytes :]
            self._slots = Slots(self._drafter, region, self.kv_spec.block_size)
            self._decoder.capture(self._drafter.captured)
        self._decode = ops.decode(weights, self._limits) if isinstance(ops, CpuOps) else None
        self._images, tower = None, weights.tower
        self.no_images = refusal_of(Capability.IMAGES, self.traits) or why_no_pillow()
        encodes = self._member is None or self._member.group.shard.rank == 0
        if self.config.vision is not None and not self.no_images and encodes:
            if tower is None:
                self.no_images = f"{self.model_dir} has no tensors of a vision tower"
            else:
                self._images = StepImages(self.config.vision, tower, self._engine.image_bytes)
        most, member = self._engine.adapter_bytes, self._member
        load = AdapterLoader(self.model_dir, self.config, ops, weights, most, self.device)
        total, shard = (list, ALONE) if member is None else (member.total, member.group.shard)
        self.loads = Loads(load, most, total=total, shard=shard)

    def num_passed(self) -> int:
        """How many layers steps have passed until now; for any thread, while one runs."""
        return self._decoder.num_passed + self.ops.num_passed

    def swap_weights(self, weights: Weights) -> Callable[[], None]:
        """Compute with others from now on, while no step runs. The call that is returned goes back
        to those before. Raises ModelError: nothing has changed."""
        drafting = self._drafter, self._slots
        before = self._decoder, self._decode, self.loads, self._images, self.no_images

        def undo() -> None:
            self._drafter, self._slots = drafting
            self._decoder, self._decode, self.loads, self._images, self.no_images = before

        try:
            self._install(weights)
        except Exception:
            undo()
            raise
        return undo

    def _identity(self, path: Path) -> WeightsIdentity | None:
        """Names what a process that this one was forked from may have kept; None: it keeps nothing
        for this one."""
        if self.device.type != "cpu" or self._member is not None:
            return None
        return WeightsIdentity.of(path, self.config, self.dtype, self._quantization)

    def _weights(
        self,
        ops: Ops,
        identity: WeightsIdentity | None,
        progress: Callable[[str], None],
        keep_as: str,
    ) -> Weights:
        """Those that the process it was forked from has kept, or loaded."""
        if identity is None or not isinstance(ops, CpuOps):
            return load_weights(self.model_dir, self.config, ops, progress)
        found = find_kept(identity)
        weights = (
            found.weights if found else load_weights(self.model_dir, self.config, ops, progress)
        )
        if keep_as:
            keep(keep_as, Kept(identity, weights, self.grammars.vocabulary()))
        return weights

    def _limits_of(self, engine: EngineSection) -> Limits:
        config, spec = self.config, self.kv_spec
        sizes = engine.num_blocks, spec.block_size, self.max_model_len
        window, windows = (config.max_window, config.num_sinks), spec.windows
        groups = windows if len(windows) > 1 else ()
        num_states = spec.num_state_groups
        return Limits(*sizes, config.vocab_size, *window, engine.guard, groups, num_states)

    @staticmethod
    def default_dtype(device_type: str = "cpu") -> str:
        """bfloat16 if that is faster than float32, which on a CPU the kernels know; they are
        compiled if necessary."""
        return "bfloat16" if device_type == "cuda" or is_bf16_faster() else "float32"

    def is_device_lost(self) -> bool:
        """Whether the device fails whatever it is asked: after most errors of CUDA, until the
        process ends. Waits for what was launched, which may have failed after a step returned."""
        if self.device.type == "cpu":
            return False
        try:
            torch.cuda.synchronize(self.device)
            torch.zeros(1, device=self.device).item()
        except RuntimeError:
            return True
        return False

    @property
    def _may_abandon(self) -> bool:
        """Whether a step that ends early leaves all as it was but for what comes again: not states,
        and not what a drafter keeps."""
        return not self.kv_spec.num_state_groups and self._draft_config is None

    def abandon(self, step_id: int) -> None:
        """End this step at its next layer, if it runs; from any thread."""
        self._running.abandon(step_id)

    def prepare(self, step: Step) -> Prepared:
        """What has to be known of images before ranks get the step."""
        return Prepared(step) if self._images is None else self._images.prepare(step)

    def execute(self, step: Step, prepared: Prepared | None = None) -> StepDone:
        """As `AbandonStep` says of a step that was abandoned; else as `_execute`. `prepared`: what
        `prepare` gave, of which `step` was made."""
        if prepared is None:
            prepared = self.prepare(step)
            step = prepared.step
        try:
            with self._running.step(step.step_id):
                return self._execute(step, prepared)
        except Abandoned:
            again, sampled = frozenset(range(len(step.seqs))), [None] * len(step.seqs)
            return StepDone(step.step_id, [*sampled], waiting=again)

    def _execute(self, step: Step, images: Prepared) -> StepDone:
        """Run `step`: KV of its tokens is written, tokens are sampled where asked. Checksums are
        left to the caller. A sequence outside the pool or the model's length is in `failed`, one
        outside the vocabulary in `invalid`, one that its grammar stops in `ungrammatical`, one
        without what it needs in `waiting` or `unloaded`, one that draws no token in `unsampled`."""
        began = perf_counter()
        failed, invalid, tables = self._guard.check(step)
        num_seqs, asked = len(step.seqs), step.seqs
        ungrammatical, waiting = dict[int, str](), set[int]()
        masks_of: Masks | None = None
        if any(seq.sample and seq.sampling.is_masked for seq in step.seqs):
            waiting, masks_of = self.grammars.not_ready(step.seqs), self.grammars.masks
            ungrammatical = self.grammars.follow(step.seqs, waiting)
        unchecked = failed | invalid
        away, unloaded = self.loads.choose(step.seqs)
        waiting |= away | images.waiting
        unseen = images_left_out(step.seqs)
        left_out = {*unchecked, *ungrammatical, *waiting, *unloaded, *unseen}
        if len(left_out) > len(unchecked) and self._member is not None:  # other ranks know none
            seqs = [*step.seqs]
            for index in (*ungrammatical, *waiting):
                seqs[index] = replace(seqs[index], sampling=GREEDY)
            step, left_out = replace(step, seqs=seqs), {*unchecked, *unloaded, *away, *unseen}
        kept = by_need(step.seqs, (i for i in range(num_seqs) if i not in left_out))
        if kept != [*range(num_seqs)]:
            checked = (index for index in range(num_seqs) if index not in unchecked)
            by_index = dict(zip(checked, tables, strict=True))
            tables = [by_index[index] for index in kept]
            repeats = step.repeats if len(kept) == num_seqs else 1
            step = replace(step, seqs=[step.seqs[index] for index in kept], repeats=repeats)
        loaded = self.loads.loaded(step.seqs)
        step, num_drafts = self._with_drafts(step, tables)
        sampled: list[Sampled | None] = []
        outputs: dict[int, PromptOutputs] = {}
        with torch.inference_mode():
            if step.seqs and self._steps is not None:
                sampled, outputs = self._steps.execute(step, tables, masks_of)
            elif step.seqs:
                sampled, outputs = self._run(step, tables, masks_of, loaded)
                self._running.check()  # before anybody learns of tokens that are none
                if self.device.type == "cuda":  # blocks are complete when this returns
                    torch.cuda.current_stream(self.device).synchronize()
        if masks_of is not None:
            sampled, more = self.grammars.advance(step.seqs, sampled)
            ungrammatical |= {kept[index]: why for index, why in more.items()}
        sampled = [
            replace(each, num_drafts=count) if each is not None and count else each
            for each, count in zip(sampled, num_drafts, strict=True)
        ]
        results = dict(zip(kept, sampled, strict=True))
        unsampled = _unsampled(results)
        for index in (*unsampled, *ungrammatical, *waiting, *unloaded, *images.failed):
            results[index] = None
        return StepDone(
            step.step_id,
            [results.get(index) for index in range(num_seqs)],
            elapsed_s=perf_counter() - began,
            draft_s=self._draft_s,
            failed=failed,
            unsampled=unsampled,
            ungrammatical=ungrammatical,
            prompts={kept[index]: each for index, each in outputs.items()},
            invalid=invalid | images.failed,
            images=images.counts,
            kept_images=images.kept,
            waiting=frozenset(waiting),
            unloaded=unloaded,
            loaded=self.loads.held(asked),
        )

    def hidden_states(self, step: Step) -> torch.Tensor:
        """Run the step, for the hidden states that it reads in place of tokens: after the last
        norm, [R, hidden_size]. Raises ValueError for a sequence outside the limits."""
        with torch.inference_mode():
            batch = Batch.from_step(step, self._limits, self.device)
            return self._decoder.hidden_states(batch).clone()

    def _run(
        self,
        step: Step,
        tables: list[Table],
        masks_of: Masks | None,
        loaded: Mapping[bytes, RowTerms],
    ) -> tuple[list[Sampled | None], dict[int, PromptOutputs]]:
        """Runs the step anywhere but on a GPU."""
        vision = self.config.vision if has_images(step.seqs) else None
        shifts = () if vision is None else shifts_of(step.seqs)
        if self._decode is not None and shifts is not None:
            step = replace(step, seqs=undrafted(step.seqs))
            drawn = self._decode.execute(step, tables, masks_of, loaded, shifts)
            if drawn is not None:
                if self._drafter is not None:
                    outputs = self._decode.outputs(step.seqs, drawn)
                    self._keep_drafter(step, tables, drawn, outputs if len(outputs) else None)
                return [*drawn], {}
        if vision is None and has_drafts(step.seqs) and self._verifies:
            return [*self._verify(step, tables, masks_of, loaded)], {}
        batch = Batch.from_step(step, self._limits, self.device, tables, loaded)
        if vision is not None:
            batch = replace(batch, images=image_rows(step.seqs, vision, self.device))

        def draw(logits: torch.Tensor, asked: list[ScheduledSeq]) -> list[Sampled]:
            masks = masks_of([replace(seq, draft_tokens=[]) for seq in asked]) if masks_of else None
            return sample(logits, asked, self.config.max_window, self._draw, masks)

        hidden = self._decoder.hidden_states(batch)
        if batch.pages is not None:
            self._running.check()
            keep_bounds(step.seqs, tables, self._limits.block_size)
        if self._drafter is not None:
            hidden, found = hidden.clone(), self._decoder.captured
            states = torch.stack(found) if found else None
            self._keep_drafter(step, tables, [None] * len(step.seqs), states)
        if any(seq.outputs_from is not None for seq in step.seqs):
            return read_prompts(step, hidden, self._decoder.logits, draw)
        logits = self._decoder.logits(hidden)
        tokens = iter(draw(logits, [seq for seq in step.seqs if seq.sample]))
        return [next(tokens) if seq.sample else None for seq in step.seqs], {}

    @property
    def _verifies(self) -> bool:
        """Whether passes that run layer by layer have the bits of any other, and so its tokens."""
        return no_to(Capability.NGRAM_DRAFTS, self.traits) is None

    def _verify(
        self,
        step: Step,
        tables: list[Table],
        masks_of: Masks | None,
        loaded: Mapping[bytes, RowTerms],
    ) -> list[Sampled]:
        def of_rows(
            logits: torch.Tensor, rows: list[ScheduledSeq], seqs: list[ScheduledSeq]
        ) -> list[Sampled]:
            masks = masks_of(seqs) if masks_of else None
            return sample(logits, rows, self.config.max_window, self._draw, masks)

        group = None if self._member is None else self._member.group
        return verify(step, tables, self._decoder, self._limits, loaded, of_rows, group)

    def _grammars(
        self, model_dir: Path, threads: int, identity: WeightsIdentity | None
    ) -> Grammars:
        config = self.config
        grammars = Grammars(model_dir, config.eos_token_ids, config.vocab_size, threads)
        if self._member is None or self._member.group.shard.rank == 0:  # others know no grammar
            found = None if identity is None else find_kept(identity)
            grammars.warm_up(None if found is None else found.vocabulary)
        return grammars

    def _launches(self) -> Launch | None:
        """Begins a step that may be followed; None where steps are only executed."""
        if self._steps is None:
            return None
        from kvrelay.engine.model.gpu.steps import Launches

        return Launches(self._steps, self._guard).launch

    def _pool(self, num_blocks: int, given: torch.Tensor | None) -> torch.Tensor:
        spec, size = self.kv_spec, num_blocks * self.kv_spec.bytes_per_block
        if given is not None:
            assert given.is_contiguous()
            assert given.device.type == self.device.type
            assert given.nbytes == size, "kv_pool has another size"
            flat = given.view(-1).view(torch.uint8)
        try:
            if given is None and self.device.type == "cpu":
                flat = HugePages().take(size).view(torch.uint8)
            elif given is None:
                flat = torch.zeros(size, dtype=torch.uint8, device=self.device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise ModelError(
                f"no memory for a KV cache of {num_blocks} blocks of "
                f"{spec.bytes_per_block} bytes: {str(error).splitlines()[0]}"
            ) from error
        blocks = flat.view(num_blocks, -1)
        return blocks if spec.draft_bytes else pool_view(blocks, spec)

    def _by_layers(self) -> torch.Tensor:
        """A view of the pool with the layers before the KV heads."""
        spec, pool = self.kv_spec, self.kv_pool
        pool = pool_view(pool, spec) if spec.draft_bytes else pool
        order = (0, 2, 3, 1, *range(4, pool.dim()))
        return pool.permute(order) if spec.num_state_groups else pool

    def _use_states(self) -> None:
        """Recurrent layers find what this rank has of the states in the blocks of the pool that is
        there now."""
        if not self.kv_spec.num_state_groups:
            return
        shard = Shard(0, 1) if self._member is None else self._member.group.shard
        layout = shard.state_layout(self.config)
        blocks = self.kv_pool.view(torch.uint8).view(len(self.kv_pool), -1)
        blocks = blocks[:, : self.kv_spec.layer_bytes]
        units = shard.stored_units(self.config)
        first = shard.rank * layout.num_units - units.start
        places = self.config.state_places(self._whole_spec)
        self.own_ops.use_states(StatePool(blocks, layout, places, (len(units), first)))

    def _fit_pool(self, ops: Any) -> None:
        """Make the pool of what memory is left. Raises ModelError."""
        from kvrelay.engine.model.gpu.penalties import DeviceCounts
        from kvrelay.engine.model.gpu.steps import after_a_step, batch_of_nothing

        limits = self._limits
        engine, share = self._engine, self._engine.gpu_memory_utilization
        lengths = spread(engine.max_num_batched_tokens, engine.max_num_seqs, self.max_model_len)
        batch = batch_of_nothing(lengths, limits, self.device)
        memory = after_a_step(self.device, lambda: self._decoder.forward(batch))
        memory = replace(memory, graphs=self._measured_graphs())
        room = memory.room(share) - DeviceCounts.size(engine.max_num_seqs, limits.vocab_size)
        room -= split_bytes(self._own, engine.max_num_seqs, self.max_model_len)
        num_blocks = room // self.kv_spec.bytes_per_block
        if self._member is not None:
            num_blocks = self._member.group.least(num_blocks, self.device)
        if num_blocks < 1:
            raise ModelError(
                f"no memory is left for KV: {share:.0%} of {memory.total / GIB:.1f} GiB is for this"
                f" worker, weights and a step of {sum(lengths)} tokens take"
                f" {memory.peak / GIB:.1f} GiB, captured graphs {memory.graphs / GIB:.1f}; raise"
                " engine.gpu_memory_utilization, or lower engine.max_num_batched_tokens"
            )
        self.kv_pool = self._pool(num_blocks, None)
        ops.use_pool(self._by_layers())
        self._use_states()
        spec = self.kv_spec
        windows = Windows.of(spec.block_size, spec.windows, self.config.num_sinks)
        longest = windows.most_tokens(num_blocks)
        if longest is not None:
            self.max_model_len = min(self.max_model_len, longest)
        self._limits = replace(
            self._limits, num_blocks=num_blocks, max_model_len=self.max_model_len
        )

    def _measured_graphs(self) -> int:
        """Bytes that captured decode passes will take; a pool of one block is enough to know."""
        if isinstance(self.own_ops, CpuOps | TorchOps) or not self._engine.cuda_graphs:
            return 0
        from kvrelay.engine.model.gpu.decode import DecodePasses
        from kvrelay.engine.model.gpu.steps import measured_graphs

        most, ranks = self._engine.max_num_seqs, self._rank_options()
        passes = DecodePasses(self._decoder, self._limits, self.device, most, **ranks)
        return measured_graphs(passes, self.device)

    def _rank_options(self) -> dict[str, Any]:
        """What decode passes are given of a group of ranks, or of states where there is none."""
        from kvrelay.engine.model.gpu.ops import TritonOps

        if self._member is not None:
            return {"group": self._member.group}
        own = self.own_ops
        return {"replay": own.replay if isinstance(own, TritonOps) else None}

    def _ops(self, num_threads: int) -> Ops:
        kind, weights = TORCH_DTYPES[self.dtype], self._quantization
        own, pool, longest = self._own, self._by_layers(), self.max_model_len
        if self.device.type == "cpu":
            self._check_backends()
            try:
                library = kernels.load(default_cache_dir())
                self._draw = CpuDraw(library, num_threads)
                made = own, pool, kind, longest, library, num_threads, weights
                return CpuOps(*made, quest=self._quest)
            except kernels.KernelsUnavailable as error:
                self.notices.append(f"CPU kernels are not used, torch is (slower): {error}")
        if self.device.type == "cuda":
            try:
                from kvrelay.engine.model.gpu.flashinfer.ops import gpu_ops

                asked = self._engine, self.notices
                return gpu_ops(own, pool, kind, longest, weights, *asked)
            except (kernels.KernelsUnavailable, ImportError) as error:
                if self._quantization == "fp8":
                    raise ModelError(str(error)) from error
                self.notices.append(f"GPU kernels are not used, torch is (slower): {error}")
        return TorchOps(own, pool, kind, longest, weights)

    @contextmanager
    def _first_launches(self) -> Iterator[None]:
        """Where kernels are compiled. Raises ModelError where they cannot be: no C compiler, no
        Python.h, or a GPU that one does not fit."""
        if self.device.type == "cpu":
            yield
            return
        try:
            with torch.cuda.device(self.device):
                yield
        except (ModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = [type(error).__name__, *str(error).splitlines()[:1]]
            raise ModelError(f"a kernel does not run on this GPU: {': '.join(what)}") from error

    def _check_backends(self) -> None:
        for name in ("attention_backend", "moe_backend"):
            value = getattr(self._engine, name)
            if value != "auto":
                raise ModelError(f"{name} {value} needs a GPU; this worker computes on a CPU")

    def _gpu_steps(self, ops: Ops, progress: Callable[[str], None]) -> GpuSteps | None:
        """None on a CPU, and without kernels. ops: of this rank alone."""
        if isinstance(ops, CpuOps | TorchOps):
            return None
        from kvrelay.engine.model.gpu.steps import GpuSteps

        steps = GpuSteps(
            self._decoder,
            self._limits,
            self.device,
            max_num_seqs=self._engine.max_num_seqs,
            graphs=self._engine.cuda_graphs,
            progress=progress,
            **self._rank_options(),
        )
        self.graph_bytes, self.notices = steps.graph_bytes, self.notices + steps.notices
        return steps


def _unsampled(results: Mapping[int, Sampled | None]) -> dict[int, str]:
    """Why no token could be drawn, for those that have none."""
    return {
        index: each.error or not_sampled().error
        for index, each in results.items()
        if each is not None and each.token == NO_TOKEN
    }


def _most_positions(config: ModelConfig, asked: int) -> int:
    longest = config.max_position_embeddings
    if config.max_window:  # relative positions never exceed it
        longest = max(longest, asked)
    return min(asked or longest, longest)
