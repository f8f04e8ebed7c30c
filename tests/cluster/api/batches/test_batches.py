"""Files and batches as OpenAI's SDK knows them, over the real application."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api import calls
from kvrelay.cluster.api.batches.store import BatchStore
from kvrelay.cluster.api.batches.uploads import MAX_UPLOADS
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.openai import generation
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.batches import batches
from kvrelay.cluster.config import TenantEntry
from kvrelay.engine.request import Refusal
from kvrelay.engine.shares import reserve_of
from kvrelay.router.messages import Failed
from tests.cluster.api.conftest import ANSWER, MODEL, Served, serve, wait_until

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = CHAT, method: str = "POST", **body: Any) -> str:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"Hi {name}"}]} | body
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": asked})


def lines(count: int) -> str:
    return "\n".join(line(f"row-{i}") for i in range(count))


@pytest.fixture
def running(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Served]:
    settings = ApiSettings(max_body_bytes=64 * 1024, max_file_bytes=256 * 1024)
    with serve(tokenizer, settings, context={"batches": BatchStore(tmp_path)}) as served:
        yield served


def begin(client: openai.OpenAI, text: str, endpoint: Any = CHAT) -> Any:
    file = client.files.create(file=("rows.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, 60)
    return client.batches.retrieve(batch.id)


def rows(client: openai.OpenAI, name: str | None) -> list[Any]:
    return (
        [json.loads(each) for each in client.files.content(name).text.splitlines()] if name else []
    )


FORM = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
HEAD = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n"
HEAD += b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"


def test_slow_uploads_of_one_address_keep_nobody_out_and_end(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A byte now and then is no progress."""
    settings, said = ApiSettings(body_timeout_s=1.0), list[bytes]()
    own = {"batches": BatchStore(tmp_path)}
    with serve(tokenizer, settings, context=own) as served, contextlib.ExitStack() as stack:
        slow, at = list[socket.socket](), ("127.0.0.1", served.port)
        for _ in range(MAX_UPLOADS):
            each = socket.create_connection(at, source_address=("127.0.0.2", 0))
            slow.append(stack.enter_context(each))
            each.sendall(HEAD + FORM)
        deadline = time.monotonic() + 20
        while len(said) < MAX_UPLOADS:
            assert time.monotonic() < deadline
            served.openai().files.create(file=("a", b"a"), purpose="batch")
            for each in [each for each in slow if select([each], [], [], 0)[0]]:
                slow.remove(each)
                said.append(each.recv(65536))
            for each in slow:
                each.sendall(b"a")
    refused = [each for each in said if b" 429 " in each]
    assert len(refused) == reserve_of(MAX_UPLOADS)
    assert all(b"for this caller, its share of 32" in each for each in refused)
    late = [each for each in said if b" 408 " in each]
    assert len(late) == MAX_UPLOADS - len(refused)
    assert all(b"expected 16384 a second" in each for each in late)


