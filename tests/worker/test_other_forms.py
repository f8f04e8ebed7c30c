"""Host memory of dead workers whose form nobody serves any more is given back at a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from kvrelay.kvtransfer.store import store_folder
from kvrelay.kvtransfer.store.arena import HostArena
from kvrelay.worker.host_tier import free_other_forms, kept_bytes
from tests.kvtransfer.store.test_arena import SIZE, SLOTS, open_arena, write
from tests.worker.test_vllm_worker import CONFIG

OLD, NEW, OTHER = (name * 16 for name in (b"o", b"n", b"x"))  # forms
ALONE, TWO = "", "rank-0-of-2"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvrelay.worker.host_tier.arena_root", lambda: tmp_path)
    return tmp_path / "c"


@pytest.fixture
def running() -> Iterator[list[HostArena]]:
    found: list[HostArena] = []
    yield found
    for each in found:
        each.close()


def left(root: Path, worker: str, form: bytes, part: str = ALONE, slots: int = SLOTS) -> Path:
    """As a worker that was killed leaves it."""
    folder = store_folder(root / part, form, worker)
    own = open_arena(folder, num_slots=slots)
    write(own, 0, 1)
    own.close()
    return folder


def starts(worker: str, form: bytes, num_ranks: int = 1) -> None:
    free_other_forms("c", structs.replace(CONFIG, node_id=worker, fingerprint=form), num_ranks)


def test_what_a_restart_cannot_use_is_freed_once_nobody_can_read_it(
    root: Path, running: list[HostArena]
) -> None:
    mine, other, gone = (left(root, name, OLD) for name in ("decode-0", "decode-1", "decode-2"))
    packed = left(root / "packed", "decode-0", OLD)
    model = left(root, "decode-b-0", OTHER)  # another model's worker, which is about to come back
    all_old = (mine, other, gone, packed)
    running.append(open_arena(other))  # still serves the old form
    starts("decode-0", NEW)
    assert all(each.exists() for each in all_old)
    running.append(open_arena(left(root, "decode-0", NEW)))
    running.pop(0).close()
    starts("decode-1", NEW)
    assert not any(each.exists() for each in all_old)
    assert model.exists()
    starts("decode-b-0", OTHER)
    assert model.exists()


@pytest.mark.parametrize("form", [OLD, NEW])
def test_another_number_of_ranks_is_another_form(root: Path, form: bytes) -> None:
    alone, halves = left(root, "decode-0", form), left(root, "decode-0", OLD, TWO)
    sibling = left(root, "decode-0", OLD, "rank-1-of-2")
    starts("decode-0", OLD, num_ranks=2)
    assert [each.exists() for each in (alone, halves, sibling)] == [False, True, True]


def test_a_start_plans_with_what_it_had_last_and_counts_all_that_comes_free(root: Path) -> None:
    """It made an arena as large as all forms together."""
    left(root, "decode-0", OLD, slots=2 * SLOTS)
    left(root, "decode-0", NEW)
    size, taken = kept_bytes("c", "decode-0")
    assert size == SLOTS * SIZE
    blocks = root.rglob("decode-0/blocks.kv")
    assert taken == sum(each.stat().st_blocks * 512 for each in blocks)
