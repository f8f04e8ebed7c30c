"""The judge of the answers: what it accepts, and each thing that it does not."""

from __future__ import annotations

import pytest

from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.request import FinishReason, Refusal, SamplingParams
from kvrelay.lab.sim.client import Outcome, SecondWave, SimClient
from kvrelay.lab.sim.workload import Job
from kvrelay.router.messages import Cancel, Failed, Output, Submit

EXPECTED = (7, 8, 9)


class Table:
    """A client with one job, and what it complained about."""

    def __init__(self, honest: bool = True, **job: object) -> None:
        self.complaints: list[str] = []
        sampling = SamplingParams(max_tokens=3)
        self.job = Job(
            "r0",
            (1, 2),
            sampling,
            0.5,
            10.0,
            EXPECTED,
            FinishReason.LENGTH,
            **job,  # type: ignore[arg-type]
        )
        self.client = SimClient(
            "client",
            ["router-0", "router-1"],
            [self.job],
            lambda order, failed, now: None if honest else "it fits",
            lambda kind, text: self.complaints.append(kind),
        )
        self.client.start(0.0)

    def submit(self) -> None:
        self.effects = self.client.receive(0.5, Woken("submit r0"))

    def output(self, index: int, *tokens: int, finish: FinishReason | None = None) -> list[object]:
        return self.client.receive(1.0, Output("r0", index, tokens, finish=finish))

    @property
    def outcome(self) -> Outcome:
        return self.client.orders["r0"].outcome


@pytest.fixture
def table() -> Table:
    table = Table()
    table.submit()
    return table


def test_a_job_is_submitted_when_it_is_due_and_ends_once(table: Table) -> None:
    (effect,) = table.effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Submit)
    table.output(0, 7)
    table.output(1, 8, 9, finish=FinishReason.LENGTH)
    assert table.outcome is Outcome.FINISHED
    assert table.client.num_open == 0
    assert table.complaints == []


@pytest.mark.parametrize(
    ("index", "tokens", "finish", "complaint"),
    [
        (0, (7, 9), None, "wrong tokens"),
        (1, (7,), None, "gap or repeat"),
        (0, (7, 8), FinishReason.LENGTH, "wrong end"),
        (0, EXPECTED, FinishReason.STOP, "wrong end"),
        (0, (*EXPECTED, 1), FinishReason.LENGTH, "wrong tokens"),
    ],
)
def test_a_wrong_answer_is_a_violation(
    table: Table, index: int, tokens: tuple[int, ...], finish: FinishReason | None, complaint: str
) -> None:
    table.output(index, *tokens, finish=finish)
    assert complaint in table.complaints


def test_a_second_end_is_a_violation(table: Table) -> None:
    table.output(0, *EXPECTED, finish=FinishReason.LENGTH)
    table.client.receive(1.0, Failed("r0", Refusal.DEADLINE, ""))
    assert table.complaints == ["answer after the end"]
    assert table.client.num_open == 0


@pytest.mark.parametrize("honest", [True, False])
def test_a_failure_without_reason_is_a_violation(honest: bool) -> None:
    table = Table(honest)
    table.submit()
    table.client.receive(1.0, Failed("r0", Refusal.NEVER_FITS, "too large"))
    assert table.outcome is Outcome.FAILED
    assert table.complaints == ([] if honest else ["failed without reason"])


def test_a_cancelled_job_may_get_what_was_on_its_way_and_nothing_later() -> None:
    table = Table(cancel_at_output=2)
    table.submit()
    effects = table.output(0, 7, 8)
    assert effects == [Send("router-0", Cancel("r0"))]
    table.output(2, 9)
    assert table.complaints == []
    table.client.receive(1.1, Output("r0", 2, (9,)))
    assert table.complaints == ["answer after the end"]


def test_a_job_that_ended_is_not_cancelled() -> None:
    table = Table(cancel_after_s=1.0)
    table.submit()
    assert table.effects[1:] == [Wake(1.0, "cancel r0")]
    table.output(0, *EXPECTED, finish=FinishReason.LENGTH)
    assert table.client.receive(1.5, Woken("cancel r0")) == []
    assert table.outcome is Outcome.FINISHED


def test_the_second_wave_waits_to_be_told() -> None:
    table = Table(after_faults=True)
    assert table.client.num_open == 0
    assert table.client.receive(0.0, SecondWave()) == [Wake(0.5, "submit r0")]
    assert table.client.num_open == 1
