"""A choice in native code: what it is asked, and what it answers. See `router/native/choice.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_char, c_double, c_int64, c_uint64, c_void_p
from functools import cache
from struct import Struct
from typing import Any, NamedTuple
from weakref import finalize

from router.cost import CostModel
from router.endpoint import Endpoint
from router.fleet import Fleet
from router.index_table import NUM_RUNS, IndexTable
from router.library import library
from router.placement import Intake, Seconds, Work
from router.prefix_index import Held
from router.prompt_queue import WaitingMemory

_OPTION = Struct("=Qq4q10d3q2dQq")
_ADDRESS = Struct("=Q")
_HELD, _SECONDS, _INTAKE = slice(2, 6), slice(6, 16), slice(16, 22)


class _Found(ctypes.Structure):
    """`found_kind` of native/cost.h."""

    _fields_ = (
        ("model", c_uint64),
        ("block_size", c_int64),
        ("unit", c_int64),
        ("ends", c_void_p),
        ("num_slots", c_int64),
    )


class Question(ctypes.Structure):
    """`question` of native/choice.h."""

    _fields_ = (
        ("now", c_double),
        ("output_tokens", c_double),
        ("num_tokens", c_int64),
        ("found", c_void_p),
        ("num_found", c_int64),
        ("lendings", c_void_p),
        ("num_lendings", c_int64),
        ("total_tokens", c_int64),
        ("max_inflight", c_int64),
        ("max_memory_wait_s", c_double),
        ("probe_after_s", c_double),
        ("avoid", c_void_p),
        ("num_avoid", c_int64),
        ("trusting", c_bool),
        ("given", c_bool),
        ("decodes", c_void_p),
        ("prefills", c_void_p),
        ("lenders", c_void_p),
        ("num_decodes", c_int64),
        ("num_prefills", c_int64),
        ("num_lenders", c_int64),
        ("num_idle", c_int64),
        ("num_holders", c_int64),
        ("max_tried", c_int64),
        ("lenders_of_a_role", c_int64),
    )


class _Answer(ctypes.Structure):
    """`answer` of native/choice.h."""

    _fields_ = (
        ("decodes", c_void_p),
        ("prefills", c_void_p),
        ("workers", c_void_p),
        ("num_decodes", c_int64),
        ("num_prefills", c_int64),
        ("num_workers", c_int64),
    )


class Option(NamedTuple):
    """One way to serve the request. For a prefill worker alone, only what comes before the first
    token counts."""

    endpoint: Endpoint
    prefill: Endpoint | None
    held: Held  # tokens on `endpoint`
    seconds: Seconds
    intake: Intake


class Options:
    """All ways that a choice has looked at: the records that native code has written, read when
    somebody asks. At least one has a decode worker."""

    __slots__ = ("_decodes", "_endpoints", "_num_decodes", "_num_prefills", "_prefills")

    def __init__(
        self, answer: _Answer, decodes: Any, prefills: Any, endpoints: Mapping[int, Endpoint]
    ) -> None:
        self._decodes, self._prefills = decodes, prefills
        self._num_decodes: int = answer.num_decodes
        self._num_prefills: int = answer.num_prefills
        self._endpoints = endpoints

    @property
    def best(self) -> Option:
        """Decode worker and all."""
        return self._read(self._decodes, 0)

    @property
    def best_prefill(self) -> Option | None:
        """The prefill worker's part of `best`."""
        number: int = _OPTION.unpack_from(self._decodes)[1]
        return None if number < 0 else self._read(self._prefills, number)

    @property
    def decodes(self) -> list[Option]:
        """Best first, as the following."""
        return [self._read(self._decodes, number) for number in range(self._num_decodes)]

    @property
    def prefills(self) -> list[Option]:
        return [self._read(self._prefills, number) for number in range(self._num_prefills)]

    def _read(self, records: Any, number: int) -> Option:
        values = _OPTION.unpack_from(records, _OPTION.size * number)
        device, host, disk, said = values[_HELD]
        computed, loaded, fetched, load_s, fetch_s, lender = values[_INTAKE]
        fetch_from = self._endpoints[lender].worker if lender else None
        prefill = None
        if values[1] >= 0:
            (address,) = _ADDRESS.unpack_from(self._prefills, _OPTION.size * values[1])
            prefill = self._endpoints[address]
        return Option(
            self._endpoints[values[0]],
            prefill,
            Held(device, host, disk, said),
            Seconds(*values[_SECONDS]),
            Intake(computed, loaded, fetched, load_s, fetch_s, fetch_from),
        )


