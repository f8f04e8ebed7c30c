"""Keys and limits that change while the server serves."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants, load_tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import load_config
from kvrelay.cluster.processes.reload import Source, follow
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until

pytestmark = pytest.mark.anyio
OLD = '[[tenant]]\nname = "red"\nkeys = ["old-key"]\nrequests_per_minute = 1000\n'
NEW = '[[tenant]]\nname = "red"\nkeys = ["new-key"]\nrequests_per_minute = 1\n'
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}


class Following:
    """A server that follows its files."""

    def __init__(self, served: Served, folder: Path, tenants: Tenants) -> None:
        self.served, self.folder = served, folder
        self.source: Source | None = None
        self.hangup: Callable[[], None] = lambda: None
        self._tenants = tenants

    def status(self, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return self.served.http.post("/v1/completions", json=BODY, headers=headers).status_code

    async def follow(self, poll_s: float) -> None:
        path = self.folder / "kvrelay.toml"
        self.source = Source(path, {}, hangup := asyncio.Event())
        loop = asyncio.get_running_loop()
        self.hangup = lambda: loop.call_soon_threadsafe(hangup.set) and None
        await follow(self.source.read(), self.source, self._tenants.update, poll_s)


@pytest.fixture
def following(tokenizer: Tokenizer, tmp_path: Path, request: Any) -> Iterator[Following]:
    (tmp_path / "kvrelay.toml").write_text(
        f'[tenants]\nfile = "tenants.toml"\n[sessions]\nstate_dir = "{tmp_path}"\n'
    )
    (tmp_path / "tenants.toml").write_text(OLD)
    tenants = load_tenants(load_config(tmp_path / "kvrelay.toml", {}))
    with serve(tokenizer, ApiSettings(), context={"tenants": tenants}) as served:
        found = Following(served, tmp_path, tenants)
        loop = asyncio.new_event_loop()
        task = loop.create_task(found.follow(getattr(request, "param", 0.05)))
        thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
        thread.start()
        wait_until(lambda: found.source is not None)
        time.sleep(0.1)  # it has looked at the files
        yield found
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def salt_of(following: Following, key: str) -> bytes:
    tenant = following.served.ctx.tenants.find(key)
    assert tenant is not None
    return tenant.salt


def test_a_tenants_file_that_changes_is_read_and_nothing_that_runs_is_lost(
    following: Following, tokenizer: Tokenizer
) -> None:
    served = following.served
    assert (following.status("old-key"), following.status("new-key")) == (200, 401)
    salt = salt_of(following, "old-key")
    served.router.answer = lambda submit: tokenizer.encode("word " * 40)
    served.router.delay_s = 0.03
    headers = {"authorization": "Bearer old-key"}
    body = BODY | {"stream": True, "max_tokens": 40}
    with served.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        (following.folder / "tenants.toml").write_text(NEW)
        wait_until(lambda: served.ctx.tenants.find("new-key") is not None)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    served.router.delay_s = 0.0
    assert salt_of(following, "new-key") == salt
    assert following.status("old-key") == 401
    assert [following.status("new-key") for _ in range(2)] == [200, 429]  # its new rate


async def test_a_router_that_starts_later_has_the_tenants_of_now(tmp_path: Path) -> None:
    """It got those that the server has started with: a key that was taken back opened it again."""
    path = tmp_path / "kvrelay.toml"
    path.write_text(f'[sessions]\nstate_dir = "{tmp_path}"\n{OLD}')
    config = load_config(path, {})
    given = load_tenants(config)
    path.write_text(f'[sessions]\nstate_dir = "{tmp_path}"\n{NEW}')
    task = asyncio.create_task(
        follow(config, Source(path, {}, asyncio.Event()), given.update, poll_s=60.0)
    )
    async with asyncio.timeout(5):
        while given.find("new-key") is None:
            await asyncio.sleep(0.01)
    task.cancel()
    assert given.find("old-key") is None


@pytest.mark.parametrize("following", [60.0], indirect=True)
def test_a_hangup_reads_them_at_once(following: Following) -> None:
    (following.folder / "tenants.toml").write_text(NEW)
    time.sleep(0.2)
    assert following.status("old-key") == 200
    following.hangup()
    wait_until(lambda: following.status("new-key") in (200, 429))
    assert following.status("old-key") == 401


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[[tenant]]\n", "[[tenant", OLD + OLD, OLD + "max = 3\n"])
def test_what_is_wrong_is_logged_and_changes_nothing(
    following: Following, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "kvrelay.tenants"):
        (following.folder / "tenants.toml").write_text(text)
        wait_until(lambda: "tenants stay as they are" in caplog.text)
    assert "old-key" not in caplog.text
    assert following.status("old-key") == 200
    assert following.status("none") == 401


def test_a_file_that_is_away_for_a_moment_or_read_again_the_same_changes_nothing(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    path = following.folder / "tenants.toml"
    path.rename(path.with_suffix(".away"))
    with caplog.at_level(logging.ERROR, "kvrelay.tenants"):
        wait_until(lambda: "No such file" in caplog.text)
    assert following.status("old-key") == 200
    path.with_suffix(".away").rename(path)
    os.utime(path)
    path.write_text(NEW)
    wait_until(lambda: following.status("new-key") in (200, 429))


def test_a_server_with_keys_does_not_become_one_without() -> None:
    from kvrelay.cluster.config import ConfigError, TenantEntry

    tenants = Tenants.of((TenantEntry("red", keys=("red-key",)),), b"a secret")
    with pytest.raises(ConfigError, match="restart to serve without keys"):
        tenants.update(Tenants())
    assert tenants.find(None) is None
