"""What a placement costs, in seconds: one sum for the request itself and for those it delays.

total = queue + load + fetch + prefill + transfer + lost + memory + decode   its own time
      + delay + stall + crowd                                  what it takes from others
  queue     prompts that go before it: those that are shorter
  load      reading KV from the worker's own host memory and disk into its device
  fetch     reading KV from a peer that holds more of the prefix
  prefill   computing the tokens that are missing then
  transfer  reading KV from the prefill worker, as far as it does not overlap with the prefill
  lost      where KV of that prefill worker often does not come: waiting for it for nothing, and
            computing it after all. `fetch` has the same of a peer
  memory    waiting for blocks, where there are too few
  decode    its output at the worker's step time, with the KV that is there then
  delay     to the longer prompts, which now wait for this one
  stall     the time that the prompt is computed, once for each sequence that decodes there
            meanwhile; the few tokens that a decode step computes beside its own are free. On a
            prefill worker, the time that its own output waits for prompts
  crowd     to the sequences there: each step takes longer. On a prefill worker, to the prompts

Workers that share the cores of a machine also take the time that they compute from each sequence
that decodes on another one (stall, crowd): whoever goes first, as much is done in all.

KV is loaded or fetched only where that is quicker than computing it. queue + load + fetch + prefill
is the time to the first token.

The sums are computed in `router/native/cost.c`, from the rates that are kept here and in the
endpoints.
"""

from __future__ import annotations

from kvrelay.engine.stats import WorkerStats
from kvrelay.router.native.bindings import address_of, ffi
from kvrelay.router.placement.endpoint import struct_field

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates
# The fleet's rates before any worker has reported one.
GUESSES = {
    "prefill_tokens_per_s": 1000.0,
    "decode_step_s": 0.03,
    "read_bytes_per_s": 1e9,
    "host_read_bytes_per_s": 2e9,
    "disk_read_bytes_per_s": 5e8,
    "object_read_bytes_per_s": 1e8,
    "adapter_load_s": 0.3,
}


class CostModel:
    """Owned by a router. The rates are the fleet's, for workers that have measured none. They lie
    in a struct that native code reads: `cost_model` of kvrelay_router.h."""

    handoff_s: float = struct_field("handoff_s")
    prefill_tokens_per_s: float = struct_field("fleet.prefill_tokens_per_s")
    decode_step_s: float = struct_field("fleet.decode_step_s")

    def __init__(
        self,
        *,
        handoff_s: float = 0.01,
        stalled_at_least: float = 0.5,
        prefilling_at_least: float = 0.5,
        low_priority_factor: float = 4.0,
        free_tokens: int = 16,
    ) -> None:
        """`handoff_s`: messages and connection of one handoff, whatever its size.
        `stalled_at_least`: sequences that will come to decode while a prompt is computed, where
        they are meant to. `prefilling_at_least`: share of the time in which prompts will be
        computed, where they are meant to be. `low_priority_factor`: how much longer prompts for
        others take while sequences decode on the same cores, by the niceness in worker.threads.
        `free_tokens` of a prompt cost a decode step nothing: it waits for the weights anyway."""
        fields = {
            "fleet": GUESSES,
            "handoff_s": handoff_s,
            "stalled_at_least": stalled_at_least,
            "prefilling_at_least": prefilling_at_least,
            "low_priority_factor": low_priority_factor,
            "free_tokens": free_tokens,
        }
        self.struct = ffi.new("cost_model *", fields)
        self.address = address_of(self.struct)
        self._measured: set[str] = set()
        self._prompt_weights: tuple[float, ...] = ()
        self._decode_weights: tuple[float, ...] = ()

    def on_stats(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        fleet = self.struct.fleet
        for name in GUESSES:
            value = getattr(stats, name)
            if value > 0:
                known = getattr(fleet, name)
                weight = SMOOTHING if name in self._measured else 1.0
                setattr(fleet, name, known + weight * (value - known))
                self._measured.add(name)
        self._prompt_weights = _nearer(self._prompt_weights, stats.prompt_weights)
        self._decode_weights = _nearer(self._decode_weights, stats.decode_weights)
        fleet.prompt_weights, fleet.decode_weights = self._prompt_weights, self._decode_weights

    @property
    def is_measured(self) -> bool:
        """Whether any worker has reported what prompts cost."""
        return bool(self._prompt_weights)


def _nearer(known: tuple[float, ...], measured: tuple[float, ...]) -> tuple[float, ...]:
    """`known`, moved towards what one worker has measured."""
    if not measured:
        return known
    if not known:
        return measured
    return tuple(a + SMOOTHING * (b - a) for a, b in zip(known, measured, strict=True))
