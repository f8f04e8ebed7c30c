"""One session: what a router knows of a conversation, its limits, and what outlives the router."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvrelay.engine.kv.block_hash import HASH_BYTES, CacheScope, hash_blocks
from kvrelay.engine.kv.tier import DEFAULT_RETENTION, Retention
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import WorkerInfo
from kvrelay.router.messages import SessionState

TOKEN_BYTES = array("I").itemsize
Kind = tuple[bytes, int]  # fingerprint and block size: the same block hashes on all such workers


def kind_of(info: WorkerInfo) -> Kind:
    return info.fingerprint, info.block_size


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Limits of a router's sessions, and how long each of their states lasts."""

    max_sessions: int = 10_000
    max_per_tenant: int = 2_000
    max_tokens: int = 64_000_000  # of all sessions together; each takes 4 bytes here and in a store
    park_after_s: float = 30.0  # without a turn for this long, a session is parked; 0: never
    order_timeout_s: float = 10.0  # a command is answered after this, complete or not
    max_parks_at_once: int = 16
    max_commands: int = 1024  # that wait for workers
    retention: Retention = DEFAULT_RETENTION  # of requests that do not say
    durable: bool = False  # True: every change is an effect for a store
    shared: bool = False  # the store is other routers' too, and forgets what has expired by itself


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it outlives its router. Times count back from when it was written or read."""

    tenant: str
    session: str
    tokens: bytes  # as array("I") writes them
    scope: CacheScope
    retention: Retention
    num_turns: int
    worker: NodeId | None
    pinned: bool
    age_s: float
    idle_s: float  # since the end of its last turn
    parked: bool = True
    version: int = 0  # grows with every change; of two, the higher one counts


@dataclass(slots=True, eq=False)
class Session:
    """Owned by a `SessionTable`. Times are the router's."""

    tenant: str
    name: str
    scope: CacheScope
    retention: Retention
    created_at: float
    used_at: float  # end of its last turn; its retention counts from here
    touched_at: float  # the same, or when it was resumed: parking counts from here
    tokens: bytes = b""  # prompt and output of its last finished turn
    num_turns: int = 0
    worker: NodeId | None = None  # that decoded it
    parked: bool = False
    pinned: bool = False
    saved: bool = False  # the store may have a record of it
    version: int = 0  # of the last record that was saved or received
    foreign: bool = False  # its last change was another router's
    live: set[str] = field(default_factory=set)  # requests that are turns of it
    due_at: float | None = None  # of its entry in the table's heap; None: it has none
    _hashes: dict[Kind, bytes] = field(default_factory=dict)

    @property
    def state(self) -> SessionState:
        if self.live:
            return SessionState.ACTIVE
        return SessionState.PARKED if self.parked else SessionState.IDLE

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def set_tokens(self, tokens: bytes) -> None:
        """As array("I") writes them."""
        self.tokens = tokens
        self._hashes.clear()

    def set_hashes(self, kind: Kind, block_hashes: list[bytes]) -> None:
        """Cache the result of `block_hashes`."""
        self._hashes[kind] = b"".join(block_hashes[: self.num_blocks(kind)])

    def num_blocks(self, kind: Kind) -> int:
        """The last token was sampled, not computed: it has no KV yet."""
        return max(0, self.num_tokens - 1) // kind[1]

    def block_hashes(self, kind: Kind) -> list[bytes]:
        """Of the blocks of its KV, in order. Cached packed: a session may have thousands."""
        packed = self._hashes.get(kind)
        if packed is None:
            fingerprint, size = kind
            tokens = array("I", self.tokens[: self.num_blocks(kind) * size * TOKEN_BYTES])
            packed = b"".join(hash_blocks(fingerprint, self.scope, tokens, size))
            self._hashes[kind] = packed
        return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

    def num_shared(self, other: Session, block_size: int) -> int:
        """Whole blocks at the beginning that `other` has too: the same tokens, and the same salt or
        none. O(log blocks) comparisons."""
        size = block_size * TOKEN_BYTES
        low, high = 0, min(len(self.tokens), len(other.tokens)) // size
        mine, theirs = self.scope, other.scope
        if mine.salt != theirs.salt:
            high = min(high, mine.num_public_tokens // block_size)
            high = min(high, theirs.num_public_tokens // block_size)
        if high and self.tokens[:size] != other.tokens[:size]:
            return 0
        while low < high:  # [0, low) is shared; nothing from `high` on is
            middle = (low + high + 1) // 2
            part = slice(low * size, middle * size)
            if self.tokens[part] == other.tokens[part]:
                low = middle
            else:
                high = middle - 1
        return low

    def record(self, now: float) -> SessionRecord:
        return SessionRecord(
            tenant=self.tenant,
            session=self.name,
            tokens=self.tokens,
            scope=self.scope,
            retention=self.retention,
            num_turns=self.num_turns,
            worker=self.worker,
            pinned=self.pinned,
            age_s=now - self.created_at,
            idle_s=now - self.used_at,
            parked=self.parked,
            version=self.version,
        )


def restored(now: float, record: SessionRecord) -> Session:
    """The session of `record`, parked."""
    used_at = now - record.idle_s
    return Session(
        tenant=record.tenant,
        name=record.session,
        scope=record.scope,
        retention=record.retention,
        created_at=now - record.age_s,
        used_at=used_at,
        touched_at=used_at,
        tokens=record.tokens,
        num_turns=record.num_turns,
        worker=record.worker,
        parked=True,
        pinned=record.pinned,
        saved=True,
        version=record.version,
    )
