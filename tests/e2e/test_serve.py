"""`kvrelay serve` as a user meets it: it comes up, answers, stops, and says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.kv.spec import DTYPE_BYTES
from kvrelay.engine.model.runner import ModelRunner
from tests.e2e.serving import (
    KVRELAY,
    MODEL,
    arena_of,
    ask,
    begin_batch,
    status,
    texts_of_batch,
    wait_until,
    worker_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# Weights and rounding as they ship: on CPUs that multiply bfloat16 faster, that.
TOLERANCE = 1e-3 if ModelRunner.default_dtype() == "float32" else 0.2


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def served(state_dir: Path) -> Iterator[Served]:
    with Served({"sessions.state_dir": str(state_dir), "log.access": True}) as served:
        yield served


def logged(state_dir: Path, *options: str) -> str:
    """What an operator reads of it."""
    config = state_dir / "kvrelay.toml"
    config.write_text(f'[sessions]\nstate_dir = "{state_dir}"\n[api]\nport = 0\n')
    command = [*KVRELAY, "logs", "--config", str(config), "--lines", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_answers_and_shows_what_the_kv_cache_costs(served: Served) -> None:
    assert "Paris" in ask(served.url)
    text = "".join(served.lines)
    size = DTYPE_BYTES[ModelRunner.default_dtype()]
    shape = f"2 (K, V) x 30 layers x 3 KV heads x 64 head_dim x {size}"
    assert f"{11_520 * size:,} bytes a token = {shape}" in text
    assert "curl http" in text
    assert "Traceback" not in text


def test_rows_of_a_batch_are_answered_as_calls_are(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    questions = [f"What is the capital of {name}?" for name in ("France", "Italy", "Peru")]
    bodies: list[Any] = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 8,
            "seed": 7,
        }
        for question in questions
    ]
    name = begin_batch(client, bodies)
    called = [client.chat.completions.create(**body).choices[0].message.content for body in bodies]
    wait_until(lambda: client.batches.retrieve(name).status == "completed", 60)
    assert list(texts_of_batch(client, name).values()) == called


def test_what_vllm_lets_a_client_say_reaches_the_sampler(served: Served, smollm2_dir: Path) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]

    def chat(**fields: Any) -> Any:
        own = {name: fields.pop(name) for name in ("logprobs", "stop") if name in fields}
        return client.chat.completions.create(
            model=MODEL,
            messages=question,
            max_tokens=30,
            temperature=0,
            extra_body=fields,
            **own,
        )

    assert "Paris" in chat().choices[0].message.content
    assert "Paris" not in chat(bad_words=["Paris"]).choices[0].message.content
    # A grammar that has ended ends the output, whatever min_tokens says.
    short = chat(structured_outputs={"choice": ["yes", "no"]}, min_tokens=12).choices[0]
    assert (short.message.content in ("yes", "no"), short.finish_reason) == (True, "stop")
    assert chat(stop=["capital"], include_stop_str_in_output=True).choices[0].message.content == (
        "The capital"
    )
    tokenizer = Tokenizer(smollm2_dir)
    allowed = {token for text in (" yes", " no") for token in tokenizer.encode(text)}
    told = chat(
        allowed_token_ids=sorted(allowed),
        logprob_token_ids=sorted(allowed),
        logprobs=True,
        return_token_ids=True,
    ).choices[0]
    assert set(told.token_ids) <= allowed
    best = [top.logprob for top in told.logprobs.content[0].top_logprobs]
    assert best == sorted(best, reverse=True)
    assert told.logprobs.content[0].logprob == max(best)
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 1}
    body |= {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
    (choice,) = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"]
    ids = tokenizer.encode("The capital of France is")
    found = [
        each[str(token)]["logprob"]
        for token, each in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    assert found == choice["logprobs"]["token_logprobs"][1 : len(ids)]


def test_the_openai_client_gets_the_same_answer_streamed_and_not(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=question, temperature=0)
    stream = client.chat.completions.create(
        model=model, messages=question, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
    assert whole.choices[0].message.content == text


def test_what_a_prompt_gives_is_what_transformers_gives(served: Served, smollm2_dir: Path) -> None:
    """Twice: the second time its KV is cached, on both workers."""
    import torch
    from transformers import AutoModelForCausalLM

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60)
    text = (
        "A river is a natural stream of fresh water that flows on land, or inside caves, to a sea."
    )
    prompt = Tokenizer(smollm2_dir).encode(text * 8)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        known = torch.log_softmax(model.lm_head(states[:-1]), dim=-1)
    wanted = [known[at, token].item() for at, token in enumerate(prompt[1:])]
    vector = torch.nn.functional.normalize(states.mean(dim=0), dim=0).tolist()
    ask_for = {"model": MODEL, "max_tokens": 1, "temperature": 0}
    for _ in range(2):
        client.completions.create(prompt=prompt, **ask_for)
        answer = client.completions.create(prompt=prompt, echo=True, logprobs=1, **ask_for)
        assert answer.choices[0].logprobs is not None
        given = answer.choices[0].logprobs.token_logprobs
        assert given is not None
        assert given[0] is None
        assert given[1 : len(prompt)] == pytest.approx(wanted, abs=TOLERANCE)
        made = client.embeddings.create(model=MODEL, input=[prompt], extra_body={"pooling": "mean"})
        assert made.data[0].embedding == pytest.approx(vector, abs=TOLERANCE)


def test_health_and_status_name_both_workers(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {
        "status": "ok",
        "workers": 2,
        "workers_up": 2,
    }
    workers = status(served.url)["workers"]
    assert {(w["worker"], w["role"], w["state"]) for w in workers} == {
        ("prefill-0", "prefill", "up"),
        ("decode-0", "decode", "up"),
    }


@pytest.mark.parametrize("worker", [pytest.param("prefill-0", marks=pytest.mark.long), "decode-0"])
def test_a_worker_that_was_killed_comes_back(served: Served, worker: str) -> None:
    """With what it had in host memory."""
    before = worker_of(status(served.url), worker)
    os.kill(before["pid"], signal.SIGKILL)

    def is_back() -> bool:
        entry = worker_of(status(served.url), worker)
        kept = entry["num_host_blocks"] >= before["num_host_blocks"]
        return (entry["epoch"], entry["state"]) == (2, "up") and kept

    wait_until(is_back, 60, f"{worker} is not back")
    assert "Paris" in ask(served.url)
    assert worker != "decode-0" or before["num_host_blocks"] > 0


def test_after_all_that_an_audit_finds_nothing_left_over(served: Served) -> None:
    audit = subprocess.run(
        [*KVRELAY, "audit", "--url", served.url, "--json"], capture_output=True, timeout=60
    )
    found = json.loads(audit.stdout)
    assert (audit.returncode, found["clean"], found["left"]) == (0, True, [])
    epochs = {worker["worker"]: worker["epoch"] for worker in found["workers"]}
    assert epochs["decode-0"] == 2  # it was killed


def test_what_has_happened_is_logged_and_no_more_and_no_prompt(
    served: Served, state_dir: Path
) -> None:
    before = logged(state_dir)
    for _ in range(5):
        ask(served.url, httpx.Client(headers={"x-request-id": "of-this-test"}))
    wait_until(lambda: logged(state_dir, "--request", "of-this-test").count("\n") == 5)
    line, *_ = logged(state_dir, "--request", "of-this-test").splitlines()
    for words in ("info     router-0", "status=200", "outcome=stop", "worker=", "ttft_ms="):
        assert words in line
    text = logged(state_dir)
    new = text.removeprefix(before).splitlines()
    assert len(new) == 5, new  # while requests are served, nothing else
    for words in (
        "controller begins (epoch 1)",
        "router-0 is up (epoch 1) at port",
        "Ray: started; its own logs are in",
        "prefill-0 is up (epoch 1, prefill, 127.0.0.1, cpu, started in",
        "decode-0 (epoch 1) is gone: ",  # whoever notices it first gives the reason
        "decode-0 is up (epoch 2, decode",
        "the server is ready: smollm2-135m, router-0 at port",
    ):
        assert text.count(words) == 1, words
    assert f"log: {state_dir}/logs/0/prefill-0.log" in text
    files = list((state_dir / "logs/0").iterdir())
    names = {"supervisor", "controller", "router-0", "prefill-0", "decode-0"}
    assert {path.stem for path in files} == names
    assert all("capital" not in path.read_text() for path in files)


def test_it_stops_on_a_signal_and_leaves_nothing_behind(served: Served, state_dir: Path) -> None:
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    host_memory = arena_of(worker_of(status(served.url), "decode-0")["pid"])
    assert host_memory.exists()
    assert served.stop() == 0
    assert not host_memory.exists()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert "Traceback" not in "".join(served.lines)
    lines = logged(state_dir, "--worker", "supervisor").splitlines()
    ended = [line.split(maxsplit=3)[3] for line in lines]
    assert ended[-2:] == [
        "the server ends; requests have up to 30 s to finish",
        "the server has ended",
    ]


def test_what_is_wrong_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "bad.toml").write_text("[engine]\nblock_size = 0\n")
    (tmp_path / "big.toml").write_text("[engine]\nkv_cache_gib = 4000\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], f"port {port} of 127.0.0.1 is taken"),
            (["--port", "0", str(tmp_path / "none")], "none"),
            (["--port", "0", str(tmp_path)], "GPT2LMHeadModel is not supported"),
            (["--config", str(tmp_path / "bad.toml")], "engine.block_size = 0: expected at least"),
            (["--port", "0", "--config", str(tmp_path / "big.toml")], "too little memory"),
            (["--port", "70000"], "api.port = 70000: expected at most 65535"),
        ]
        running = [
            subprocess.Popen([*KVRELAY, "serve", *args], stderr=subprocess.PIPE, text=True)
            for args, _ in cases
        ]
        for process, (args, said) in zip(running, cases, strict=True):
            _, error = process.communicate(timeout=90)
            complaint = [line for line in error.splitlines() if line.startswith("error: ")]
            assert process.returncode == 1, (args, error)
            assert len(complaint) == 1, (args, error)
            assert said in complaint[0], args
            assert "Traceback" not in error
