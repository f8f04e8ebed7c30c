"""Adapters at vLLM, which loads one before the request that needs it: by the bytes that were
registered, of which this machine has a copy, whatever has become of the folder since."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.adapter_copies import kept_folder, read_registered
from kvrelay.engine.adapters import AdapterError
from kvrelay.engine.host import first_line
from kvrelay.engine.needs import Need


class VllmAdapters:
    """Owned by the thread of an engine. Invariant: a number stands for one adapter's bytes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers: dict[bytes, int] = {}

    def request(self, need: Need) -> Any:
        """vLLM's LoRARequest of one that is loaded; takes as long as that. Raises AdapterError."""
        from vllm.lora.request import LoRARequest

        number = self._numbers.setdefault(need.digest, len(self._numbers) + 1)
        if number not in self._engine.list_loras():
            read_registered(need)
        request = LoRARequest(need.digest.hex(), number, str(kept_folder(need)))
        try:
            self._engine.add_lora(request)
        except Exception as error:  # what it refuses has classes of its own
            raise AdapterError(f"vLLM does not load it: {first_line(error)}") from error
        return request
