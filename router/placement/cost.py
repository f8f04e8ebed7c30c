"""What a placement costs, in seconds: one sum for the request itself and for those it delays.

Each term is a field of `Seconds`, with its text for operators, the page and whoever reads it here.
Most are computed in `router/native/cost.c`, from the rates that are kept here and in the endpoints.
One that has a function is computed by that, of each candidate, whenever a request is placed.

Workers that share the cores of a machine also take the time that they compute from each sequence
that decodes on another one (stall, crowd): whoever goes first, as much is done in all. KV is loaded
or fetched only where that is quicker than computing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from kvrelay.engine.stats import WorkerStats, notes_of
from kvrelay.router.native.bindings import address_of, constants, ffi
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.work import Work

SMOOTHING = 0.05  # weight of one worker's statistics in the fleet's rates
READ_WEIGHT = 0.01  # likewise of one request, in what evicted KV costs
# The fleet's rates before any worker has reported one.
FIRST_RATES = {
    "prefill_tokens_per_s": 1000.0,
    "decode_step_s": 0.03,
    "read_bytes_per_s": 1e9,
    "host_read_bytes_per_s": 2e9,
    "disk_read_bytes_per_s": 5e8,
    "object_read_bytes_per_s": 1e8,
    "load_s": 0.3,
    "image_token_s": 0.0,  # until a worker of our engine has encoded one
}
CONSTANTS = {
    "handoff_s": 0.01,  # messages and connection of one handoff, whatever its size
    # Sequences that will come to decode while a prompt is computed, where they are meant to.
    "stalled_at_least": 0.5,
    # Share of the time in which prompts will be computed, where they are meant to be.
    "prefilling_at_least": 0.5,
    # How much longer prompts for others take while sequences decode on the same cores, by the
    # niceness in worker.threads.
    "low_priority_factor": 4.0,
    "free_tokens": 16,  # that cost a decode step nothing: it waits for the weights anyway
}
NATIVE_RATES = FIRST_RATES.keys() & dict(ffi.typeof("worker_stats").fields)


# When the time of a term passes: before the first token, while something is computed, or is read;
# or after it, or for others.
COMPUTING, READING, LATER = "computing", "reading", "later"
AT_COMPUTING: int = constants.AT_COMPUTING  # on the worker that computes the prompt
AT_DECODING: int = constants.AT_DECODING
AT_READING: int = constants.AT_READING  # on one that decodes with the KV of another


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the cost. `seconds`: its function, of a worker that does what `at` says; None: it
    is computed in native code."""

    text: str
    when: str = LATER
    at: int = 0
    seconds: Callable[[CostModel, Endpoint, Work], float] | None = None


def need_s(cost: CostModel, endpoint: Endpoint, work: Work) -> float:
    if not work.need or work.need in endpoint.loaded:
        return 0.0
    return cost.rate(endpoint, "load_s")


class Seconds(NamedTuple):
    """A cost by its terms. Those of native code come first, in the order of its `seconds`."""

    queue: Annotated[float, Term("waiting for shorter prompts, which go first", COMPUTING)] = 0.0
    load: Annotated[float, Term("reading KV from its own lower tiers", READING)] = 0.0
    fetch: Annotated[float, Term("KV from a peer that holds more, beyond that", READING)] = 0.0
    prefill: Annotated[float, Term("computing the tokens that are missing then", COMPUTING)] = 0.0
    transfer: Annotated[float, Term("reading KV of the prefill worker, once it has computed")] = 0.0
    # And computing it after all. `fetch` has the same of a peer.
    lost: Annotated[float, Term("waiting for KV that often does not come from there")] = 0.0
    memory: Annotated[float, Term("waiting for blocks, where there are too few")] = 0.0
    decode: Annotated[float, Term("its output, with the KV that is there then")] = 0.0
    delay: Annotated[float, Term("longer prompts, which now wait for it")] = 0.0
    # But for the few tokens that a decode step computes beside its own. On a prefill worker, the
    # time that its output waits for prompts.
    stall: Annotated[float, Term("computing it, for each sequence that decodes there")] = 0.0
    # On a prefill worker, also what its prompts wait for this one's steps.
    crowd: Annotated[float, Term("longer steps, for each sequence that decodes there")] = 0.0
    # On average, of all that has come to devices.
    evict: Annotated[float, Term("reading back the KV that makes way on its device")] = 0.0
    images: Annotated[
        float, Term("encoding its images whose embeddings are not there", COMPUTING)
    ] = 0.0
    need: Annotated[
        float, Term("loading what it needs, as an adapter", READING, AT_COMPUTING, need_s)
    ] = 0.0
    need_again: Annotated[
        float, Term("loading it where the prompt is handed over to", LATER, AT_READING, need_s)
    ] = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def ttft(self) -> float:
        """How long it takes from the decision to the first token."""
        return sum([self[number] for number in _FIRST])

    def sum_of(self, when: str) -> float:
        return sum([self[number] for number in _WHEN[when]])


