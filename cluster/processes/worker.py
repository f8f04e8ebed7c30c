"""A worker's process, as its guardian starts it.

`python -m kvrelay.cluster.processes.worker NAME FD`. It leaves the guardian's session, so that it
outlives it: weights and KV are worth more than what started them. NAME says in `ps` which worker
it is. FD is a channel (`engine.wire.channel`): a WorkerOrder comes, and a WorkerStarted or
StartFailed goes, then ProcessEnds."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import NoReturn

from kvrelay.engine import logs
from kvrelay.engine.host import NodeExit, first_line, settle_memory
from kvrelay.engine.stderr import set_up_process
from kvrelay.engine.wire.channel import BlockingChannel, inherited
from kvrelay.worker.core_dumps import CoreDumps
from kvrelay.worker.messages import ProcessEnds, StartFailed, WorkerStarted
from kvrelay.worker.process import BuiltWorker, Listening, WorkerProcess
from kvrelay.worker.spec import WorkerOrder, WorkerSpec


def start(
    spec: WorkerSpec, listening: Listening
) -> tuple[WorkerProcess | None, WorkerStarted | StartFailed]:
    """Build the worker and serve. What would fail again is reported as permanent."""
    from kvrelay.engine.model.errors import WeightsMissing
    from kvrelay.worker.kv_plan import BuildError

    try:
        log = str(spec.log.path / f"{spec.worker}.log") if spec.log.file_mib else ""
        process = WorkerProcess(_build(spec), listening, spec.model.device, log)
        settle_memory()
        return process, process.start()
    except BuildError as error:
        cause = error.__cause__
        missing = cause.digest if isinstance(cause, WeightsMissing) else b""
        failed = StartFailed(spec.worker, spec.epoch, str(error), not missing, missing)
        return None, failed
    except Exception as error:
        logging.getLogger("kvrelay").exception("%s does not start", spec.worker)
        why = f"{type(error).__name__}: {first_line(error)}"
        return None, StartFailed(spec.worker, spec.epoch, why, permanent=False)


def _build(spec: WorkerSpec) -> BuiltWorker:
    """Imports what its engine needs: an environment that has vLLM has not all of ours."""
    from kvrelay.cluster.roles import ROLES, build_worker

    if spec.engine.runs == "vllm":
        from kvrelay.decode_worker.vllm.build import build

        return build(spec, ROLES)
    return build_worker(spec)


def serve(spec: WorkerSpec, listening: Listening, guardian: BlockingChannel) -> int:
    """Returns the exit code of the process."""
    dumps = CoreDumps(spec.engine.core_dumps, spec.worker, on_gpu=spec.on_gpu)
    dumps.prepare(os.environ)
    process, answer = start(spec, listening)
    guardian.send(answer)
    if process is None or not isinstance(answer, WorkerStarted):
        return 1
    try:
        process.wait()
    except BaseException as error:  # the state of a node that raised is not to be trusted
        why, hangs = first_line(error), isinstance(error, NodeExit) and error.hangs
        stacks = dumps.write_stacks(why) if hangs else None
        where = f"; stacks: {stacks}" if stacks else ""
        guardian.send(ProcessEnds(f"{type(error).__name__}: {why}{where}"))
        if hangs:  # what it did, others have taken over: its step was late for long
            dumps.dump_gpus()
        if process.is_alone:
            process.close()  # nobody will take what it has in host memory
        return 1
    process.close()
    return 0


def run(fd: int) -> NoReturn:
    """The life of the process, whose channel is the file `fd`."""
    set_up_process()
    faulthandler.register(signal.SIGUSR1)  # where does it hang? stacks go to the log
    guardian = BlockingChannel(inherited(fd))
    order: WorkerOrder = guardian.receive()
    logs.set_up(order.spec.log, order.spec.worker, takes_stderr=True)
    logs.tell_ranks(order.spec.log, order.spec.worker)
    code = serve(order.spec, order.listening, guardian)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    if os.fork():  # a daemon: its parent does not wait for it
        os._exit(0)
    os.setsid()
    run(int(sys.argv[2]))


if __name__ == "__main__":
    main()
