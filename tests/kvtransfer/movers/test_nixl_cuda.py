"""Whether NIXL is built for the CUDA that torch is built for, and what is said where it is not."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elftools.elf.elffile import ELFFile

from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.movers import nixl_bindings
from kvrelay.kvtransfer.movers.nixl_bindings import (
    PACKAGES,
    check_allocator,
    check_fits,
    cuda_of_torch,
)

RUNTIME = "libcudart.so."


def cuda_needs(folder: Path) -> set[str]:
    """Major versions of the CUDA runtime that the libraries in `folder` ask the loader for."""
    found: set[str] = set()
    for path in folder.rglob("*.so*"):
        with path.open("rb") as file:
            dynamic = ELFFile(file).get_section_by_name(".dynamic")
            tags = [] if dynamic is None else list(dynamic.iter_tags("DT_NEEDED"))
        names = (tag.needed for tag in tags if tag.needed.startswith(RUNTIME))
        found |= {name.removeprefix(RUNTIME).partition(".")[0] for name in names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_each_nixl_needs_the_cuda_of_its_name(package: str) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    libraries = Path(spec.origin).parent.with_name(f"{package}.libs")
    assert cuda_needs(libraries) == {package.removeprefix("nixl_cu")}


def test_torch_and_the_nixl_that_is_taken_need_the_same_cuda() -> None:
    needs = cuda_needs(Path(torch.__file__).parent / "lib")
    assert needs == ({cuda_of_torch()} if cuda_of_torch() else set())
    if needs:
        check_fits(nixl_bindings.open_nixl(on_cpu=False), cuda_of_torch())


def test_a_nixl_for_another_cuda_is_refused_on_a_gpu() -> None:
    check_fits(SimpleNamespace(__name__="nixl_cu13._bindings"), "13")
    told = "torch is for CUDA 13, NIXL is nixl-cu12, .* make setup-gpu, or pip install nixl-cu13"
    with pytest.raises(AgentError, match=told):
        check_fits(SimpleNamespace(__name__="nixl_cu12._bindings"), "13")


def test_what_nixl_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fits torch is tried first; the other one serves host memory."""
    asked: list[str] = []

    def fail(name: str) -> Any:
        asked.append(name)
        if name.startswith("nixl_cu13"):
            raise ImportError("libcudart.so.13: cannot open shared object file")
        raise ModuleNotFoundError(f"No module named '{name}'", name=name.partition(".")[0])

    monkeypatch.setattr(nixl_bindings, "cuda_of_torch", lambda: "13")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(AgentError, match=r"nixl_cu13: ImportError: libcudart.so.13: cannot"):
        nixl_bindings.open_nixl(on_cpu=False)
    assert asked == ["nixl_cu13._bindings", "nixl_cu12._bindings"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_others_cannot_map_is_refused(name: str) -> None:
    check_allocator({name: "max_split_size_mb:128,expandable_segments:False"})
    with pytest.raises(AgentError, match=f"{name} has expandable_segments:True: NVLink"):
        check_allocator({name: "max_split_size_mb:128, expandable_segments:True"})
