"""`plan`, `check` and the runtime share one space of training layouts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.train_world import core_world, elastic_world
from libra_hpc.errors import UserError
from libra_hpc.models.shapes import model_shape
from libra_hpc.planning.initial import hybrid_of, planned_pools
from libra_hpc.planning.request import as_planned, request
from libra_hpc.planning.row_values import row_values
from libra_hpc.policies.costs.training_time import TrainCost
from libra_hpc.policies.search.best_plan import PlanResult, PlanSearch, RunPlan
from libra_hpc.policies.search.train_layout import TrainSearch, TrainSpace
from libra_hpc.preflight.checks import check_run, problems
from libra_hpc.preflight.train_worlds import degrees_of
from tests.policies.control.plant_costs import A800, agentic
from tests.slurm.test_examples import model_folder

from .conftest import run_file

FLEETS = [(2, 8), (4, 8), (6, 8), (6, 4)]
"""Nodes and GPUs of each."""


def configured(folder: Path, nodes: int, gpus: int, hybrid: int, **sections: Any) -> RunConfig:
    batch = {"prompts_per_step": 32}
    own = {"run": {"dir": str(folder)}, "model": {"path": str(folder / "policy")}, "algorithm": batch, **sections}
    return validate(run_file((1, hybrid, nodes - 1 - hybrid), gpus, **own))


def rows(config: RunConfig) -> list[tuple[RunPlan, RunConfig]]:
    """The plans of a run file, each with the run file that states it; none where nothing fits."""
    asked = request(as_planned(config))
    pools = planned_pools(config, asked.pools)
    search = PlanSearch(
        asked.shape,
        pools,
        asked.batch,
        space=asked.space,
        options=asked.options,
        whole_nodes=True,
        hybrid=hybrid_of(config, pools),
    )
    try:
        result: PlanResult = search.run(5)
    except UserError:
        return []
    return [(plan, with_values(config, row_values(config, pools, result, i))) for i, plan in enumerate(result.plans)]


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.1-70b"])
def test_every_plan_is_a_run_file_that_check_takes(name: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "policy", model_shape(name))
    planned = set()
    for nodes, gpus in FLEETS:
        for plan, config in rows(configured(tmp_path, nodes, gpus, hybrid=min(2, nodes - 2))):
            planned.add((nodes, gpus))
            check_run(config)
            core, layout = core_world(config), plan.train.layout
            assert (core.ranks, core.dp) == (layout.devices, layout.dp)
            assert str(degrees_of(core)) == str(layout.degrees)
            assert config.components.hybrid.nodes == plan.hybrid <= 2
            assert not plan.hybrid or elastic_world(config).ranks % elastic_world(config).replica == 0
    assert (6, 8) in planned
    assert name == "llama-3.1-70b" or planned == set(FLEETS)


@pytest.mark.parametrize("name", ["qwen3-14b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("core", "hybrid", "gpus"), [(1, 0, 8), (3, 0, 8), (2, 1, 4)])
def test_the_search_has_exactly_the_layouts_that_check_takes(
    name: str, core: int, hybrid: int, gpus: int, tmp_path: Path
) -> None:
    space = TrainSpace(tp=(1, 2, 4, 8), pp=(1, 2, 3), cp=(1, 2), ep=(1, 2, 8, 16), recompute=("none",))
    shape = model_shape(name)
    search = TrainSearch(TrainCost(shape, A800, gpus, agentic(64)), gpus, space)
    has = {
        layout.degrees._replace(etp=layout.etp)
        for layout in search.candidates(core * gpus)
        if not hybrid or search.runs_beside(layout)
    }
    config = configured(tmp_path, core + hybrid + 1, gpus, hybrid, train={"processes": gpus})
    config = with_values(config, {"components.train.nodes": core, "components.rollout.nodes": 1})
    model = json.loads((model_folder(tmp_path / "policy", shape) / "config.json").read_text())
    taken = set()
    for tp, pp, cp, ep, etp in itertools.product(space.tp, space.pp, space.cp, space.ep, (0, 1)):
        degrees = {"train.tp": tp, "train.pp": pp, "train.cp": cp, "train.ep": ep, "train.etp": etp}
        # One tensor rank of an expert is also all of them where there is one.
        if (etp and tp == 1) or (etp and ep == 1):
            continue
        stated = with_values(config, degrees)
        if not list(problems(stated, model)):
            taken.add(degrees_of(core_world(stated))._replace(etp=etp))
    assert taken == has
    assert len(has) > 3
