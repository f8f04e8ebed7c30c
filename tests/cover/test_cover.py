"""The array has all pairs, what the matrix refuses is refused, and a row of each kind is right.

All rows take minutes: `pytest -m long tests/cover`, or `python -m tests.cover`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.weights import UpdateMode
from kvrelay.kvtransfer.store.arena import remove_arenas
from kvrelay.worker.kv_plan import BuildError
from tests.cover.checkpoints import Checkpoints
from tests.cover.rows import Combination, combinations_in, possible, refused, rows
from tests.cover.serve import Served, command_of, prepare, serve
from tests.cover.settings import DEFAULTS, NO, YES, cannot_be, parsed, shown, why_not
from tests.support.weights import Operator

QUICK = (
    "model=latent drafter=mtp ngrams=yes adapters=yes logprobs=yes updates=yes left=yes",
    "model=hybrid pools=two models=two grammars=yes penalties=yes approximate=yes sessions=yes",
)
# But for adapters on GPUs, which a device refuses that is not there: tests/docs/test_matrix.py.
REFUSED = [
    pair for pair in refused() if not cannot_be(dict(pair)) and ("adapters", YES) not in pair
]
ROWS = [*(parsed(text) for text in QUICK), *rows()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("cover"))


def test_every_pair_is_in_a_row_or_refused() -> None:
    covered = set().union(*(combinations_in(row, 2) for row in rows()))
    assert covered == possible(2)
    assert not covered & set(refused())
    assert rows() == rows(), "another one each time would be no test"
    assert rows(seed=1) != rows()


def test_a_row_is_what_is_written() -> None:
    for row in ROWS:
        assert parsed(shown(row)) == row
    assert parsed("") == DEFAULTS
    with pytest.raises(ValueError, match="'ranks=2' is no setting of a row: model=dense"):
        parsed("ranks=2")


@pytest.mark.slow
@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: shown(dict(pair)))
def test_what_the_matrix_refuses_is_refused_in_its_words(
    pair: Combination, made: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_layer = {"model": "experts"} if ("drafter", "mtp") in pair else {}
    row = DEFAULTS | has_layer | dict(pair)
    no = why_not(row)
    assert no is not None
    prepare(monkeypatch, row)
    served = Served(row, made, tmp_path)
    if row["updates"] == NO:
        with pytest.raises(BuildError, match=re.escape(no.text)), served.cluster():
            pass
        return
    with served.cluster() as cluster:
        version = read_version(made.retrained(row["model"]))
        answer = Operator(cluster).begin("decode-0", version, UpdateMode.DRAIN).result(60)
        assert answer.why == no.text
    remove_arenas(served.name)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(at, marks=[pytest.mark.slow if at < len(QUICK) else pytest.mark.long])
        for at in range(len(ROWS))
    ],
)
def test_a_row_answers_as_a_plain_worker(number: int, made: Checkpoints, tmp_path: Path) -> None:
    try:
        serve(ROWS[number], made, tmp_path)
    except Exception as error:
        raise AssertionError(f"it fails again by: {command_of(ROWS[number])}") from error
