"""vLLM's KV connector, version 1: between its scheduler and its blocks on one side, `Copies` and
`RankCopies` on the other. vLLM makes one for its scheduler and one in each rank, which may be in a
process of its own: what it needs goes there with the configuration and with each step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvrelay.decode_worker.vllm.copies import Copies, Move
from kvrelay.decode_worker.vllm.groups import windows_of
from kvrelay.decode_worker.vllm.memory import ALL, Heads
from kvrelay.decode_worker.vllm.ranks import RankCopies, Step, say_to
from kvrelay.engine.kv.window import Windows

PROCESS, PIPE = "process", "pipe"  # the worker's, in the configuration


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]
    """What is copied because of one step."""

    step: Step


class KVRelayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """With SupportsHMA vLLM keeps of layers with windows what these read, in groups of layers that
    have a block table each. Invariant: what `get_num_new_matched_tokens` promises of a request was
    compared with its checksums, and is in its table until the request has ended."""

    made_for: ClassVar[dict[str, Copies]] = {}  # by the engine's id

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not saved is computed again

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, self._config = vllm_config.kv_transfer_config, vllm_config
        self._cache = kv_cache_config
        self._block_size: int = vllm_config.cache_config.block_size
        self._loads: dict[str, range] = {}  # in the step that is scheduled
        if role is KVConnectorRole.SCHEDULER:
            self._copies = self.made_for[transfer.engine_id]
            sizes = windows_of(kv_cache_config.kv_cache_groups, self._block_size)
            self._copies.windows = Windows.of(self._block_size, sizes or (0,))
            self._copies.is_understood = sizes is not None
            return
        place = transfer.kv_connector_extra_config
        is_here = place[PROCESS] == os.getpid()
        say = self.made_for[transfer.engine_id].copied if is_here else say_to(place[PIPE])
        rank = vllm_config.parallel_config.rank
        self._rank = RankCopies(rank, say)
        RankCopies.made[transfer.engine_id, rank] = self._rank

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        first = num_computed_tokens // self._block_size
        end = (request.num_tokens - 1) // self._block_size
        more = self._copies.check(_key(request.request_id), first, end)
        return len(more) * self._block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            more = self._copies.checked(_key(request.request_id))
            self._loads[request.request_id] = more[: num_external_tokens // self._block_size]

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        loads, self._loads = self._loads, {}
        before = {
            each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs
        }
        again = scheduler_output.scheduled_cached_reqs
        before |= zip(again.req_ids, again.num_computed_tokens, strict=True)
        get_block_ids = scheduler_output.kv_connector_block_state.get_block_ids
        moves = []
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            block_ids = partial(get_block_ids, request_id)
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            end = before[request_id] + num_new - len(drafts)
            about = block_ids, loads.get(request_id, range(0)), end
            moves.append(Move(_key(request_id), *about))
        return Moves(self._copies.plan(moves))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None  # its blocks may be reused: what is copied has been gathered

    # Where the model runs

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layout = (getattr(self._cache, "kv_cache_layout", None) or "").replace("L", "")
        self._rank.register(kv_caches, self._cache.num_blocks, self._heads, layout)

    def _heads(self, layer: str) -> Heads | None:
        model, parallel = self._config.model_config, self._config.parallel_config
        size = parallel.tensor_parallel_size
        if size == 1:
            return ALL
        own = next(
            getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
            for group in self._cache.kv_cache_groups
            if layer in group.layer_names
        ).num_kv_heads
        total = own * size
        if own == model.get_num_kv_heads(parallel):  # else this layer has a number of its own
            total = 1 if model.use_mla else model.get_total_num_kv_heads()
        return Heads.of_rank(total, own, parallel.rank % size, size)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._rank.load(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All were loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """All are saved after the step."""

    def wait_for_save(self) -> None:
        self._rank.save(self._get_connector_metadata().step)


def _key(request_id: str) -> str:
    """As `Begin` has it: vLLM adds a random part."""
    return request_id.rpartition("-")[0]
