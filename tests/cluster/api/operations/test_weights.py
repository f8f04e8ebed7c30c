"""`/v1/weights`, `/pause`, `/resume` and `/is_paused`: what operators ask, and what is wrong with
it in words; and which weights answered, as usage says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.api.utility.weights import usage_of_weights
from kvrelay.cluster.orders import OrderRefused, PauseModel, UpdateModel
from kvrelay.cluster.status import ClusterStatus
from kvrelay.engine.weights import (
    PauseMode,
    SharedTensor,
    SharedWeights,
    UpdateMode,
    WeightVersion,
)
from tests.cluster.api.conftest import STATUS, Served, cluster_status, serve

ROW = {"name": "norm", "dtype": "float32", "shape": [8], "offset": 64, "digest": "00" * 32}
MEMORY = {"region": "step-1", "tensors": [ROW]}


class Orders:
    def __init__(self) -> None:
        self.given: list[Any] = []
        self.paused: PauseMode | None = None

    async def order(self, order: UpdateModel | PauseModel) -> dict[str, Any]:
        if isinstance(order, PauseModel):
            self.paused = order.mode
            return {}
        if order.version.path == "/none":
            raise OrderRefused("/none is no folder")
        if order.version.memory is not None and order.version.memory.region == "none":
            raise OrderRefused("none has no tensors")
        self.given.append((order.version, order.mode, order.back))
        return {"name": "v2", "digest": "ab12"}

    def status(self) -> ClusterStatus:
        row = {"model": "", "number": 1, "state": "done", "current": "v2", "mode": "drain"}
        row |= {"paused": str(self.paused)} if self.paused else {}
        return cluster_status(STATUS | {"weights": [row]})


@pytest.fixture(scope="module")
def both(tokenizer: Tokenizer) -> Iterator[tuple[Served, Orders]]:
    orders = Orders()
    with serve(tokenizer, ApiSettings(), context={"order": orders.order}) as served:
        served.ctx.operations.status = orders.status
        yield served, orders


def test_an_update_is_begun_and_its_version_named(both: tuple[Served, Orders]) -> None:
    served, orders = both
    answer = served.post({"path": "/v2", "name": "v2", "mode": "drain"}, "/v1/weights")
    assert answer.status_code == 202
    assert (answer.json()["name"], answer.json()["digest"]) == ("v2", "ab12")
    assert served.post({"back": True}, "/v1/weights").status_code == 202
    assert served.post({"memory": MEMORY}, "/v1/weights").status_code == 202
    shared = SharedWeights("step-1", (SharedTensor("norm", "float32", (8,), 64, bytes(32)),))
    assert orders.given == [
        (WeightVersion("v2", path="/v2"), UpdateMode.DRAIN, False),
        (WeightVersion(), UpdateMode.RECOMPUTE, True),
        (WeightVersion(memory=shared), UpdateMode.RECOMPUTE, False),
    ]
    (row,) = served.http.get("/v1/weights").json()["data"]
    assert (row["current"], row["state"]) == ("v2", "done")


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "expected 'path', a folder of weights, or 'memory', a region that has them, or"),
        ({"path": "/v2", "memory": MEMORY}, 400, "expected 'path'"),
        ({"memory": {**MEMORY, "region": "none"}}, 400, "'memory': none has no tensors"),
        ({"memory": {**MEMORY, "tensors": [ROW | {"digest": "ab"}]}}, 400, "tensors[0].digest"),
        ({"memory": {**MEMORY, "tensors": [ROW | {"offset": -1}]}}, 400, "tensors[0].offset"),
        ({"path": "/v2", "back": True}, 400, "expected 'path'"),
        ({"path": "/none"}, 400, "'path': /none is no folder"),
        ({"path": "/v2", "mode": "now"}, 400, "expected one of ['drain', 'recompute', 'keep']"),
        ({"path": "/v2", "name": "a b"}, 400, "'name'"),
        ({"path": "/v2", "model": "other"}, 404, "There is no model 'other'"),
        ({"path": "/v2", "colour": "red"}, 400, "colour"),
    ],
)
def test_what_is_wrong_is_said(
    both: tuple[Served, Orders], body: Any, status: int, says: str
) -> None:
    answer = both[0].post(body, "/v1/weights")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"]
    if "is no folder" in says or "no tensors" in says:
        assert error["param"] == says.split("'")[1]


def test_a_pause_is_as_in_vllm(both: tuple[Served, Orders]) -> None:
    served, orders = both
    for path, wanted in (
        ("/pause", PauseMode.KEEP),
        ("/pause?mode=wait", PauseMode.WAIT),
        ("/resume", None),
    ):
        assert served.post({}, path).status_code == 200
        assert orders.paused is wanted
        is_paused = served.http.get("/is_paused").json()
        assert is_paused == {"is_paused": wanted is not None}
    refused = served.post({}, "/pause?mode=abort")
    assert refused.status_code == 400
    assert "expected one of ['keep', 'wait'], got 'abort'" in refused.json()["error"]["message"]


def test_usage_has_a_row_for_each_range_where_weights_have_changed() -> None:
    assert usage_of_weights({}) == {}
    assert usage_of_weights({0: ((0, "a"),), 1: ((0, "a"),)}) == {"weight_version": "a"}
    found = usage_of_weights({0: ((0, "a"), (7, "b"))})
    assert found["weight_version"] == "b"
    assert found["weight_versions"] == [
        {"choice": 0, "index": 0, "weight_version": "a"},
        {"choice": 0, "index": 7, "weight_version": "b"},
    ]
