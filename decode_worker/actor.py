"""A decode worker as Ray knows it; one of both roles is one too."""

from __future__ import annotations

from kvrelay.worker.guardian import WorkerGuardian


class DecodeWorker(WorkerGuardian):
    """The actor that holds a decode worker's place on its machine."""
