"""Supervisors of one cluster, with a real Redis between them and processes that are not there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvrelay.cluster.config import ClusterSection, Config, ConfigError, StateSection
from kvrelay.cluster.control.lease import LeaseKey, epoch_of
from kvrelay.cluster.control.messages import Checkpoint, SendPeers
from kvrelay.cluster.orders import Service, ServiceRequest
from kvrelay.cluster.prepare import PreparedModel, PreparedModels
from kvrelay.cluster.processes import supervisor
from kvrelay.cluster.processes.control_process import ControlProcess
from kvrelay.cluster.processes.launch import _open_life
from kvrelay.cluster.processes.life import Deadline, now_s
from kvrelay.cluster.processes.orders import (
    ControllerListens,
    ControlSpec,
    Follow,
    Leads,
    LeaseOrder,
)
from kvrelay.cluster.processes.ready import ServeError
from kvrelay.cluster.processes.router_spec import RouterOrder
from kvrelay.cluster.processes.servers import Leadership
from kvrelay.cluster.processes.supervisor import Supervisor
from kvrelay.cluster.state.given import with_cluster_token
from kvrelay.worker.messages import Peer, UpdatePeers
from tests.cluster.state.stores import Server

pytestmark = pytest.mark.anyio
TOKEN = "secret-of-the-tests"


class Child:
    """A process that is there once it was started, and hears."""

    def __init__(self, name: str, on_message: Any, on_end: Any) -> None:
        self.name, self.say, self.on_end = name, on_message, on_end
        self.is_alive, self.started_at, self.heard_at = False, 0.0, 1e12
        self.heard: list[Any] = []

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        self.is_alive = True
        self.heard += [] if first is None else [first]

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def kill(self) -> None:
        if self.is_alive:
            self.is_alive = False
            asyncio.get_running_loop().call_soon(self.on_end, -9)

    async def ended(self, timeout_s: float) -> bool:
        self.kill()
        return True

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def config(store: Server, tmp_path: Path) -> Config:
    return with_cluster_token(
        replace(
            Config(),
            cluster=ClusterSection(name="c", token=TOKEN, lease_s=1.0),
            state=StateSection(url=store.url),
        )
    )


Make = Callable[..., Any]


@pytest.fixture
async def make(config: Config, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(supervisor, "Child", Child)
    none: Any = None
    async with contextlib.AsyncExitStack() as stack:

        async def server(port: int, **model: str) -> Supervisor:
            own = replace(config, model=replace(config.model, **model))
            sockets: Any = {"router-0": SimpleNamespace(getsockname=lambda: ("h", port))}
            life = await _open_life(own, sockets, None)
            names = {f"router-0@{port}": SimpleNamespace(fileno=lambda: 0)}
            made = Supervisor(own, none, names, life, none, "h", lambda *_: None, None)  # type: ignore[arg-type]
            await made.start()
            model = PreparedModel(Path(), none, "m", 1, none, checkpoint=own.model.name.encode())
            made.use_models(PreparedModels({"": model}))
            stack.push_async_callback(made.end, 0.0)
            return made

        yield server


async def until(holds: Callable[[], Any], why: str = "it did not come true") -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


def leads(server: Any) -> bool:
    return server._leads and server._controller is not None and bool(server._controller.heard)


def listens(server: Any) -> Peer:
    """Its controller announces where it listens."""
    spec: ControlSpec = server._controller.of(ControlSpec)[-1]
    peer = Peer("controller", "h", 7, spec.epoch)
    server._controller.say(ControllerListens(peer))
    return peer


async def test_one_has_a_controller_and_the_routers_of_both_follow_it(make: Make) -> None:
    first = await make(1)
    await until(lambda: leads(first))
    second = await make(2)
    await until(lambda: second._routers)
    controller = listens(first)
    for server in (first, second):
        (router,) = server._routers.values()
        await until(lambda router=router: router.of(Follow)[-1:] == [Follow(controller)])
        assert router.of(RouterOrder)[0].spec.router in server._sockets
    assert second._controller is None
    assert first._controller.of(Leads)
    assert controller.epoch == epoch_of(1, 1)


async def test_the_next_leader_has_the_same_cluster_and_a_higher_epoch(make: Make) -> None:
    first = await make(1)
    await until(lambda: leads(first))
    second = await make(2)
    await until(lambda: second._spare is not None)
    ready = second._spare
    await first.end(0.0)
    await until(lambda: leads(second))
    assert second._controller is ready, "its libraries are loaded"
    old, new = (server._controller.of(ControlSpec)[0] for server in (first, second))
    assert (new.cluster, new.listening) == (old.cluster, old.listening)
    assert (old.epoch, new.epoch) == (epoch_of(1, 1), epoch_of(2, 1))
    assert first._life.record.token == second._life.record.token


@pytest.mark.slow
async def test_one_that_was_replaced_ends_its_controller_and_follows(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = await make(1)
    await until(lambda: leads(first))
    second = await make(2)
    await until(lambda: second._servers.leader)
    old = first._controller
    with first._servers._keeper._changed:  # its thread does not get on
        await until(lambda: leads(second))
        assert first._life.deadline.is_over()
    controller = listens(second)
    await until(lambda: not old.is_alive)
    await until(lambda: first._leader == controller)
    assert "steps down" in caplog.text
    assert first._controller is None
    first._on_router_message(ServiceRequest(Service.RESTART))
    await until(lambda: "does not lead; ask" in caplog.text)


async def test_a_controller_that_ends_is_started_again_while_the_server_leads(make: Make) -> None:
    first = await make(1)
    await until(lambda: leads(first))
    old = first._controller
    old.kill()
    await until(lambda: first._controller is not old and leads(first))
    assert first._controller.of(ControlSpec)[0].epoch == epoch_of(1, 2)


async def test_a_router_that_ends_is_started_again_by_its_server_with_a_higher_epoch(
    make: Make,
) -> None:
    first = await make(1)
    await until(lambda: first._routers)
    (name,) = first._routers
    old = first._routers[name]
    old.kill()
    await until(lambda: first._routers[name] is not old and first._routers[name].heard)
    assert first._routers[name].of(RouterOrder)[0].spec.epoch == 2


async def test_a_server_of_another_model_does_not_serve(make: Make) -> None:
    first = await make(1)
    await until(lambda: leads(first))
    other = await make(2, name="qwen")
    with pytest.raises(ServeError, match=r"serves smollm2-135m and this server qwen"):
        await asyncio.wait_for(asyncio.shield(other.failed), 10)


class Host:
    """A host of nodes that is closed at most."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def test_a_controller_gives_no_order_once_its_lease_is_over(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP: it goes on where it was, and another server has led for a while."""
    process = object.__new__(ControlProcess)  # without its node, wire and guardians
    deadline, ended, sent = Deadline(), list[str](), list[Any]()
    deadline.write(now_s() + 60.0)
    order = LeaseOrder(LeaseKey(store.url, "test:cluster:c", 1.0), 1, deadline.fd)
    process._leads, process._loop = Leadership(order, ended.append), asyncio.get_running_loop()
    process.host = host = Host()  # type: ignore[assignment]
    process.wire = SimpleNamespace(send=lambda _, message: sent.append(message))  # type: ignore[assignment]
    process._keeping = None
    monkeypatch.setattr(process, "_publish_soon", lambda: None)
    first, second = (SendPeers("router-0", "decode-0", epoch, ()) for epoch in (1, 2))
    process.perform(first)
    deadline.write(now_s() - 1.0)
    process.perform(second)
    process._stop_worker("decode-0", 1)
    assert (sent, host.closed) == ([UpdatePeers("decode-0", 1, ())], True)
    process._watch_lease()
    assert ended == []
    deadline.write(now_s() + 60.0)
    process.perform(second)
    assert len(sent) == 1, "what it knows may be out of date"
    process._watch_lease()
    (why,) = ended
    assert "again" in why


