"""`/v1/conversations`: made, listed, changed, continued by responses, and seen by their tenant."""

from __future__ import annotations

import json
import sqlite3
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.responses import conversations as module
from kvrelay.cluster.api.responses.items import ConversationItems
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import ANSWER, MODEL, Served, serve
from tests.cluster.api.responses.asking import ASK, PATH, ask, post, refused, stream, user
from tests.cluster.api.tools.templates import prompt

BASE = "/v1/conversations"


def begin(served: Served, *items: Any, **fields: Any) -> str:
    made = served.post({"items": list(items)} | fields, BASE)
    assert made.status_code == 200, made.text
    name: str = made.json()["id"]
    return name


def texts(served: Served, name: str) -> list[str]:
    listed = served.http.get(f"{BASE}/{name}/items?order=asc&limit=100").json()["data"]
    return [item["content"][0]["text"] for item in listed]


def test_a_conversation_lives_as_the_sdk_knows_it(served: Served) -> None:
    client = served.openai().conversations
    hi: Any = {"type": "message", "role": "user", "content": "Hi"}
    made = client.create(items=[hi], metadata={"a": "b"})
    assert client.retrieve(made.id) == made
    assert client.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    added = client.items.create(made.id, items=[hi | {"content": "Ho"}])
    (new,) = added.data
    assert client.items.retrieve(new.id or "", conversation_id=made.id) == new
    listed = list(client.items.list(made.id, limit=1))  # page after page
    assert [item.content[0].text for item in listed] == ["Ho", "Hi"]  # type: ignore[union-attr]
    client.items.delete(new.id or "", conversation_id=made.id)
    assert texts(served, made.id) == ["Hi"]
    assert client.delete(made.id).deleted
    assert served.http.get(f"{BASE}/{made.id}").status_code == 404


def test_responses_continue_a_conversation_and_add_to_it(served: Served) -> None:
    name = begin(served, user("The word is slate."))
    made = ask(served, conversation=name)
    assert made.conversation is not None
    assert made.conversation.id == name
    stream(served, "Which word?", conversation={"id": name}, store=False)
    assert "The word is slate." in prompt(served)
    assert f"assistant\n{ANSWER}<|im_end|>" in prompt(served)
    assert texts(served, name) == ["The word is slate.", ASK, ANSWER, "Which word?", ANSWER]
    assert [submit.session for submit in served.router.submits] == [name, None]
    items = served.http.get(f"{BASE}/{name}/items?limit=100").json()["data"]
    assert len({item["id"] for item in items}) == 5


def test_items_of_a_conversation_can_be_named(served: Served) -> None:
    name = begin(served, user("The word is slate."))
    (item,) = served.http.get(f"{BASE}/{name}/items").json()["data"]
    ask(served, [{"type": "item_reference", "id": item["id"]}])
    assert "The word is slate." in prompt(served)


