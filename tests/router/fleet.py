"""Workers that have told their rates, what they hold, and a choice among them."""

from __future__ import annotations

from dataclasses import replace

from router.cost import CostModel, Work
from router.endpoint import Endpoint
from router.policy import Choice, Policy
from router.prefix_index import Held
from tests.router.script import worker_info, worker_stats

STATS = worker_stats("", prefill_tokens_per_s=1000.0, decode_step_s=0.01)


def endpoint(name: str, *, info: dict[str, object] | None = None, **stats: object) -> Endpoint:
    """A worker that has told its rates, and `stats`."""
    made = Endpoint(worker_info(name, num_blocks=1000, **(info or {})), heard_at=0.0)
    told = {"worker": name, "num_free_blocks": 1000, **stats}
    made.observe(0.0, replace(STATS, **told))  # type: ignore[arg-type]
    return made


def on(device: int = 0, host: int = 0, disk: int = 0) -> Held:
    """Tokens that a worker holds and has said so."""
    return Held(device, host, disk, said=device + host + disk)


def work(
    num_tokens: int,
    output_tokens: float = 100.0,
    lenders: tuple[Endpoint, ...] = (),
    **cached: int | Held,
) -> Work:
    """`cached`: tokens by worker, of its device where it is a number."""
    held = {
        name.replace("_", "-"): on(tokens) if isinstance(tokens, int) else tokens
        for name, tokens in cached.items()
    }
    return Work(num_tokens, held, output_tokens, lenders)


def choose(todo: Work, *workers: Endpoint, policy: str = "prefix") -> Choice:
    decodes = [w for w in workers if w.worker.startswith("decode")]
    prefills = [w for w in workers if w.worker.startswith("prefill")]
    return Policy(policy, CostModel(), lambda worker: 0).choose(todo, decodes, prefills)


def names_of(choice: Choice) -> tuple[str, str | None]:
    return choice.decode.worker, choice.prefill.worker if choice.prefill else None
