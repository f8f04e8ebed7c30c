"""What a server finds of the one before it, and what it may take over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.processes import life
from kvrelay.cluster.processes.life import (
    Installed,
    Life,
    LifeRecord,
    all_weights,
    changed_settings,
    changed_weights,
    fixed_settings,
    open_life,
    settings_of_workers,
    weights_of,
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
        {"model__name": "other"},
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
    assert f"{next(iter(change)).replace('__', '.')} changed" in caplog.text
    assert settings_of_workers(before, tmp_path) != settings_of_workers(after, tmp_path)


def test_what_is_a_matter_of_routers_ends_no_workers(tmp_path: Path) -> None:
    before, after = config(tmp_path), config(tmp_path, cluster__routers=2, state__url="")
    assert settings_of_workers(before, tmp_path) == settings_of_workers(after, tmp_path)
    assert changed_settings(open_life(before, 8000).record, after) == ["cluster.routers"]


def test_a_record_that_knows_of_no_fixed_settings_goes_by_all_of_them(
    tmp_path: Path, ended: list[str]
) -> None:
    """The version before has written it, without them."""
    path = open_life(config(tmp_path), 8000).path
    record = LifeRecord("kvrelay-old", b"token", workers_of(config(tmp_path)), 3)
    old = {k: v for k, v in msgspec.to_builtins(record).items() if k not in ("fixed", "weights")}
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


def test_weights_that_were_replaced_in_their_place_are_others(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    before = weights_of(tmp_path)
    assert weights_of(tmp_path) == before
    os.utime(file, (1, 1))
    assert weights_of(tmp_path) != before


def test_models_may_come_and_go_and_weights_of_one_that_stays_may_not_change(
    tmp_path: Path,
) -> None:
    paths = {name: tmp_path / name for name in ("large", "small", "third")}
    for path in paths.values():
        path.write_bytes(b"weights")
    large, small, third = paths["large"], paths["small"], paths["third"]
    before = all_weights({"large": large, "small": small})
    assert changed_weights(before, all_weights({"large": large, "third": third})) == []
    assert changed_weights(before, all_weights({"large": large, "small": third})) == ["small"]
    assert changed_weights("", before) == []
    alone = all_weights({"": large})
    assert alone == weights_of(large)
    assert changed_weights(alone, all_weights({"": small})) == [""]


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
    assert changed_settings(record, config_with(a="bfloat16", b="float32")) == ["models.a"]
