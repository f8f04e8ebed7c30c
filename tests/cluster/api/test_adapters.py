"""Adapters at the API: names, routes, what the router is given, and what operators are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.adapters import FILE, AdapterBase, Adapters, Registered
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import (
    AdapterEntry,
    ConfigError,
    TenantEntry,
    build_config,
    load_config,
)
from kvrelay.engine.adapters import Adapter, read_adapter
from tests.cluster.api.conftest import MODEL, Served, serve
from tests.cluster.api.test_bad_input import error_of
from tests.cluster.api.test_models import ALIAS, OTHER, Two, two
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


def read_named(folder: Path) -> Adapter:
    return Adapter(read_adapter(folder).digest, str(folder))


def registered(folder: Path, model: str = MODEL) -> Registered:
    found = read_named(folder)
    return Registered(found.source, found.digest, model)


def ask(server: Served, model: str, path: str = "/v1/completions", **more: Any) -> Any:
    """The adapter that the router is given, and the answer."""
    given: dict[str, Any] = {"prompt": "Hello"}
    if path != "/v1/completions":
        given = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = server.post({"model": model, "max_tokens": 4, **given, **more}, path)
    assert answer.status_code == 200, answer.text
    return server.router.submits[-1].need, answer.json()


def register(server: Served, name: str, folder: Path) -> None:
    answer = server.post({"name": name, "path": str(folder)}, "/v1/adapters")
    assert answer.status_code == 200, answer.text
    digest = read_named(folder).digest.hex()
    shown = {"id": name, "object": "adapter", "path": str(folder), "digest": digest}
    shown |= {"model": MODEL, "tenants": []}
    assert answer.json() == shown
    assert shown in server.http.get("/v1/adapters").json()["data"]


def test_a_registered_adapter_is_a_models_name(server: Served, folder: Path) -> None:
    register(server, "tuned", folder)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
        adapter, answer = ask(server, "tuned", path)
        assert adapter == read_named(folder)
        assert answer["model"] == "tuned"
        adapter, answer = ask(server, MODEL, path)
        assert adapter is None
        assert answer["model"] == MODEL
    responded = server.post({"model": "tuned", "input": "Hi", "store": False}, "/v1/responses")
    assert responded.json()["model"] == "tuned"
    assert server.router.submits[-1].need == read_named(folder)
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert cards["tuned"]["parent"] == MODEL
    assert cards["tuned"]["root"] == str(folder)
    assert server.http.get("/v1/models/tuned").json() == cards["tuned"]


def test_one_that_is_registered_again_has_its_new_digest(
    server: Served, folder: Path, llama: Path
) -> None:
    register(server, "tuned", folder)
    before, _ = ask(server, "tuned")
    scope = server.router.submits[-1].scope
    write_adapter(folder, llama, seed=1)
    assert ask(server, "tuned")[0] == before, "only what was registered counts"
    register(server, "tuned", folder)
    assert ask(server, "tuned")[0] != before
    assert server.router.submits[-1].scope.salt != scope.salt
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"name": MODEL, "path": "x"}, "is the name of a model already"),
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
    entries, models = [AdapterEntry("fixed", str(folder))], {MODEL: AdapterBase()}
    mine, others = (Adapters.open(entries, tmp_path / FILE, models) for _ in range(2))
    mine.add("tuned", registered(other))
    assert others.find("tuned") == registered(other)
    assert list(others.every()) == ["fixed", "tuned"]
    others.add("fixed", registered(other))
    assert mine.find("fixed") == registered(other)
    assert others.remove("fixed")
    assert not others.remove("fixed")
    assert mine.find("fixed") is None
    assert list(Adapters.open(entries, tmp_path / FILE, models).every()) == ["tuned"]
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
    with pytest.raises(ConfigError, match=r"'tuned' is an adapter in .*, twice"):
        build_config({"adapters": twice}, "x.toml")
    with pytest.raises(ConfigError, match=r"adapters: gone: .*No such file"):
        Adapters.open([AdapterEntry("gone", "/nowhere")], tmp_path / FILE, {MODEL: AdapterBase()})


@pytest.fixture
def both(tokenizer: Tokenizer, smollm2_dir: Path, tmp_path: Path) -> Iterator[Two]:
    given = {"adapters": Adapters(file=tmp_path / FILE), "reserved": lambda: {"coming": "a model"}}
    yield from two(tokenizer, smollm2_dir, context=given)


def test_no_door_of_the_api_takes_a_name_that_is_taken(both: Two, folder: Path) -> None:
    own = {"name": "tuned", "path": str(folder), "model": OTHER}
    assert both.served.post(own, "/v1/adapters").status_code == 200
    for name, who in (
        (MODEL, "is the name of a model already"),
        (OTHER, "is the name of a model already"),
        (ALIAS, f"is an alias of the model '{OTHER}' already"),
        ("coming", "is a model already"),
        ("tuned", f"is an adapter of '{OTHER}' already"),
    ):
        load = {"lora_name": name, "lora_path": str(folder), "base_model_name": MODEL}
        load |= {"load_inplace": True}
        for body, path in (
            ({"name": name, "path": str(folder), "model": MODEL}, "/v1/adapters"),
            (load, "/v1/load_lora_adapter"),
        ):
            assert who in error_of(both.served.post(body, path), 400)["message"]
    assert [each["id"] for each in both.served.http.get("/v1/adapters").json()["data"]] == ["tuned"]


def test_an_adapter_is_of_the_model_that_it_was_made_for(
    both: Two, folder: Path, tmp_path: Path
) -> None:
    server, body = both.served, {"name": "a/b", "path": str(folder)}
    told = error_of(server.post(body, "/v1/adapters"), 400)["message"]
    assert f"say which model it was made for ({MODEL}, {OTHER}): it names none itself" in told
    told = error_of(server.post(body | {"model": "x"}, "/v1/adapters"), 400)["message"]
    assert f"there is no model 'x'; there are: {MODEL}, {OTHER}" in told
    assert server.post(body | {"model": OTHER}, "/v1/adapters").json()["model"] == OTHER
    for path in ("/v1/completions", "/v1/embeddings"):
        given = {"prompt": "Hi", "max_tokens": 2} if "comp" in path else {"input": "Hi"}
        before = len(server.router.submits)
        assert server.post({"model": "a/b", **given}, path).status_code == 200
        assert both.other.submits[-1].need == read_named(folder)
        assert len(server.router.submits) == before
    assert server.http.get("/v1/models/a/b").json()["parent"] == OTHER
    both.served.ctx.offer([MODEL])
    told = error_of(server.post({"model": "a/b", "prompt": "Hi"}, "/v1/completions"), 404)
    assert told["message"] == f"The model 'a/b' does not exist; this server has '{MODEL}'"
    assert server.http.delete("/v1/adapters/a/b").json() == {
        "id": "a/b",
        "object": "adapter",
        "deleted": True,
    }


def test_another_base_of_the_same_name_does_not_have_its_adapters(
    tmp_path: Path, folder: Path
) -> None:
    file, entry = tmp_path / FILE, AdapterEntry("fixed", str(folder), model="chat")
    chat, other = (AdapterBase("c", lambda d=digest: d) for digest in (b"one", b"two"))  # type: ignore[misc]
    adapters = Adapters.open([entry], file, {"chat": chat, "base": other})
    adapters.add("tuned", chat.read(str(folder), "chat"))
    assert adapters.find("tuned") is not None
    assert adapters.of_model("base") == {}
    for models in ({"base": other}, {"chat": other}):
        after = Adapters.open([], file, models)
        found = after.find("tuned")
        assert found is None or found.model not in models
        assert not after.of_model(next(iter(models)))
        assert "tuned" in after.every(), "operators see it"
    adapters.know_base("chat", b"three")  # the name is another model's now
    assert adapters.find("tuned") is adapters.find("fixed") is None


def test_what_workers_cannot_load_is_not_registered(
    tokenizer: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    why = ["it has rank 9", "the model's workers compute no adapters"]
    base = AdapterBase(why_not=lambda _: why[0], refuses=lambda: why[1])
    with serve(tokenizer, ApiSettings(), context={"adapter_base": base}) as server:
        for _ in range(2):
            body = {"lora_name": "x", "lora_path": str(folder)}
            error = error_of(server.post(body, "/v1/load_lora_adapter"), 400)
            assert (why[1] or why[0]) in error["message"]
            why[1] = ""
        assert server.http.get("/v1/adapters").json()["data"] == []


def test_tenants_see_and_use_their_own_adapters_and_no_paths(
    tokenizer: Tokenizer, folder: Path
) -> None:
    keys = {name: f"a-key-of-{name}-012345" for name in ("ann", "ben")}
    entries = [TenantEntry(name, (key,)) for name, key in keys.items()]
    tenants = Tenants.of(entries, b"a secret of sixteen bytes")
    settings = ApiSettings(operations_key="an-operators-key-0123")
    with serve(tokenizer, settings, context={"tenants": tenants}) as server:

        def call(who: str, path: str, body: Any = None) -> Any:
            headers = {"authorization": f"Bearer {keys.get(who, settings.operations_key)}"}
            method = "GET" if body is None else "POST"
            return server.http.request(method, path, json=body, headers=headers)

        body = {"name": "anns", "path": str(folder), "tenants": ["ann"]}
        told = error_of(call("", "/v1/adapters", body | {"tenants": ["eve"]}), 400)["message"]
        assert told == "'tenants': there is no tenant 'eve'; there are: ann, ben"
        assert call("ann", "/v1/adapters", body).status_code in (401, 403)
        assert call("", "/v1/adapters", body).json()["tenants"] == ["ann"]
        assert call("", "/v1/adapters", body | {"name": "all", "tenants": []}).status_code == 200
        for who, names in (("ann", {"anns", "all"}), ("ben", {"all"})):
            for path in ("/v1/adapters", "/v1/models"):
                listed = call(who, path)
                assert {each["id"] for each in listed.json()["data"]} - {MODEL} == names
                assert str(folder) not in listed.text
            asked = call(who, "/v1/completions", {"model": "anns", "prompt": "Hi"})
            assert asked.status_code == (200 if who == "ann" else 404)
            assert call(who, "/v1/models/anns").status_code == asked.status_code
        assert call("", "/v1/adapters").json()["data"][0]["path"] == str(folder)


def test_what_a_request_costs_does_not_grow_with_the_adapters(folder: Path) -> None:
    one, many = (Adapters({f"{n}": registered(folder) for n in range(7, 7 + k)}) for k in (1, 500))

    def steps(of: Adapters) -> int:
        count = 0

        def counted(*_: Any) -> Any:
            nonlocal count
            count += 1
            return counted

        sys.settrace(counted)
        try:
            of.find("7")
        finally:
            sys.settrace(None)
        return count

    assert steps(many) == steps(one)
