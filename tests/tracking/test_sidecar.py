"""Trackers get every step once, whatever happens to the sidecar, and the steps that a restart trains again."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.tracking import sidecar
from libra_hpc.tracking.sidecar import MetricsTail


def line(step: int, reward: float = 0.0) -> str:
    return json.dumps({"step": step, "t": 1000.0 + step, "reward": reward}) + "\n"


def test_steps_come_once_a_torn_line_waits_and_a_restart_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)

    def new() -> list[tuple[int, bool]]:
        return [(entry.step, entry.again) for entry in tail.new()]

    assert new() == []
    path.write_text(line(1) + line(2) + line(3)[:9])
    assert new() == [(1, False), (2, False)]
    path.write_text(line(1) + line(2) + line(3))
    assert new() == [(3, False)]
    path.write_text(line(1))
    assert new() == [(1, True)]
    path.write_text(line(1) + line(2, 0.5) + line(3, 0.5) + line(4))
    assert new() == [(2, False), (3, False), (4, False)]
    # Cut back and grown again between two looks.
    path.write_text(line(1) + line(2, 0.5) + line(3, 0.7) + line(4, 0.7) + line(5))
    assert new() == [(2, True), (3, False), (4, False), (5, False)]
    first, *_, last = MetricsTail(path).new()
    assert [entry.step for entry in MetricsTail(path, 1, first.line).new()] == [2, 3, 4, 5]
    path.write_text(path.read_text().replace("0.7", "0.8"))
    assert [entry.step for entry in MetricsTail(path, 4, last.line).new()] == [5]
    path.write_text(line(1))
    assert [(e.step, e.again) for e in MetricsTail(path, 5, last.line).new()] == [(0, True), (1, False)]


class Fragile:
    """A tracker whose library fails."""

    name = "fragile"

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.fails_at = 3

    def send(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        if "reward" in values:
            self.steps.append(step)
        else:
            self.evaluations.append((step, values))

    def again(self, step: int) -> bool:
        return False

    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_a_tracker_that_fails_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, fragile = RunDir.create(tmp_path, "t"), Fragile()
    run.write_json(run.config, validate({}).as_data())
    run.metrics.write_text("".join(map(line, range(1, 6))))
    evaluation = {"task": "aime", "step": 2, "mean": 0.25, "pass_at": {"1": 0.5}}
    run.evaluations.write_text(json.dumps(evaluation) + "\n")
    monkeypatch.setattr(sidecar, "trackers", lambda *_: [fragile])
    sidecar.follow(run, lambda: True)
    assert fragile.steps == [1, 2]
    assert "fragile: ConnectionError: no route to host" in capsys.readouterr().err
    fragile.fails_at = -1
    sidecar.follow(run, lambda: True)
    assert fragile.steps == [1, 2, 3, 4, 5]
    # Its steps only grow: what a restart trains again stays as it was sent.
    run.metrics.write_text("".join(map(line, range(1, 4))) + line(4, 1.0) + line(5, 1.0) + line(6))
    sidecar.follow(run, lambda: True)
    assert fragile.steps == [1, 2, 3, 4, 5, 6]
    run.evaluations.write_text(json.dumps(evaluation) + "\n" + json.dumps({"task": "aime", "step": 4}) + "\n")
    sidecar.follow(run, lambda: True)
    first = {"eval/aime": 0.25, "eval/aime/step": 2.0, "eval/aime/pass@1": 0.5}
    assert fragile.evaluations == [(5, first), (6, {"eval/aime/step": 4.0})]


def test_without_a_tracker_and_without_a_run_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert sidecar.main([str(tmp_path), "--once"]) == 2
    assert "the configuration of the run cannot be read" in capsys.readouterr().err
    run = RunDir.create(tmp_path, "t")
    run.write_json(run.config, validate({}).as_data())
    assert sidecar.main([str(run.path), "--once"]) == 2
    assert capsys.readouterr().err == f"error: {run.path} has no tracker; its run file sets none in [track].\n"


def tensorboard(run: RunDir) -> dict[int, float]:
    """Reward by step as TensorBoard shows it: an event of a later file purges what it says."""
    from tensorboardX.proto.event_pb2 import Event

    shown: dict[int, float] = {}
    for path in sorted((run.path / "track" / "tensorboard").glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while len(data) >= 12:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            if event.session_log.status == 1:
                shown = {step: reward for step, reward in shown.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == "reward":
                    shown[event.step] = value.simple_value
            data = data[16 + size :]
    return shown


def test_steps_that_are_trained_or_sent_again_are_shown_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run = RunDir.create(tmp_path, "t")
    run.write_json(run.config, validate({"track": {"tensorboard": True}}).as_data())
    for rewards in ([0.0] * 5, [0.0, 0.0, 0.5, 0.25]):
        run.metrics.write_text("".join(line(step, reward) for step, reward in enumerate(rewards, 1)))
        sidecar.follow(run, lambda: True)
    # Killed between sending and recording it.
    sidecar.Sent(run).record("tensorboard", 3, 0, 0)
    sidecar.follow(run, lambda: True)
    assert tensorboard(run) == {1: 0.0, 2: 0.0, 3: 0.5, 4: 0.25}
