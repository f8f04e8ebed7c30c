"""What the node of a vLLM worker and the thread that runs vLLM say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.images import Expanded, Images
from kvrelay.engine.needs import Need
from kvrelay.engine.request import Refusal, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Begin:
    """Effect: generate from `tokens`. Answered by `Stepped`s, or by `NotBegun`."""

    key: str
    tokens: tuple[int, ...]
    salt: str  # blocks of different salts are never shared; "": of no tenant
    options: Mapping[str, Any]  # vLLM's, from `parameters.options`
    # Entries of a block table (`engine.kv.window`): blocks of the worker's own memory that its KV
    # is copied to, and -1 where none is.
    table: tuple[int, ...] = ()
    checksums: tuple[
        int, ...
    ] = ()  # for each, from the first, that has its KV already; 0: no block
    num_covered: int = 0  # entries, from the first, that have their blocks; 0: all have
    saves_tail: bool = False  # its last block is copied too, full or not
    images: Images | None = None  # each has a mark in `tokens`, for which more tokens come
    priority: int = 0  # the lowest goes first, and keeps its blocks
    need: Need | None = None  # an adapter, which is loaded before


@dataclass(frozen=True, slots=True)
class Extend:
    """Effect: entries of the table of the request of this key, from `first` on, are these now."""

    key: str
    first: int
    blocks: tuple[int, ...]
    num_covered: int  # entries, from the first, that have their blocks
    ends: bool = False  # there is no room for more: nothing else of it is copied


@dataclass(frozen=True, slots=True)
class Found:
    """vLLM has more of a prompt than its table: from so many entries on it is computed. Answered by
    `Extend`: the table is to be such that it goes on there."""

    key: str
    num_entries: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Effect: forget the request of this key, if it is there. Answered by `Stopped`."""

    key: str


@dataclass(frozen=True, slots=True)
class Expand:
    """Effect: say what tokens these images are to the model. Answered by `ExpandDone`."""

    key: str
    images: Images


@dataclass(frozen=True, slots=True)
class ExpandDone:
    key: str
    expanded: Expanded | None = None
    why: str = ""  # there is none


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of it is read or written from now on."""

    key: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Effect: run no step (any more), or go on. Answered by `Held` where it holds."""

    holds: bool


@dataclass(frozen=True, slots=True)
class Held:
    """No step is under way, and none begins."""


@dataclass(frozen=True, slots=True)
class NotBegun:
    """vLLM does not take the request of this key."""

    key: str
    why: str
    reason: Refusal = Refusal.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Generated:
    """What a step has added to a request."""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one per token
    finish: str = ""  # "stop", "length", or what went wrong; "": it goes on
    num_cached: int = 0  # tokens of what it began from that were not computed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with its first token, if asked for
    embedding: bytes = b""  # float32, of its prompt, where vLLM pools


@dataclass(frozen=True, slots=True)
class Stored:
    """These blocks are cached from now on, one after the other, by vLLM's own hashes."""

    hashes: tuple[Any, ...]
    parent: Any  # hash of the block before them; None: there is none
    tokens: tuple[int, ...]
    salt: str  # where it is the first block of a sequence; later ones have that of their parent


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block is cached any more."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Entries of a request's table from `first` on have been copied, with these checksums; None:
    there is no block."""

    key: str
    first: int
    checksums: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """These blocks of its table did not have the bytes that they should: they and what follows were
    not given to vLLM, which computes it. No block of the table that has a checksum is written."""

    key: str
    blocks: tuple[tuple[int, int], ...]  # in the worker's memory, each with its checksum


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of vLLM has ended, with these results."""

    generated: tuple[Generated, ...]
    events: tuple[Stored | Removed | Cleared, ...] = ()
    elapsed_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    used: float = 0.0  # share of the KV blocks that requests hold
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class EngineLost:
    """vLLM has raised, or a process of it has ended: nothing more will come."""

    why: str
