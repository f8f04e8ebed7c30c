"""How fast a worker reads KV, by source: whether to load, and how long to wait."""

from __future__ import annotations

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.cost import Rate
from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.tiers.manager import Tiers
from kvrelay.kvtransfer.tiers.registry import TIERS

RETRY_S = 30.0  # after a read from a lower tier, until one that was slow is taken for fast again
SLACK = 10.0  # a read may take so many times as long as at the measured rate
MAX_COUNTED_PEERS = 32  # each with counters of its own: they are in every message of statistics
OTHER_PEERS = "others"
ASSUMED_BYTES_PER_S = 50e6  # from a peer, until a read from one was measured


class ReadRates:
    """How fast a worker reads KV into device memory, by source, and what follows from it: what a
    load costs, and how long a read may take before it is given up.

    Owned by a connector. A source is a lower tier of the worker itself, or None: a peer."""

    def __init__(self, config: WorkerConfig, tiers: Tiers) -> None:
        self._config = config
        self._tiers = tiers
        self.read_bytes_per_s: dict[Tier | None, Rate] = {tier: Rate() for tier in (None, *Tier)}
        self._at_connection = Rate()  # by small reads from peers when they were connected
        self.now = 0.0
        self._read_at: dict[Tier | None, float] = {}  # when a read from it ended last
        self.counters: dict[str, float] = {}  # "kv_read_bytes:SOURCE:PEER", and seconds
        self._peers: set[str] = set()  # with counters of their own

    def load_s(self, tier: Tier) -> float:
        """Seconds that a block takes from a lower tier into device memory. One that was slow is
        tried again after a while: nothing else would show that it is not any more."""
        rate, assumed = self.bytes_per_s(tier), TIERS[tier].bytes_per_s
        if self.now - self._read_at.get(tier, self.now) > RETRY_S:
            rate = max(rate, assumed)
        return self._config.bytes_per_block / (rate or assumed)

    def bytes_per_s(self, tier: Tier | None) -> float:
        """Measured rate of reads into device memory; until there was one, that of small reads when
        peers were connected, or of copies down to the tier, which take the same way, if it is
        better than what is assumed. 0: not known."""
        own = self.read_bytes_per_s[tier].value
        if tier is None:
            return own or self._at_connection.value
        if own or tier not in TIERS:
            return own
        written = self._tiers.written_bytes_per_s(tier)
        return written if written > TIERS[tier].bytes_per_s else 0.0

    def timeout_s(self, tier: Tier | None, num_blocks: int) -> float:
        """Seconds that a read may take until `num_blocks` have come from this source: its own and
        those that were asked for before."""
        assumed = ASSUMED_BYTES_PER_S if tier is None else TIERS[tier].bytes_per_s
        # A read for a request is checked and shares its way, which a small one alone does not.
        measured = self.read_bytes_per_s[tier].value if tier is None else self.bytes_per_s(tier)
        rate = measured or assumed
        expected_s = num_blocks * self._config.bytes_per_block / rate
        config = self._config
        return min(config.read_timeout_s, max(config.read_floor_s, SLACK * expected_s))

    def connected(self, bytes_per_s: float) -> None:
        """A peer was, and a small read from it has shown this rate; 0: none."""
        if bytes_per_s:
            self._at_connection.add(bytes_per_s, 1.0)

    def add(self, tier: Tier | None, num_bytes: int, elapsed_s: float, peer: str = "") -> None:
        """A read has ended well."""
        self.read_bytes_per_s[tier].add(num_bytes, elapsed_s)
        self._read_at[tier] = self.now
        if tier is None and len(self._peers) < MAX_COUNTED_PEERS:
            self._peers.add(peer)
        elif tier is None and peer not in self._peers:
            peer = OTHER_PEERS
        source = f"{tier or 'peer'}:{peer}"
        for name, amount in (("bytes", num_bytes), ("seconds", elapsed_s)):
            key = f"kv_read_{name}:{source}"
            self.counters[key] = self.counters.get(key, 0.0) + amount
