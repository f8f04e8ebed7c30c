"""Chat completions with `store: true`, as OpenAI's SDK lists, gets, changes and deletes them."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import ANSWER, MODEL, Served, serve

PATH = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "Hi"}]


def test_one_lives_as_the_sdk_knows_it(served: Served) -> None:
    client = served.openai().chat.completions
    made = client.create(model=MODEL, messages=ASK, store=True, metadata={"a": "b"})
    kept = client.retrieve(made.id)
    assert kept.choices[0].message.content == ANSWER
    assert (kept.usage, kept.created) == (made.usage, made.created)
    assert client.update(made.id, metadata={"c": "d"}).id == made.id
    assert [each.id for each in client.list(metadata={"c": "d"})] == [made.id]
    assert list(client.list(metadata={"a": "b"})) == []
    (asked,) = client.messages.list(made.id)
    assert (asked.role, asked.content) == ("user", "Hi")
    assert client.delete(made.id).deleted
    assert served.http.get(f"{PATH}/{made.id}").status_code == 404


def test_a_stream_is_kept_whole(served: Served) -> None:
    chunks = served.openai().chat.completions.create(
        model=MODEL, messages=ASK, store=True, stream=True, n=2
    )
    name = [chunk.id for chunk in chunks][-1]
    kept = served.openai().chat.completions.retrieve(name)
    assert [choice.message.content for choice in kept.choices] == [ANSWER, ANSWER]
    assert [choice.finish_reason for choice in kept.choices] == ["stop", "stop"]
    assert kept.object == "chat.completion"


def test_what_is_not_to_be_kept_is_not(served: Served) -> None:
    for changes in ({}, {"store": False}, {"store": None}):
        made = served.post({"model": MODEL, "messages": ASK} | changes).json()
        response = served.http.get(f"{PATH}/{made['id']}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "completion_not_found"


def test_log_probabilities_are_told_and_not_kept(served: Served) -> None:
    body = {"model": MODEL, "messages": ASK, "store": True, "logprobs": True, "top_logprobs": 2}
    made = served.post(body).json()
    assert len(made["choices"][0]["logprobs"]["content"]) > 3
    kept = served.http.get(f"{PATH}/{made['id']}").json()
    assert kept["choices"][0]["logprobs"] is None


def test_lists_have_pages_and_say_what_is_wrong(served: Served) -> None:
    client = served.openai().chat.completions
    tag = {"list": "pages"}
    made = [client.create(model=MODEL, messages=ASK, store=True, metadata=tag) for _ in range(3)]
    ids = [each.id for each in made]
    assert [each.id for each in client.list(limit=2, metadata=tag)] == ids
    assert [each.id for each in client.list(order="desc", metadata=tag)] == ids[::-1]
    response = served.http.get(f"{PATH}?limit=0")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
    wrong = served.post({"metadata": {"a": 5}}, f"{PATH}/{ids[0]}")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "metadata.a")
    assert served.post({"metadata": {}}, f"{PATH}/chatcmpl-x").status_code == 404


@pytest.mark.parametrize("path", ["", "/messages"])
def test_one_is_its_tenants_alone(tokenizer: Tokenizer, path: str) -> None:
    entries = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
    context = {"tenants": Tenants.of(entries, b"a secret")}
    with serve(tokenizer, ApiSettings(), context=context) as served:
        red, blue = ({"authorization": f"Bearer {key}-key"} for key in ("red", "blue"))
        body = {"model": MODEL, "messages": ASK, "store": True}
        made = served.http.post(PATH, json=body, headers=red).json()["id"]
        for headers, status in ((blue, 404), ({}, 401), (red, 200)):
            assert served.http.get(f"{PATH}/{made}{path}", headers=headers).status_code == status
        assert served.http.get(PATH, headers=blue).json()["data"] == []
