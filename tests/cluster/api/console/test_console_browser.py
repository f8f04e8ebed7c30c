"""The console in a real browser: what operators see, and what they can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.listening import bind_socket
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.operate import console
from kvrelay.engine.stats import Role
from tests.cluster.api.conftest import MODEL, SCALING, Served, serve, wait_until
from tests.cluster.api.console.demo import ANSWER, NAMES, Fleet, demo

pytestmark = [pytest.mark.e2e]

Open = Callable[..., Any]
DECISIONS: list[dict[str, Any]] = [
    {
        "at_s": 1.7e9,
        "reason": "grow",
        "text": "2 decode workers more: 3 would miss the target",
        "wanted": 4,
        "inputs": {"prefill": 1, "hit_rate": 0.4123},
        "alternatives": [{"workers": 3, "on_time": 0.9812, "gpu_s_per_s": 2.4}],
        "starts": ["decode", "decode"],
        "drains": [],
    },
    {"at_s": 1.7e9 + 5, "reason": "enough", "text": "<i>2 are enough</i>", "wanted": 4},
]
LIVE = "#link-state[data-state=live]"


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer) -> Iterator[tuple[Served, Fleet]]:
    with demo(tokenizer, 48) as found:
        yield found


def test_the_overview_shows_the_cluster_and_goes_on(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    served, _ = cluster
    page = open_page(f"{served.url}/console")
    page.wait_for_selector(LIVE)
    assert page.title() == "Overview · KVRelay console"
    assert page.inner_text("#model") == MODEL
    tiles = page.locator(".tile").all_inner_texts()
    assert re.match(r"Workers up\s+46\s+of 48, 2 not up", tiles[0]), tiles
    assert re.match(r"TTFT p99\s+[\d.]+ m?s\s+p50 [\d.]+ ms", tiles[3]), tiles
    rows = page.locator("section:has(h2:text-is('Pools')) tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["prefill", "decode", "both"]
    assert rows[0].split()[1:4] == ["16", "/", "16"]
    label = page.get_attribute("canvas.fleet", "aria-label")
    assert label.startswith("48 workers by KV use, 2 not up.")
    lines = page.locator("canvas.lines").first
    assert re.search(r"now p50 [\d.]+ ms", lines.get_attribute("aria-label"))
    figures = page.inner_text(".tile:nth-child(2)")
    wait_until(lambda: page.inner_text(".tile:nth-child(2)") != figures)


def test_one_of_several_models_is_shown_alone(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    served, fleet = cluster
    fleet.serve_models("chat", "small")
    try:
        page = open_page(f"{served.url}/console#/overview")
        page.wait_for_selector(LIVE)
        page.wait_for_selector("#models option:text-is('All 2 models')", state="attached")
        assert not page.locator("#model").is_visible()
        assert re.match(r"Workers up\s+46\s+of 48", page.inner_text(".tile >> nth=0"))
        page.select_option("#models", "small")
        assert re.match(r"Workers up\s+23\s+of 24", page.inner_text(".tile >> nth=0"))
        assert re.search(r"Live requests\s+\d+\s+1 queued", page.inner_text(".tile >> nth=1"))
        assert re.match(
            r"Cache hit rate\s+50 %\s+of 1,?0?0?0?k? ", page.inner_text(".tile >> nth=5")
        )
        page.click("nav a[data-view=workers]")
        page.wait_for_selector(".vt-row")
        assert page.inner_text(".head [role=status]") == "24 workers"
        assert page.inner_text("nav a[data-view=workers] .count") == "24"
        page.click("nav a[data-view=scaling]")
        page.wait_for_selector("h2:text-is('small')")
        page.select_option("#models", "chat")
        page.wait_for_selector(".empty")
        page.click("nav a[data-view=chat]")
        fleet.serve_models()
        page.wait_for_selector("#model", state="visible")
        assert not page.locator("#models").is_visible()
        assert page.inner_text("nav a[data-view=workers] .count") == "48"
    finally:
        fleet.serve_models()


def test_a_worker_is_found_and_its_role_set_by_keyboard(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    served, fleet = cluster
    page = open_page(f"{served.url}/console#/workers")
    page.wait_for_selector(".vt-row")
    page.fill("input[type=search]", "decode-1")
    wait_until(lambda: page.locator(".vt-row").count() == 11)
    page.focus(".vt")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    active = page.locator(".vt-row[aria-selected=true]")
    assert active.get_attribute("data-name") == "decode-10"
    assert page.get_attribute(".vt", "aria-activedescendant") == active.get_attribute("id")
    page.keyboard.press("Enter")
    assert page.inner_text("#drawer-title") == "decode-10"
    page.get_by_role("button", name="Prefill", exact=True).press("Enter")
    page.get_by_role("button", name="Set role").press("Enter")
    page.wait_for_selector("#drawer .toast:has-text('was decode')")
    found = next(w for w in fleet.workers if w["worker"] == "decode-10")
    assert found["role"] == "prefill"
    page.wait_for_selector("#drawer .role.prefill")
    page.keyboard.press("Escape")
    assert not page.locator("#drawer").is_visible()
    fleet.set_role("decode-10", Role.DECODE)


def test_workers_are_sorted_and_filtered(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    page = open_page(f"{cluster[0].url}/console#/workers")
    page.wait_for_selector(".vt-row")
    page.get_by_label("All states").select_option("down")
    wait_until(lambda: page.locator(".vt-row").count() == 1)
    assert "1 of 48" in page.inner_text(".head [role=status]")
    page.get_by_label("All states").select_option("")
    page.get_by_role("button", name="KV held").click()
    head = page.locator("[role=columnheader]:has-text('KV held')")
    assert head.get_attribute("aria-sort") == "descending"
    shares = page.evaluate(
        "[...document.querySelectorAll('.vt-row')]"
        ".sort((a, b) => a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex'))"
        ".map(row => parseInt(row.querySelector('.meter span').textContent))"
    )
    assert len(shares) > 10
    assert shares == sorted(shares, reverse=True)


def test_a_session_is_parked_and_resumed(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    page = open_page(f"{cluster[0].url}/console#/sessions")
    page.wait_for_selector(".sessions tbody tr")
    assert page.locator(".sessions tbody tr").count() == len(NAMES)
    row = page.locator("tr:has-text('agents/review-9')")
    assert "idle" in row.inner_text()
    row.get_by_role("button", name="Park").click()
    page.wait_for_selector("tr:has-text('agents/review-9'):has-text('parked')")
    assert "0 device, 133 host, 66 disk" in row.inner_text()
    page.wait_for_selector(".toast:has-text('133 blocks on decode-3')")
    row.get_by_role("button", name="Resume").click()
    page.wait_for_selector("tr:has-text('agents/review-9'):has-text('133 device')")
    row.get_by_role("button", name="Pin").click()
    page.wait_for_selector("tr:has-text('agents/review-9') .chip.warn")


def test_a_key_is_revoked_by_a_second_click(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    served, _ = cluster
    asked = {"name": "for <b>Grafana</b>", "scopes": ["metrics"], "tokens_per_day": 5000}
    key = served.http.post("/v1/organization/admin_api_keys", json=asked).json()
    used = served.http.get("/metrics", headers={"authorization": f"Bearer {key['value']}"})
    assert used.status_code == 200
    page = open_page(f"{served.url}/console#/keys")
    row = page.locator("tr:has-text('for <b>Grafana</b>')")
    row.get_by_role("button", name="Revoke").click()
    text = row.inner_text()
    assert all(each in text for each in ("active", "metrics", "5,000 tokens/day", "now"))
    assert key["value"] not in page.content()
    row.get_by_role("button", name="Revoke").click()
    page.wait_for_selector("tr:has-text('for <b>Grafana</b>'):has-text('revoked')")
    found = served.http.get(f"/v1/organization/admin_api_keys/{key['id']}").json()
    assert found["state"] == "revoked"


def test_a_chat_streams_and_its_request_is_explained(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    served, _ = cluster
    page = open_page(f"{served.url}/console#/chat")
    page.wait_for_selector(LIVE)
    page.fill("textarea[aria-label=Message]", "<b>How</b> does KV move?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .content:not(:empty)")
    early = page.inner_text(".turn.assistant .content")
    page.wait_for_selector(".turn.assistant .meta")
    answer = page.locator(".turn.assistant .content").text_content()
    assert answer.strip() == ANSWER.strip()
    assert len(early) < len(answer)  # it was seen to grow
    assert page.inner_text(".turn.user .content") == "<b>How</b> does KV move?"
    meta = page.inner_text(".turn .meta")
    assert re.match(r"first token [\d.]+ m?s · \d+ tokens, [\d.]+ tok/s · 0 of \d+ prompt", meta)
    page.click(".meta a")
    page.wait_for_selector(".explain")
    phases = page.locator(".phases").first.locator("tbody th").all_inner_texts()
    assert [phase.split("\n")[0] for phase in phases][:3] == ["receive", "tokenise", "queue"]
    names = page.locator(".phases").nth(1).locator("tbody th").all_inner_texts()
    assert "chosen" in names[0]
    assert sum("decode-" in name for name in names) >= 2
    assert page.locator(".vt-row").count() >= 1


def test_an_answer_can_be_stopped(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    served, _ = cluster
    page = open_page(f"{served.url}/console#/chat")
    page.wait_for_selector(LIVE)
    page.fill("textarea[aria-label=Message]", "Tell me")
    page.click("button:text-is('Send')")
    page.wait_for_selector(".turn.assistant .content:not(:empty)")
    page.click("button:text-is('Stop')")
    page.wait_for_selector(".turn .notice:text-is('Stopped')")
    wait_until(lambda: served.client.num_live == 0)
    assert page.locator("button:text-is('Send')").is_visible()


def test_an_unknown_request_is_a_plain_message(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    page = open_page(f"{cluster[0].url}/console#/requests/none", allow="404")
    page.wait_for_selector(".detail .notice:has-text(\"Request 'none' is not known\")")


def test_scaling_decisions_are_shown_once_there_are_any(
    open_page: Open, cluster: tuple[Served, Fleet]
) -> None:
    served, fleet = cluster
    page = open_page(f"{served.url}/console#/scaling")
    page.wait_for_selector("h2:text-is('No autoscaler runs here')")
    fleet.scaling = SCALING | {"decisions": DECISIONS}
    try:
        page.wait_for_selector(".facts:has-text('2 are enough')")
        shown = page.locator(".decisions li").all_inner_texts()
        assert "Enough" in shown[0]  # the newest first
        assert "<i>2 are enough</i>" in shown[0]
        assert "Starts: decode, decode" in shown[1]
        page.locator(".decisions summary").last.click()
        row = page.locator(".decisions table tbody tr").first
        assert row.inner_text().split() == ["3", "0.981", "2.4"]
        assert "0.412" in page.locator(".decisions li").last.locator(".facts").inner_text()
    finally:
        fleet.scaling = None


def test_a_printed_address_opens_it_once(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    """Sessions and requests too, where clients have no keys."""
    served, _ = cluster
    printed = CliRunner().invoke(console, ["--url", served.url]).output.strip()
    page = open_page(printed, key="")
    page.wait_for_selector(LIVE)
    assert page.url == f"{served.url}/console"
    stored = page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})")
    assert printed.partition("#ticket=")[2] not in stored
    assert page.context.cookies() == []
    page.reload()
    page.wait_for_selector(LIVE)
    page.click("#nav a[data-view=sessions]")
    page.wait_for_selector(f"text={NAMES[0]}")
    again = open_page(printed, allow="401", key="")
    again.wait_for_selector("#key-dialog[open]")
    assert "kvrelay console" in again.inner_text("#key-dialog")
    for each in (page, again):
        each.context.close()


def test_the_key_is_asked_for_and_stays_in_the_tab(open_page: Open, tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(operations_key="right-key")) as served:
        page = open_page(f"{served.url}/console", allow="401", key="")
        page.wait_for_selector("#key-dialog[open]")
        assert "api.operations_key" in page.inner_text("#key-problem")
        page.fill("#operator-key", "wrong-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#link-state[data-state=locked]")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#operator-key", "right-key")
        page.keyboard.press("Enter")
        page.wait_for_selector(LIVE)
        assert page.locator(".tile").first.inner_text().split() == [
            "Workers",
            "up",
            "1",
            "all",
            "of",
            "them",
        ]
        assert "right-key" in page.evaluate("JSON.stringify({...sessionStorage})")
        assert "right-key" not in page.evaluate("JSON.stringify({...localStorage})")
        assert page.context.cookies() == []
        assert "right-key" not in page.url
        page.reload()
        page.wait_for_selector(LIVE)
        other = page.context.new_page()  # another tab has to ask again
        other.goto(f"{served.url}/console")
        other.wait_for_selector("#key-dialog[open]")
        page.context.close()  # it listens, and the server is about to end


def test_it_reconnects_when_the_server_is_back(open_page: Open, tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings()) as served:
        port = served.port
        page = open_page(f"{served.url}/console", allow="ERR_")
        page.wait_for_selector(LIVE)
    page.wait_for_selector("#link-state[data-state=stale]")
    assert page.locator(".tile").count() == 6  # what was known is still shown
    with serve(tokenizer, ApiSettings(), sock=bind_socket("127.0.0.1", port)):
        page.wait_for_selector(LIVE)
        page.goto("about:blank")


def test_the_theme_is_chosen_and_kept(open_page: Open, cluster: tuple[Served, Fleet]) -> None:
    page = open_page(f"{cluster[0].url}/console", scheme="dark")
    page.wait_for_selector(LIVE)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    page.wait_for_selector(LIVE)
    assert page.evaluate(background) == light
    assert page.get_attribute("#theme", "aria-label") == "Theme: light"
    page.click("#theme")
    assert page.evaluate(background) == dark
