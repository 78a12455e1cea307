"""The gate of an engine over time: seconds without leave to step, and when its turns are wanted back."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.gate.gated_steps import REOPEN_S, GateConfig, GatedSteps
from libra_hpc.gate.page import Page
from libra_hpc.policies.serving.pauses import LONGEST_S, PAUSES, STAND_S
from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_cost import MIN_STEPS, StepWork
from libra_hpc.policies.serving.step_gate import PROBE
from tests.gate.page_writer import PageWriter


class Plant:
    """An engine's scheduler and batches, and a server of ``served`` users, over a clock of its own."""

    def __init__(self, path: Path) -> None:
        Page.create(path)
        self.now, self.served, self.max_num_scheduled_tokens = 1000.0, 0, 2048
        self._writer, self._step = PageWriter(path), StepWork()
        config = GateConfig(page=str(path), ttft_s=0.5)
        self.steps = GatedSteps(config, self, self, clock=lambda: self.now)

    def take(self) -> StepWork:
        return self._step

    def upcoming(self) -> StepWork:
        return StepWork(decodes=4, kv_tokens=400, prefill=5000)

    def ask(self, work: bool = True) -> bool:
        self._writer.write(ServingView(written=self.now, served=self.served))
        return self.steps.may_step(work)

    def wait(self, seconds: float, served: int | None = None, work: bool = True, every: float = 0.01) -> None:
        """``served``: users from now on."""
        self.served = self.served if served is None else served
        end = self.now + seconds
        while self.now < end:
            self.now += every
            self.ask(work)

    def step(self, tokens: int, seconds: float) -> None:
        self._step = StepWork(prefill=tokens)
        self.now += seconds
        self.steps.stepped(seconds)


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    return Plant(tmp_path / "page")


def test_the_scheduler_gets_the_tokens_that_end_in_time(plant: Plant) -> None:
    for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) * MIN_STEPS:
        assert plant.ask()
        assert plant.max_num_scheduled_tokens <= 2048
        plant.step(size, 0.01 + 1e-4 * size)
    assert plant.ask()
    # 0.15 of 500 ms, less 10 ms for the step itself, at 0.1 ms a token.
    assert 500 < plant.max_num_scheduled_tokens <= 650


def test_before_a_measurement_steps_are_small(plant: Plant) -> None:
    assert plant.ask()
    assert plant.max_num_scheduled_tokens == PROBE


def test_paused_seconds_count_with_work_only(plant: Plant) -> None:
    plant.wait(1.0, 1, work=False)
    assert plant.steps.paused_s == 0.0
    plant.wait(1.0)
    plant.wait(1.0, 0)
    assert plant.steps.paused_s == pytest.approx(1.0, abs=0.03)
    assert (plant.steps.pause, plant.steps.reason) == ("served", "probe")
    assert not plant.steps.stands_still


def test_it_stands_still_after_a_while_with_work_and_until_the_gate_stays_open(plant: Plant) -> None:
    plant.wait(2 * STAND_S, 1, work=False)
    assert not plant.steps.stands_still
    plant.wait(STAND_S + 0.05)
    assert plant.steps.stands_still
    # Its turns are gone, and it is not open.
    plant.wait(1.0, work=False)
    assert plant.steps.stands_still
    plant.wait(0.5 * REOPEN_S, 0)
    plant.wait(0.1, 1)
    plant.wait(0.8 * REOPEN_S, 0)
    assert plant.steps.stands_still
    plant.wait(0.4 * REOPEN_S)
    assert not plant.steps.stands_still


def test_short_pauses_do_not_add_up_to_a_stand_still(plant: Plant) -> None:
    for _ in range(10):
        plant.wait(0.5 * STAND_S, 1)
        plant.wait(0.02, 0)
    assert not plant.steps.stands_still


def stood_s(plant: Plant) -> float:
    """Seconds from now until it stands still."""
    plant.served, begin = 1, plant.now
    while not plant.steps.stands_still:
        plant.wait(0.1)
    return plant.now - begin


def test_turns_wait_as_long_as_pauses_usually_are(plant: Plant) -> None:
    for _ in range(4):
        plant.wait(1.9, 1)
        plant.wait(1.0, 0)
    assert stood_s(plant) == pytest.approx(PAUSES * 1.9, abs=0.2)
    for _ in range(40):
        plant.wait(100.0, 1, every=0.2)
        plant.wait(1.0, 0)
    assert stood_s(plant) == pytest.approx(LONGEST_S, abs=0.2)


def test_time_without_work_is_no_pause(plant: Plant) -> None:
    plant.wait(0.5, 1)
    # Its turns were aborted; nobody asks until the next ones come.
    plant.now += 600.0
    plant.wait(0.5)
    assert not plant.steps.stands_still
    plant.wait(0.5, 0)
    assert stood_s(plant) == pytest.approx(STAND_S, abs=0.2)
