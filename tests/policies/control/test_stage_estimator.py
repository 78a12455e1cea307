"""When the planner may use in-flight work, and when it has to measure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.policies.control.node_scaling import NodeScaling
from libra_hpc.policies.control.rollout_by_nodes import NodeEngines, RolloutByNodes
from libra_hpc.policies.control.stage_estimator import CHANGING_STEPS, IN_FLIGHT_ERROR, PROMPT_QUANTITY, StageEstimator
from libra_hpc.policies.control.stage_times import Estimate, Split
from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, RolloutWindowFact, TrainStepFact, TrajectoryFact

from .plant import Plant, ideal, trajectory

BATCH, GROUP = 16, 4
DOCUMENT, THOUGHT = (8000, 200), (100, 5000)
"""(prompt, generated tokens)."""
SPLIT = Split(3, 1)
TOKEN_S = 1e-3
"""Of training, on one node."""


class PerToken(RolloutByNodes):
    """A millisecond of a node for every generated token."""

    def __init__(self) -> None:
        super().__init__(NodeEngines(model_shape("qwen3-14b"), device("a800"), ((4, 1),)))
        self._mean = 0.0

    def _build(self, snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> None:
        self._mean, self._cache = fmean(t.generated for t in done), {}

    def _least(self, nodes: int) -> float | None:
        return self._mean * BATCH * GROUP * 1e-3 / nodes


class Run(Plant):
    """Batches of one kind after the other, trained at once; `in_flight` are admitted groups that have not begun."""

    def __init__(self, model: RolloutByNodes | None) -> None:
        super().__init__(ideal(1.0, 1.0), prompts=BATCH, group=GROUP)
        self.estimator = StageEstimator(model, NodeScaling(model))
        self.split, self.admitted = SPLIT, 0
        self.in_flight: list[GroupFact] = []
        self.estimator.set_split(SPLIT, 0.0)

    def batch(self, kind: tuple[int, int], slow: float = 1.0) -> None:
        prompt, mean = kind
        for _ in range(BATCH):
            for member in range(GROUP):
                one = (prompt, round(mean * (0.7 + 0.2 * member)))
                self.done.append(trajectory(len(self.done), one, self.admitted, self.now))
            self.admitted += 1
        newest = self.done[-BATCH * GROUP :]
        tokens, generated = sum(t.context for t in newest), sum(t.generated for t in newest)
        seconds = slow * tokens * TOKEN_S / self.split.train
        self.now += seconds
        self.steps.append(TrainStepFact(self.now, tokens, generated, nodes=self.split.train, seconds=seconds))
        work = {"generated_tokens": generated, "prefilled_tokens": tokens, "busy": 0.5}
        self.windows.append(RolloutWindowFact(self.now, seconds, self.split.rollout, **work))  # type: ignore[arg-type]

    def admit(self, kind: tuple[int, int]) -> None:
        self.in_flight += [GroupFact(self.admitted + i, kind[0], GROUP, 0, 0) for i in range(BATCH)]
        self.admitted += BATCH

    def evaluate(self) -> Any:
        """The estimate, or why there is none."""
        snapshot = replace(self.snapshot(100), groups=tuple(self.in_flight))
        self.estimator.observe(snapshot, self.now)
        return self.estimator.estimate(snapshot, self.split)

    def move(self, split: Split) -> None:
        self.split = split
        self.estimator.set_split(split, self.now)


def _settled(*admitted: tuple[int, int]) -> Run:
    """A long time with documents, then ``admitted`` batches that have not begun."""
    run = Run(PerToken())
    for _ in range(4):
        run.batch(THOUGHT)
    for _ in range(CHANGING_STEPS + 8):
        run.batch(DOCUMENT)
        run.evaluate()
    for kind in admitted:
        run.admit(kind)
    run.evaluate()
    return run


def _tokens(kind: tuple[int, int]) -> float:
    return BATCH * GROUP * float(sum(kind))


def test_new_prompts_are_predicted_before_one_of_them_is_finished() -> None:
    run = _settled()
    steady = run.evaluate()
    assert not steady.from_in_flight
    assert steady.times.train == pytest.approx(_tokens(DOCUMENT) * TOKEN_S / 3, rel=0.05)
    run.admit(THOUGHT)
    run.admit(THOUGHT)
    measured = run.evaluate()
    assert measured.from_in_flight
    assert run.estimator.drift.quantity == PROMPT_QUANTITY
    assert measured.times.train == pytest.approx(_tokens(THOUGHT) * TOKEN_S / 3, rel=0.05)
    assert measured.times.rollout == pytest.approx(BATCH * GROUP * THOUGHT[1] * 1e-3, rel=0.05)
    assert measured.train_error >= IN_FLIGHT_ERROR
    assert not run.estimator.measured.from_in_flight


def test_after_a_move_what_was_measured_is_carried_over() -> None:
    run = _settled(THOUGHT, THOUGHT)
    run.move(Split(1, 3))
    measured = run.evaluate()
    assert run.estimator.measured is None
    assert measured.split == Split(1, 3)
    assert measured.times.train == pytest.approx(_tokens(THOUGHT) * TOKEN_S, rel=0.05)
    assert measured.times.rollout == pytest.approx(BATCH * GROUP * THOUGHT[1] * 1e-3 / 3, rel=0.05)


@pytest.mark.parametrize(("slow", "carried"), [(1.05, True), (1.6, False)])
def test_first_steps_that_disagree_with_the_carried_over_estimate_make_it_measure(slow: float, carried: bool) -> None:
    run = _settled(THOUGHT, THOUGHT)
    run.move(Split(1, 3))
    run.batch(DOCUMENT, slow)
    assert isinstance(run.evaluate(), Estimate) is carried


def test_a_change_is_over_after_some_steps() -> None:
    run = _settled(THOUGHT)
    run.in_flight = []
    for _ in range(CHANGING_STEPS):
        run.batch(DOCUMENT)
    run.evaluate()
    assert not run.evaluate().from_in_flight


def test_the_first_split_may_be_left_after_two_steps_that_agree() -> None:
    run, slow = Run(PerToken()), Run(PerToken())
    run.batch(DOCUMENT)
    slow.batch(DOCUMENT, slow=3.0)
    assert isinstance(run.evaluate(), str)
    run.batch(DOCUMENT)
    slow.batch(DOCUMENT)
    assert isinstance(slow.evaluate(), str)
    measured = run.evaluate()
    assert measured.times.train == pytest.approx(_tokens(DOCUMENT) * TOKEN_S / 3, rel=0.05)
    assert measured.rollout_error > IN_FLIGHT_ERROR, "the draw of so few groups counts"


def test_without_a_cost_model_nothing_is_predicted() -> None:
    run = Run(None)
    for _ in range(8):
        run.batch(DOCUMENT)
    run.admit(THOUGHT)
    assert not run.evaluate().from_in_flight