async def test_what_a_leader_keeps_is_for_the_next_one_and_tried_again_without_a_store(
    store: Server,
) -> None:
    deadline, ended = Deadline(), list[str]()
    deadline.write(now_s() + 60.0)
    key = LeaseKey(store.url, "test:cluster:c", 1.0)
    old, new = (Leadership(LeaseOrder(key, t, deadline.fd), ended.append) for t in (1, 2))
    assert old.read() == Checkpoint()
    assert old.keep(Checkpoint(num_named=1))
    assert new.read() == Checkpoint(num_named=1)
    store.kill()
    assert not new.keep(Checkpoint(num_named=2))
    assert ended == []


def test_what_servers_need_to_share_is_asked_for(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_CLUSTER_TOKEN", raising=False)
    without = replace(config, cluster=ClusterSection(name="c"))
    with pytest.raises(ConfigError, match="KVRELAY_CLUSTER_TOKEN"):
        with_cluster_token(without)
    with pytest.raises(ConfigError, match="KVRELAY_REDIS_URL"):
        with_cluster_token(replace(config, state=StateSection()))
    monkeypatch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
    assert with_cluster_token(without).cluster.token == TOKEN
    assert config.tenants.salt_secret == with_cluster_token(without).tenants.salt_secret != ""
    assert with_cluster_token(Config()) == Config()
