"""A hybrid that was trained here, served. Only the states of its recurrent layers know who likes
what, so a state that is lost, old or another's gives a wrong answer, not other noise.

    python -m pytest tests/e2e/test_trained_hybrid.py -m "e2e and long"
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.cache_dir import default_cache_dir, publish_dir
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model import batch
from kvrelay.engine.model.states import NO_STATE
from kvrelay.engine.request import SamplingParams
from kvrelay.training import corpus, hybrid
from tests.e2e.prompts import Message, greedy
from tests.e2e.serving import all_up, status, wait_for, worker_of
from tests.e2e.test_same_tokens import HAND_OVER, Asked, wait_until_on_disk
from tests.support.local import Completion, LocalCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

MAX_TOKENS = 8
NUM_SHARING, LEAST_HITS = 64, 62


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    answer: str


@pytest.fixture(scope="session")
def trained() -> Path:
    """Trained once for each version of the recipe, into the default cache."""
    recipe = b"".join(Path(str(each.__file__)).read_bytes() for each in (corpus, hybrid))
    name = f"trained-hybrid-{hashlib.sha256(recipe).hexdigest()[:16]}"
    return publish_dir(
        default_cache_dir() / name, lambda path: print(hybrid.train(path, lambda *_: None))
    )


def system_of(likes: dict[str, str], seed: int, words: int) -> Message:
    """The facts among so many words of the reference, the longer part before them."""
    chosen = random.Random(seed).choices(corpus.sentences(), k=words)
    before = after = ""
    while len(before.split()) < words * 0.8:
        before += chosen.pop()
    while len(after.split()) < words * 0.2:
        after += chosen.pop()
    told = "".join(corpus.fact(*each) for each in likes.items())
    return {"role": "system", "content": (before + told + after).strip()}


def turns_of(likes: dict[str, str], names: list[str]) -> tuple[list[Message], str]:
    """Each name is asked for and answered, but the last: its answer is the second."""
    turns: list[Message] = []
    for name in names:
        turns.append({"role": "user", "content": corpus.question(name).strip()})
        turns.append({"role": "assistant", "content": corpus.fact(name, likes[name]).strip()})
    return turns[:-1], turns[-1]["content"]


def likes_of(seed: int) -> dict[str, str]:
    draw = random.Random(seed)
    names = draw.sample(corpus.NAMES, corpus.NUM_FACTS)
    return dict(zip(names, draw.sample(corpus.THINGS, corpus.NUM_FACTS), strict=True))


def conversation(seed: int, words: int) -> Conversation:
    likes = likes_of(seed)
    turns, answer = turns_of(likes, random.Random(seed).choices(list(likes), k=1 + seed % 4))
    return Conversation([system_of(likes, seed, words), *turns], answer)


CONVERSATIONS = [conversation(seed, words=30 + 25 * seed) for seed in range(12)]


@dataclass(frozen=True)
class Known(Asked):
    tokenizer: Tokenizer

    def num_right(self, tokens: list[list[int]]) -> int:
        said = [self.tokenizer.decode(each).strip() for each in tokens]
        wanted = [each.answer for each in CONVERSATIONS]
        return sum(a.startswith(b) for a, b in zip(said, wanted, strict=True))


@pytest.fixture(scope="session")
def asked(trained: Path) -> Known:
    tokenizer = Tokenizer(trained)
    prompts = [tokenizer.chat_prompt(each.messages).tokens for each in CONVERSATIONS]
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=tuple(tokenizer.eos_token_ids)
    )
    known = Known(prompts, sampling, greedy(trained, torch.float32, prompts, MAX_TOKENS), tokenizer)
    assert known.num_right(known.expected) >= len(CONVERSATIONS) - 1, "it has not learnt it"
    return known


def one_by_one(cluster: LocalCluster, asked: Asked) -> list[Completion]:
    return [cluster.submit(each, asked.sampling).result(120) for each in asked.prompts]


def test_one_pool_at_once_then_from_host_memory_then_from_disk(
    trained: Path, asked: Known, tmp_path: Path
) -> None:
    engine = EngineSection(num_blocks=400)
    disk: dict[str, Any] = {
        "disk_path": str(tmp_path),
        "disk_bytes": 1 << 30,
        "disk_after_s": 0.0,
    }
    for host_bytes, source in ((1 << 30, "host"), (0, "disk")):
        with LocalCluster(
            trained, prefill=0, engine=engine, host_bytes=host_bytes, **disk
        ) as cluster:
            if source == "host":
                asked.check(cluster.generate(asked.prompts, asked.sampling))
                wait_until_on_disk(cluster)
                pool = cluster.workers["decode-0"].node.core.kv.pool
                cluster.run(lambda pool=pool: pool.evict(pool.block_hashes()))
            asked.check(one_by_one(cluster, asked))
            cluster.wait_idle()
            loaded = cluster.status().totals.cached_tokens_by_source[source]
            assert loaded > 0.5 * sum(map(len, asked.prompts)), f"{loaded} tokens from {source}"
            wait_until_on_disk(cluster)
            assert cluster.audit()["clean"], cluster.audit()


def test_two_pools_in_chunks(trained: Path, asked: Known) -> None:
    engine = EngineSection(num_blocks=400, max_num_batched_tokens=64)
    with LocalCluster(trained, engine=engine, router=HAND_OVER) as cluster:
        asked.check(cluster.generate(asked.prompts, asked.sampling))
        assert cluster.status().totals.handoffs == len(asked.prompts)
        cluster.wait_idle()


def test_a_handoff_without_states_would_show(
    trained: Path, asked: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token after a prompt finds KV alone, as if its worker had been given no states."""
    states_of = batch._states_of

    def without(seqs: Any, tables: Any, size: int) -> Any:
        lost: list[bool] = []
        for seq in seqs:
            end = seq.start + len(seq.tokens)
            lost += [seq.start == seq.num_prompt_tokens] * (-(-end // size) - seq.start // size)
        made = []
        for spans in states_of(seqs, tables, size):
            pairs = zip(spans.load, lost, strict=True)
            load = tuple(NO_STATE if is_lost else slot for slot, is_lost in pairs)
            made.append(batch.StateSpans(spans.rows, load, spans.store))
        return tuple(made)

    monkeypatch.setattr(batch, "_states_of", without)
    with LocalCluster(trained, engine=EngineSection(num_blocks=400), router=HAND_OVER) as cluster:
        answers = [each.tokens for each in cluster.generate(asked.prompts, asked.sampling)]
    print("right without states:", asked.num_right(answers), "of", len(answers))
    assert asked.num_right(answers) <= len(answers) // 4


@pytest.fixture(scope="module")
def server(trained: Path) -> Iterator[Served]:
    settings = {
        "model.name": str(trained),
        "model.served_name": "trained",
        "model.dtype": "float32",
        "engine.max_model_len": 4096,
        "router.policy": "round_robin",  # every prompt is handed over
    }
    with Served(settings) as served:
        yield served


def chat(url: str, messages: list[Message], **options: Any) -> Any:
    body = {"model": "trained", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **options}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_served_tokens_are_those_of_transformers(server: Served, asked: Known) -> None:
    right = 0
    for known, tokens in zip(CONVERSATIONS, asked.expected, strict=True):
        (choice,) = chat(server.url, known.messages, return_token_ids=True)["choices"]
        assert choice["token_ids"] == tokens
        right += choice["message"]["content"].strip() == known.answer
    assert right >= len(CONVERSATIONS) - 1


def test_prompts_with_one_beginning_hit_and_are_answered_right(server: Served) -> None:
    likes = likes_of(seed=100)
    system = system_of(likes, seed=100, words=900)
    shared = len(tokens_of(server.url, [system]))
    assert shared > 1200
    draw, hits, right = random.Random(9), 0, 0
    for _ in range(NUM_SHARING):
        turns, answer = turns_of(likes, draw.choices(list(likes), k=5))
        said = chat(server.url, [system, *turns])
        found = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        hits += found > 0.8 * shared
        right += said["choices"][0]["message"]["content"].strip() == answer
    print(f"{hits} of {NUM_SHARING} found the {shared} tokens they share, {right} are right")
    assert hits >= LEAST_HITS
    assert right >= LEAST_HITS


def tokens_of(url: str, messages: list[Message]) -> list[int]:
    answer = httpx.post(f"{url}/tokenize", json={"model": "trained", "messages": messages})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def streamed(
    url: str, messages: list[Message], options: dict[str, Any], on_chunk: Any = None
) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    chunks = client.chat.completions.create(
        model="trained", messages=messages, stream=True, temperature=0, **options
    )
    text = ""
    for number, chunk in enumerate(chunks):
        text += chunk.choices[0].delta.content or ""
        if on_chunk is not None:
            on_chunk(number)
    return text


def test_a_stream_goes_on_when_its_worker_is_killed(server: Served) -> None:
    """Ends of turns are passed over, so it lasts."""
    known = CONVERSATIONS[-1]
    options = {"max_tokens": 300, "extra_body": {"min_tokens": 300}}
    undisturbed = streamed(server.url, known.messages, options)
    before = worker_of(status(server.url), "decode-0")

    def disturb(number: int) -> None:
        if number == 5:
            os.kill(before["pid"], signal.SIGKILL)

    assert streamed(server.url, known.messages, options, disturb) == undisturbed
    assert undisturbed.strip().startswith(known.answer)

    def is_replaced(state: dict[str, Any]) -> bool:
        return bool(worker_of(state, "decode-0")["epoch"] > before["epoch"] and all_up(state))

    wait_for(server.url, is_replaced, 300, "decode-0 is not replaced")
    (choice,) = chat(server.url, known.messages)["choices"]
    assert choice["message"]["content"].strip() == known.answer
