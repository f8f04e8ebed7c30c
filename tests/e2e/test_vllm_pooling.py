"""Embeddings by a real vLLM that pools, beside our own engine with the same checkpoint.

As tests.e2e.test_vllm it needs KVRELAY_VLLM_PYTHON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import all_up, wait_for
from tests.e2e.test_vllm import PYTHON, START_S, WORDS, assert_clean, client
from tests.e2e.test_vllm import pytestmark as pytestmark
from tests.support.vllm_settings import small

TEXTS = [f"Tell me a story about a {word}." for word in WORDS] + ["the sea " * 300]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    vllm = {"runs": "vllm", "python": PYTHON, "arguments": {"runner": "pooling"}}
    common = {"checkpoint": "smollm2-135m", "prefill": 0, "decode": 1}
    models = [{"name": "vllm", "engine": vllm, **common}, {"name": "own", **common}]
    settings = small(tmp_path_factory.mktemp("pooling"), START_S)
    with Served(settings | {"models": models}) as served:
        wait_for(served.url, all_up, START_S, "not up")
        yield served


def vectors(url: str, model: str, texts: list[str], **more: Any) -> np.ndarray:
    found = client(url).embeddings.create(model=model, input=texts, **more).data
    return np.array([each.embedding for each in sorted(found, key=lambda each: each.index)])


def test_vectors_are_those_of_our_engine(server: Served) -> None:
    ours, theirs = (vectors(server.url, name, TEXTS) for name in ("own", "vllm"))
    np.testing.assert_allclose(theirs, ours, atol=2e-3)
    np.testing.assert_allclose((theirs**2).sum(axis=1), 1, atol=1e-5)
    short = vectors(server.url, "vllm", TEXTS[:2], dimensions=64)
    cut = theirs[:2, :64] / np.linalg.norm(theirs[:2, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(short, cut, atol=1e-4)
    assert_clean(server.url)


def test_chats_and_other_kinds_of_pooling_are_refused_in_words(server: Served) -> None:
    about: dict[str, Any] = {"model": "vllm", "messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(openai.BadRequestError, match="computes embeddings alone"):
        client(server.url).chat.completions.create(**about)
    with pytest.raises(openai.BadRequestError, match="ask 'last'"):
        vectors(server.url, "vllm", TEXTS[:1], extra_body={"pooling": "mean"})
    assert_clean(server.url)
