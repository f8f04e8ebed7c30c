"""Passes captured as graphs, in step with other ranks. What captures is a stand-in: it runs the
pass once, and its graphs compute nothing."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton")

from kvrelay.engine.model.device_memory import GRAPH_BYTES
from tests.engine.model.gpu.triton_world import DEVICE, World

from kvrelay.engine.model.gpu.steps import TRIAL_GRAPHS, measured_graphs  # isort: skip

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU captures for real")


class Rank:
    """The group of a rank whose peers fail to capture their `failing`th graph."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.agreed = failing, []
        self.was_used = False

    def least(self, number: int, device: torch.device) -> int:
        self.agreed.append(bool(number))
        return min(number, len(self.agreed) != self.failing)

    def share(self, tensor: torch.Tensor) -> None:
        pass


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture(scope="module")
def world(path):
    return World(path, "triton")


@pytest.fixture
def captured(world, monkeypatch):
    """Call it with a group and the number of the capture that fails here: what was captured."""
    broken, free = [0], [1 << 40]

    @contextmanager
    def graph(*_args, **_options):
        yield
        free[0] -= 900 if free[0] == 1 << 40 else 7  # the first has what the others share
        broken[0] -= 1
        if not broken[0]:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free[0], 1 << 40))
    passes = world.steps._passes

    def run(group: Rank | None, failing: int = 0, *, trial: bool = False):
        broken[0], free[0] = failing, 1 << 40
        passes._group = group
        with torch.inference_mode():
            if trial:
                return measured_graphs(passes, torch.device("cuda")), passes
            world.steps._capture(lambda _: None)
        return passes, world.steps.notices

    yield run
    passes.forget_graphs()
    passes._group = None
    world.steps.notices.clear()


def test_a_replay_counts_as_use_of_the_group(captured):
    group = Rank()
    passes, notices = captured(group)
    assert notices == []
    assert sorted(passes._graphs) == passes.sizes
    assert group.agreed == [True] * len(passes.sizes)
    group.was_used, before = False, Graph.replays
    with torch.inference_mode():
        passes.launch(passes.sizes[0], 0)
    assert group.was_used
    assert Graph.replays == before + 1


def test_a_rank_that_cannot_capture_says_so_to_the_others(captured):
    group = Rank()
    passes, notices = captured(group, failing=2)
    assert group.agreed == [True, False]
    assert passes._graphs == {}
    assert "not permitted when stream is capturing" in notices[0]


def test_where_another_rank_cannot_capture_none_does(captured):
    group = Rank(failing=2)
    passes, notices = captured(group)
    assert group.agreed == [True, True]
    assert passes._graphs == {}
    assert notices == [
        "decode steps are not captured as graphs (slower): another rank could not capture a step"
    ]


def test_without_other_ranks_the_error_alone_decides(captured):
    passes, notices = captured(None, failing=1)
    assert passes._graphs == {}
    assert len(notices) == 1


def test_what_graphs_take_is_measured_by_the_first_ones(captured, world):
    sizes = len(world.steps._passes.sizes)
    assert sizes >= TRIAL_GRAPHS
    group = Rank()
    measured, passes = captured(group, trial=True)
    assert len(group.agreed) == TRIAL_GRAPHS
    assert passes._graphs == {}, "they hold addresses of a pool that is not the last"
    captured(None)
    assert measured == world.steps.graph_bytes == 900 + 7 * (sizes - 1)


def test_where_none_can_be_captured_a_constant_is_reserved(captured, world):
    assert captured(None, failing=1, trial=True)[0] == GRAPH_BYTES
    assert world.steps.graph_bytes == 0
