"""Every field that a peer knows is obeyed, refused by name, or harmless, on every endpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.peer_fields import ENDPOINTS, NESTED, Endpoint
from tests.cluster.api.test_answers import ASK
from tests.cluster.api.test_bad_input import error_of
from tests.docs.parameters import PAGE, with_parameters

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"text_1": "Hello", "text_2": "Hello"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hello"]},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/compact": {"input": "Hello"},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/tokenize": {"messages": ASK},
    "/detokenize": {"tokens": [5]},
}
# Values of harmless fields; the others get an object.
VALUES = {
    **dict.fromkeys(("user", "request_id", "rid"), "x"),
    "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": False},
}
by_path = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.path)


@by_path
def test_every_field_that_is_known_is_one_of_three(endpoint: Endpoint) -> None:
    fields = endpoint.fields
    left = endpoint.known - endpoint.obeyed - {*fields.refused} - {*fields.harmless}
    assert not left, "obey these, refuse them or say why they are harmless"
    assert not endpoint.obeyed & {*fields.refused}
    assert not {*fields.harmless} & {*fields.refused}
    assert len(endpoint.known) > 1


def test_every_field_within_an_object_is_one_of_three(served: Served) -> None:
    for path, name, model, fields, known in NESTED:
        assert known == {*model.model_fields, *fields.refused, *fields.harmless}, name
        body = {"model": MODEL, **BODIES[path]}
        assert served.post(body | {name: dict.fromkeys(fields.harmless, "x")}, path).is_success
        wrong = next(iter(model.model_fields))
        response = served.post(body | {name: {wrong: 5}}, path)
        assert (response.status_code, f"{name}.{wrong}" in response.text) == (400, True)


def test_no_field_is_listed_that_nobody_knows() -> None:
    known = {name for endpoint in ENDPOINTS for name in endpoint.known}
    for endpoint in ENDPOINTS:
        assert {*endpoint.fields.refused, *endpoint.fields.harmless} <= known
        assert all(len(why) > 10 for why in endpoint.fields.harmless.values())


@by_path
def test_a_field_that_is_refused_is_named(served: Served, endpoint: Endpoint) -> None:
    body = {"model": MODEL, **BODIES[endpoint.path]}
    for name, refused in endpoint.fields.refused.items():
        value = False if refused.but == (True,) else {"x": 1}
        response = served.post(body | {name: value}, endpoint.path)
        message = response.json()["error"]["message"]
        assert (response.status_code, refused.why in message) == (400, True), (name, message)
        assert f"'{name}'" in message
        if "messages" not in endpoint.path:
            assert error_of(response, 400)["param"] == name
        for idle in (None, *refused.but):
            assert served.post(body | {name: idle}, endpoint.path).status_code == 200, name
    assert not served.router.submits or served.router.submits[-1].sampling.max_tokens


@by_path
def test_a_field_that_is_harmless_changes_nothing(served: Served, endpoint: Endpoint) -> None:
    body = {"model": MODEL, "seed": 7, **BODIES[endpoint.path]}
    plain = served.post(body, endpoint.path)
    assert plain.status_code == 200, plain.text
    for name in endpoint.fields.harmless:
        served.router.submits.clear()
        found = served.post(body | {name: VALUES.get(name, {"x": "1"})}, endpoint.path)
        assert found.status_code == 200, (name, found.text)
        if endpoint.path in ("/tokenize", "/v1/messages/count_tokens"):
            assert found.json() == plain.json()
            continue
        submit = served.router.submits[-1]
        same = served.post(body, endpoint.path)
        assert same.status_code == 200
        expected = served.router.submits[-1]
        if endpoint.path == "/v1/messages":  # it has no seed
            sampling = replace(submit.sampling, seed=expected.sampling.seed)
            assert sampling == expected.sampling
        else:
            assert submit.sampling == expected.sampling
        assert (submit.tokens, submit.scope, submit.priority) == (
            expected.tokens,
            expected.scope,
            expected.priority,
        )


def test_a_field_that_nobody_knows_is_ignored(served: Served) -> None:
    for endpoint in ENDPOINTS:
        body = {"model": MODEL, **BODIES[endpoint.path], "a_field_of_a_proxy": {"x": 1}}
        assert served.post(body, endpoint.path).status_code == 200


def test_the_table_in_the_documents_is_up_to_date() -> None:
    """If this fails: `python -m tests.docs.parameters`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_parameters(page) == page
