"""Which transport a peer is read by: what UCX has chosen, and what it may choose from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.agents import nixl_bindings as nixl_library
from kvtransfer.agents import nixl_lanes
from kvtransfer.agents.nixl import NixlAgent
from tests.kvtransfer.agents.agent_kit import AgentMaker, agent_maker, read
from tests.kvtransfer.agents.nixl_peer import peer_process

NUM_BLOCKS, SIZE = 4, 65536


@pytest.fixture
def make() -> Iterator[AgentMaker]:
    with agent_maker("nixl") as maker:
        yield maker


def nixl_agent(make: AgentMaker, name: str) -> NixlAgent:
    agent, _ = make(name, NUM_BLOCKS, SIZE)
    assert isinstance(agent, NixlAgent)
    return agent


def test_without_shared_memory_the_lane_is_tcp(
    make: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    agent = nixl_agent(make, "me")
    with peer_process(NUM_BLOCKS, SIZE, seed=1) as (_, metadata):
        agent.connect("p", 1, NUM_BLOCKS, metadata)
        lanes = agent.lanes()
        assert list(lanes) == ["p"]
        assert all(each.startswith("tcp/") for each in lanes["p"].split())
        agent.disconnect("p")
        assert agent.lanes() == {}


def test_a_peer_on_the_same_host_is_read_through_shared_memory(
    make: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")
    agent = nixl_agent(make, "me")
    with peer_process(NUM_BLOCKS, SIZE, seed=1) as (_, metadata):
        agent.connect("p", 1, NUM_BLOCKS, metadata)
        lane = agent.lanes()["p"]
        assert lane.split("/")[0] in ("cma", "knem", "xpmem", "sysv", "posix"), lane


def test_peers_that_read_each_other_both_know_their_lane(make: AgentMaker) -> None:
    """The second to connect gets no endpoint of its own: UCX uses the first one's for both."""
    a, b, c = (nixl_agent(make, name) for name in "abc")
    a.connect("b", 1, NUM_BLOCKS, b.metadata())
    read(a, "b", [0], [1])
    c.connect("b", 1, NUM_BLOCKS, b.metadata())
    read(c, "b", [0], [1])
    b.connect("a", 1, NUM_BLOCKS, a.metadata())
    b.connect("c", 1, NUM_BLOCKS, c.metadata())
    assert b.lanes().keys() == {"a", "c"}
    assert nixl_lanes.UNKNOWN not in {*a.lanes().values(), *b.lanes().values()}


@pytest.mark.parametrize(
    ("transports", "on_gpu", "lane"),
    [
        ([("tcp", "lo"), ("cma", "memory")], False, "cma/memory"),
        ([("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1")], False, "rc_mlx5/mlx5_0:1"),
        (
            [("tcp", "eth0"), ("rc_mlx5", "mlx5_0:1"), ("rc_mlx5", "mlx5_1:1")],
            False,
            "rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1",
        ),
        ([("tcp", "lo"), ("cma", "memory"), ("cuda_ipc", "cuda")], True, "cuda_ipc/cuda"),
        ([("tcp", "lo"), ("cma", "memory"), ("cuda_ipc", "cuda")], False, "cma/memory"),
        ([("tcp", "lo"), ("sysv", "memory")], False, "sysv/memory"),
        ([("tcp", "lo"), ("tcp", "lo")], False, "tcp/lo"),
        ([("cuda_copy", "cuda")], True, "unknown"),
        ([], False, "unknown"),
    ],
)
def test_bulk_data_goes_by_the_best_kind_of_transport(
    transports: list[tuple[str, str]], on_gpu: bool, lane: str
) -> None:
    assert nixl_lanes.bulk_lane(transports, on_gpu) == lane


def test_a_ucx_that_does_not_tell_is_unknown(
    make: AgentMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_lanes, "_libraries", dict)
    a, b = nixl_agent(make, "a"), nixl_agent(make, "b")
    a.connect("b", 1, NUM_BLOCKS, b.metadata())
    assert a.lanes() == {"b": "unknown"}
    read(a, "b", [0], [1])


class TestWhatUcxMayChooseFrom:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for key in [*nixl_library.ENVIRONMENT, "UCX_TLS"]:
            monkeypatch.setenv(key, "")
            monkeypatch.delenv(key)
        monkeypatch.setattr(nixl_library, "RDMA_DEVICES", tmp_path / "infiniband")

    def test_on_a_plain_machine_tcp_and_shared_memory(self) -> None:
        nixl_library.open_nixl(on_cpu=True)
        assert os.environ["UCX_TLS"] == "tcp,sm,self"

    def test_with_rdma_devices_everything(self) -> None:
        nixl_library.RDMA_DEVICES.mkdir()
        assert not nixl_library.has_rdma(), "the driver alone"
        (nixl_library.RDMA_DEVICES / "mlx5_0").touch()
        nixl_library.open_nixl(on_cpu=True)
        assert "UCX_TLS" not in os.environ

    def test_with_a_gpu_everything(self) -> None:
        nixl_library.open_nixl(on_cpu=False)
        assert "UCX_TLS" not in os.environ

    def test_what_the_operator_has_set_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
        nixl_library.open_nixl(on_cpu=True)
        assert os.environ["UCX_TLS"] == "tcp"
