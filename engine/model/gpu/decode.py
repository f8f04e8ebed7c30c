"""Decode passes on the device: fixed inputs, one pass right behind another.

Life of a pass: rows of the inputs are filled and sent; those that follow the pass before take their
tokens from what it drew; logits are computed and a token is drawn for each row, which the host
reads when it is there. A pass is a replay of a captured graph where there is one for its number of
rows, and the same calls where not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from kvrelay.engine.model.batch import Batch, Limits, Table, tables_of
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.device_memory import GIB
from kvrelay.engine.model.gpu.penalties import NO_ROW, DeviceCounts, penalize
from kvrelay.engine.model.gpu.recurrent import KEPT_ROWS, READS
from kvrelay.engine.model.gpu.sampling import COLUMNS, draw, draws_of
from kvrelay.engine.model.gpu.staging import StaticInputs, stage_arrays
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.ops import Group

OWN = -1  # the row follows none: its token is the host's
NO_SLOT = -1  # the row only fills up a captured size: nothing is written for it
Replay = Callable[[Batch, torch.Tensor], None]  # TritonOps.replay
ROWS = 1024  # a program of the kernel has that takes them
SLOTS = 2  # passes of which the host holds inputs and results: one runs, one waits behind it


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that passes are captured for, ascending: a step is filled up to the next."""
    sizes = {1, 2, 4, max_num_seqs, *range(8, max_num_seqs, 8)}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodePasses:
    """Owned by `GpuSteps`. Up to `max_num_seqs` rows: a sequence's token, and each draft token.

    Invariants: a row past the step's sequences has no slot, and reads position 0 of a block that it
    once had, or of block 0. A pass is loaded only after the result of the last but one has been
    read: that one used the same arrays on the host. Block tables on the device are as those on the
    host: what changes in them is sent, behind the pass before."""

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        device: torch.device,
        max_num_seqs: int,
        group: Group | None = None,
        replay: Replay | None = None,
    ) -> None:
        """group: of the ranks that run the same passes; all draw, and have the tokens of rank 0.
        replay: of a model with states, whose draft tokens can be verified then."""
        self._group, self._replay = group, replay
        self._decoder, self._limits, self._device = decoder, limits, device
        self.sizes = graph_sizes(max_num_seqs)
        rows, width = (max_num_seqs,), -(-limits.max_model_len // limits.block_size)
        self._inputs = StaticInputs(
            {
                "tokens": (rows, np.int64),
                "positions": (rows, np.int64),
                "slots": (rows, np.int64),
                **{name: (rows, kind) for name, kind in COLUMNS.items()},
                "query_start": (rows, np.int32),
                "query_len": (rows, np.int32),
                "context_len": (rows, np.int32),
                "follows": (rows, np.int32),
                "counted": (rows, np.int32),  # row of `counts`
                "passed": (rows, np.int32),
                "more_slots": ((limits.num_groups - 1, max_num_seqs), np.int64),
            },
            device,
            SLOTS,
        )
        for host in self._inputs.hosts:
            host["query_start"][:] = np.arange(max_num_seqs)
            host["query_len"][:] = host["passed"][:] = 1
        self._accepted = StaticInputs({"rows": ((KEPT_ROWS,), np.int32)}, device, 1)
        self.counts = DeviceCounts(max_num_seqs, limits.vocab_size, limits.window, device)
        self._last = 0  # index of the last pass's arrays
        self._host_tables = np.zeros((max_num_seqs, limits.num_groups, width), np.int32)
        self._tables = torch.from_numpy(self._host_tables).to(device, copy=True)
        # What their rows were written from, and how many rows of that; and those of the parameters.
        self._held: list[tuple[Table | None, int]] = [(None, 0)] * max_num_seqs
        self._params: list[list[SamplingParams | None]] = [
            [None] * max_num_seqs for _ in range(SLOTS)
        ]
        self._rows = torch.arange(max_num_seqs, device=device)
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        shape = (max_num_seqs, limits.vocab_size)
        self.logits = torch.empty(shape, dtype=torch.float32, device=device)  # from the last pass
        on_gpu = device.type == "cuda"
        results = (SLOTS, max_num_seqs)
        self._results = torch.zeros(results, dtype=torch.int64, pin_memory=on_gpu)
        # A thread that waits for one sleeps: a rank's would keep a core busy.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(SLOTS if on_gpu else 0)]
        self.graph_bytes: list[int] = []  # that each graph took of the device, in their order
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._replays: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, num_rows: int) -> int:
        """Rows of a pass that has so many of use; 0 if they are too many."""
        return next((size for size in self.sizes if size >= num_rows), 0)

    def verifies(self, num_rows: int) -> bool:
        """Whether draft tokens are verified in a pass of so many rows. With states, what recurrent
        layers are given has to be kept."""
        size, has_states = self.size_for(num_rows), self._limits.num_state_groups > 0
        return size > 0 and (not has_states or self._keeps(size))

    def _keeps(self, size: int) -> bool:
        return self._replay is not None and size <= KEPT_ROWS

    def begin(
        self,
        seqs: list[ScheduledSeq],
        tables: Sequence[Table] | None = None,
        follows: Sequence[int] | None = None,
    ) -> Callable[[], list[int]]:
        """Load and launch a pass; what is returned waits for its tokens, one of each row, and may
        be called from any thread, once. Parameters and errors as of `load`."""
        slot = self.load(seqs, tables, follows)
        num_rows = sum(len(seq.input_tokens) for seq in seqs)
        self.launch(self.size_for(num_rows), slot)
        return partial(self.result, slot, num_rows)

    def load(
        self,
        seqs: list[ScheduledSeq],
        tables: Sequence[Table] | None = None,
        follows: Sequence[int] | None = None,
    ) -> int:
        """Send a pass's inputs: of each sequence a row for its token and, after it, one for each
        draft token. `tables`: as `Guard.check` gives them; without, they and the tokens are checked
        here. `follows`: for each sequence the row of the pass before whose token is its input; -1:
        its own. Returns what `launch` and `result` want. Raises ValueError for a sequence that is
        not within the limits; nothing is sent then."""
        if tables is None:
            tables = tables_of(seqs, self._limits)
        slot, block_size = (self._last + 1) % SLOTS, self._limits.block_size
        host, last_params = self._inputs.hosts[slot], self._params[slot]
        count = 0
        changed: dict[int, ScheduledSeq] = {}  # rows whose parameters are not the last step's
        rows_of: list[Table] = []
        for seq, table in zip(seqs, tables, strict=True):
            for row in range(count, count + len(seq.input_tokens)):
                if last_params[row] is not seq.sampling:
                    changed[row] = seq
                rows_of.append(table)
            count += len(seq.input_tokens)
        self._send_tables(rows_of)
        size = self.size_for(count)
        if count == len(seqs):
            starts = np.array([seq.start for seq in seqs], np.int64)
            tokens = np.array([seq.tokens[0] for seq in seqs], np.int64)
        else:
            spans = (range(seq.start, seq.end) for seq in seqs)
            starts = np.fromiter(chain.from_iterable(spans), np.int64, count)
            inputs = chain.from_iterable(seq.input_tokens for seq in seqs)
            tokens = np.fromiter(inputs, np.int64, count)
        rows, rest = slice(0, count), slice(count, size)
        blocks = self._host_tables[np.arange(count), :, starts // block_size].astype(np.int64)
        slots = blocks * block_size + (starts % block_size)[:, np.newaxis]  # [count, groups]
        host["tokens"][rows], host["tokens"][rest] = tokens, 0
        host["positions"][rows], host["positions"][rest] = starts, 0
        host["slots"][rows], host["more_slots"][:, rows] = slots[:, 0], slots[:, 1:].T
        host["slots"][rest], host["more_slots"][:, rest] = NO_SLOT, NO_SLOT
        if self._limits.num_state_groups:
            self._load_passed(host, seqs, size)
        host["context_len"][rows], host["context_len"][rest] = starts + 1, 1
        host["follows"][:size] = OWN
        if follows is not None:
            host["follows"][rows] = follows
        host["counted"][:size] = NO_ROW
        counted = self.counts.rows_of(seqs, [seq.start for seq in seqs], ahead=1)
        host["counted"][rows] = np.repeat(counted, [len(seq.input_tokens) for seq in seqs])
        if changed:
            for name, each in draws_of([*changed.values()]).items():
                host[name][[*changed]] = each
            for row, seq in changed.items():
                last_params[row] = seq.sampling
        for name in COLUMNS:
            host[name][rest] = 0
        host["position"][rows] = starts + 1
        for row in range(count, size):
            last_params[row] = None
        self._inputs.send(slot)
        self._last = slot
        return slot

    def _load_passed(
        self, host: Mapping[str, np.ndarray], seqs: Sequence[ScheduledSeq], size: int
    ) -> None:
        """A state is passed by all rows of its sequence, and with draft tokens not stored."""
        host["passed"][:size], row = 1, 0
        of_states = host["more_slots"][-self._limits.num_state_groups :]
        for seq in seqs:
            count = len(seq.input_tokens)
            if count > 1:
                host["passed"][row : row + count] = [count, *[0] * (count - 1)]
                of_states[:, row : row + count] = READS
            row += count

    def replay(self, num_rows: int, counts: Sequence[int]) -> None:
        """After a pass over `num_rows` rows: from each row on, so many are passed again by the
        recurrent layers, which store states. Waits for that."""
        size, host = self.size_for(num_rows), self._accepted.hosts[0]["rows"]
        host[:] = 0
        host[: len(counts)] = counts
        self._accepted.send(0)
        graph = self._replays.get(size)
        if graph is None:
            self._pass_again(size)
        else:
            graph.replay()
        if self._events:
            torch.cuda.current_stream(self._device).synchronize()

    def _pass_again(self, size: int) -> None:
        assert self._replay is not None
        self._replay(self._batch(size), self._accepted.device["rows"][:size])

    def _send_tables(self, tables: Sequence[Table]) -> None:
        """Sends what is not there yet of each row."""
        places: list[np.ndarray] = []
        blocks: list[np.ndarray] = []
        row_size = self._host_tables[0].size
        for row, table in enumerate(tables):
            held, num_rows = self._held[row]
            first = num_rows if held is table else 0
            if first < table.num_rows:
                places.append(row * row_size + table.places(first, table.num_rows))
                blocks.append(table.visible(first, table.num_rows))
            self._held[row] = table, table.num_rows
        if places:
            changed = {"places": np.concatenate(places), "blocks": np.concatenate(blocks)}
            changed["blocks"] = changed["blocks"].astype(np.int32)
            self._host_tables.reshape(-1)[changed["places"]] = changed["blocks"]
            there = stage_arrays(changed, self._device)
            self._tables.view(-1)[there["places"]] = there["blocks"]

    def launch(self, size: int, slot: int) -> None:
        """Begin the pass that was loaded last, over `size` rows; the host does not wait."""
        graph = self._graphs.get(size)
        if graph is None:
            self._pass(size)
        else:
            if self._group is not None:
                self._group.was_used = True  # by what the graph holds
            graph.replay()
        self._results[slot, :size].copy_(self._drawn[:size], non_blocking=True)
        if self._events:
            self._events[slot].record()

    def result(self, slot: int, num_rows: int) -> list[int]:
        """Tokens that were drawn; waits for them."""
        if self._events:
            self._events[slot].synchronize()
        return self._results[slot, :num_rows].tolist()

    def capture(self, progress: Callable[[str], None], most: int | None = None) -> None:
        """Make a graph for every size, largest first, in memory that they share; `most`: for so
        many. Raises RuntimeError if a pass cannot be captured."""
        host = self._inputs.hosts[self._last]
        host["slots"][:], host["more_slots"][:] = NO_SLOT, NO_SLOT
        host["passed"][:] = 1
        host["context_len"][:], host["follows"][:], host["counted"][:] = 1, OWN, NO_ROW
        self._inputs.send(self._last)
        pool = torch.cuda.graph_pool_handle()
        self.graph_bytes.clear()
        for done, size in enumerate(self.sizes[::-1][:most]):
            self._pass(size)  # compiles, and lets libraries allocate what they keep
            if self._keeps(size):  # counts are 0: nothing is passed
                self._pass_again(size)
            torch.cuda.synchronize(self._device)
            free = torch.cuda.mem_get_info(self._device)[0]
            graph, error = torch.cuda.CUDAGraph(), None
            try:
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._pass(size)
            except RuntimeError as caught:
                error = caught
            self._agree(error)
            self._graphs[size] = graph
            if self._keeps(size):
                self._replays[size] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    self._replays[size], pool=pool, capture_error_mode="thread_local"
                ):
                    self._pass_again(size)
            self.graph_bytes.append(max(0, free - torch.cuda.mem_get_info(self._device)[0]))
            taken = f"{sum(self.graph_bytes) / GIB:.2f} GiB"
            progress(f"capturing decode steps: {done + 1} of {len(self.sizes)}, {taken}")

    def _agree(self, error: RuntimeError | None) -> None:
        """Raises `error`, or RuntimeError where another rank has one: ranks that run a pass more
        than others would wait for them."""
        failed = self._group is not None and not self._group.least(error is None, self._device)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("another rank could not capture a step")

    def forget_graphs(self) -> None:
        self._graphs.clear()
        self._replays.clear()
        self.graph_bytes.clear()

    def _batch(self, size: int) -> Batch:
        """The first rows, as they are on the device."""
        inputs = self._inputs.device
        there = {name: each[:size] for name, each in inputs.items()}
        tables = self._tables[:size]
        has_groups = self._limits.num_groups > 1
        longest = self._limits.max_model_len  # a bound: contexts are known on the device only
        return Batch(
            tokens=there["tokens"],
            positions=there["positions"],
            slots=there["slots"],
            query_start=there["query_start"],
            query_len=there["query_len"],
            context_len=there["context_len"],
            block_tables=tables[:, 0],
            sample_rows=self._rows[:size],
            spans=tuple((row, 1, longest) for row in range(size)),
            more_slots=inputs["more_slots"][:, :size] if has_groups else None,
            more_tables=tables[:, 1:].transpose(0, 1) if has_groups else None,
            passed=there["passed"] if self._keeps(size) else None,
        )

    def _pass(self, size: int) -> None:
        """Logits, and a token per row."""
        batch = self._batch(size)
        there = {name: each[:size] for name, each in self._inputs.device.items()}
        drawn, logits, times = self._drawn[:size], self.logits[:size], self.counts.times
        _take[(triton.cdiv(size, ROWS),)](
            self._drawn, there["follows"], batch.tokens, times, there["counted"], times.shape[1],
            size, ROWS=ROWS,
        )  # fmt: skip
        logits.copy_(self._decoder.forward(batch))
        penalize(logits, times, there["counted"], there)
        draw(logits, there, drawn)
        if self._group is not None:
            self._group.share(drawn)


@triton.jit(do_not_specialize=["num_rows"])
def _take(drawn, follows, tokens, times, counted, vocab, num_rows, ROWS: tl.constexpr):
    """What was drawn in the pass before is the input of the rows that follow it. Inputs of rows
    that are penalized are counted."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(follows + row, mask=row < num_rows, other=-1)
    there = source >= 0
    token = tl.load(drawn + source, mask=there, other=0)
    token = tl.maximum(token, 0)  # NO_TOKEN is thrown away later
    tl.store(tokens + row, token, mask=there)
    token = tl.where(there, token, tl.load(tokens + row, mask=row < num_rows, other=0))
    own = tl.load(counted + row, mask=row < num_rows, other=-1)
    at = times + own.to(tl.int64) * vocab + token
    tl.store(at, tl.load(at, mask=own >= 0, other=0) + 1, mask=own >= 0)