@pytest.mark.slow
def test_an_address_without_an_upload_takes_the_place_of_the_slowest_of_who_has_most(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each address that came before took what its share left it: 28, 2, 1 and 1 of 32."""
    own = {"batches": BatchStore(tmp_path)}
    with serve(tokenizer, ApiSettings(), context=own) as served, contextlib.ExitStack() as stack:
        at, uploads = ("127.0.0.1", served.port), list[list[socket.socket]]()
        for host, most in ((2, 28), (3, 2), (4, 1), (5, 1)):
            uploads.append([])
            for _ in range(most + 1):
                each = socket.create_connection(at, 20, source_address=(f"127.0.0.{host}", 0))
                uploads[-1].append(stack.enter_context(each))
                each.sendall(HEAD + FORM)
            ready = select(uploads[-1], [], [], 5)[0]
            assert [b"429" in each.recv(65536) for each in ready] == [True]
            uploads[-1].remove(ready[0])
        fast = uploads[0][:26] + uploads[0][27:]
        for each in fast:
            each.sendall(b"a" * 100_000)
        time.sleep(1.2)
        began = time.monotonic()
        served.openai().files.create(file=("a", b"a"), purpose="batch")
        assert time.monotonic() - began < 2
        said = uploads[0][26].recv(65536)
        assert b"HTTP/1.1 429" in said
        assert b"its slowest, this one, made room for another caller's first" in said
        assert not select([*fast, *uploads[1], *uploads[2], *uploads[3]], [], [], 0.1)[0]
        end = b"a" * (200_000 - 100_000 - len(FORM) - 9) + b"\r\n--x--\r\n"
        for each in fast[:2]:
            each.sendall(end)
            assert b"HTTP/1.1 400" in each.recv(65536)  # it has no purpose, but was read


def test_a_file_lives_as_the_sdk_knows_it(running: Served) -> None:
    client, data = running.openai(), b"\r\n--\r\n" * 20_000 + "Zürich".encode()
    made = client.files.create(file=("a/b c.jsonl", data), purpose="batch")
    assert (made.filename, made.bytes, made.status) == ("b c.jsonl", len(data), "processed")
    assert client.files.retrieve(made.id) == made
    assert [each.id for each in client.files.list(purpose="batch", limit=10_000)] == [made.id]
    second = client.files.create(file=("b", b"b"), purpose="batch")
    assert [each.id for each in client.files.list(limit=1)] == [second.id, made.id]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(second.id).deleted
    for path in ("files", "batches"):
        answer = running.http.get(f"/v1/{path}?after=file-no")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
        empty = {"has_more": False, "first_id": None, "last_id": None}
        found = running.http.get(f"/v1/{path}?purpose=no&order=asc").json()
        assert found == {"object": "list", "data": [], **empty}
    assert client.files.content(made.id).content == data
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_a_batch_runs_in_the_lowest_class_and_gives_each_row_once(running: Served) -> None:
    client = running.openai()
    batch = begin(client, lines(40) + "\n" + line("bad", max_tokens=-1, service_tier="priority"))
    done = ended(client, batch)
    assert (done.status, done.metadata) == ("completed", {"a": "b"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    answers, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert [each["custom_id"] for each in answers] == [f"row-{i}" for i in range(40)]
    bodies = [each["response"]["body"] for each in answers]
    assert {body["choices"][0]["message"]["content"] for body in bodies} == {ANSWER}
    assert {body["created"] for body in bodies} == {done.in_progress_at}
    assert done.usage.total_tokens == sum(body["usage"]["total_tokens"] for body in bodies)
    (error,) = errors
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert "max_tokens" in error["response"]["body"]["error"]["message"]
    assert {submit.priority for submit in running.router.submits} == {50}
    assert {submit.caller for submit in running.router.submits} == {""}
    assert len({submit.sampling.seed for submit in running.router.submits}) == 40
    assert [each.id for each in client.batches.list()] == [batch.id]


def test_rows_are_in_no_histogram_and_push_no_call_out_of_those_that_are_explained(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_ROWS", 4)
    client = running.openai()
    answer = running.post({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    assert ended(client, begin(client, lines(12))).request_counts.completed == 12
    metrics = running.http.get("/metrics").text
    for name in ("ttft", "itl", "e2e", "queue", "router_ttft_prediction_ratio"):
        (line,) = re.findall(rf'kvrelay_{name}(?:_seconds)?_count{{model="{MODEL}"}} (.*)', metrics)
        assert float(line) <= (9 if name == "itl" else 1), name
    assert 'endpoint="batch",model="smollm2-135m",outcome="stop",status="200"} 12.0' in metrics
    assert 'kvrelay_tenant_tokens_total{kind="output"' in metrics
    kept = running.http.get("/requests?limit=100").json()["data"]
    assert len(kept) == 5
    assert answer.json()["id"].removeprefix("chatcmpl-") in {each["id"] for each in kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_other_endpoints_serve_rows_too(running: Served, url: str, body: Any) -> None:
    client = running.openai()
    text = json.dumps(
        {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL} | body}
    )
    done = ended(client, begin(client, text, url))
    assert done.request_counts.completed == 1, rows(client, done.error_file_id)
    assert done.usage.input_tokens > 0


def test_all_lines_are_checked_before_any_runs(running: Served) -> None:
    client = running.openai()
    wrong = [
        line("a"),
        line("a"),
        "",
        "{",
        line("b", url="/v1/completions"),
        line("c", method="GET"),
        line("d", model="other"),
        line("e", stream=True),
        '{"custom_id": "f", "method": "POST", "url": "/v1/chat/completions"}',
        line(""),
        line("g", filler="x" * 70_000),
    ]
    done = ended(client, begin(client, "\n".join(wrong)))
    assert (done.status, running.router.submits) == ("failed", [])
    assert [(each.line, each.code) for each in done.errors.data] == [
        (2, "duplicate_custom_id"),
        (4, "invalid_json_line"),
        (5, "mismatched_url"),
        (6, "invalid_method"),
        (7, "model_not_found"),
        (8, "unsupported_parameter"),
        (9, "invalid_json_line"),
        (10, "invalid_custom_id"),
        (11, "request_too_large"),
    ]
    (empty,) = ended(client, begin(client, "\n\n")).errors.data
    assert empty.code == "empty_file"


def test_a_batch_is_cancelled_and_keeps_what_it_has(running: Served) -> None:
    client = running.openai()
    slow = [*running.ctx.tokenizer.encode(" word") * 400]
    quick = running.ctx.tokenizer.encode(ANSWER)
    running.router.delay_s = 0.1
    sent = running.router.submits
    running.router.answer = lambda submit: slow if sent.index(submit) >= 5 else quick[:2]
    batch = begin(client, lines(30))
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed) == ("cancelled", 5)
    answers, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    names = [each["custom_id"] for each in answers + errors]
    assert sorted(names) == sorted(f"row-{i}" for i in range(30))
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="failed"):
        client.batches.cancel(ended(client, begin(client, "{")).id)


@pytest.mark.slow
def test_a_row_that_finds_no_room_is_sent_again(running: Served) -> None:
    client = running.openai()
    running.router.refuse = Failed("", Refusal.QUEUE_FULL, "full", 0.1)
    batch = begin(client, lines(3))
    wait_until(lambda: len(running.router.submits) >= 3)
    running.router.refuse = None
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed) == ("completed", 3)


def test_a_row_may_take_longer_than_a_call(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its batch's window; a call that takes so long is answered 504."""
    monkeypatch.setattr(generation, "_DEADLINE_GRACE_S", 0.0)
    settings = ApiSettings(request_timeout_s=0.2)
    with serve(tokenizer, settings, context={"batches": BatchStore(tmp_path)}) as served:
        client = served.openai()
        served.router.answer = lambda submit: served.ctx.tokenizer.encode(" word") * 10
        served.router.delay_s = 0.05
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        assert served.post(body).status_code == 504
        del served.router.submits[:]
        done = ended(client, begin(client, lines(2)))
        assert (done.status, done.request_counts.completed) == ("completed", 2)
        assert {submit.timeout_s > 80_000 for submit in served.router.submits} == {True}


def test_what_cannot_be_is_said(running: Served) -> None:
    client = running.openai()
    with pytest.raises(openai.APIStatusError, match="limit of 262144 bytes") as large:
        client.files.create(file=("a", b"x" * 300_000), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="fine-tune"):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError, match="file-none"):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    assert client.files.list().data == []
    folder = running.ctx.batches.path("x").parent
    assert list(folder.iterdir()) == []
    assert running.http.post("/v1/files", json={}).status_code == 415


