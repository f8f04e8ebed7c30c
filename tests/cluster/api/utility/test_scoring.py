"""Scores of texts by their embeddings, in vLLM's form and in Jina's and Cohere's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.request import Pooling
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.test_bad_input import error_of

LONG, SHORT, MIDDLE = "word " * 40, "word", "word " * 10


def cosine(first: int, second: int) -> float:
    """Of the vectors that the scripted router gives texts of so many tokens: (tokens, 4)."""
    return (first * second + 16) / (math.hypot(first, 4) * math.hypot(second, 4))


def ask(served: Served, path: str, **fields: Any) -> Any:
    answer = served.post({"model": MODEL, "pooling": "mean"} | fields, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_one_text_is_scored_with_many(
    served: Served, tokenizer: Tokenizer, path: str, names: tuple[str, str]
) -> None:
    texts = [LONG, SHORT, {"text": MIDDLE}]
    answer = ask(served, path, **{names[0]: SHORT, names[1]: texts})
    lengths = [len(tokenizer.encode(text)) for text in (SHORT, LONG, SHORT, MIDDLE)]
    assert [len(submit.tokens) for submit in served.router.submits] == lengths
    assert {submit.sampling.pooling for submit in served.router.submits} == {Pooling.MEAN}
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    expected = [cosine(lengths[0], length) for length in lengths[1:]]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected)
    assert answer["data"][1]["score"] == pytest.approx(1.0)
    usage = {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths), "completion_tokens": 0}
    assert answer["usage"] == usage


def test_as_many_texts_are_scored_in_pairs(served: Served, tokenizer: Tokenizer) -> None:
    answer = ask(served, "/v1/score", text_1=[LONG, SHORT], text_2=[MIDDLE, LONG])
    long, short, middle = (len(tokenizer.encode(text)) for text in (LONG, SHORT, MIDDLE))
    expected = [cosine(long, middle), cosine(short, long)]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_scores(served: Served, path: str) -> None:
    documents = [LONG, SHORT, {"text": MIDDLE}]
    answer = ask(served, path, query=SHORT, documents=documents)
    results = answer["results"]
    assert [each["index"] for each in results] == [1, 2, 0]
    assert [each["document"] for each in results] == [
        {"text": text} for text in (SHORT, MIDDLE, LONG)
    ]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1.0)
    first = ask(served, path, query=SHORT, documents=documents, top_n=1, return_documents=False)
    assert first["results"] == [{"index": 1, "relevance_score": scores[0]}]


def test_texts_keep_as_many_tokens_as_is_said(served: Served, tokenizer: Tokenizer) -> None:
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 5}
    ask(served, "/v1/rerank", query=LONG, documents=[LONG, SHORT, "\U0001f600" * 9], **limits)
    query, long, short, faces = (submit.tokens for submit in served.router.submits)
    assert query == tuple(tokenizer.encode(LONG)[:2])
    assert long == tuple(tokenizer.encode(LONG)[:5])
    assert short == tuple(tokenizer.encode(SHORT))
    assert 0 < len(faces) <= 5
    assert set(tokenizer.decode(faces)) == {"\U0001f600"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [""]}, "documents"),
        ({"documents": [{"image": "x"}]}, "documents"),
        ({"documents": "long " * 600}, "documents"),
        ({"documents": ["a"] * 2048}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_wrong_fields_of_a_rerank_are_named(
    served: Served, change: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"]}
    assert error_of(served.post(body | change, "/v1/rerank"), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_1": "a"}, "'text_1' and 'text_2'"),
        ({"text_1": "a", "documents": "b"}, "'queries' and 'documents'"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 texts cannot be paired with the 3"),
        ({"text_1": ["a"] * 1500, "text_2": ["a"] * 1500}, "at most 2048 texts together"),
        ({"text_1": "a", "text_2": "long " * 600}, "maximum context length"),
    ],
)
def test_wrong_fields_of_a_score_are_named(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    error = error_of(served.post(fields, "/v1/score"), 400)
    assert message in error["message"]
