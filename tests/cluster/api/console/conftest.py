"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.api.conftest import OPERATORS_KEY

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
EVIL = "evil.example"  # which a page's owner has bound to this machine
# As root there is no sandbox; the rest keeps it from calling its maker.
ARGUMENTS = (
    "--no-sandbox",
    "--no-first-run",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    f"--host-resolver-rules=MAP {EVIL} 127.0.0.1",
    # What newer ones refuse by themselves, others let through.
    "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """KVRELAY_CHROMIUM may name one that is not in PATH."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("KVRELAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium was found: install one, or name it in KVRELAY_CHROMIUM")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page of anybody. `document`: what comes in place of the answer at its URL."""
    context = browser.new_context()

    def open_at(url: str, document: str = "") -> Any:
        page = context.new_page()
        page.set_default_timeout(15_000)
        if document:
            page.route(url, lambda route: route.fulfill(body=document, content_type="text/html"))
        page.goto(url)
        return page

    yield open_at
    context.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page at a URL. At the end: it has logged no error, and has called nobody else."""
    contexts = []
    wrong: list[str] = []

    def open_at(
        url: str,
        width: int = 1440,
        height: int = 900,
        scheme: str = "light",
        allow: str = "\0",
        key: str = OPERATORS_KEY,
    ) -> Any:
        """`allow`: an error with this text is none, as where the server refuses a key. `key`: that
        its tab has; "": none."""
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        contexts.append(context)
        if key:
            given = f"sessionStorage['kvrelay-operators-key'] ??= '{key}'"
            context.add_init_script(f"try {{ {given} }} catch {{}}")  # an error's page has none
        page = context.new_page()
        page.set_default_timeout(15_000)

        def on_console(message: Any) -> None:
            if message.type in ("error", "warning") and allow not in message.text:
                wrong.append(message.text)

        host = "/".join(url.split("/")[:3])
        page.on("console", on_console)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith(host) or wrong.append(f"called {request.url}"),
        )
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []
