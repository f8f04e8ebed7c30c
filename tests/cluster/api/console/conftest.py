"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# As root there is no sandbox; the rest keeps it from calling its maker.
ARGUMENTS = (
    "--no-sandbox",
    "--no-first-run",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
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
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page at a URL. At the end: it has logged no error, and has called nobody else."""
    contexts = []
    wrong: list[str] = []

    def open_at(
        url: str, width: int = 1440, height: int = 900, scheme: str = "light", allow: str = "\0"
    ) -> Any:
        """`allow`: an error with this text is none, as where the server refuses a key."""
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        contexts.append(context)
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