def test_tenants_do_not_see_each_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tenants = Tenants.of([TenantEntry("red", ("r",)), TenantEntry("blue", ("b",))], b"secret")
    context = {"tenants": tenants, "batches": BatchStore(tmp_path)}
    settings = ApiSettings(max_tenant_file_bytes=2000)
    with serve(tokenizer, settings, context=context) as served:
        red, blue = (
            openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) for key in "rb"
        )
        done = ended(red, begin(red, lines(2)))
        assert done.request_counts.completed == 2
        assert {submit.tenant for submit in served.router.submits} == {"red"}
        assert (blue.batches.list().data, blue.files.list().data) == ([], [])
        for call in (
            lambda: blue.batches.retrieve(done.id),
            lambda: blue.batches.cancel(done.id),
            lambda: blue.files.retrieve(done.output_file_id),
            lambda: blue.files.content(done.input_file_id),
            lambda: blue.files.delete(done.input_file_id),
            lambda: blue.batches.create(
                input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.PermissionDeniedError, match="delete some"):
            red.files.create(file=("a", b"x" * 1900), purpose="batch")
        store = served.ctx.batches
        (upload := store.draft("blue")).write_bytes(b"x" * 200)
        with pytest.raises(openai.PermissionDeniedError, match="uploads of 2100"):
            blue.files.create(file=("a", b"x" * 1900), purpose="batch")
        upload.unlink()
        blue.files.create(file=("a", b"x" * 1900), purpose="batch")


def test_a_full_disk_is_said_and_leaves_nothing(
    running: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, fsync = running.openai(), os.fsync
    folder = running.ctx.batches.path("x").parent

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(openai.APIStatusError, match="disk") as said:
        client.files.create(file=("a", b"x"), purpose="batch")
    assert (said.value.status_code, list(folder.iterdir())) == (507, [])
    monkeypatch.setattr(os, "fsync", fsync)
    batch = begin(client, lines(3))
    assert ended(client, batch).status == "completed"


def command(served: Served, *words: str) -> Any:
    return CliRunner().invoke(batches, [*words, "--url", served.url])


def test_the_command_line_runs_shows_and_cancels_them(
    running: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cluster.cli.batches.POLL_S", 0.02)
    assert "there are no batches" in command(running, "list").output
    file, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    file.write_text(lines(3))
    assert command(running, "run", str(file), "--out", str(out)).exit_code == 0
    answers = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == ["row-0", "row-1", "row-2"]
    assert not (tmp_path / "answers.jsonl.errors").exists()
    (made,) = running.openai().batches.list().data
    assert made.id in command(running, "list").output
    assert made.output_file_id in command(running, "show", made.id).output
    found = command(running, "cancel", made.id)
    assert (found.exit_code, "completed" in found.output) == (1, True)
    assert "not found" in command(running, "show", "a?b").output

    file.write_text(lines(2) + "\n" + line("bad", max_tokens=-1))
    found = command(running, "run", str(file), "--out", str(out))
    assert (found.exit_code, len(out.read_text().splitlines())) == (1, 2)
    assert "max_tokens" in (tmp_path / "answers.jsonl.errors").read_text()
    file.write_text(line("a", url="/v1/nothing"))
    assert "/v1/nothing" in command(running, "run", str(file), "--out", str(out)).output
    file.write_text(line("a") + "\n{")
    assert "line 2: " in command(running, "run", str(file), "--out", str(out)).output
    file.write_text("[]")
    assert "expected {" in command(running, "run", str(file), "--out", str(out)).output


def test_a_store_without_a_folder_leaves_nothing() -> None:
    store = BatchStore()
    folder = store.path("x").parent.parent
    assert folder.exists()
    del store
    assert not folder.exists()
