"""vLLM's KV connector, version 1: between its scheduler and its blocks on one side, and `Copies` on
the other. vLLM makes one for its scheduler and one for what runs the model, in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from kvrelay.decode_worker.vllm.copies import Copies, Move


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]
    """What is copied because of one step."""

    each: list[Move] = field(default_factory=list)


class KVRelayConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Invariant: what `get_num_new_matched_tokens` promises of a request was compared with its
    checksums, and is in its table until the request has ended."""

    made_for: ClassVar[dict[str, Copies]] = {}  # by the engine's id

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not saved is computed again

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._copies = self.made_for[vllm_config.kv_transfer_config.engine_id]
        self._block_size: int = vllm_config.cache_config.block_size
        self._num_blocks: int = kv_cache_config.num_blocks
        self._loads: dict[str, range] = {}  # in the step that is scheduled

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
        moves = Moves()
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            (block_ids,) = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            end = before[request_id] + num_new - len(drafts)
            about = block_ids, loads.get(request_id, range(0)), end
            moves.each.append(Move(_key(request_id), *about))
        return moves

    # Where the model runs

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._copies.register(kv_caches, self._num_blocks)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._copies.load(self._get_connector_metadata().each)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All were loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """All are saved after the step."""

    def wait_for_save(self) -> None:
        self._copies.save(self._get_connector_metadata().each, self._block_size)


def _key(request_id: str) -> str:
    """As `Begin` has it: vLLM adds a random part."""
    return request_id.rpartition("-")[0]
