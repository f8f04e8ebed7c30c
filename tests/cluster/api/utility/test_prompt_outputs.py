"""What a prompt gives: its log-probabilities in an echo, and embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrelay.cluster.api.openai.embeddings import EmbeddingFormat, EmbeddingRequest
from kvrelay.cluster.api.openai.parts import Piece
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.request import Pooling
from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.test_bad_input import error_of

PROMPT = "Say it: caf\u00e9 \U0001f600."


def completion(served: Served, **fields: Any) -> Any:
    answer = served.post({"model": MODEL, "prompt": PROMPT} | fields, "/v1/completions")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_an_echo_begins_with_the_log_probabilities_of_the_prompt(
    served: Served, tokenizer: Tokenizer, max_tokens: int, as_tokens: bool
) -> None:
    ids = tokenizer.encode(PROMPT)
    prompt: Any = ids if as_tokens else PROMPT
    answer = completion(served, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == ("length" if max_tokens < 8 else "stop")
    assert choice["text"].startswith(PROMPT)
    found = choice["logprobs"]
    num_output = answer["usage"]["completion_tokens"]
    assert num_output <= max_tokens
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for values in found.values():
        assert len(values) >= len(ids)
        assert len(values) <= len(ids) + max_tokens
    assert found["token_logprobs"][: len(ids)] == [None, *(-0.25 * at for at in range(1, len(ids)))]
    assert found["top_logprobs"][0] is None
    assert all(len(top) >= 2 for top in found["top_logprobs"][1 : len(ids)])
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    if max_tokens == 0:
        assert choice["text"] == PROMPT
        assert num_output == 0
    else:
        assert offsets[len(ids)] == len(PROMPT)


def test_a_streamed_echo_says_the_same(served: Served) -> None:
    whole = completion(served, echo=True, logprobs=1, max_tokens=6)["choices"][0]
    chunks = served.openai().completions.create(
        model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=6, stream=True
    )
    text, tokens, offsets = "", [], []
    for chunk in chunks:
        text += chunk.choices[0].text
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.token_logprobs if logprobs else []
        offsets += logprobs.text_offset if logprobs else []
    assert text == whole["text"]
    assert tokens == whole["logprobs"]["token_logprobs"]
    assert offsets == whole["logprobs"]["text_offset"]


def test_without_an_echo_nothing_is_asked_of_the_prompt(served: Served) -> None:
    completion(served, logprobs=1)
    completion(served, echo=True)
    assert not any(submit.sampling.reads_prompt for submit in served.router.submits)


def test_no_tokens_at_all_may_be_asked_for(served: Served) -> None:
    answer = completion(served, max_tokens=0)
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def embeddings(served: Served, **fields: Any) -> Any:
    return served.post({"model": MODEL, "input": "Hi"} | fields, "/v1/embeddings")


def test_embeddings_have_length_one_in_the_order_of_the_texts(served: Served) -> None:
    texts = ["A", "A longer text", "A text that is longer still"]
    answer = embeddings(served, input=texts).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    lengths = [len(submit.tokens) for submit in served.router.submits]
    for entry, length in zip(answer["data"], lengths, strict=True):
        norm = math.hypot(length, 4.0)
        assert entry["embedding"] == pytest.approx([length / norm, 4.0 / norm, 0.0, 0.0])
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert {submit.sampling.pooling for submit in served.router.submits} == {Pooling.LAST}


def test_dimensions_pooling_and_base64(served: Served) -> None:
    answer = embeddings(
        served, dimensions=1, encoding_format="base64", pooling="mean", input=[1, 2, 3]
    ).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<f", packed) == pytest.approx((1.0,))
    (submit,) = served.router.submits
    assert submit.sampling.pooling is Pooling.MEAN
    assert submit.tokens == (1, 2, 3)


def test_the_client_of_openai_takes_many_texts_at_once(served: Served) -> None:
    texts = [f"text {number}" for number in range(300)]
    answer = served.openai().embeddings.create(model=MODEL, input=texts)
    assert [entry.index for entry in answer.data] == list(range(300))
    assert len(answer.data[299].embedding) == 4


def test_many_vectors_are_written_between_other_work(served: Served) -> None:
    """2,048 vectors of thousands of numbers take seconds, and the loop serves others."""
    request = EmbeddingRequest(model=MODEL, input=[f"{number}" for number in range(256)])
    pieces = [
        Piece(index, "", (), "length", embedding=struct.pack("2f", index, 1.0))
        for index in range(256)
    ]
    usage = {"prompt_tokens": 256, "total_tokens": 256}
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> Any:
        plan: Any = SimpleNamespace(choices=pieces)
        format = EmbeddingFormat(served.ctx, plan, request, "r")
        task = asyncio.create_task(others())
        content = await format.whole(pieces, usage)
        task.cancel()
        return json.loads(msgspec.json.encode(content))

    answer = asyncio.run(run())
    assert turns >= 256
    assert [entry["index"] for entry in answer["data"]] == list(range(256))
    assert answer["data"][0]["embedding"] == [0.0, 1.0]
    assert answer["usage"] == usage


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": "long " * 600}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_wrong_fields_are_named(served: Served, change: dict[str, Any], param: str) -> None:
    assert error_of(embeddings(served, **change), 400)["param"] == param
