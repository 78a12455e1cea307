"""Repartition advice and the rollout cost model, on 48 A800 with operator tables."""

from __future__ import annotations

import random

import msgspec
import pytest

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.models.devices import device
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import model_shape
from libra_hpc.policies.control.repartition_choice import RepartitionAdvisor, RunningLayout
from libra_hpc.policies.control.rollout_by_nodes import NodeEngines, RolloutByNodes
from libra_hpc.policies.control.stage_times import Estimate, Split
from libra_hpc.policies.costs.rollout_time import RolloutOptions
from libra_hpc.policies.search.run_plan import DevicePool
from libra_hpc.policies.search.train_layout import TrainSpace
from libra_hpc.protocol.plan import NodeFact, PlanDecision, PlanSnapshot, TrajectoryFact

from .plant import NOTHING, exact

SETTINGS = PlannerSection(repartition_cost_s=600.0)
SPACE = TrainSpace(cp=(1,), recompute=("full",))
CORE = TrainLayout(tp=8, pp=1, cp=1, ep=1, dp=1, micro_tokens=8192, recompute="full")
EARLY = float("-inf")


def snapshot(median: float = 2000.0, count: int = 1024) -> PlanSnapshot:
    rng = random.Random(1)
    lengths = [max(1, round(min(20_000.0, median * rng.lognormvariate(0.0, 0.8)))) for _ in range(count)]
    done = tuple(
        TrajectoryFact(i, float(i), n, 2 * n + 500, turns=1 + n // 500, tool_s=0.5) for i, n in enumerate(lengths)
    )
    nodes = tuple(NodeFact(i, kind, kind, 0.0) for i, kind in enumerate(["train"] + ["rollout"] * 5))
    return msgspec.structs.replace(NOTHING, nodes=nodes, trajectories=done, steps_left=1000)


def _repartition() -> RepartitionAdvisor:
    return RepartitionAdvisor(
        model_shape("qwen3-14b"), DevicePool(device("a800"), 6, 8), RunningLayout(CORE, 1, 1, ((8, 1),)), space=SPACE
    )


def measured(train: float, rollout: float, split: Split = Split(1, 5)) -> Estimate:  # noqa: B008
    return exact(split, train, rollout, tokens=(2e6, 1e6), train_error=0.02, rollout_error=0.02)


def advise(
    seen: PlanSnapshot, advisor: RepartitionAdvisor | None = None, since: float = EARLY, horizon: float = 20_000.0
) -> PlanDecision | None:
    """Of a run whose core nodes take 600 s a batch and whose rollout takes 100 s."""
    return (advisor or _repartition()).advise(
        seen, measured(600.0, 100.0), since=since, horizon=horizon, settings=SETTINGS
    )


def test_a_training_bottleneck_of_core_nodes_gets_a_proposal_once() -> None:
    repartition = _repartition()
    advice = advise(snapshot(), repartition)
    assert (advice.action, advice.node, advice.nodes) == ("repartition", -1, ())
    assert advice.layout in advice.reason
    assert "at the next step boundary" in advice.reason
    assert "train with TP" in advice.layout
    assert "xTP" in advice.layout
    best = advice.candidates[0]
    assert best.train > 1
    assert best.train + best.rollout == 6
    assert best.batch_s == min(c.batch_s for c in advice.candidates)
    assert advice.numbers["pays_s"] > advice.numbers["needed_s"] == 1.5 * 600.0
    assert advise(snapshot(), repartition) is None


def test_no_advice_below_the_restart_cost_without_trajectories_or_while_a_node_is_lost() -> None:
    seen = snapshot()
    nodes = (*seen.nodes[:-1], msgspec.structs.replace(seen.nodes[-1], role="lost"))
    assert advise(seen, horizon=500.0) is None
    assert advise(seen, since=1e9) is None
    assert advise(msgspec.structs.replace(seen, nodes=nodes)) is None


def _model(engines: tuple[tuple[int, int], ...] = ((4, 1),), median: float = 2000.0) -> RolloutByNodes:
    model = RolloutByNodes(NodeEngines(model_shape("qwen3-14b"), device("a800"), engines, RolloutOptions(16)))
    model.observe(snapshot(median), EARLY)
    return model


@pytest.mark.parametrize("engines", [((4, 1),), ((1, 4), (4, 1)) * 4])
def test_more_nodes_help_less_and_less_and_never_more_than_evenly(engines: tuple[tuple[int, int], ...]) -> None:
    model = _model(engines)
    seconds = [model.seconds(nodes) or 0.0 for nodes in (2, 4, 8)]
    assert seconds[0] > seconds[1] > seconds[2]
    assert 0.49 < model.ratio(2, 4) < model.ratio(4, 8) < 1.0


def test_of_unlike_nodes_the_last_ones_stay_in_rollout() -> None:
    mixed, large = _model(((1, 4), (1, 4), (4, 1), (4, 1))), _model()
    assert mixed.seconds(2) == large.seconds(2)
    assert mixed.seconds(4) != large.seconds(4)


def test_the_model_divides_evenly_before_it_has_lengths_and_learns_its_factor() -> None:
    new, model = RolloutByNodes(_model()._node), _model()
    assert new.ratio(2, 4) == 0.5
    assert new.unthrottled(3) is None
    assert model.unthrottled(3) == model.seconds(3)
    model.learn(3, 1.3 * model.seconds(3))
    assert model.unthrottled(6) == pytest.approx(1.3 * (model.seconds(6) or 0.0))


def test_longer_trajectories_count_once_a_batch_of_them_is_finished() -> None:
    model = _model(median=1000.0)
    before = model.seconds(4) or 0.0
    model.observe(snapshot(4000.0, 2048), EARLY)
    assert (model.seconds(4) or 0.0) > 2.0 * before