class Chooser:
    """Owned by a policy. Invariant: native code has the endpoints in `_by_slot`, by their slots."""

    def __init__(self, cost: CostModel, index: IndexTable, **limits: float) -> None:
        """`limits`: fields of a question that are always the same."""
        _check_sizes()
        self._lib = library()
        self._cost, self._index = cost, index
        self._address: int = self._lib.chooser_new(index.address)
        finalize(self, self._lib.chooser_free, self._address)
        self._by_slot: dict[int, Endpoint] = {}
        self._question = Question(**limits)
        self._at = ctypes.addressof(self._question)
        self._answer = _Answer()
        self._answer_at = ctypes.addressof(self._answer)

    def put(self, endpoint: Endpoint, slot: int | None) -> None:
        """`endpoint` has this slot of the index from now on; None: none any more, it may go."""
        if self._by_slot.get(endpoint.slot) is endpoint:
            del self._by_slot[endpoint.slot]
            self._lib.chooser_put(self._address, endpoint.slot, None)
        endpoint.slot = -1 if slot is None else slot
        if slot is not None:
            self._by_slot[slot] = endpoint
            self._lib.chooser_put(self._address, slot, endpoint.address)

    def ask(self, now: float, work: Work, *, trusting: bool) -> None:
        """What the following calls are about. `trusting`: silent workers, and those that have
        failed this request, are better than none."""
        question = self._question
        question.now, question.trusting = now, trusting
        question.num_tokens, question.total_tokens, question.output_tokens, found, avoid = work
        kinds = (_Found * len(found))()
        for kind, each in zip(kinds, found, strict=True):
            kind.model, kind.block_size, kind.unit, ends = each
            kind.ends, kind.num_slots = ctypes.addressof(ends), len(ends) // NUM_RUNS
        question.found, question.num_found = ctypes.addressof(kinds), len(found)
        addresses = _addresses(avoid)
        question.avoid, question.num_avoid = ctypes.addressof(addresses), len(avoid)
        self._asked = work, kinds, addresses  # native code reads them until the next question

    def is_usable(self, endpoint: Endpoint) -> bool:
        """Whether it can take the request now, and would have room for its KV soon."""
        usable: bool = self._lib.choice_is_usable(self._cost.address, self._at, endpoint.address)
        return usable

    def find(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        """The cheapest of what `num_candidates` of each role, or fewer, can do; None: nobody who
        decodes is usable."""
        self._question.given = False
        return self._choose(decodes, prefills, num_candidates)

    def weigh(
        self,
        decodes: Fleet,
        prefills: Fleet,
        given: tuple[Sequence[Endpoint], Sequence[Endpoint]],
        lenders: Sequence[Endpoint] = (),
    ) -> Options | None:
        """What it costs to let the first of `given` decode and the second prefill, in this
        order."""
        question = self._question
        question.given = True
        arrays = [_addresses(each) for each in (*given, lenders)]
        question.decodes, question.prefills, question.lenders = map(ctypes.addressof, arrays)
        question.num_decodes, question.num_prefills, question.num_lenders = map(len, arrays)
        return self._choose(decodes, prefills, max(map(len, given)))

    def _choose(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        answer = self._answer
        decode_type, prefill_type, workers_type = _buffers(num_candidates)
        decode_records, prefill_records, workers = decode_type(), prefill_type(), workers_type()
        answer.decodes = ctypes.addressof(decode_records)
        answer.prefills = ctypes.addressof(prefill_records)
        answer.workers = ctypes.addressof(workers)
        self._lib.choose(
            self._address, self._cost.address, decodes.address, prefills.address, self._at,
            self._answer_at,
        )  # fmt: skip
        if not answer.num_decodes:
            return None
        endpoints = {
            address: decodes.at(address) or prefills.at(address)
            for address in workers[: answer.num_workers]
        }
        return Options(answer, decode_records, prefill_records, endpoints)  # type: ignore[arg-type]


@cache
def _buffers(num_candidates: int) -> tuple[type[ctypes.Array[Any]], ...]:
    """Types of arrays with room for what so many of each role can do, and for whom they name."""
    record = c_char * _OPTION.size
    return record * (2 * num_candidates), record * num_candidates, c_void_p * (5 * num_candidates)


def _addresses(endpoints: Sequence[Endpoint]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(endpoints))(*(endpoint.address for endpoint in endpoints))


@cache
def _check_sizes() -> None:
    """What Python and C share has to look the same to both."""
    ours = [Endpoint, WaitingMemory, CostModel, Question, _Found, _Answer]
    sizes = (c_uint64 * (len(ours) + 1))()
    library().choice_sizes(sizes)
    expected = [*map(ctypes.sizeof, ours), _OPTION.size]  # type: ignore[arg-type]
    assert list(sizes) == expected, (list(sizes), expected)
