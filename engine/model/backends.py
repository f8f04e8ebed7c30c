"""Whose kernels compute what on a GPU, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.model.errors import ModelError, check_one_of

BACKENDS = ("auto", "triton", "flashinfer")


@dataclass(frozen=True, slots=True)
class Backends:
    """Each one of BACKENDS; auto: Triton's kernels, which need no other package."""

    attention: str = "auto"
    moe: str = "auto"  # experts of a mixture

    def check(self, device_type: str) -> None:
        """Raises ModelError for an unknown one, and for one that a CPU does not have."""
        for name, value in (("attention_backend", self.attention), ("moe_backend", self.moe)):
            check_one_of(name, value, BACKENDS)
            if value != "auto" and device_type == "cpu":
                raise ModelError(f"{name} {value} needs a GPU; this worker computes on a CPU")
