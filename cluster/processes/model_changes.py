"""Models that come and go while the server serves: `kvrelay models add` and `remove`.

One change has three steps. Routers get the union of the models before and after, and offer those
that stay; requests for one that goes end meanwhile. Then another controller takes over: it adopts
the workers of the models that stay, starts those of a new one, and ends those of one that is gone.
When all are up, routers offer what is there now. Where a new one does not come up, all is as it was
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvrelay.cluster.config import Config, ConfigError, ModelEntry
from kvrelay.cluster.orders import ChangeModels
from kvrelay.cluster.prepare import (
    PreparedModels,
    for_gpus,
    num_gpus,
    prepare_models,
    uses_gpus,
)
from kvrelay.cluster.processes.adapter_bases import check_names
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.processes.kept_models import changes_file, keep_change
from kvrelay.cluster.processes.router_spec import ServedModel, UseModels
from kvrelay.cluster.processes.supervised import Child
from kvrelay.engine.host import in_thread
from kvrelay.engine.node import NodeId
from kvrelay.worker.kv_plan import BuildError

OnModel = Callable[[Config, PreparedModels], None]


class Server(Protocol):
    """The supervisor, as a change sees it."""

    @property
    def serving(self) -> dict[NodeId, Child]:
        """The routers that run now."""
        ...

    def serve_models(self, config: Config, models: PreparedModels) -> None:
        """Whoever starts from now on serves these."""
        ...

    async def replace_controller(self) -> None:
        """Raises HandoverError where not all workers are up in time."""
        ...


class ModelChanges:
    """Owned by the supervisor, which begins one change at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.forks: OnModel = lambda *_: None  # `Supervisor.use_model` says what it does
        self._answers: dict[tuple[NodeId, int], asyncio.Future[None]] = {}
        self._number = 0

    def answered(self, router: NodeId, number: int) -> None:
        """A router serves what it was told to."""
        answer = self._answers.get((router, number))
        if answer is not None and not answer.done():
            answer.set_result(None)

    async def change(self, config: Config, models: PreparedModels, order: ChangeModels) -> None:
        """`config`, `models`: what is served. Raises HandoverError."""
        name, entry = order.name, order.entry
        drain_s = config.cluster.drain_s if order.drain_s is None else order.drain_s
        try:
            after = config.with_model(name, entry)
            check_names(after, ())
            found = await in_thread(partial(_prepared, after, models, entry), "prepare-model")
        except (ConfigError, BuildError) as error:
            raise HandoverError(str(error)) from None
        union = (config, models) if entry is None else (after, found)
        staying = tuple(each for each in models.by_name if each in found.by_name)
        self._server.serve_models(*union)
        try:
            await self._tell(*union, staying, drain_s)
            _check_still_free(after)
            self._server.serve_models(after, found)
            await self._server.replace_controller()
        except HandoverError:
            self._server.serve_models(config, models)
            await self._tell(config, models, tuple(models.by_name), 0.0)
            await self._server.replace_controller()
            raise
        await self._tell(after, found, tuple(found.by_name), 0.0)
        self.forks(after, found)
        try:
            keep_change(config, name, entry)
        except OSError as error:
            raise HandoverError(
                f"{name} is {'added' if entry else 'removed'}, and that does not outlive the "
                f"server: {changes_file(config)} cannot be written: {error.strerror}"
            ) from None

    async def _tell(
        self, config: Config, models: PreparedModels, offered: tuple[str, ...], drain_s: float
    ) -> None:
        """All routers that run. Raises HandoverError."""
        self._number += 1
        number = self._number
        order = UseModels(number, config, ServedModel.by_name(models), offered, drain_s)
        self._answers = {
            (router, number): asyncio.get_running_loop().create_future()
            for router in self._server.serving
        }
        for child in self._server.serving.values():
            child.send(order)
        timeout_s = drain_s + config.cluster.start_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        while late := self._late():
            if asyncio.get_running_loop().time() > deadline:
                raise HandoverError(f"{', '.join(late)} does not follow within {timeout_s:g} s")
            await asyncio.wait([self._answers[router, number] for router in late], timeout=1.0)

    def _late(self) -> list[NodeId]:
        """One that has ended starts anew with what is served then."""
        there = self._server.serving
        return [r for (r, _), answer in self._answers.items() if r in there and not answer.done()]


def _check_still_free(config: Config) -> None:
    """Routers refuse the new model's names to adapters from now on; one that was registered just
    before keeps its name. Raises HandoverError."""
    try:
        check_names(config, ())
    except ConfigError as error:
        raise HandoverError(str(error)) from None


def _prepared(config: Config, models: PreparedModels, entry: ModelEntry | None) -> PreparedModels:
    """Those that were served, with the new one found and checked. Raises BuildError."""
    known = models.by_name
    if entry is not None:
        found = num_gpus()
        for_gpus(config, found)
        alone = config.with_models((entry,))
        are_here = not config.cluster.address
        on_gpu = uses_gpus(config, found)
        new = prepare_models(alone, lambda _: None, are_here=are_here, on_gpu=on_gpu)
        known = known | new.by_name
    return PreparedModels({name: known[name] for name in config.by_model()})
