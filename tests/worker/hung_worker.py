"""A worker's process whose first step hangs: `python -m tests.worker.hung_worker FOLDER FD`.

All of it is the real thing but for the function that computes. FD is the channel to its guardian.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from kvrelay.cluster.processes import worker as worker_main
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.wire.channel import BlockingChannel, inherited
from kvrelay.worker.process import Listening, WorkerProcess
from kvrelay.worker.spec import WorkerSpec

WORKER = "decode-0"


def wait_for_a_kernel_that_hangs(*_: Any) -> None:
    threading.Event().wait()


def start(spec: WorkerSpec, listening: Listening) -> tuple[WorkerProcess | None, Any]:
    """Starts as a worker does, and a request comes at once."""
    from kvrelay.engine.model.runner import ModelRunner

    ModelRunner.execute = wait_for_a_kernel_that_hangs  # type: ignore[assignment]
    process, answer = REAL_START(spec, listening)
    assert process is not None, answer
    params = SamplingParams(max_tokens=4, temperature=0)
    request = Decode("a", params, 0, "router-0", (1, 2, 3), 3, 60.0)
    process._host.deliver_soon(WORKER, request)
    return process, answer


REAL_START = worker_main.start


def main() -> None:
    engine = EngineSection(
        num_blocks=16, threads=1, max_model_len=128, step_timeout_s=0.1, core_dumps=sys.argv[1]
    )
    spec = WorkerSpec(
        cluster="c",
        worker=WORKER,
        role=Role.DECODE,
        epoch=1,
        model_dir=str(resolve_model("smollm2-135m", progress=logging.info)),
        model=ModelSection(name="smollm2-135m", dtype="float32", device="cpu"),
        engine=engine,
        tiers=TiersSection(),
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    worker_main.start = start
    guardian = BlockingChannel(inherited(sys.argv[2]))
    sys.exit(worker_main.serve(spec, Listening("127.0.0.1", b"token" * 8, 1 << 20), guardian))


if __name__ == "__main__":
    main()
