"""Which transports UCX may choose from, by the environment that it is loaded in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.kvtransfer.movers import nixl_bindings as nixl_library


class TestWhatUcxMayChooseFrom:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for key in [*nixl_library.ENVIRONMENT, *nixl_library.CPU_ENVIRONMENT]:
            monkeypatch.setenv(key, "")
            monkeypatch.delenv(key)
        monkeypatch.setattr(nixl_library, "RDMA_DEVICES", tmp_path / "infiniband")

    def test_on_a_plain_machine_tcp_and_shared_memory(self) -> None:
        nixl_library.open_nixl(on_cpu=True)
        assert os.environ["UCX_TLS"] == "tcp,sm,self"
        assert os.environ["UCX_MEM_EVENTS"] == "n"

    def test_with_rdma_devices_everything(self) -> None:
        nixl_library.RDMA_DEVICES.mkdir()
        assert not nixl_library.has_rdma(), "the driver alone"
        (nixl_library.RDMA_DEVICES / "mlx5_0").touch()
        nixl_library.open_nixl(on_cpu=True)
        assert not nixl_library.CPU_ENVIRONMENT.keys() & os.environ.keys()

    def test_with_a_gpu_everything(self) -> None:
        nixl_library.open_nixl(on_cpu=False)
        assert not nixl_library.CPU_ENVIRONMENT.keys() & os.environ.keys()

    def test_what_the_operator_has_set_stands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
        nixl_library.open_nixl(on_cpu=True)
        assert os.environ["UCX_TLS"] == "tcp"
