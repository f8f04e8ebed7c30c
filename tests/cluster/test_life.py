"""What a server finds of the one before it, and what it may take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.control.messages import differing
from kvrelay.cluster.processes import life
from kvrelay.cluster.processes.life import (
    Installed,
    Life,
    LifeRecord,
    changed_settings,
    fixed_of_workers,
    fixed_settings,
    open_life,
    workers_of,
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Clusters whose workers were ended."""
    found: list[str] = []
    monkeypatch.setattr(life, "kill_workers", found.append)
    return found


def config(folder: Path, **changes: Any) -> Config:
    tables: dict[str, Any] = {"sessions": {"state_dir": str(folder)}}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        tables.setdefault(section, {})[key] = value
    return msgspec.convert(tables, Config)


def left_behind(found: Life) -> None:
    """As a server that was killed leaves it."""
    found.next_controller()


def test_workers_go_on_under_other_settings(tmp_path: Path, ended: list[str]) -> None:
    """They were ended, all at once, whatever setting had changed."""
    first = open_life(config(tmp_path), 8000)
    left_behind(first)
    other = config(tmp_path, engine__num_blocks=77, cluster__decode=3, tiers__host_gib=0.5)
    again = open_life(other, 8000)
    assert (again.record.cluster, again.record.token) == (first.record.cluster, first.record.token)
    assert ended == []


@pytest.mark.parametrize(
    "change",
    [
        {"model__quantization": "int8"},
        {"engine__window": 512},
        {"tls__frames": True},
    ],
)
def test_workers_that_cannot_follow_the_settings_are_left_to_the_controller_to_end(
    tmp_path: Path, ended: list[str], change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever they are: by the token and the names that they have."""
    before, after = config(tmp_path), config(tmp_path, **change)
    first = open_life(before, 8000)
    left_behind(first)
    again = open_life(after, 8000)
    assert again.record.cluster == first.record.cluster
    assert ended == []
    assert f"end: {next(iter(change)).replace('__', '.')}" in caplog.text
    assert differing(fixed_of_workers(before, "c"), fixed_of_workers(after, "c"))


def test_what_is_a_matter_of_routers_ends_no_workers(tmp_path: Path) -> None:
    before, after = config(tmp_path), config(tmp_path, cluster__routers=2, state__url="")
    assert fixed_of_workers(before, "c") == fixed_of_workers(after, "c")
    assert changed_settings(open_life(before, 8000).record, after) == ["cluster.routers"]


def test_a_record_that_knows_of_no_fixed_settings_goes_by_all_of_them(
    tmp_path: Path, ended: list[str]
) -> None:
    """The version before has written it, without them."""
    path = open_life(config(tmp_path), 8000).path
    record = LifeRecord("kvrelay-old", b"token", workers_of(config(tmp_path)), 3)
    old = {
        k: v for k, v in msgspec.to_builtins(record).items() if k not in ("fixed", "checkpoints")
    }
    (path / "life").write_bytes(msgspec.msgpack.encode(old | {"token": b"token"}))
    assert open_life(config(tmp_path), 8000).record.cluster == "kvrelay-old"
    (path / "life").write_bytes(msgspec.msgpack.encode(old | {"token": b"token"}))
    assert open_life(config(tmp_path, engine__num_blocks=5), 8000).record.cluster != "kvrelay-old"
    assert ended == ["kvrelay-old"]


def test_a_rollback_goes_to_what_served_well_before(tmp_path: Path) -> None:
    found = Life(tmp_path, LifeRecord("c", b"t", "s"))
    one, two, bad = (Installed(v, ("kvrelay",), "", v) for v in ("1", "2", "bad"))
    assert found.earlier(one) is None
    found.is_good(one)
    assert found.earlier(one) is None
    assert found.earlier(bad) == one, "whose workers did not come up"
    found.is_good(two)
    found.is_good(two)
    assert found.earlier(two) == one
    found.is_good(one)
    assert found.earlier(one) == two, "and forth again"
    assert (tmp_path / "good").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "spelled",
    [
        {"model__name": "/elsewhere/llama"},
        {"model__revision": "main"},
        {"model__cache_dir": "/elsewhere"},
        {"tls__ca": "/elsewhere/ca.pem", "tls__frames": True},
        {"cluster__address": "10.0.0.1:6379"},
    ],
)
def test_how_a_server_names_what_is_the_same_ends_no_workers(
    tmp_path: Path, spelled: dict[str, Any]
) -> None:
    """Another server of a cluster, or another pod, has other folders and other names."""
    plain: dict[str, Any] = {"tls__frames": "tls__frames" in spelled}
    plain["cluster__address"] = "auto" if "cluster__address" in spelled else ""
    before, after = config(tmp_path, **plain), config(tmp_path, **{**plain, **spelled})
    assert fixed_of_workers(before, "c") == fixed_of_workers(after, "c")
    assert changed_settings(open_life(before, 8000).record, after) == []


def test_a_setting_that_one_version_lacks_is_no_difference(tmp_path: Path) -> None:
    """It refused a restart, and had a controller end all workers."""
    now = fixed_settings(config(tmp_path))
    for known in ({**now, "of the next version": "x"}, {"of the last one": "y"}, {}):
        assert changed_settings(LifeRecord("c", b"t", fixed=known), config(tmp_path)) == []
        assert differing(known, now) == []
    assert differing({**now, "model.dtype": "x"}, now) == ["model.dtype"]


def test_settings_of_a_model_that_stays_are_fixed_and_others_may_come(tmp_path: Path) -> None:
    def config_with(**dtypes: str) -> Config:
        models = [
            {"name": name, "checkpoint": "smollm2-135m", "model": {"dtype": dtype}}
            for name, dtype in dtypes.items()
        ]
        return build_config({"models": models, "sessions": {"state_dir": str(tmp_path)}}, "")

    before = config_with(a="float32", b="float32")
    record = LifeRecord("c", b"t", workers_of(before), fixed=fixed_settings(before))
    assert changed_settings(record, config_with(a="float32", new="float32")) == []
    changed = changed_settings(record, config_with(a="bfloat16", b="float32"))
    assert changed == ["models.a.model.dtype"]
