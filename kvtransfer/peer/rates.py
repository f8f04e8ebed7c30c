"""How fast a worker reads KV into device memory, by source, and what follows from it: what a load
costs, and how long a read may take before it is given up.
"""

from __future__ import annotations

from engine.config import WorkerConfig
from engine.cost import Rate
from engine.kv.tier import Tier
from kvtransfer.tiers.manager import Tiers
from kvtransfer.tiers.registry import TIERS

SLACK = 10.0  # a read may take so many times as long as at the measured rate
MAX_COUNTED_PEERS = 32  # each with counters of its own: they are in every message of statistics
OTHER_PEERS = "others"
ASSUMED_BYTES_PER_S = 50e6  # from a peer, until a read from one was measured


class ReadRates:
    """Owned by a connector. A source is a lower tier of the worker itself, or None: a peer."""

    def __init__(self, config: WorkerConfig, tiers: Tiers) -> None:
        self._config = config
        self._tiers = tiers
        self.read_bytes_per_s: dict[Tier | None, Rate] = {tier: Rate() for tier in (None, *Tier)}
        self._at_connection = Rate()  # of small reads from peers when they were connected
        self.counters: dict[str, float] = {}  # "kv_read_bytes:SOURCE:PEER", and seconds
        self._peers: set[str] = set()  # with counters of their own

    def load_s(self, tier: Tier) -> float:
        """Seconds that a block takes from a lower tier into device memory."""
        rate = self.bytes_per_s(tier) or TIERS[tier].bytes_per_s
        return self._config.bytes_per_block / rate

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
        if tier is None and len(self._peers) < MAX_COUNTED_PEERS:
            self._peers.add(peer)
        elif tier is None and peer not in self._peers:
            peer = OTHER_PEERS
        source = f"{tier or 'peer'}:{peer}"
        for name, amount in (("bytes", num_bytes), ("seconds", elapsed_s)):
            key = f"kv_read_{name}:{source}"
            self.counters[key] = self.counters.get(key, 0.0) + amount
