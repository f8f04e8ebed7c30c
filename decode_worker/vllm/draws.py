"""Seeds on CPUs, in each process that computes a model.

vLLM 0.32 draws a token for a prompt that is not computed to its end, and takes the draw back by the
generator's offset, which generators of CPUs do not have: it raises, and the worker ends. Here such
a prompt's generator is out of reach while the step draws, so that there is nothing to take back.
"""

from __future__ import annotations

from typing import Any

NEEDED = ("sample_tokens", "discard_request_mask", "input_batch")


def keep_draws(worker: Any) -> bool:
    """Begin, in the `worker` of a rank. Returns False where its vLLM samples in another way."""
    runner = worker.model_runner
    if not all(hasattr(runner, name) for name in NEEDED):
        return False
    sample = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators  # by row; draws and their return look there
        not_drawn = runner.discard_request_mask.np
        kept = {row: generators.pop(row) for row in [*generators] if not_drawn[row]}
        try:
            return sample(*args, **kwargs)
        finally:
            generators.update(kept)

    runner.sample_tokens = sample_tokens
    return True
