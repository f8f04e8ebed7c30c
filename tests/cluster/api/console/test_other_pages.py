"""Pages of other sites in an operator's browser, at a server without keys: they get nothing.

A page whose name was bound anew is played by a browser that takes the name for this machine, and by
a document that comes from elsewhere: from there on the page and the server are one origin to it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import MODEL, Served, serve
from tests.cluster.api.console.conftest import EVIL

pytestmark = [pytest.mark.e2e]

SECRET = "my password is hunter2"
CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": SECRET}]})
KEPT = {"model": MODEL, "input": SECRET}
RESPONSE = json.dumps({"type": "response.create", "model": MODEL, "input": SECRET})
# What each page does; it gives what it has got, "" for nothing. `at`: the server, as the page names
# it; `chat`, `response`: bodies.
HELP = """
const read = async (asked) => {
  try {
    const answer = await asked;
    return answer.ok ? await answer.text() : "";
  } catch { return ""; }
};
const get = (path) => read(fetch(at + path));
const post = (path, body, headers = {}, more = {}) =>
  read(fetch(at + path, { method: "POST", body, headers, ...more }));
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const json = { "content-type": "application/json" };
const blind = { mode: "no-cors" };
const socket = () => new Promise((done) => {
  const ws = new WebSocket(at.replace("http", "ws") + "/v1/responses");
  ws.onopen = () => ws.send(response);
  ws.onmessage = (event) => done(event.data);
  ws.onerror = ws.onclose = () => done("");
});
const form = async (path, enctype, name, value) => {
  const made = document.createElement("form");
  const field = document.createElement("textarea");
  const frame = document.createElement("iframe");
  frame.name = "hidden-" + Math.random();
  Object.assign(made, { method: "POST", action: at + path, enctype, target: frame.name });
  Object.assign(field, { name, value });
  made.append(field);
  document.body.append(frame, made);
  made.submit();
  await wait(300);
  return "";
};
const tag = async (kind, path) => {
  const made = Object.assign(document.createElement(kind), { src: at + path });
  document.body.append(made);
  await wait(300);
  try { return made.contentDocument?.querySelector("#nav")?.outerHTML ?? ""; } catch { return ""; }
};
"""
REBOUND = {
    "the list of batches": 'get("/v1/batches")',
    "items of a response": 'get("/v1/responses/" + id + "/input_items")',
    "requests": 'get("/requests")',
    "the status": 'get("/status")',
    "the models": 'get("/v1/models")',
    "a chat": 'post("/v1/chat/completions", chat, json)',
    "a chat as bytes": 'post("/v1/chat/completions", new Blob([chat]))',
    "a drain": 'post("/drain", "{}", json)',
    "a session closed": 'read(fetch(at + "/v1/sessions/one", { method: "DELETE" }))',
    "a WebSocket": "socket()",
    "events of the console": 'post("/console/session", "{}", json).then(() => get("/console"))',
}
CROSS_SITE = {
    "bytes without a type": 'post("/v1/chat/completions", new Blob([chat]), {}, blind)',
    "plain text": 'post("/v1/chat/completions", chat, { "content-type": "text/plain" }, blind)',
    "JSON, which is asked for": 'post("/v1/chat/completions", chat, json)',
    "a beacon": 'navigator.sendBeacon(at + "/v1/chat/completions", new Blob([chat])), wait(300)',
    "a form": 'form("/v1/chat/completions", "text/plain", `${chat.slice(0, -1)}, "x": "`, `"}`)',
    "a form of files": 'form("/v1/files", "multipart/form-data", "purpose", "batch")',
    "a drain": 'post("/drain", undefined, {}, { ...blind, keepalive: true })',
    "a WebSocket": "socket()",
    "a frame": 'tag("iframe", "/console")',
    "a script": 'tag("script", "/v1/models")',
}


@dataclass
class Scene:
    served: Served
    orders: list[Any]
    kept_id: str  # of a response
    elsewhere: int  # the port of another site


@pytest.fixture(scope="module")
def scene(tokenizer: Tokenizer) -> Iterator[Scene]:
    """A server with a stored response, and another site."""
    orders: list[Any] = []
    other = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    with serve(tokenizer, ApiSettings(), context={"order": orders.append}) as served:
        kept_id = served.post(KEPT, "/v1/responses").json()["id"]
        served.router.submits.clear()
        yield Scene(served, orders, kept_id, other.server_address[1])
    other.shutdown()
    other.server_close()


class Page(BaseHTTPRequestHandler):
    """A page that somebody else serves to the browser."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><body>")

    def log_message(self, *_: object) -> None:
        """Writes nothing, since nobody reads it."""


def what_it_got(scene: Scene, page: Any, at: str, attack: str) -> str:
    given = {"at": at, "id": scene.kept_id, "chat": CHAT, "response": RESPONSE}
    code = f"async ({{ at, id, chat, response }}) => {{ {HELP} return String(await ({attack})); }}"
    got = str(page.evaluate(code, given))
    assert scene.served.http.get("/v1/models").status_code == 200  # calls before it are over
    return "" if got == "undefined" else got


def check_untouched(scene: Scene, why: str) -> None:
    served = scene.served
    assert (served.router.submits, scene.orders) == ([], []), why
    assert served.http.get("/v1/files").json()["data"] == [], why
    assert served.http.get(f"/v1/responses/{scene.kept_id}").status_code == 200, why


def test_a_page_that_was_bound_to_the_server_gets_nothing(
    scene: Scene, open_tab: Callable[..., Any]
) -> None:
    at = f"http://{EVIL}:{scene.served.port}"
    for name, attack in REBOUND.items():
        page = open_tab(f"{at}/page", document="<!doctype html><body>")
        assert what_it_got(scene, page, at, attack) == "", name
        check_untouched(scene, name)


@pytest.mark.parametrize(
    ("page_at", "at"), [(EVIL, "127.0.0.1"), (EVIL, "localhost"), ("localhost", "localhost")]
)
def test_a_page_of_another_site_gets_nothing(
    scene: Scene, open_tab: Callable[..., Any], page_at: str, at: str
) -> None:
    for name, attack in CROSS_SITE.items():
        page = open_tab(f"http://{page_at}:{scene.elsewhere}/")
        server = f"http://{at}:{scene.served.port}"
        got = what_it_got(scene, page, server, attack)
        assert got == "" or name == "a beacon", (name, got)
        check_untouched(scene, name)


def test_the_pages_would_get_it_at_home(scene: Scene, open_tab: Callable[..., Any]) -> None:
    """With the server's own name the same calls are answered, so it is the name that counts."""
    at = scene.served.url
    page = open_tab(f"{at}/page", document="<!doctype html><body>")
    for name in ("the models", "items of a response", "a chat", "a WebSocket"):
        assert what_it_got(scene, page, at, REBOUND[name]), name
    for name in ("the status", "the list of batches", "a drain"):
        assert what_it_got(scene, page, at, REBOUND[name]) == "", name
    assert httpx.get(f"{at}/status").status_code == 401
