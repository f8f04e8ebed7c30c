"""Several models behind one endpoint: each call is served by the one that it names."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import connect

from kvrelay.cluster.api.client import RouterClient
from kvrelay.cluster.api.context import ApiContext, ApiSettings
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from kvrelay.cluster.orders import ChangeModels, OrderRefused
from kvrelay.router.messages import SessionCommand, SessionRefusal, SessionReply
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until
from tests.cluster.api.conftest import tokenizer as tokenizer
from tests.cluster.api.fake_router import FakeRouter

OTHER, ALIAS = "small-talk", "gpt-4o-mini"
OTHER_ANSWER = " It is the other one."
OTHER_LEN = 96
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
)
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@dataclass
class Two:
    served: Served
    other: FakeRouter
    ctx: ApiContext  # the other one's


def two(tokenizer: Tokenizer, smollm2_dir: Path, **options: Any) -> Iterator[Two]:
    """The default model, and another one with its own template, context, limits and router."""
    settings = options.pop("settings", None) or ApiSettings(
        max_body_bytes=96 * 1024, max_live_requests=3, request_timeout_s=20
    )
    answer = [*tokenizer.encode(OTHER_ANSWER), tokenizer.eos_token_ids[0]]
    router = FakeRouter(answer=lambda submit: answer)
    added: list[ApiContext] = []
    allowed = options.pop("allowed", ())

    def add(ctx: ApiContext) -> None:
        client = RouterClient("api-1", "router-0", router.deliver)
        router.reply = lambda message: client.receive(asyncio.get_running_loop().time(), message)
        added.append(
            ctx.beside(
                model_name=OTHER,
                aliases=(ALIAS,),
                allowed=allowed,
                tokenizer=Tokenizer(smollm2_dir, chat_template=TEMPLATE),
                client=client,
                max_model_len=OTHER_LEN,
                explanations=router.explanations,
                settings=replace(ctx.settings, reasoning_parser="think"),
            )
        )

    with serve(tokenizer, settings, further=add, **options) as served:
        yield Two(served, router, added[0])


@pytest.fixture
def both(tokenizer: Tokenizer, smollm2_dir: Path) -> Iterator[Two]:
    yield from two(tokenizer, smollm2_dir)


def test_all_are_listed_with_their_aliases(both: Two) -> None:
    listed = both.served.openai().models.list().data
    found = [(card.id, getattr(card, "root"), getattr(card, "max_model_len")) for card in listed]  # noqa: B009
    assert found == [(MODEL, MODEL, 512), (OTHER, OTHER, OTHER_LEN), (ALIAS, OTHER, OTHER_LEN)]
    card = both.served.openai().models.retrieve(ALIAS)
    assert getattr(card, "root") == OTHER  # noqa: B009


def test_a_chat_is_of_the_model_that_it_names(both: Two) -> None:
    client = both.served.openai()
    said = {}
    for name in (MODEL, OTHER, ALIAS):
        answer = client.chat.completions.create(model=name, messages=CHAT["messages"])  # type: ignore[arg-type]
        said[name] = answer.choices[0].message.content, answer.model
    assert said[MODEL] == (" The capital of France is Paris.", MODEL)
    assert said[OTHER] == said[ALIAS] == (OTHER_ANSWER, OTHER)
    assert (len(both.served.router.submits), len(both.other.submits)) == (1, 2)
    prompt = both.ctx.tokenizer.decode(both.other.submits[0].tokens)
    assert prompt == "<user>What is the capital of France?", "its own template"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "It is"}),
        ("/v1/embeddings", {"input": "It is"}),
        ("/v1/messages", CHAT | {"max_tokens": 9}),
        ("/v1/responses", {"input": "It is"}),
        ("/v1/responses", {"input": "It is", "background": True}),
        ("/v1/responses/compact", {"input": "It is"}),
    ],
)
def test_each_endpoint_knows_them_all(both: Two, path: str, body: dict[str, Any]) -> None:
    for name, mine, others in (
        (MODEL, both.served.router, both.other),
        (ALIAS, both.other, both.served.router),
    ):
        before = len(others.submits)
        answer = both.served.post(body | {"model": name}, path)
        assert answer.status_code == 200, answer.text
        wait_until(lambda mine=mine: len(mine.submits) == 1)  # type: ignore[misc]
        assert len(others.submits) == before
        if "compact" not in path:
            assert answer.json()["model"] == (MODEL if name == MODEL else OTHER)
    wait_until(lambda: not both.other.num_live)


def test_metrics_are_of_the_model_that_was_called(both: Two) -> None:
    def found() -> dict[tuple[str, str], float]:
        text = both.served.http.get("/metrics").text
        names = {
            "kvrelay_ttft_seconds_count": "model",
            "kvrelay_output_tokens_total": "model",
            "vllm:time_to_first_token_seconds_count": "model_name",
            "gen_ai_server_time_to_first_token_seconds_count": "gen_ai_request_model",
        }
        return {
            (each.name, each.labels[names[each.name]]): each.value
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name in names
        }

    for number, name in enumerate((MODEL, ALIAS, OTHER)):
        both.served.post(
            {"model": name, "prompt": "a", "max_tokens": 3 + number}, "/v1/completions"
        )
    both.served.wait_idle()
    counts = found()
    for metric in ("kvrelay", "vllm:time", "gen_ai"):
        of = {model: n for (name, model), n in counts.items() if name.startswith(metric)}
        assert {MODEL, OTHER} == of.keys(), metric
    assert counts["vllm:time_to_first_token_seconds_count", MODEL] == 1
    assert counts["vllm:time_to_first_token_seconds_count", OTHER] == 2
    assert counts["kvrelay_ttft_seconds_count", OTHER] == 2
    assert counts["kvrelay_output_tokens_total", MODEL] == 3
    assert counts["kvrelay_output_tokens_total", OTHER] == 4 + 5
    wait_until(lambda: not both.other.num_live)


@pytest.mark.parametrize("slow_one", [MODEL, OTHER])
def test_a_model_that_tokenises_much_holds_up_no_other(both: Two, slow_one: str) -> None:
    """All threads of one are taken. Bodies are so large that threads parse them."""
    quick_one = OTHER if slow_one == MODEL else MODEL
    begun, ended = threading.Semaphore(0), threading.Event()
    ctx = both.served.ctx if slow_one == MODEL else both.ctx
    encode = ctx.tokenizer.encode

    def slow(*args: Any, **options: Any) -> Any:
        begun.release()
        assert ended.wait(60)
        return encode(*args, **options)

    ctx.tokenizer.encode = slow  # type: ignore[method-assign]
    num = ctx.settings.tokenizer_threads

    def ask(model: str) -> int:
        body = json.dumps({"model": model, "prompt": "It is", "max_tokens": 1})
        content = body + " " * SMALL_BODY_BYTES
        return both.served.http.post("/v1/completions", content=content).status_code

    with ThreadPoolExecutor(num) as pool:
        waiting = [pool.submit(ask, slow_one) for _ in range(num)]
        for _ in range(num):
            assert begun.acquire(timeout=60)
        assert ask(quick_one) == 200
        ended.set()
        assert [each.result() for each in waiting] == [200] * num
    ctx.tokenizer.encode = encode  # type: ignore[method-assign]
    wait_until(lambda: not both.other.num_live)


def test_calls_of_a_busy_model_push_out_none_of_another(both: Two, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvrelay.cluster.api.calls.MAX_CALLS", 4)
    for name in (MODEL, *[OTHER] * 6, MODEL):
        assert both.served.post({"model": name, "prompt": "a"}, "/v1/completions").is_success
    both.served.wait_idle()
    rows = both.served.http.get("/requests").json()["data"]
    assert [row["model"] for row in rows] == [MODEL, OTHER, OTHER, MODEL]
    wait_until(lambda: not both.other.num_live)


def test_without_a_name_it_is_the_first(both: Two) -> None:
    assert both.served.post({"prompt": "It is"}, "/v1/completions").json()["model"] == MODEL


def test_one_that_is_not_there_is_a_404_that_lists_those_that_are(both: Two) -> None:
    wanted = f"The model 'gpt-5' does not exist; this server has '{MODEL}', '{OTHER}', '{ALIAS}'"
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = both.served.post(body | {"model": "gpt-5"}, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["message"] == wanted
    assert both.served.http.get("/v1/models/gpt-5").status_code == 404
    assert both.served.http.get("/v1/sessions?model=gpt-5").status_code == 404


def test_anthropic_and_websockets_too(both: Two) -> None:
    client = anthropic.Anthropic(base_url=both.served.url, api_key="none", max_retries=0)
    asked: Any = CHAT["messages"]
    message = client.messages.create(model=ALIAS, max_tokens=20, messages=asked)
    assert (message.content[0].text, message.model) == (OTHER_ANSWER, OTHER)  # type: ignore[union-attr]
    counts = {
        name: client.messages.count_tokens(model=name, messages=asked).input_tokens
        for name in (MODEL, OTHER)
    }
    assert counts[MODEL] > counts[OTHER] > 0
    with connect(f"{both.served.url.replace('http', 'ws')}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", "model": OTHER, "input": "a"}))
        while (event := json.loads(socket.recv(20)))["type"] != "response.completed":
            pass
    assert event["response"]["model"] == OTHER


def test_text_becomes_tokens_of_the_model_that_is_named(both: Two) -> None:
    counts = {
        name: both.served.post(CHAT | {"model": name}, "/tokenize").json()
        for name in (MODEL, ALIAS)
    }
    assert counts[MODEL]["count"] > counts[ALIAS]["count"]
    assert counts[ALIAS]["max_model_len"] == OTHER_LEN


def test_the_context_is_the_models_own(both: Two) -> None:
    long = {"prompt": "a " * 150, "max_tokens": 1}
    assert both.served.post(long | {"model": MODEL}, "/v1/completions").status_code == 200
    refused = both.served.post(long | {"model": OTHER}, "/v1/completions")
    assert refused.status_code == 400
    assert str(OTHER_LEN) in refused.json()["error"]["message"]


@pytest.mark.slow
def test_so_many_live_requests_of_one_leave_the_others_theirs(both: Two) -> None:
    router, statuses = both.served.router, list[int]()
    router.delay_s = 0.2
    body = {"model": MODEL, "prompt": "a"}

    def call() -> None:
        statuses.append(httpx.post(f"{both.served.url}/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: both.served.ctx.live.num_taken == 2)
    assert both.served.post(body, "/v1/completions").status_code == 429
    assert both.served.post(body | {"model": OTHER}, "/v1/completions").status_code == 200
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]


def test_a_call_is_explained_by_its_models_router(both: Two) -> None:
    for name in (MODEL, OTHER):
        both.served.post({"model": name, "prompt": "It is"}, "/v1/completions")
    listed = both.served.http.get("/requests").json()["data"]
    shown = [both.served.http.get(f"/requests/{each['id']}/explanation").json() for each in listed]
    assert [each["model"] for each in shown] == [OTHER, MODEL]
    assert all(each["phases"] for each in shown)
    assert [each["prefix"] for each in shown] == [None, None], "no prompt of its own before"


def test_sessions_are_of_a_model(both: Two) -> None:
    def no(command: SessionCommand) -> SessionReply:
        return SessionReply(command.command_id, SessionRefusal.UNKNOWN, "none")

    both.other.answer_command = both.served.router.answer_command = no
    assert both.served.http.get("/v1/sessions/a?model=small-talk").status_code == 404
    assert (len(both.other.commands), len(both.served.router.commands)) == (1, 0)
    both.served.http.get("/v1/sessions/a")
    assert (len(both.other.commands), len(both.served.router.commands)) == (1, 1)


def test_a_model_for_some_tenants_is_not_there_for_others(
    tokenizer: Tokenizer, smollm2_dir: Path
) -> None:
    keys = {"red": "red-key-of-16-chars", "blue": "blue-key-of-16-chars"}
    tenants = Tenants.of([TenantEntry(name, (key,)) for name, key in keys.items()], b"secret")
    options = {"allowed": ("red",), "context": {"tenants": tenants}}
    for both in two(tokenizer, smollm2_dir, **options):
        clients = {
            name: openai.OpenAI(base_url=f"{both.served.url}/v1", api_key=key, max_retries=0)
            for name, key in keys.items()
        }
        named = {name: [m.id for m in client.models.list()] for name, client in clients.items()}
        assert named == {"red": [MODEL, OTHER, ALIAS], "blue": [MODEL]}
        assert clients["red"].completions.create(model=ALIAS, prompt="a").model == OTHER
        with pytest.raises(openai.NotFoundError, match=f"this server has '{MODEL}'"):
            clients["blue"].completions.create(model=ALIAS, prompt="a")
        assert len(both.other.submits) == 1


def test_metrics_count_each(both: Two) -> None:
    for name in (MODEL, OTHER, OTHER):
        both.served.post({"model": name, "prompt": "It is"}, "/v1/completions")
    lines = both.served.http.get("/metrics").text.splitlines()
    counted = {
        name: [
            float(line.split()[-1])
            for line in lines
            if "request_duration_seconds_count" in line and f'gen_ai_request_model="{name}"' in line
        ]
        for name in (MODEL, OTHER)
    }
    assert counted == {MODEL: [1.0], OTHER: [2.0]}


def test_operators_add_and_remove_models_and_bad_ones_are_said(
    tokenizer: Tokenizer, smollm2_dir: Path
) -> None:
    asked: list[Any] = []

    async def change(order: ChangeModels) -> dict[str, Any]:
        if order.name == "taken":
            raise OrderRefused("there is a model 'taken'")
        asked.append((order.name, order.entry and order.entry.checkpoint, order.drain_s))
        return {}

    settings = ApiSettings(operations_key="operators-key-1234")
    key = {"authorization": "Bearer operators-key-1234"}
    for found in two(tokenizer, smollm2_dir, context={"order": change}, settings=settings):
        url = found.served.url

        def call(
            method: str, path: str, body: str = "", headers: Any = key, url: str = url
        ) -> tuple[int, str]:
            headers = {"content-type": "application/json", **headers}
            answer = httpx.request(method, url + path, content=body, headers=headers, timeout=30)
            return answer.status_code, answer.text

        assert call("POST", "/models", '{"name": "n", "checkpoint": "c"}', {})[0] == 401
        assert call("POST", "/models", '{"name": "n", "checkpoint": "c"}')[0] == 202
        assert call("DELETE", f"/models/{OTHER}?drain_s=5")[0] == 202
        assert asked == [("n", "c", None), (OTHER, None, 5)]
        for method, path, body, status, why in (
            ("POST", "/models", "{", 400, "not JSON"),
            ("POST", "/models", "[]", 400, "no [[models]]"),
            ("POST", "/models", '{"name": "n"}', 400, "checkpoint"),
            ("POST", "/models", '{"name": "a b", "checkpoint": "c"}', 400, "letters, digits"),
            ("POST", "/models", '{"name": "taken", "checkpoint": "c"}', 400, "there is a model"),
            ("DELETE", "/models/none", "", 404, OTHER),
            ("DELETE", f"/models/{OTHER}?drain_s=-1", "", 400, "from 0 to 86400"),
        ):
            answer = call(method, path, body)
            assert answer[0] == status, answer
            assert why in answer[1]
        assert len(asked) == 2


def test_a_model_that_was_removed_leaves_no_thread(both: Two) -> None:
    other = both.ctx
    assert both.served.post({"model": OTHER, **CHAT}).status_code == 200
    own = {*other._tokenizing._small._threads, *other._tokenizing._large._threads}
    assert any(each.is_alive() for each in own)
    both.served.ctx.offer([MODEL])
    other.end_threads()
    wait_until(lambda: not any(each.is_alive() for each in own))
    assert both.served.post({"model": MODEL, **CHAT}).status_code == 200
