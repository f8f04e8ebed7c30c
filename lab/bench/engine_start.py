"""A fresh process up to its first token: what `kvrelay bench engine` starts and times.

`python -m kvrelay.lab.bench.engine_start SPEC` writes one JSON object: when each stage was
reached, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import time


def main(text: str) -> None:
    reached = {"python": time.monotonic()}
    from kvrelay.cluster.prepare import prepare_model
    from kvrelay.lab.bench.engine import EngineSpec, LoneWorker, Prompts, greedy

    reached["imports"] = time.monotonic()
    given = json.loads(text)
    spec = EngineSpec(**given | {name: tuple(given[name]) for name in ("batches", "prefills")})
    config = spec.config()
    model = prepare_model(config, 1, lambda _: None)
    with LoneWorker(config, model) as worker:
        reached["weights"] = time.monotonic()
        prompts = Prompts(model.config.vocab_size, spec.seed).take(1, spec.input_len)
        worker.generate(prompts, greedy(1))
        reached["first token"] = time.monotonic()
    sys.stdout.write(json.dumps(reached) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
