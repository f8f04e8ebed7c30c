"""What starts processes crosses a channel whole, and with what a later version adds to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvrelay.cluster.api.tenants import Access, Tenants
from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.control.messages import RouterStarted
from kvrelay.cluster.prepare import prepare_models
from kvrelay.cluster.processes.certificates import identity_of, with_certificates
from kvrelay.cluster.processes.orders import ControlSpec
from kvrelay.cluster.processes.router_spec import (
    LoadRouter,
    RouterOrder,
    RouterProcessSpec,
    ServedModel,
)
from kvrelay.cluster.processes.supervisor import Child
from kvrelay.engine.model.parallel.link import RankHost
from kvrelay.engine.stats import Role
from kvrelay.engine.wire.channel import LENGTH_BYTES, frame, greeting, pack, unpack
from kvrelay.worker.messages import Peer
from kvrelay.worker.process import Listening
from kvrelay.worker.spec import WorkerOrder
from tests.cluster.control.test_specs import GPUS, spec_of
from tests.worker.test_rank_host import SPEC

CONFIG = build_config(
    {
        "cluster": {"decode": 3},
        "tenant": [{"name": "red", "keys": ["k"]}],
        "tiers": {"host_gib": "auto"},
    },
    "test",
)
WORKER = replace(
    spec_of(CONFIG, Role.DECODE, 2, GPUS, ("machine-1",)),
    rank_hosts=(RankHost("10.0.0.2", 7, 1, b"\0secret\xff"),),
)


@pytest.fixture
def listening(tmp_path: Path) -> Listening:
    settings = {"tls": {"frames": True}, "sessions": {"state_dir": str(tmp_path)}}
    identity = identity_of(with_certificates(build_config(settings, "test")).tls)
    assert identity.fingerprint  # is kept on the object, and does not go along
    return Listening("127.0.0.1", b"\xfftoken", 1 << 20, tls=identity)


def later_version(value: Any, *, is_named: bool = False) -> Any:
    """With a field more in every map whose keys are names, but for those that users name."""
    if isinstance(value, dict) and is_named:
        return {key: later_version(each) for key, each in value.items()}
    if isinstance(value, dict):
        more = {"added_later": 1} if all(isinstance(key, str) for key in value) else {}
        maps = {
            key: later_version(value[key], is_named=isinstance(value[key], dict))
            for key in value.keys() & {"models", "by_name"}
        }
        later = {key: later_version(each) for key, each in value.items() if key != "arguments"}
        return value | later | maps | more
    return [later_version(each) for each in value] if isinstance(value, list) else value


def check_crosses(message: Any) -> None:
    assert unpack(pack(message)) == message
    name, fields = msgpack.unpackb(frame(message)[LENGTH_BYTES:], strict_map_key=False)
    body = msgpack.packb([name, later_version(fields)])
    assert unpack(greeting() + len(body).to_bytes(LENGTH_BYTES, "big") + body) == message


def test_what_starts_a_worker_and_its_ranks_crosses(listening: Listening) -> None:
    check_crosses(WorkerOrder(WORKER, listening))
    check_crosses(WorkerOrder(replace(WORKER, engine=CONFIG.engine), listening))
    check_crosses(SPEC)
    check_crosses(WORKER.rank_hosts[0])


def test_what_starts_a_router_crosses(listening: Listening) -> None:
    tenants = Tenants.of(CONFIG.tenant, b"a secret")
    spec = RouterProcessSpec(
        "c",
        "router-0",
        2,
        ("router-0",),
        CONFIG,
        {"": ServedModel(Path("/models/x"), "x", 4096)},
        Access(tenants, ("You are",)),
    )
    check_crosses(LoadRouter("router-0", CONFIG, spec.models))
    check_crosses(RouterOrder(spec, listening, "127.0.0.1", 9))
    (order,) = [unpack(pack(RouterOrder(spec, listening, "", 9)))]
    assert order.spec.access.tenants.find("k") == tenants.find("k")
    # What the command line says goes along as it is: a field more in it would be one.
    order = replace(order, spec=replace(spec, source=(Path("a.toml"), {"api.port": 1, "x": None})))
    assert unpack(pack(order)) == order


def test_what_starts_a_controller_crosses(listening: Listening, smollm2_dir: Path) -> None:
    check_crosses(ControlSpec("c", 1, Config(), Path("k"), Listening("", b"t", 1), "", (), ()))
    peer = RouterStarted(Peer("router-0", "127.0.0.1", 5, 1), 8000, 77)
    check_crosses(
        ControlSpec("c", 1, CONFIG, Path("/run/kept"), listening, "", ("router-0",), (peer,))
    )
    config = build_config({"model": {"name": str(smollm2_dir)}}, "test")
    check_crosses(prepare_models(config, lambda _: None, are_here=False, on_gpu=False))


def test_a_process_that_does_not_understand_its_first_message_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one of another version would be, with the reason in the supervisor's log."""

    async def start_a_router_with_what_it_does_not_know() -> int:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child = Child("router-0", lambda _: None, ended.set_result)
        await child.start("router", SPEC)
        return await asyncio.wait_for(ended, 60)

    assert asyncio.run(start_a_router_with_what_it_does_not_know()) != 0
    assert "router-0 is ended: the other end did not understand" in caplog.text
    assert "unknown message 'RankHostSpec'" in caplog.text