TERMS: dict[str, Term] = notes_of(Seconds)
_WHEN = {
    each: [n for n, t in enumerate(TERMS.values()) if t.when is each]
    for each in (COMPUTING, READING)
}
_FIRST = sorted(_WHEN[COMPUTING] + _WHEN[READING])
FUNCTIONS = [(n, term.seconds) for n, term in enumerate(TERMS.values()) if term.seconds]


class CostModel:
    """Owned by a router. The rates are the fleet's, for workers that have measured none. They lie
    in a struct that native code reads: `cost_model` of kvrelay_router.h."""

    def __init__(self, **constants: float) -> None:
        """`constants`: other values of some of CONSTANTS."""
        fields = {
            "fleet": {name: FIRST_RATES[name] for name in NATIVE_RATES},
            "terms_at": [term.at for term in TERMS.values()],
        }
        self.struct = ffi.new("cost_model *", fields | CONSTANTS | constants)
        self.address = address_of(self.struct)
        self.rates = FIRST_RATES.copy()  # the fleet's
        self._measured: set[str] = set()
        self._read_s = self._brought = 0.0  # see `on_placed`
        self._prompt_weights: tuple[float, ...] = ()
        self._decode_weights: tuple[float, ...] = ()

    def on_stats(self, stats: WorkerStats) -> None:
        """Let one worker's rates count for the fleet; 0 is "not measured"."""
        for name, known in self.rates.items():
            value = getattr(stats, name)
            if value > 0:
                weight = SMOOTHING if name in self._measured else 1.0
                self.rates[name] = known + weight * (value - known)
                self._measured.add(name)
        fleet = self.struct.fleet
        for name in NATIVE_RATES:
            setattr(fleet, name, self.rates[name])
        self._prompt_weights = _nearer(self._prompt_weights, stats.prompt_weights)
        self._decode_weights = _nearer(self._decode_weights, stats.decode_weights)
        fleet.prompt_weights, fleet.decode_weights = self._prompt_weights, self._decode_weights

    def on_placed(self, read_s: float, num_tokens: int) -> None:
        """A request brings so many tokens to devices that were not there, and reads KV for so long.
        What is read was evicted before, so that is what an evicted token costs."""
        keep = 1.0 - READ_WEIGHT
        self._read_s = keep * self._read_s + read_s
        self._brought = keep * self._brought + num_tokens
        self.struct.evicted_token_s = self._read_s / max(1.0, self._brought)

    def rate(self, endpoint: Endpoint, name: str) -> float:
        """As the worker has measured it, or else the fleet."""
        own: float = getattr(endpoint.stats, name, 0.0)
        return own or self.rates[name]

    def write_terms(self, endpoint: Endpoint, work: Work) -> None:
        """Compute those that have a function, for native code to add."""
        terms = endpoint.struct.terms
        for number, seconds in FUNCTIONS:
            terms[number] = seconds(self, endpoint, work)

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
