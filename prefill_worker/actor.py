"""A prefill worker as Ray knows it."""

from __future__ import annotations

from kvrelay.worker.guardian import WorkerGuardian


class PrefillWorker(WorkerGuardian):
    """The actor that holds a prefill worker's place on its machine."""
