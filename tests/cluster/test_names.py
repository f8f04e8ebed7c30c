"""One name is one model, alias or adapter, by whichever door it comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.cluster.api.adapters import FILE, Registered
from kvrelay.cluster.config import (
    Config,
    ConfigError,
    ModelEntry,
    build_config,
    check_tenants,
)
from kvrelay.cluster.orders import ChangeModels
from kvrelay.cluster.processes import model_changes
from kvrelay.cluster.processes.adapter_bases import check_change, check_names, check_settings
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.processes.kept_models import keep_change, with_changes
from kvrelay.engine.model.checkpoint.adapter_check import why_not
from tests.cluster.test_model_changes import Server, prepared
from tests.support.adapters import write_adapter

CHAT = {"name": "chat", "checkpoint": "c", "aliases": ["gpt-4o"]}
BASE = {"name": "base", "checkpoint": "b"}
TAKEN = {
    "chat": "'chat' is the name of a model",
    "gpt-4o": "'gpt-4o' is an alias of the model 'chat'",
    "fixed": "an adapter in [[adapters]]",
    "late": "an adapter that is registered in",
}


def settings(folder: Path, models: list[Any], adapters: list[str], *, late: bool = True) -> Config:
    if late:
        registered = {"late": Registered("/x", b"d", "chat"), "gone": Registered("/x", b"d", "old")}
        (folder / FILE).write_bytes(msgspec.json.encode(registered))
    return build_config(
        {
            "sessions": {"state_dir": str(folder)},
            "models": models,
            "adapters": [{"name": each, "path": "/x", "model": "chat"} for each in adapters],
        },
        "kvrelay.toml",
    )


def as_model(folder: Path, name: str) -> None:
    """In the file, under a registered adapter."""
    check_names(settings(folder, [CHAT, BASE | {"name": name}], ["fixed"]), ())


def as_alias(folder: Path, name: str) -> None:
    check_names(settings(folder, [CHAT, BASE | {"aliases": [name]}], ["fixed"]), ())


def as_adapter(folder: Path, name: str) -> None:
    if name == "late":
        pytest.skip("the settings give the name, and the file what stands for it now")
    settings(folder, [CHAT, BASE], ["fixed", name])


def added(folder: Path, name: str) -> None:
    """`kvrelay models add`, before anything begins."""
    config = settings(folder, [CHAT, BASE], ["fixed"])
    check_change(config, name, ModelEntry(name, "x"), ())


def added_alias(folder: Path, name: str) -> None:
    config = settings(folder, [CHAT, BASE], ["fixed"])
    check_change(config, "new", ModelEntry("new", "x", aliases=(name,)), ())


def kept(folder: Path, name: str) -> None:
    """At the start, models-PORT.json is read."""
    config = settings(folder, [CHAT, BASE], ["fixed"])
    keep_change(config, "new", ModelEntry("new", "x", aliases=(name,)))
    check_names(with_changes(config), ())


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("door", [as_model, as_alias, as_adapter, added, added_alias, kept])
def test_a_name_that_is_taken_is_refused(
    tmp_path: Path, door: Callable[[Path, str], None], name: str
) -> None:
    door(tmp_path, "free")
    door(tmp_path, "gone")  # an adapter of a model that is not served
    with pytest.raises(ConfigError) as refused:
        door(tmp_path, name)
    known = f"there is a model {name!r}; remove it first"
    assert TAKEN[name] in str(refused.value) or known in str(refused.value)


def test_without_names_of_their_own_too(tmp_path: Path) -> None:
    config = settings(tmp_path, [], ["fixed"], late=False)
    check_names(config, ["served"])
    with pytest.raises(ConfigError, match="'fixed' is the model, and an adapter in"):
        check_names(config, ["fixed"])
    registered = {"source": "/x", "digest": "ZA==", "model": "served"}
    (tmp_path / FILE).write_text(json.dumps({"served": registered}))
    with pytest.raises(ConfigError, match="'served' is the model, and an adapter that is reg"):
        check_names(config, ["served"])


@pytest.mark.anyio
async def test_an_adapter_that_is_registered_meanwhile_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_changes, "prepare_models", lambda config, *_, **__: prepared(config))
    config, server = settings(tmp_path, [CHAT, BASE], [], late=False), Server()
    send = server.send

    def register(order: Any) -> None:
        settings(tmp_path, [CHAT, BASE], [])  # "late", once routers know the new model
        send(order)

    monkeypatch.setattr(server, "send", register)
    order = ChangeModels("late", ModelEntry("late", "x", prefill=0))
    with pytest.raises(HandoverError, match="'late' is the name of a model, and an adapter"):
        await server.changes.change(config, prepared(config), order)
    assert server.done[-2:] == [(["base", "chat"], ["base", "chat"]), ("chat", "base")]


def test_a_tenant_that_there_is_not_is_an_error() -> None:
    for tables, said in (
        ({"models": [BASE | {"tenants": ["suport"]}]}, "models: base: tenants has 'suport'"),
        ({"adapters": [{"name": "a", "path": "x", "tenants": ["x"]}]}, "adapters: a: tenants has"),
    ):
        config = build_config(tables, "x.toml")
        for known, there in ((["support"], "there are support"), ([], "there is no")):
            with pytest.raises(ConfigError) as refused:
                check_tenants(config, known)
            assert said in str(refused.value)
            assert there in str(refused.value)
    with pytest.raises(ConfigError, match="tenants has 'x'"):
        check_change(
            build_config({"models": [BASE]}, ""), "n", ModelEntry("n", "x", tenants=("x",)), ["y"]
        )


@pytest.mark.slow
def test_adapters_of_the_settings_are_checked_before_the_start(
    tmp_path: Path, llama: Path, checkpoint_of: Any
) -> None:
    folder = write_adapter(tmp_path / "adapter", llama, modules=("q_proj",))
    models = {"chat": ("chat", llama), "base": ("base", checkpoint_of("llama", hidden_size=48))}

    def refused(model: str, *, on_gpu: bool = False) -> str:
        entry = {"name": "a", "path": str(folder), "model": model}
        tables = {"models": [CHAT, BASE], "adapters": [entry]}
        try:
            config = build_config({**tables, "sessions": {"state_dir": str(tmp_path)}}, "x.toml")
            check_settings(config, models, on_gpu=on_gpu)
        except ConfigError as error:
            return str(error)
        pytest.fail("it was not refused")

    assert "'none' is not in [[models]]; there are chat, base" in refused("none")
    assert "say which model it was made for (chat, base): it names none" in refused("")
    assert "adapters are computed on CPUs, not on GPUs" in refused("chat", on_gpu=True)
    assert "is for 96 inputs and 96 outputs, the model has 48" in refused("base"), "a process's own"


def test_what_a_worker_has_no_memory_for_is_refused(tmp_path: Path, llama: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", llama, modules=("q_proj",), rank=8)
    size = 3 * 8 * (96 + 96)  # numbers
    assert why_not(folder, llama, "float32", 4 * size, 1) == ""
    assert why_not(folder, llama, "bfloat16", 2 * size, 1) == ""
    assert why_not(folder, llama, "float32", 2 * size, 2) == "", "each rank has a half"
    told = f"it takes {4 * size} bytes, engine.adapter_bytes allows {2 * size}"
    assert why_not(folder, llama, "float32", 2 * size, 1) == told
