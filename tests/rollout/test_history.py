"""A policy learns from the line of a trajectory what it learns from the trajectory itself."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.facts.journal import LineLog
from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.env import Signal
from libra_hpc.rollout.trajectory import MAX_RECORDS, Trajectory, history
from libra_hpc.simulator.simulated_trajectory import SimulatedTrajectory
from libra_hpc.traces.read import read_trace
from tests.rollout.plant import generated


def trajectory_of(turns: int) -> Trajectory:
    """``turns`` turns of 2 tokens under rising weight versions; each but the last calls two tools that add 3 tokens."""
    trajectory = Trajectory(index=4, sample=1)
    trajectory.prompt_id = "p"
    trajectory.add_environment(pack_i32([1] * 5))
    for number in range(turns):
        trajectory.add_generated(
            generated("r", [7, 8], finish="stop", logprobs=[-1, -2], versions=((number, 2),)), "e0"
        )
        if number < turns - 1:
            slow = Signal("pytest", "error", 2, 0.25, exit_code=1, passed=number, failed=2)
            trajectory.add_signals([Signal("grep", "ok", 1, 0.125), slow])
            trajectory.add_environment(pack_i32([9] * 3))
    return trajectory


def test_a_line_teaches_what_the_trajectory_did(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    originals = [trajectory_of(turns) for turns in (1, 3)]
    LineLog(path).write_all(trajectory.numbers for trajectory in originals)
    found = history(path, "code")
    for read, original in zip(found, originals, strict=True):
        assert read == Finished.of(original, read.trajectory, "code")
    assert found[1].version == 2
    assert [signal.tool for signal in found[1].signals] == ["pytest", "grep"] * 2, "the slowest call first"
    assert found[1].at_signal == (2, 2, 4, 4)


def test_the_replay_of_a_line_gives_the_same_signals(tmp_path: Path) -> None:
    path, original = tmp_path / "trajectories.jsonl", trajectory_of(3)
    LineLog(path).write_all([original.numbers])
    (read,) = read_trace(path).trajectories
    assert [turn.new_tokens for turn in read.turns] == [0, 3, 3]
    assert (read.context, read.generated) == (original.context_tokens, original.generated)
    replayed = SimulatedTrajectory("r", read)
    for _ in read.turns:
        replayed.answered(0, 0)
    assert list(replayed.signals) == original.signals
    assert Finished.of(read, "r").at_signal == Finished.of(original, "r").at_signal


def test_the_newest_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    turns = [{"new_tokens": 0, "gen_tokens": 1}]
    LineLog(path).write_all(
        {"prompt_id": str(n), "sample": 0, "prompt_tokens": 1, "turns": turns} for n in range(MAX_RECORDS + 2)
    )
    found = [record.prompt_id for record in history(path, "code")]
    assert (len(found), found[0], found[-1]) == (MAX_RECORDS, "2", str(MAX_RECORDS + 1))


def test_without_a_file_nothing_is_learned_nor_of_foreign_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    assert history(path, "code") == []
    LineLog(path).write_all([trajectory_of(2).numbers])
    path.write_bytes(b"\xff\xfe\n" + path.read_bytes() + b"[1]\n{\n")
    assert len(history(path, "code")) == 1