def test_what_cannot_be_continued_is_refused(served: Served) -> None:
    name = begin(served)
    made = ask(served)
    error = refused(served, conversation=name, previous_response_id=made.id)
    assert error["param"] == "conversation"
    for wrong in ("conv_x", made.id):
        response = post(served, conversation=wrong)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "conversation_not_found"
    assert served.http.get(f"{PATH}/{name}").status_code == 404  # it is no response
    assert served.http.get(f"{BASE}/{made.id}").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "x"}]}, "input"),
        ("", {"items": 5}, "items"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata.a"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: Any, param: str) -> None:
    place = f"{BASE}/{begin(served)}{path}" if path else BASE
    response = served.post(body, place)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_lists_name_what_is_wrong_with_their_query(served: Served) -> None:
    path = f"{BASE}/{begin(served, user('Hi'))}/items"
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        response = served.http.get(f"{path}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_conversation_has_a_bound(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    name = begin(served, user("Hi"))
    monkeypatch.setattr("kvrelay.cluster.api.responses.conversations.MAX_BYTES", 300)
    error = refused(served, "word " * 60, conversation=name)
    assert error["code"] == "conversation_too_large"
    response = served.post({"items": [user("word " * 60)]}, f"{BASE}/{name}/items")
    assert response.json()["error"]["code"] == "conversation_too_large"
    assert texts(served, name) == ["Hi"]


def test_a_conversation_is_its_tenants_alone(tokenizer: Tokenizer) -> None:
    entries = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
    context = {"tenants": Tenants.of(entries, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        red, blue = ({"authorization": f"Bearer {key}-key"} for key in ("red", "blue"))
        made = served.http.post(BASE, json={"items": [user("Hi")]}, headers=red).json()["id"]
        body = {"model": MODEL, "input": ASK, "conversation": made}
        for headers, status in ((blue, 404), ({}, 401), (red, 200)):
            assert served.http.get(f"{BASE}/{made}/items", headers=headers).status_code == status
            assert served.http.post(PATH, json=body, headers=headers).status_code == status
        assert served.http.delete(f"{BASE}/{made}", headers=blue).status_code == 404


def keep_as_before(served: Served, number: int) -> tuple[str, list[str]]:
    """A conversation as the last version wrote it, with an item that was taken out."""
    end = f"{number:032x}"
    name, ids = f"conv_{end}", [f"item_{end}_{i}" for i in (0, 2, 3)]
    shown = {"id": name, "object": "conversation", "created_at": 1, "metadata": {"a": "b"}}
    items = [user(i) | {"id": i, "content": [{"type": "input_text", "text": i}]} for i in ids]
    record = {"conversation": shown, "items": items, "num_items": 4}
    served.ctx.responses.put("", name, json.dumps(record).encode())
    return name, ids


def test_conversations_of_the_version_before_become_rows(served: Served) -> None:
    name, ids = keep_as_before(served, 1)
    assert served.http.get(f"{BASE}/{name}").json()["metadata"] == {"a": "b"}
    assert texts(served, name) == ids
    served.post({"items": [user("Ho")]}, f"{BASE}/{name}/items")
    listed = served.http.get(f"{BASE}/{name}/items?limit=1").json()
    assert listed["last_id"] == f"item_{1:032x}_4"
    # The version before finds no conversation, rather than one without its items.
    assert set(json.loads(served.ctx.responses.get("", name) or b"")) == {"header"}
    other, ids = keep_as_before(served, 2)
    assert served.http.delete(f"{BASE}/{other}/items/{ids[1]}").status_code == 200
    assert texts(served, other) == [ids[0], ids[2]]


def test_pages_of_items_have_a_bound_in_bytes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = begin(served, *(user(f"{i} " + "word " * 20) for i in range(5)))
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 500)
    page = served.http.get(f"{BASE}/{name}/items?limit=100").json()
    assert (len(page["data"]), page["has_more"]) == (2, True)
    listed = list(served.openai().conversations.items.list(name, order="asc"))
    assert [item.content[0].text[0] for item in listed] == [*"01234"]  # type: ignore[union-attr]
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 1)
    assert len(served.http.get(f"{BASE}/{name}/items").json()["data"]) == 1


def test_nothing_of_a_conversation_is_read_or_made_in_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, (first, *_) = keep_as_before(served, 3)
    names: set[str] = set()

    def watched(call: Any, *args: Any, **options: Any) -> Any:
        names.add(threading.current_thread().name.rpartition("_")[0])
        return call(*args, **options)

    calls = SimpleNamespace(loads=partial(watched, json.loads), dumps=partial(watched, json.dumps))
    monkeypatch.setattr(module, "json", calls)
    monkeypatch.setattr("kvrelay.cluster.api.responses.items.json", calls)
    served.http.get(f"{BASE}/{name}/items")
    served.http.get(f"{BASE}/{name}/items/{first}")
    served.post({"items": [user("Ho")]}, f"{BASE}/{name}/items")
    ask(served, conversation=name)
    assert names == {"json", "responses-read"}


def test_an_answer_says_that_its_conversation_lacks_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    name = begin(served)
    monkeypatch.setattr(ConversationItems, "append", full)
    for answer in (
        ask(served, conversation=name).to_dict(),
        stream(served, conversation=name)[-1]["response"],
    ):
        assert (answer["status"], answer["conversation"]) == ("completed", None)
        (warning,) = answer["warnings"]
        assert warning["code"] == "not_in_conversation"
        assert name in warning["message"]
        assert "database or disk is full" in warning["message"]
        kept = served.http.get(f"{PATH}/{answer['id']}").json()
        assert kept["warnings"] == answer["warnings"]
    monkeypatch.undo()
    assert "warnings" not in ask(served, conversation=name).to_dict()


def test_an_answer_that_is_larger_than_what_is_kept_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The youngest go last, but one that is more than all of its tenant's share has no place."""
    name = begin(served, user("Hi"))
    monkeypatch.setattr("kvrelay.cluster.api.responses.store.MAX_BYTES", 300)
    monkeypatch.setattr("kvrelay.cluster.api.responses.store.MAX_MEMORY_BYTES", 300)
    answer = ask(served, "word " * 100, conversation=name).to_dict()
    codes = [warning["code"] for warning in answer["warnings"]]
    assert (answer["store"], codes) == (False, ["not_in_conversation", "not_stored"])
    assert "larger than its tenant's share" in answer["warnings"][1]["message"]
    assert served.http.get(f"{PATH}/{answer['id']}").status_code == 404


def test_each_call_about_what_is_stored_counts_as_a_request(tokenizer: Tokenizer) -> None:
    red = TenantEntry("red", keys=("red-key",), requests_per_minute=1)
    context = {"tenants": Tenants.of((red,), b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        headers = {"authorization": "Bearer red-key"}
        assert served.http.get(f"{BASE}/x", headers=headers).status_code == 404
        one = f"{BASE}/x/items/y"
        calls = {
            "GET": (f"{BASE}/x", f"{BASE}/x/items", one, f"{PATH}/x", f"{PATH}/x/input_items"),
            "POST": (BASE, f"{BASE}/x", f"{BASE}/x/items", f"{PATH}/x/cancel"),
            "DELETE": (f"{BASE}/x", one, f"{PATH}/x"),
        }
        for method, path in [(m, p) for m, paths in calls.items() for p in paths]:
            response = served.http.request(method, path, headers=headers)
            assert response.status_code == 429, (method, path)
