"""Whole runs on real parts: Slurm or local ranks, MPI agents, Megatron, vLLM, environment host.  Kills, cancel,
resume, and a node that moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.rundir import read_lines
from libra_hpc.protocol.trace import recorded
from libra_hpc.rollout.records import transcripts
from tests.example_files import KEYCHAIN_TASK

from .runs import BATCH, ENGINE_MARKS, Case, sampled_once, trained_once

pytestmark = ENGINE_MARKS

STEPS = 80
"""The first attempt is cancelled long before them, also when the machine is so busy that a command takes as long as
many steps."""


@pytest.mark.nightly
def test_killed_engines_cancel_and_resume_on_slurm(cluster: ClusterInfo, policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "slurm", steps=STEPS, hybrid=0)
    run = case.submit("-o", f'task.eval=[{{name="held", task="{KEYCHAIN_TASK}", every=5, prompts=4, samples=2}}]')
    case.wait(lambda: len(case.steps()) >= 4, "first steps")
    case.kill(2, "libra_hpc.engine")
    case.wait(lambda: case.events("engine_lost"), "the lost engine")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 6, "steps with a rebuilt vLLM engine")
    case.kill(1, "libra_hpc.trainer.worker")
    case.wait(lambda: len(case.events("engine_lost")) == 2, "the lost worker")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 2, "steps with a rebuilt Megatron worker")
    case.kill(2, "libra_hpc.host.host")
    case.wait(lambda: case.events("host_lost"), "the lost environment host")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) >= before + 3, "steps with another environment host")
    assert not [event for event in case.events("resubmitted") if "did not answer" in event["reason"]], (
        "its environments came back as they were"
    )

    case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    reached = run.latest_checkpoint()
    assert reached is not None
    assert reached[0] == case.steps()[-1], "cancelling saves at a step boundary"
    state = run.read_json(reached[1] / "state.json")
    untrained = set(range(state["low"], STEPS * BATCH)) - set(state["extra"])
    case.resume()
    assert case.ended() == "completed"
    trained_once(run, STEPS)
    (learned,) = case.events("scheduler_warm_start")
    assert learned["trajectories"] >= 16 * reached[0], "the resumed attempt's scheduler knows what the first one saw"
    assert max(line["staleness_max"] for line in read_lines(run.metrics)) <= 1
    for line, path in zip(read_lines(run.metrics), transcripts.steps(run.transcripts).values(), strict=True):
        said = [turn.gen_tokens for record in transcripts.read(path) for turn in record.turns]
        assert sum(said) == line["gen_tokens"], "what a step was trained on is in its transcripts"
    evaluated = list(read_lines(run.evaluations))
    assert len({line["step"] for line in evaluated}) == len(evaluated) >= 3
    assert all((line["task"], line["failed"]) == ("held", 0) and line["gen_tokens"] > 0 for line in evaluated)
    assert "-- policy (" in case.cli("show", str(run.path), "--best", "1").stdout
    again = case.events("job_started")[1]["t"]
    finished = [one for one in recorded(run.trajectories) if one.finished_at < again and one.index in untrained]
    kept = case.events("experience_kept")
    assert sum(event["trajectories"] for event in kept) == len(finished)
    assert not any(event["dropped"] for event in kept)
    assert not [event for event in case.events("resubmitted") if event["t"] > again], (
        "every environment answered as before"
    )
    sampled_once(run)

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run.policy).config.num_hidden_layers == 2
    words = ("--task", "held", "--samples", "6", "--wait", "--json")
    found = json.loads(case.cli("eval", str(run.path), *words).stdout)
    assert list(found["policies"]) == [str(STEPS)]
    assert found["results"][0]["failed"] == 0, "vLLM serves the exported policy"
    assert -0.2 <= found["results"][0]["mean"] <= 1.0
    assert transcripts.steps(Path(found["path"]) / "transcripts", "held").keys() == {STEPS}


def test_the_planner_moves_a_node_to_training_while_the_core_goes_on(policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "local", steps=400, notes=96)
    run = case.submit()
    case.wait(lambda: case.events("move_done"), "a move on the planner's own decision")
    started, done = case.events("move_started")[0], case.events("move_done")[0]
    assert (started["rank"], started["to"], done["role"]) == (2, "train", "train")
    assert "batch from" in started["reason"]
    meanwhile = [line for line in read_lines(run.metrics) if started["t"] < line["t"] < done["t"]]
    assert meanwhile, "the core goes on stepping while the node moves"
    newcomer = [e for e in case.events("member_joined") if e["rank"] == 2]
    received = newcomer[0]["received_bytes"]
    assert received == 0 or received > 4 * 100_000, "it has the core's weights for rollout, or gets them"
    case.wait(lambda: any(line["replicas"] == 2 for line in read_lines(run.metrics)), "a step of two replicas")
    case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    trained_once(run, case.steps()[-1])


@pytest.mark.nightly
def test_two_hybrid_nodes_are_one_replica_that_dies_and_begins_anew_as_one(
    cluster: ClusterInfo, policy: Path, tmp_path: Path
) -> None:
    case = Case(tmp_path, policy, "slurm", steps=100_000, hybrid=2, rollout=1, notes=96)
    # Synchronous, so that portions of a batch are trained ahead of it.
    keys = (
        "components.train.nodes=2",
        "components.hybrid.nodes_per_replica=2",
        "train.pp=2",
        "train.processes=1",
        "algorithm.eta=0",
        "train.micro_tokens=64",
    )
    run = case.submit(*(part for key in (*keys, "planner.hybrid_start=train") for part in ("-o", key)))

    def joined() -> list[int]:
        return [event["rank"] for event in case.events("member_joined") if event["rank"] in (3, 4)]

    case.wait(lambda: {3, 4} <= set(joined()), "the replica")
    case.wait(lambda: case.steps() and case.steps()[-1] >= 2, "steps with it")
    before = len(joined())
    case.kill(3, "libra_hpc.trainer.worker")
    case.wait(lambda: {3, 4} <= set(joined()[before:]), "both nodes are back")
    steps = len(case.steps())
    case.wait(lambda: len(case.steps()) >= steps + 2, "steps after it")
    case.wait(lambda: any(line["train_ahead_s"] > 0.0 for line in read_lines(run.metrics)), "a portion trained ahead")
    assert list(read_lines(run.metrics))[-1]["replicas"] == 2
    case.cli("cancel", str(run.path))
    assert case.ended() == "cancelled"
    trained_once(run, case.steps()[-1])


LAYOUT = ("train.tp=2", "rollout.tp=2", "components.train.nodes=2", "components.rollout.nodes=1")


@pytest.mark.chaos
def test_a_resumed_run_goes_on_in_another_layout(cluster: ClusterInfo, policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, policy, "slurm", steps=4, hybrid=0, rollout=2)
    # What is kept may be a version old, and the first batch afterwards is to be compared to the digit.
    run = case.submit("-o", "checkpoint.experience=false")
    assert case.ended() == "completed"
    case.resume(*(part for key in (*LAYOUT, "run.steps=8") for part in ("-o", key)))
    assert case.ended() == "completed"
    trained_once(run, 8)
    started = case.events("job_started")
    rows = list(read_lines(run.metrics))
    assert [row["replicas"] for row in rows] == [1] * 4 + [2] * 4
    assert max(row["staleness_max"] for row in rows) <= 1
    # The first batch was rolled out by the weights it is trained on: what TP-2 engines and TP-2 trainers say of it is
    # the same.
    assert rows[4]["logprob_gap"] < 1e-3
    later = [record for record in recorded(run.trajectories) if record.finished_at > started[1]["t"]]
    assert {turn.engine for record in later for turn in record.turns} == {"r3.0"}

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run.policy).config.num_hidden_layers == 2
