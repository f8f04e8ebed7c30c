"""A process that `kvrelay serve` supervises.

`python -m kvrelay.cluster.processes.child KIND NAME FD`: KIND is `router` or `controller`; NAME
says in `ps` which it is. FD is a channel (`engine.wire.channel`): first comes a ControlSpec, or a
RouterOrder (after a LoadRouter, if it succeeds another). A process whose channel is at its end
has lost its supervisor, and ends."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from kvrelay.cluster.control.messages import RouterLost, RouterStarted
from kvrelay.cluster.processes.orders import (
    ControlSpec,
    Follow,
    GaveUp,
    Leads,
    Reload,
    RestartWorkers,
    RouterLoaded,
    Serves,
    Stop,
    WorkersRestarted,
)
from kvrelay.cluster.status import RestartStatus
from kvrelay.engine.host import first_line
from kvrelay.engine.logs import set_up
from kvrelay.engine.stderr import set_up_process
from kvrelay.engine.wire.channel import BEAT_S, Beat, Channel, ChannelError, inherited

log = logging.getLogger("kvrelay")


class Parent:
    """The supervisor, as its process sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._beat()

    async def first(self) -> Any:
        """What the process is to be."""
        return await self._channel.receive()

    async def follow(self, on_message: Callable[[Any], None]) -> None:
        """Hand on what comes, until the supervisor is gone."""
        try:
            while True:
                on_message(await self._channel.receive())
        except EOFError:
            return
        except ChannelError as error:
            log.error("the supervisor is not understood: %s", error)

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def _beat(self) -> None:
        if not self._channel.is_open:
            os._exit(1)  # the supervisor has died
        self.send(Beat())
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)


async def run_router(parent: Parent) -> int:
    from kvrelay.cluster.processes.router_process import RouterProcess, load_tokenizers
    from kvrelay.cluster.processes.router_spec import LoadRouter, RouterProcessError, UseModels

    order, tokenizers = await parent.first(), None
    if isinstance(order, LoadRouter):
        set_up(order.config.log, order.router)
        try:
            tokenizers = await load_tokenizers(order.models, order.config.by_model())
        except Exception as error:  # whatever reads them has raised
            parent.send(GaveUp(f"{order.router}: {type(error).__name__}: {first_line(error)}"))
            return 1
        parent.send(RouterLoaded(order.router))
        order = await parent.first()
    spec = order.spec
    set_up(spec.config.log, spec.router)
    sock = socket.socket(fileno=order.sock)
    stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()

    def on_message(message: Any) -> None:
        if isinstance(message, Stop) and not stop.done():
            stop.set_result(message)
        elif isinstance(message, Reload):
            process.hangup.set()
        elif isinstance(message, Follow):
            process.follow(message.controller)
        elif isinstance(message, UseModels):
            process.use_models(message, parent.send)

    try:
        process = RouterProcess(spec, order.listening, parent.send, tokenizers)
        gone = asyncio.create_task(parent.follow(on_message))
        parent.send(await process.start(sock, order.host))
    except (RouterProcessError, OSError) as error:
        parent.send(GaveUp(f"{spec.router}: {error}"))
        return 1
    serving = asyncio.create_task(process.serves())
    serving.add_done_callback(lambda _: parent.send(Serves(spec.router)))
    ends: set[asyncio.Future[Any]] = {gone, stop, process.failed}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if process.failed.done():
        failure = process.failed.result()
        why = f"{type(failure).__name__}: {first_line(failure)}"
        parent.send(RouterLost(spec.router, spec.epoch, why))
        return 1
    if not stop.done():  # the supervisor has died
        return 1
    asked = stop.result()
    if asked.refuse:
        left = await process.drain(asked.drain_s)
        if left and asked.drain_s:
            log.warning("%d requests are cut off", left)
        else:
            log.info("drained: no request is left")
    await process.close(0.0 if asked.refuse else asked.drain_s)
    return 0


async def run_controller(parent: Parent) -> int:
    from kvrelay.cluster.prepare import PreparedModels
    from kvrelay.cluster.processes.control_process import ControlProcess

    spec: ControlSpec = await parent.first()
    set_up(spec.config.log, "controller")
    process = ControlProcess(spec, parent.send)
    stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()

    def on_message(message: Any) -> None:
        match message:
            case PreparedModels():
                process.use_models(message)
            case Stop():
                stop.set_result(message)
            case Leads(is_kept):
                process.lease_renewed(is_kept)
            case RouterStarted() | RouterLost():
                process.say(message)
            case RestartWorkers(only_outdated):
                process.restart_workers(
                    only_outdated, lambda why: parent.send(WorkersRestarted(why))
                )
            case RestartStatus():
                process.show_restart(message)

    await process.start()
    gone = asyncio.create_task(parent.follow(on_message))
    ends: set[asyncio.Future[Any]] = {gone, stop}
    await asyncio.wait({*ends, process.failed}, return_when=asyncio.FIRST_COMPLETED)
    if process.failed.done():
        parent.send(GaveUp(process.failed.result()))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        await process.end(stop.result().keep_workers)
    return 0


def main() -> None:
    kind, end = sys.argv[1], inherited(sys.argv[3])
    set_up_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # where does it hang? stacks go to stderr
    run = {"router": run_router, "controller": run_controller}[kind]

    async def begin() -> int:
        return await run(Parent(await Channel.over(end)))

    code = asyncio.run(begin())
    logging.shutdown()
    os._exit(code)  # no thread of a library holds it up


if __name__ == "__main__":
    main()
