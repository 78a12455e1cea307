"""Tasks that raise, hang, answer too much or reward nothing finite, with real engines: what is trained stays right,
and a run without samples ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from tests.cluster.runs import ENGINE_MARKS, Case

from .harness import PROMPTS, nothing_left

pytestmark = ENGINE_MARKS

TASK = f"{Path(__file__).with_name('odd_task.py')}:OddKeyChain"


def odd(folder: Path, policy: Path, steps: int, **options: object) -> Case:
    case = Case(folder, policy, "local", steps=steps, hybrid=0)
    words = [f'task.name="{TASK}"', "deadlines.floor_s=8", "deadlines.first_s=60"]
    words += [f"task.options.{key}={json.dumps(value)}" for key, value in options.items()]
    case.submit(*(word for override in words for word in ("-o", override)))
    return case


@pytest.mark.chaos
def test_bad_rewards_raised_errors_hanging_steps_and_huge_answers_cost_their_trajectories_alone(
    policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "met").mkdir()
    case = odd(tmp_path, policy, 14, once=True, met=str(tmp_path / "met"))
    assert case.ended() == "completed"
    run = case.run
    assert run is not None
    # The verdict is written before the other ranks end, and the rollout leader writes its last lines when it ends.
    nothing_left(run)
    rows = list(read_lines(run.metrics))
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert all(math.isfinite(value) for row in rows for value in row.values() if value is not None)
    assert all(-0.2 <= row["reward"] <= 1.0 for row in rows), "info overwrites no metric"
    assert rows[0]["task_reward"] == 99.0
    assert rows[0]["rare"] == 1.0, "an average is over the trajectories that have the number"
    failures = {event["failure"] for event in case.events("trajectory_failed")}
    assert {"raised", "reward", "timeout"} <= failures
    assert case.events("hung"), "a step that blocks its host ends the host"
    lines = [line for line in read_lines(run.trajectories) if "index" in line]
    assert not [line for line in lines if (line["index"], line["sample"]) == (9, 0)], (
        "three rewards that are not finite: given up"
    )
    (clipped,) = [line for line in lines if (line["index"], line["sample"]) == (24, 3)]
    assert clipped["info"]["truncated"] == 1.0
    assert clipped["clipped"]
    longest = max(
        line["prompt_tokens"] + sum(turn["gen_tokens"] + turn["new_tokens"] for turn in line["turns"]) for line in lines
    )
    assert longest <= 832, "max_model_len bounds every context"

    import torch
    from safetensors.torch import load_file

    assert all(torch.isfinite(tensor).all() for tensor in load_file(run.policy / "model.safetensors").values())
    newest = run.latest_checkpoint()
    assert newest is not None
    state = run.read_json(newest[1] / "state.json")
    assert state["low"] + len(state["extra"]) == 14 * PROMPTS
