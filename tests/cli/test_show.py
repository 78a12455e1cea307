"""`libra-hpc show`: which trajectories are printed, and how."""

from __future__ import annotations

import json

from libra_hpc.facts.rundir import RunDir
from libra_hpc.policies.learning.advantages import advantage_named
from libra_hpc.rollout.group_state import GroupState
from libra_hpc.rollout.records.transcripts import TranscriptWriter
from libra_hpc.rollout.trajectory import Trajectory
from tests.rollout.plant import generated

from .conftest import Cli, one_line

MEAN = advantage_named("group_mean")


def _group(rewards: list[float]) -> GroupState:
    group = GroupState(7, len(rewards))
    for sample, reward in enumerate(rewards):
        trajectory = Trajectory(index=7, sample=sample, task="toy")
        trajectory.prompt_id, trajectory.prompt_tokens, trajectory.reward = "toy-7", 2, reward
        trajectory.add_environment(bytes(8))
        answer = generated("", [1, 2, 3], finish="stop", versions=((3, 3),))
        trajectory.add_generated(answer, "r2.0")
        group.done.append(trajectory)
    return group


def test_the_worst_and_the_best_of_a_step(submitted: RunDir, cli: Cli) -> None:
    group = _group([0.5, -1.0, 2.0])
    writer = TranscriptWriter(submitted.transcripts, 10**6)
    for step in (4, 9):
        writer.write(step, group.done, [group.to_group(MEAN)])
    shown = cli("show", "--worst", "1", "--best", "1").out
    assert [line.split(":")[1].split(",")[0] for line in shown.splitlines() if line.startswith("==")] == [
        " reward -1",
        " reward 2",
    ]
    assert "== step 9, toy-7, sample 1: reward -1, advantage -1.50, 1 turns, 3 tokens, weights 3" in shown
    assert "-- policy (3)" in shown
    (record,) = (json.loads(cli("show", "--step", "4", "--worst", "1", "--json").out),)
    assert [part["who"] for part in record["text"]] == ["prompt", "policy"]


def test_an_evaluation_and_what_failed(submitted: RunDir, cli: Cli) -> None:
    group, writer = _group([0.5, -1.0]), TranscriptWriter(submitted.transcripts, 10**6)
    group.done[1].error = "ValueError: no"
    writer.write(4, group.done, [])
    for trajectory in group.done:
        trajectory.task, trajectory.reward = "held", 0.25
    writer.write(2, group.done, [], "held")
    shown = cli("show")
    assert "== step 4, toy-7, sample 0: reward 0.5, " in shown.out
    assert "the least reward of 1 trajectories; others: --worst, --best, --prompt, --failed" in shown.err
    shown = cli("show", "--failed")
    assert "== step 4, toy-7, sample 1: failed, 1 turns, 3 tokens, weights 3\n   ValueError: no\n" in shown.out
    assert "1 of 2 trajectories failed" in shown.err
    assert "== step 2, toy-7, sample 0: reward 0.25, " in cli("show", "--task", "held").out


def test_mistakes_are_one_sentence(submitted: RunDir, cli: Cli) -> None:
    assert "has no transcripts" in one_line(cli("show"))
    group = _group([0.0])
    TranscriptWriter(submitted.transcripts, 10**6).write(4, group.done, [group.to_group(MEAN)])
    assert "--step = 5: no transcripts of it; valid: 4 to 4." in one_line(cli("show", "--step", "5"))
    assert "--prompt = 'toy-8': the step has no such prompt; valid: toy-7" in one_line(cli("show", "--prompt", "toy-8"))
    assert "--task = 'top': the step has no such task; valid: toy" in one_line(cli("show", "--task", "top"))
