"""Several models at one router: no prompt at another model's worker, and no wait for its requests.
All workers here are equal but for the model that they serve, their KV too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.node import Effect, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams, TokenDelta
from kvrelay.engine.stats import Role, RouterUp
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import (
    Cancel,
    DrainReport,
    Failed,
    Output,
    PromptRouted,
    RoleChanged,
    Submit,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from kvrelay.router.models import AddModel, ForModel, ModelRouters, RemoveModel
from kvrelay.router.router import Router
from tests.router.script import BLOCK, CLIENT, Outbox, worker_info, worker_stats

MODELS = ("large", "small")


class Models(Outbox):
    """Feeds the routers of two models with one decode worker each, `decode-large` and
    `decode-small`."""

    def __init__(self, *workers: str, **config: Any) -> None:
        self.now = 100.0
        config = {"max_queue": 4, **config}
        self.routers = ModelRouters(
            {
                model: Router("router-0", RouterConfig(**config), controller="controller")
                for model in MODELS
            }
        )
        self.sent: list[tuple[str, Any]] = []
        self.notes: list[Note] = []
        self.wakes: list[tuple[float, str]] = []
        self.perform(self.routers.start(self.now))
        for worker in workers or ("decode-large", "decode-small"):
            self.up(worker)
        self.sent.clear()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.sent.append((to, message))
                case Wake(after_s, tag):
                    self.wakes.append((self.now + after_s, tag))
                case Note():
                    self.notes.append(effect)
                case _:
                    raise AssertionError(effect)

    def tell(self, message: Any) -> None:
        self.perform(self.routers.receive(self.now, message))

    def up(self, worker: str, **changes: Any) -> None:
        model = worker.split("-")[1]
        self.tell(WorkerUp(worker_info(worker, **{"model": model, **changes})))
        self.tell(KVSnapshot(worker, changes.get("epoch", 1), 0, ()))

    def submit(self, model: str, request_id: str, tokens: Any = range(10)) -> None:
        params = SamplingParams(max_tokens=8, stop_token_ids=(999,))
        self.tell(ForModel(model, Submit(request_id, params, CLIENT, tuple(tokens), 60.0)))

    def token(self, worker: str, request_id: str, attempt: int = 1, **more: Any) -> None:
        delta = TokenDelta(request_id, attempt, 10, (5,), **more)
        self.tell(TokenDeltas(worker, 1, (delta,)))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.wakes and min(self.wakes)[0] <= end:
            first = min(self.wakes)
            self.wakes.remove(first)
            self.now = first[0]
            self.tell(Woken(first[1]))
        self.now = end

    def asked(self) -> set[tuple[str, str]]:
        """Takes which worker was sent which request."""
        sent = [(to, m) for to, m in self.sent if isinstance(m, Decode | Prefill)]
        self.take(Decode), self.take(Prefill)
        return {(to, m.request_id) for to, m in sent}


def test_a_request_goes_to_a_worker_of_its_model() -> None:
    models = Models()
    for number in range(8):
        models.submit(MODELS[number % 2], f"r{number}")
    wanted = {(f"decode-{MODELS[number % 2]}", f"r{number}") for number in range(8)}
    assert models.asked() == wanted


def test_nor_does_a_prefix_lead_it_to_another_model() -> None:
    """Equal weights under two names have equal KV, and each its own workers all the same."""
    models = Models()
    prompt = tuple(range(40))
    blocks = tuple(hash_blocks(worker_info("decode-large").fingerprint, UNSALTED, prompt, BLOCK))
    models.tell(KVSnapshot("decode-large", 1, 1, blocks))
    models.submit("small", "r", prompt)
    assert models.asked() == {("decode-small", "r")}
    decision = models.routers.routers["small"].explain("r")[0]
    assert decision.options.best.fetch_from is None
    assert [each.worker for each in decision.options.decodes] == ["decode-small"]


def test_a_full_queue_of_one_model_refuses_nobody_of_another() -> None:
    models = Models(max_inflight_per_worker=1)
    for number in range(10):
        models.submit("large", f"l{number}")
    refused = {failed.request_id for failed in models.take(Failed)}
    assert len(refused) == 5, "one runs, four wait"
    models.asked()
    models.submit("small", "s")
    assert models.asked() == {("decode-small", "s")}
    assert models.take(Failed) == []


def test_what_a_worker_says_is_for_its_model_only() -> None:
    """Names of requests come from the API: two of one name may run at once."""
    models = Models()
    models.submit("large", "r")
    models.submit("small", "r")
    models.token("decode-large", "r", finish=FinishReason.STOP)
    assert [output.tokens for output in models.take(Output)] == [(5,)]
    routers = models.routers.routers
    assert not routers["large"].live
    assert routers["small"].live["r"].num_output_tokens == 0
    assert models.take(Abort) == []


def test_a_request_whose_worker_is_lost_waits_for_one_of_its_model() -> None:
    models = Models()
    models.submit("large", "r")
    models.asked()
    models.tell(WorkerDown("decode-large", 1, "killed"))
    models.pass_time(1.0)
    assert models.asked() == set()
    models.up("decode-large", epoch=2)
    models.pass_time(1.0)
    assert models.asked() == {("decode-large", "r")}
    assert models.take(Failed) == []


def test_a_late_word_of_an_earlier_epoch_changes_nothing() -> None:
    models = Models()
    models.up("decode-small", epoch=2)
    models.tell(WorkerDown("decode-small", 1, "killed"))
    models.tell(WorkerUp(worker_info("decode-small", model="large")))
    models.submit("small", "r")
    models.submit("large", "l")
    assert models.asked() == {("decode-small", "r"), ("decode-large", "l")}


def test_a_worker_that_starts_again_with_another_model_leaves_the_first() -> None:
    models = Models()
    models.submit("small", "r")
    models.asked()
    models.up("decode-small", epoch=2, model="large")
    models.submit("small", "waits")
    models.pass_time(1.0)
    assert models.asked() == set()
    models.tell(WorkerDown("decode-large", 1, "killed"))
    models.submit("large", "l")
    assert models.asked() == {("decode-small", "l")}


def test_a_model_without_workers_is_refused_alone() -> None:
    models = Models("decode-large", no_workers_wait_s=2.0)
    models.submit("small", "s")
    models.submit("large", "l")
    for _ in range(20):
        models.tell(worker_stats("decode-large"))
        models.pass_time(0.25)
    failed = models.one(Failed)
    assert (failed.request_id, failed.reason) == ("s", Refusal.NO_WORKERS)


def test_each_ticks_by_itself() -> None:
    models = Models()
    assert sorted(tag for _, tag in models.wakes) == ["large tick", "small tick"]
    models.pass_time(0.3)
    assert sorted(tag for _, tag in models.wakes) == ["large tick", "small tick"]


def test_a_worker_that_drains_is_reported_once() -> None:
    models = Models()
    models.submit("small", "r")
    models.asked()
    models.tell(WorkerDraining("decode-small", 1))
    assert models.take(DrainReport) == [DrainReport("router-0", "decode-small", 1, 1)]
    models.tell(WorkerDraining("decode-none", 1))
    assert models.one(DrainReport).num_requests == 0
    models.submit("small", "waits")
    assert models.asked() == set()


def test_a_role_and_another_routers_prompt_are_of_the_workers_model() -> None:
    models = Models("decode-large", "decode-small", "prefill-small")
    models.tell(RoleChanged("prefill-small", 1, Role.DECODE))
    roles = {
        model: sorted(str(each.role) for each in router.status(models.now).workers)
        for model, router in models.routers.routers.items()
    }
    assert roles == {"large": ["decode"], "small": ["decode", "decode"]}
    prompt = tuple(range(8))
    blocks = hash_blocks(worker_info("decode-small").fingerprint, UNSALTED, prompt, BLOCK)
    models.tell(PromptRouted("decode-small", 1, b"".join(blocks)))
    found = {
        model: router.index.lookup(models.now, bytearray(b"".join(blocks))).longest
        for model, router in models.routers.routers.items()
    }
    assert found == {"large": 0, "small": 2}


def test_another_router_hears_of_the_prompts_of_every_model() -> None:
    models = Models()
    models.tell(RouterUp("router-1"))
    models.submit("small", "s")
    models.submit("large", "l")
    assert {m.worker for m in models.take(PromptRouted, "router-1")} == {
        "decode-large",
        "decode-small",
    }


def test_what_fits_into_no_frame_is_refused_by_the_router_that_has_sent_it() -> None:
    models = Models()
    models.submit("small", "r")
    decode = models.one(Decode)
    models.tell(Unsendable("decode-small", decode, "it has a value of no type"))
    assert models.one(Failed).reason is Refusal.UNENCODABLE


def test_a_client_that_goes_ends_its_own_request() -> None:
    models = Models()
    models.submit("large", "r")
    models.submit("small", "r")
    models.tell(ForModel("small", Cancel("r")))
    assert [to for to, m in models.sent if isinstance(m, Abort)] == ["decode-small"]


def test_a_worker_of_a_model_that_is_not_there_is_noted_and_left_alone() -> None:
    models = Models()
    models.up("decode-other")
    assert [note.counter for note in models.notes] == ["unknown_model"]
    assert "'other', and there are large, small" in models.notes[0].text
    models.submit("large", "r")
    assert models.asked() == {("decode-large", "r")}


def test_one_model_is_as_a_router_alone() -> None:
    """Where there are no [[models]], what is sent is what one router sends."""
    alone = Router("router-0", RouterConfig())
    only = ModelRouters({"": Router("router-0", RouterConfig())})
    submit = Submit("r", SamplingParams(max_tokens=8), CLIENT, tuple(range(10)), 60.0)
    messages = [
        WorkerUp(worker_info("decode-0")),
        KVSnapshot("decode-0", 1, 0, ()),
        submit,
        TokenDeltas("decode-0", 1, (TokenDelta("r", 1, 10, (5,)),)),
        WorkerDown("decode-0", 1, "killed"),
    ]
    assert only.start(0.0) == alone.start(0.0)
    for message in messages:
        expected = alone.receive(1.0, message)
        found = only.receive(1.0, message)
        assert [
            replace(each, tag=each.tag.removeprefix(" ")) if isinstance(each, Wake) else each
            for each in found
        ] == expected


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left_of_requests_that_have_ended(model: str) -> None:
    models = Models()
    for number, each in enumerate(MODELS):
        models.submit(each, f"r{number}")
        models.token(f"decode-{each}", f"r{number}", finish=FinishReason.STOP)
    assert models.routers.check_idle() == []
    models.submit(model, "left")
    assert any("left" in line for line in models.routers.check_idle())


def first_tokens(rate_of_large: float) -> list[float]:
    """How long each request of the small model waits for its first token, beside so many requests
    a second of the large one. A worker takes four at once, 0.1 s for a prompt and 0.4 s for the
    rest, and says how it is four times a second."""
    models = Models(max_queue=64, max_inflight_per_worker=4)
    events: list[tuple[float, int, Callable[[], None]]] = []
    numbers, submitted, waited = count(), dict[str, float](), dict[str, float]()

    def at(at_s: float, call: Callable[[], None]) -> None:
        heappush(events, (at_s, next(numbers), call))

    def submit(model: str, name: str) -> None:
        submitted[name] = models.now
        models.submit(model, name)

    def serve() -> None:
        for worker, name in sorted(models.asked()):
            at(models.now + 0.1, partial(models.token, worker, name))
            last = TokenDelta(name, 1, 11, (6,), finish=FinishReason.STOP)
            at(models.now + 0.5, partial(models.tell, TokenDeltas(worker, 1, (last,))))
        for output in models.take(Output):
            waited.setdefault(output.request_id, models.now - submitted[output.request_id])

    for tick in range(120):
        for worker in ("decode-large", "decode-small"):
            at(100.0 + 0.25 * tick, partial(models.tell, worker_stats(worker)))
    for number in range(50):
        at(100.05 + 0.37 * number, partial(submit, "small", f"s{number}"))
    for number in range(int(20 * rate_of_large)):
        at(100.0 + number / rate_of_large, partial(submit, "large", f"l{number}"))
    while events:
        at_s, _, call = heappop(events)
        models.pass_time(at_s - models.now)
        call()
        serve()
    refused = models.take(Failed)
    assert bool(refused) == (rate_of_large > 8), "eight a second are served"
    assert all(failed.request_id.startswith("l") for failed in refused)
    return [waited[f"s{number}"] for number in range(50)]


@pytest.mark.slow
def test_an_overload_of_one_moves_no_first_token_of_the_other() -> None:
    alone = first_tokens(rate_of_large=0.1)
    assert max(alone) == pytest.approx(0.1)
    assert first_tokens(rate_of_large=100.0) == pytest.approx(alone)


def test_a_model_that_is_added_is_served_as_the_others() -> None:
    models = Models()
    models.tell(RouterUp("router-1"))
    models.tell(AddModel("new", Router("router-0", RouterConfig(), controller="controller")))
    models.up("decode-new-0")
    models.take(PromptRouted)
    models.submit("new", "n")
    assert models.asked() == {("decode-new-0", "n")}
    models.token("decode-new-0", "n", finish=FinishReason.LENGTH)
    assert models.take(Output)[-1].finish is FinishReason.LENGTH
    assert models.take(PromptRouted, "router-1"), "it knows the routers of before"


def test_what_a_removed_model_has_left_is_refused_and_the_other_goes_on() -> None:
    models = Models()
    for model, name in (("large", "l"), ("small", "s")):
        models.submit(model, name)
    models.sent.clear()
    models.tell(RemoveModel("large"))
    (failed,) = models.take(Failed)
    assert (failed.request_id, failed.reason) == ("l", Refusal.NO_WORKERS)
    assert models.routers.status(models.now).totals.submitted == 2, "counters never fall"
    assert [each.request_id for each in models.take(Abort, "decode-large")] == ["l"]
    models.submit("large", "late")  # its client had begun before
    assert [each.request_id for each in models.take(Failed)] == ["late"]
    models.pass_time(5.0)
    models.token("decode-large", "l")
    models.token("decode-small", "s", finish=FinishReason.LENGTH)
    (output,) = models.take(Output)
    assert output.request_id == "s"
    assert (list(models.routers.routers), models.routers.default) == (["small"], "small")
    assert models.routers.check_idle() == []
