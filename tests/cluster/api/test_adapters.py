"""Adapters at the API: names, routes, what the router is given, and what operators are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.adapters import FILE, Adapters, read_named
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import AdapterEntry, ConfigError, build_config, load_config
from tests.cluster.api.conftest import MODEL, Served, serve
from tests.cluster.api.test_bad_input import error_of
from tests.support.adapters import write_adapter


@pytest.fixture
def folder(tmp_path: Path, llama: Path) -> Path:
    return write_adapter(tmp_path / "adapter", llama)


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Served]:
    adapters = Adapters(file=tmp_path / FILE)
    with serve(tokenizer, ApiSettings(), context={"adapters": adapters}) as served:
        yield served
        served.wait_idle()


def ask(server: Served, model: str, path: str = "/v1/completions", **more: Any) -> Any:
    """The adapter that the router is given, and the answer."""
    given: dict[str, Any] = {"prompt": "Hello"}
    if path != "/v1/completions":
        given = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = server.post({"model": model, "max_tokens": 4, **given, **more}, path)
    assert answer.status_code == 200, answer.text
    return server.router.submits[-1].adapter, answer.json()


def register(server: Served, name: str, folder: Path) -> None:
    answer = server.post({"name": name, "path": str(folder)}, "/v1/adapters")
    assert answer.status_code == 200, answer.text
    digest = read_named(str(folder)).digest.hex()
    shown = {"id": name, "object": "adapter", "path": str(folder), "digest": digest}
    assert answer.json() == shown
    assert shown in server.http.get("/v1/adapters").json()["data"]


def test_a_registered_adapter_is_a_models_name(server: Served, folder: Path) -> None:
    register(server, "tuned", folder)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        adapter, answer = ask(server, "tuned", path)
        assert adapter == read_named(str(folder))
        assert answer["model"] == "tuned"
        adapter, answer = ask(server, MODEL, path)
        assert adapter is None
        assert answer["model"] == MODEL
    responded = server.post({"model": "tuned", "input": "Hi", "store": False}, "/v1/responses")
    assert responded.json()["model"] == "tuned"
    assert server.router.submits[-1].adapter == read_named(str(folder))
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert cards["tuned"]["parent"] == MODEL
    assert cards["tuned"]["root"] == str(folder)
    assert server.http.get("/v1/models/tuned").json() == cards["tuned"]


def test_one_that_is_registered_again_has_its_new_digest(
    server: Served, folder: Path, llama: Path
) -> None:
    register(server, "tuned", folder)
    before, _ = ask(server, "tuned")
    scope = server.router.submits[-1].kv_scope
    write_adapter(folder, llama, seed=1)
    assert ask(server, "tuned")[0] == before, "only what was registered counts"
    register(server, "tuned", folder)
    assert ask(server, "tuned")[0] != before
    assert server.router.submits[-1].kv_scope.salt != scope.salt
    assert server.http.delete("/v1/adapters/tuned").json()["deleted"]
    error = error_of(server.post({"model": "tuned", "prompt": "Hi"}, "/v1/completions"), 404)
    assert error["message"] == f"The model 'tuned' does not exist; this server has '{MODEL}'"


def test_vllms_routes_do_the_same(server: Served, folder: Path) -> None:
    load = {"lora_name": "tuned", "lora_path": str(folder)}
    answer = server.post(load, "/v1/load_lora_adapter")
    assert answer.text == "Success: LoRA adapter 'tuned' added successfully."
    assert ask(server, "tuned")[0] is not None
    assert (
        "is loaded already" in error_of(server.post(load, "/v1/load_lora_adapter"), 400)["message"]
    )
    assert server.post(load | {"load_inplace": True}, "/v1/load_lora_adapter").status_code == 200
    assert server.post({"lora_name": "tuned"}, "/v1/unload_lora_adapter").status_code == 200
    error = error_of(server.post({"lora_name": "tuned"}, "/v1/unload_lora_adapter"), 404)
    assert error["message"] == "There is no adapter 'tuned'; registered: none"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"name": MODEL, "path": "x"}, "is the name of the model itself"),
        ({"name": "a b", "path": "x"}, "name"),
        ({"name": "x", "path": "/nowhere"}, "adapter_config.json cannot be read: No such file"),
        ({"name": "x"}, "path"),
    ],
)
def test_what_cannot_be_registered_is_told_why(server: Served, body: Any, told: str) -> None:
    assert told in error_of(server.post(body, "/v1/adapters"), 400)["message"]
    assert server.http.get("/v1/adapters").json()["data"] == []


def test_others_routers_and_the_next_server_have_what_was_registered(
    tmp_path: Path, folder: Path, llama: Path
) -> None:
    other = write_adapter(tmp_path / "other", llama, seed=5)
    entries = [AdapterEntry("fixed", str(folder))]
    mine, others = (Adapters.open(entries, tmp_path / FILE) for _ in range(2))
    mine.add("tuned", read_named(str(other)))
    assert others.find("tuned") == read_named(str(other))
    assert list(others.all()) == ["fixed", "tuned"]
    others.add("fixed", read_named(str(other)))
    assert mine.find("fixed") == read_named(str(other))
    assert others.remove("fixed")
    assert not others.remove("fixed")
    assert mine.find("fixed") is None
    assert list(Adapters.open(entries, tmp_path / FILE).all()) == ["tuned"]
    (tmp_path / FILE).write_text("{")
    assert mine.find("tuned") is not None, "a damaged file changes nothing"


def test_adapters_of_the_settings_are_beside_their_file_and_have_one_name_each(
    tmp_path: Path, folder: Path
) -> None:
    text = f'[[adapters]]\nname = "tuned"\npath = "{folder.name}"\n'
    (tmp_path / "kvrelay.toml").write_text(text)
    config = load_config(tmp_path / "kvrelay.toml", {})
    assert config.adapters == (AdapterEntry("tuned", str(folder)),)
    twice = [{"name": "tuned", "path": "x"}] * 2
    with pytest.raises(ConfigError, match="adapters: 'tuned' is there twice"):
        build_config({"adapters": twice}, "x.toml")
    with pytest.raises(ConfigError, match=r"adapters: gone: .*No such file"):
        Adapters.open([AdapterEntry("gone", "/nowhere")], tmp_path / FILE)
