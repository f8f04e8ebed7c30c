"""Several models at one router: a `Router` for each, which share its name and its process.

A worker serves one model (`WorkerInfo.model`). What it says, and what is said of it, goes to the
router of that model, and a client's request to the one that it names; so a prompt reaches no worker
of another model, and each has an index, a queue, admission, limits and costs of its own: where one
is overloaded, the requests of the others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.node import Effect, Exit, NodeId, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.request import Refusal
from kvrelay.engine.stats import RouterDown, RouterUp, WorkerInfo
from kvrelay.router.messages import Cancel, Failed, Submit, WorkerDown, WorkerUp
from kvrelay.router.router import Router
from kvrelay.router.status import RouterStatus, Totals


@dataclass(frozen=True, slots=True)
class ForModel:
    """A message to the router of `model`; or an effect of that router, which its own executor
    performs."""

    model: str
    content: Any


@dataclass(frozen=True, slots=True)
class AddModel:
    """From the process: another model is served from now on."""

    model: str
    router: Router


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """From the process: its requests that have not ended are refused."""

    model: str


class ModelRouters:
    """A Node. Invariant: `_up` has the latest epoch of each worker that is up, and what comes from
    it reaches the router of its model only."""

    def __init__(self, routers: Mapping[str, Router]) -> None:
        """`routers`: by model, all of one name; the first is for what names no model."""
        self.routers = dict(routers)
        self.default = next(iter(self.routers))
        self.node_id: NodeId = self.routers[self.default].node_id
        self._up: dict[NodeId, WorkerInfo] = {}
        self._others: dict[NodeId, RouterUp] = {}
        self._removed = Totals()  # models' counts: they must not fall

    def start(self, now: float) -> list[Effect]:
        return [
            effect
            for model, router in self.routers.items()
            for effect in _of_model(model, router.start(now))
        ]

    def receive(self, now: float, message: Any) -> list[Effect]:
        worker = getattr(message, "worker", None)  # most messages are from one, or about one
        if worker is None:
            return self._receive(now, message)
        info = self._up.get(worker)
        if info is not None and isinstance(message, WorkerDown) and message.epoch >= info.epoch:
            del self._up[worker]
        return self._tell(now, self.default if info is None else info.model, message)

    def _receive(self, now: float, message: Any) -> list[Effect]:
        match message:
            case ForModel(model, content):
                return self._tell(now, model, content)
            case Woken(tag):
                model, _, tag = tag.rpartition(" ")
                return self._tell(now, model, Woken(tag))
            case WorkerUp():
                return self._on_worker_up(now, message)
            case AddModel(model, router):
                self.routers[model] = router
                effects = _of_model(model, router.start(now))
                for up in self._others.values():
                    effects += self._tell(now, model, up)
                return effects
            case RemoveModel(model):
                return self._remove(now, model)
            case RouterUp() | RouterDown() | Unsendable():
                if isinstance(message, RouterUp):
                    self._others[message.router] = message
                elif isinstance(message, RouterDown):
                    self._others.pop(message.router, None)
                each = [self._tell(now, model, message) for model in self.routers]
                return [effect for effects in each for effect in effects]
            case _:
                return self._tell(now, self.default, message)

    def status(self, now: float) -> RouterStatus:
        """What the routers know, as if they were one."""
        first, *others = [router.status(now) for router in self.routers.values()]
        for other in others:
            first.totals.add(other.totals)
            first.workers += other.workers
            first.num_live += other.num_live
            first.num_queued += other.num_queued
            first.bad_links += other.bad_links
        totals = first.totals
        totals.add(self._removed)
        first.cache_hit_rate = totals.cached_tokens / max(1, totals.prompt_tokens)
        errors = [each.prediction_error for each in (first, *others)]
        first.prediction_error = max((e for e in errors if e is not None), default=None)
        return first

    def check_idle(self) -> list[str]:
        """A line for each thing that should not be there when no request is."""
        return [line for router in self.routers.values() for line in router.check_idle()]

    def _on_worker_up(self, now: float, up: WorkerUp) -> list[Effect]:
        info = up.info
        if info.model not in self.routers:
            text = f"{info.worker} is of {info.model!r}, and there are {', '.join(self.routers)}"
            return [Note("warning", "unknown_model", text)]
        before, effects = self._up.get(info.worker, info), list[Effect]()
        if before.epoch > info.epoch:
            return []
        if before.model != info.model:
            why = f"it serves {info.model} now"
            effects = self._tell(now, before.model, WorkerDown(info.worker, info.epoch, why))
        self._up[info.worker] = info
        return effects + self._tell(now, info.model, up)

    def _remove(self, now: float, model: str) -> list[Effect]:
        router = self.routers.pop(model)
        self.default = next(iter(self.routers))
        self._up = {worker: info for worker, info in self._up.items() if info.model != model}
        effects: list[Effect] = []
        for record in list(router.live.values()):
            effects.append(_refused(model, record.submit))
            effects += _of_model(model, router.receive(now, Cancel(record.request_id)))
        self._removed.add(router.status(now).totals)
        return effects

    def _tell(self, now: float, model: str, message: Any) -> list[Effect]:
        if model not in self.routers:  # it was removed, and this was on its way
            return [_refused(model, message)] if isinstance(message, Submit) else []
        return _of_model(model, self.routers[model].receive(now, message))


def _refused(model: str, submit: Submit) -> Send:
    why = f"the model {model} is served no more"
    return Send(submit.reply_to, Failed(submit.request_id, Refusal.NO_WORKERS, why))


def _of_model(model: str, effects: list[Effect]) -> list[Effect]:
    """What a router asked for, so that what comes of it finds the way back."""
    return [each if type(each) is Send else _tagged(model, each) for each in effects]


def _tagged(model: str, effect: Effect) -> Effect:
    match effect:
        case Exit():
            return effect
        case Wake(after_s, tag):
            return Wake(after_s, f"{model} {tag}")
        case Note(level, counter, text):
            return Note(level, counter, f"{model}: {text}" if model else text)
        case _:
            return ForModel(model, effect)
