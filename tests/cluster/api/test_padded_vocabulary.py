"""All that names tokens, on models whose logits are wider than the tokenizer, as most models' are:
grammars, tools, biases, sampling, log-probabilities and embeddings, through a real router and
worker. The tokens that the tokenizer lacks are those that these models like best."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import EngineSection
from kvrelay.engine.node import Effect
from kvrelay.router.explain import Explanations
from tests.cluster.api.calls import APIS, Api, answers_of, asked
from tests.cluster.api.conftest import MODEL, Served, serve
from tests.support.local import LocalCluster

TEXT = {"prompt": "The capital of France is", "max_tokens": 8, "return_token_ids": True}


class ModelRouter:
    """The router of a local cluster, whose workers run a model, in the place of `FakeRouter`. Node
    of that cluster, for the API."""

    node_id = "api-0"

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._loop: asyncio.AbstractEventLoop | None = None  # the API's
        self.client: Any = None  # the API's node
        self.reply: Any = None  # takes what the router answers

    @property
    def explanations(self) -> Explanations:
        return self._cluster.router.explanations

    @property
    def num_live(self) -> int:
        return self._cluster.status().num_live

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.reply, message)
        return []

    def deliver(self, to: str, message: Any) -> None:
        """Begins with the first message, on the loop that it comes on."""
        host = self._cluster.host
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._cluster.run(lambda: host.add(self))
        self._cluster.run(lambda: host.deliver(to, message))


@pytest.fixture(scope="module", params=[0, 1, 31, 64, 267])
def num_padded(request: pytest.FixtureRequest) -> int:
    """Rows that a model's embedding has more than its tokenizer has tokens."""
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def served(
    num_padded: int, make_padded_model: Callable[[int], Path], tokenizer: Tokenizer
) -> Iterator[Served]:
    engine = EngineSection(threads=1, num_blocks=256)
    with (
        LocalCluster(make_padded_model(num_padded), prefill=0, engine=engine) as cluster,
        serve(tokenizer, ApiSettings(), real_router=ModelRouter(cluster)) as running,
    ):
        yield running
        cluster.wait_idle()


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    answer = served.post(asked(TEXT | fields), "/v1/completions")
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


@pytest.mark.slow
def test_all_apis_answer_with_tools_and_schemas(served: Served) -> None:
    assert len(answers_of(served.http, served.url)) == 11


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS[:2], ids=["chat", "completions"])
def test_an_id_that_only_the_model_has_is_refused_by_name(
    served: Served, tokenizer: Tokenizer, api: Api
) -> None:
    unknown = tokenizer.vocab_size
    fields: dict[str, Any] = {"logit_bias": {str(unknown): 5}, "allowed_token_ids": [5, unknown]}
    fields |= {"stop_token_ids": [unknown], "logprob_token_ids": [unknown]}
    asks = asked(api.plain) | {"logprobs": True if "messages" in api.plain else 1}
    for name, value in fields.items():
        answer = served.post(asks | {name: value}, api.path)
        assert answer.status_code == 400, answer.text
        assert name in answer.json()["error"]["message"]


def test_biases_and_bans_move_the_choice(served: Served, tokenizer: Tokenizer) -> None:
    (word,) = tokenizer.encode(" Paris")
    assert complete(served, logit_bias={word: 100})["token_ids"] == [word] * 8
    assert set(complete(served, allowed_token_ids=[word, 17])["token_ids"]) <= {word, 17}
    fields = {"logit_bias": {word: 100}, "bad_words": ["Paris"]}
    assert word not in complete(served, **fields)["token_ids"]
    fields = {"logit_bias": {word: 100}, "frequency_penalty": 2.0, "repetition_penalty": 1.3}
    assert complete(served, **fields)["token_ids"][0] == word


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["kernels", "torch"])
def test_what_is_drawn_is_within_the_logits(
    served: Served, tokenizer: Tokenizer, num_padded: int, more: dict[str, Any]
) -> None:
    size = tokenizer.vocab_size
    for fields in (
        {"top_k": size + 1},
        {"top_k": size + num_padded + 1, "top_p": 0.9},
        {"top_k": 2**31 - 1, "min_p": 0.001},
        {"top_k": 5, "presence_penalty": 1.5, "repetition_penalty": 1.5},
    ):
        ids = complete(served, temperature=1.5, seed=3, **fields, **more)["token_ids"]
        assert all(0 <= token < size + num_padded for token in ids)


def test_log_probabilities_name_tokens_without_a_text(
    served: Served, tokenizer: Tokenizer, num_padded: int
) -> None:
    size = tokenizer.vocab_size
    fields = {"logprobs": 5, "prompt_logprobs": 5, "echo": True}
    told = complete(served, return_tokens_as_token_ids=True, **fields)
    best = {name for top in told["logprobs"]["top_logprobs"][1:] for name in top}
    assert any(int(name.removeprefix("token_id:")) >= size for name in best) == (num_padded > 0)
    named = complete(served, **fields)
    entries = [entry for each in named["prompt_logprobs"][1:] for entry in each.items()]
    for token, entry in entries:
        assert (entry["decoded_token"] == "") == (int(token) >= size)
    chat = asked(APIS[0].plain) | {"logprobs": True, "top_logprobs": 20}
    (choice,) = served.post(chat).json()["choices"]
    assert all(len(each["top_logprobs"]) == 20 for each in choice["logprobs"]["content"])


def test_embeddings_come(served: Served) -> None:
    for given in ("a river", ["a river", "a sea"], [5, 6, 7]):
        answer = served.post({"model": MODEL, "input": given}, "/v1/embeddings")
        assert answer.status_code == 200, answer.text
        assert {len(each["embedding"]) for each in answer.json()["data"]} == {96}
