"""A model is added, or removed, step by step; what does not come up leaves all as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from kvrelay.cluster.config import Config, ConfigError, ModelEntry, build_config
from kvrelay.cluster.orders import ChangeModels
from kvrelay.cluster.prepare import PreparedModel, PreparedModels
from kvrelay.cluster.processes import model_changes
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.processes.kept_models import changes_file, keep_change, with_changes
from kvrelay.cluster.processes.model_changes import ModelChanges

pytestmark = pytest.mark.anyio
ENTRY = ModelEntry(name="new", checkpoint="somewhere", prefill=0)


def entry_of(name: str, **engine: Any) -> ModelEntry:
    return ModelEntry(name=name, checkpoint="x", engine=engine)


def settings(folder: Path, *names: str, port: int = 8000) -> Config:
    models = [{"name": name, "checkpoint": "smollm2-135m"} for name in names]
    sections = {"sessions": {"state_dir": str(folder)}, "api": {"port": port}}
    return build_config({**sections, "models": models}, "test")


def prepared(config: Config) -> PreparedModels:
    none = cast(Any, None)
    names = config.by_model()
    return PreparedModels({name: PreparedModel(Path(name), none, name, 1, none) for name in names})


class Server:
    """Its one router answers at once; a controller comes up unless `fails`."""

    def __init__(self) -> None:
        self.fails = 0
        self.done: list[Any] = []
        self.changes = ModelChanges(self)
        self.serving: Any = {"router-0": self}

    def send(self, order: Any) -> None:
        self.done.append((sorted(order.models), sorted(order.offered)))
        asyncio.get_running_loop().call_soon(self.changes.answered, "router-0", order.number)

    def serve_models(self, config: Config, models: PreparedModels) -> None:
        assert tuple(models.by_name) == tuple(config.by_model())
        self.serves = tuple(models.by_name)

    async def replace_controller(self) -> None:
        self.done.append(self.serves)
        self.fails -= 1
        if self.fails == 0:
            raise HandoverError("not all workers are up after 180 s")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    def prepare(config: Config, *_: Any, **__: Any) -> PreparedModels:
        return prepared(config)

    monkeypatch.setattr(model_changes, "prepare_models", prepare)
    return Server()


async def test_one_is_offered_when_its_workers_are_up(server: Server, tmp_path: Path) -> None:
    config = settings(tmp_path, "a", "b")
    forked: list[Any] = []
    server.changes.forks = lambda _, models: forked.append(next(iter(models.by_name)))
    await server.changes.change(config, prepared(config), ChangeModels("new", ENTRY))
    assert server.done == [
        (["a", "b", "new"], ["a", "b"]),
        ("a", "b", "new"),
        (["a", "b", "new"], ["a", "b", "new"]),
    ]
    assert [each.name for each in with_changes(config).models] == ["a", "b", "new"]
    assert forked == ["a"]


async def test_one_goes_when_its_requests_have_ended(server: Server, tmp_path: Path) -> None:
    config = settings(tmp_path, "a", "b")
    forked: list[Any] = []
    server.changes.forks = lambda _, models: forked.append(next(iter(models.by_name)))
    await server.changes.change(config, prepared(config), ChangeModels("a", None))
    assert server.done == [(["a", "b"], ["b"]), ("b",), (["b"], ["b"])]
    assert [each.name for each in with_changes(config).models] == ["b"]
    assert forked == ["b"], "the first model is another one"


@pytest.mark.parametrize("entry", [ENTRY, None])
async def test_what_does_not_come_up_changes_nothing(
    server: Server, tmp_path: Path, entry: ModelEntry | None
) -> None:
    config = settings(tmp_path, "a", "b")
    server.fails = 1
    order = ChangeModels("new" if entry else "b", entry)
    with pytest.raises(HandoverError, match="not all workers are up"):
        await server.changes.change(config, prepared(config), order)
    assert server.done[-2:] == [(["a", "b"], ["a", "b"]), ("a", "b")]
    assert with_changes(config) == config


@pytest.mark.parametrize(
    ("name", "entry", "why"),
    [
        ("c", None, "there is no model 'c'; there are a, b"),
        ("a", ModelEntry(name="a", checkpoint="x"), "there is a model 'a'"),
        ("c", ModelEntry(name="c", checkpoint="x", engine={"max_num_seqs": -1}), "of c: .*max_num"),
        (
            "c",
            ModelEntry(name="c", checkpoint="x", aliases=("b",)),
            "'b' is the name of a model, and",
        ),
        ("c", entry_of("c", runs="vllm", python="/tmp/x"), "engine.python of c.*only the server's"),
        ("c", entry_of("c", arguments={"worker_cls": "x"}), "engine.arguments of c: it says which"),
    ],
)
async def test_what_cannot_be_is_said_before_anything_changes(
    server: Server, tmp_path: Path, name: str, entry: ModelEntry | None, why: str
) -> None:
    config = settings(tmp_path, "a", "b")
    with pytest.raises(HandoverError, match=why):
        await server.changes.change(config, prepared(config), ChangeModels(name, entry))
    assert server.done == []


def test_a_change_is_kept_for_its_port_alone(tmp_path: Path) -> None:
    config = settings(tmp_path, "a")
    keep_change(config, "new", ENTRY)
    keep_change(config, "a", None)
    assert [each.name for each in with_changes(config).models] == ["new"]
    assert with_changes(other := settings(tmp_path, "a", port=8001)) == other
    keep_change(config, "new", entry_of("new", runs="vllm", python="/tmp/x"))  # as it once could be
    with pytest.raises(ConfigError, match=r"models-8000.json.*engine.python of new"):
        with_changes(config)
    keep_change(config, "new", None)
    with pytest.raises(ConfigError, match=r"models-8000.json.*no model would be left"):
        with_changes(config)
    file = changes_file(config)
    assert file is not None
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"models-8000.json is not read"):
        with_changes(config)
