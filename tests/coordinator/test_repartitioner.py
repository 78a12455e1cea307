"""When ranks may be repartitioned, and what is left for their next start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import load_resolved, validate
from libra_hpc.coordinator.repartitioner import Repartitioner
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.mesh.agent_context import RankLayout
from libra_hpc.policies.control.layout_choice import EVERY_S
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.plan import PlanDecision
from tests.stage.node_parts import Outbox

from .test_coordinator import DRY_RUN

CONFIG = validate(DRY_RUN.as_data())
"""As agents read it."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.write_json(found.config, CONFIG.as_data())
    return found


def rank_0(run: RunDir, speedup: float = 1.0) -> Repartitioner:
    config = CONFIG.changed(simulated={"speedup": speedup})
    components, start = RankLayout.of(CONFIG).components, ResumePoint(0, "", 0, ())
    context = Outbox().context_of(run.path, 0, *components, config=config, start=start, attempt=2)

    def event(kind: str, **fields: Any) -> None:
        LineLog(run.events).write({"t": 1000.0, "kind": kind, **fields})

    return Repartitioner(context, event)


def proposal(changes: dict[str, Any]) -> PlanDecision:
    return PlanDecision("repartition", -1, "better", {}, layout="better", changes=changes)


def test_nothing_is_touched_before_it_is_carried_out(run: RunDir) -> None:
    repartitioner = rank_0(run)
    assert repartitioner.propose(proposal({"train.tp": 2, "rollout.tp": [1, 2]}))
    assert repartitioner.ordered
    assert load_resolved(run.config) == CONFIG
    repartitioner.carry_out(7)
    config = load_resolved(run.config)
    assert (config.train.tp, config.rollout.tp) == (2, [1, 2])
    assert [event["kind"] for event in read_lines(run.events)] == ["repartitioned"]
    assert repartitioner.last == "after step 7: better"


def test_a_proposal_that_is_none_is_refused_in_words(run: RunDir) -> None:
    repartitioner = rank_0(run)
    assert not repartitioner.propose(proposal({"components.rollout.nodes": 0, "components.train.nodes": 2}))
    assert not repartitioner.propose(proposal({"rollout.tp": [1, 2, 4]}))
    run.config.write_text("{")
    assert not repartitioner.propose(proposal({"train.tp": 2}))
    assert not repartitioner.ordered
    whys = ("components.rollout.nodes = 0", "rollout.tp = ", "config.json")
    for event, why in zip(read_lines(run.events), whys, strict=True):
        assert event["kind"] == "repartition_refused"
        assert why in event["reason"]


def test_at_most_one_in_an_hour_of_the_run(run: RunDir) -> None:
    repartitioner = rank_0(run)
    assert repartitioner.not_before == float("-inf")
    assert repartitioner.propose(proposal({"train.tp": 2}))
    repartitioner.carry_out(3)
    assert rank_0(run).not_before == 1000.0 + EVERY_S
    assert rank_0(run, speedup=10.0).not_before == 1000.0 + EVERY_S / 10.0, "a dry run's hour is shorter"
    assert rank_0(run).last == "after step 3: better"
