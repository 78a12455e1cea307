"""`plan` and `check` share one space of training layouts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.node_groups import core_world
from libra_hpc.config.run import RunConfig
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.train_seconds import TrainCost
from libra_hpc.planning.train_layout import TrainSearch, TrainSpace
from libra_hpc.preflight.checks import problems
from tests.policies.control.plant_costs import A800, agentic
from tests.slurm.test_examples import model_folder

from .conftest import run_file


def configured(folder: Path, nodes: int, gpus: int, hybrid: int, **sections: Any) -> RunConfig:
    batch = {"prompts_per_step": 32}
    own = {"run": {"dir": str(folder)}, "model": {"path": str(folder / "policy")}, "algorithm": batch, **sections}
    return validate(run_file((1, hybrid, nodes - 1 - hybrid), gpus, **own))


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
            taken.add(core_world(stated).degrees._replace(etp=etp))
    assert taken == has
    assert len(has) > 3
