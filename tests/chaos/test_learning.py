"""A policy that breaks: a dry run in which all samples fail alike from some prompt on."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.policies.learning.guards import HOLD, READ
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.read import encode

from .harness import PROMPTS, SIMULATED, Chaos, patched, sound

pytestmark = [pytest.mark.timeout(300)]
SAMPLES = 4
BREAKS = 31
"""The first step of the broken policy."""
STEPS = 120


def workload(file: Path) -> Path:
    """Trajectories of one short turn, in the order of the prompts."""
    turns = (TurnRecord(new_tokens=0, gen_tokens=32),)
    records = (
        TrajectoryRecord(f"p{prompt}", sample, 64, turns, reward=float(sample > 0) if sound else 0.0)
        for prompt in range(PROMPTS * STEPS)
        for sound in [prompt < PROMPTS * (BREAKS - 1)]
        for sample in range(SAMPLES)
    )
    file.write_bytes(encode(records))
    return file


WRONG = """
from libra_hpc.agent.rollout_node import RolloutNode
from msgspec.structs import replace
import struct
answer = RolloutNode._answer
def wrong(self, name, done):
    answer(self, name, replace(done, logprobs=struct.pack("f", -1.0) * (len(done.logprobs) // 4)))
RolloutNode._answer = wrong
"""


@pytest.mark.chaos
def test_an_engine_whose_log_probabilities_are_off_is_reloaded_then_closed_and_the_run_ends_well(
    tmp_path: Path,
) -> None:
    case = Chaos(tmp_path, steps=60, hybrid=0, rollout=3)
    case.submit(*patched(tmp_path, WRONG, 3))
    sound(case)
    assert [(event["engine"], event["action"]) for event in case.events("engine_off")] == [
        ("r3.0", "reload"),
        ("r3.0", "close"),
    ]
    assert case.events("engine_off")[0]["reason"].endswith("by 1 nats, those of the others by 0")
    (reloaded,) = [event for event in case.events("engine_ready") if event.get("engine") == "r3.0"][1:]
    assert reloaded["version"] > 0
    assert len(case.events("engine_lost")) == 2
    assert [event["rank"] for event in case.events("node_quarantined")] == [3], "it has no other engine"


@pytest.mark.chaos
def test_a_run_whose_policy_breaks_is_paused_and_goes_back(tmp_path: Path) -> None:
    trace = workload(tmp_path / "trace.jsonl")
    # Ten steps apart, so that one of the two newest checkpoints is good when the break is noticed.
    text = SIMULATED.replace('presets = ["search"]', "").replace("every = 5", "every = 10")
    text += f'[task.work]\ntrace = "{trace}"\n'
    text = text.replace("speedup = 100.0", "speedup = 20.0")
    case = Chaos(tmp_path, text=text.replace("restarts = 3", "restarts = 3\nrequeues = 9"), steps=STEPS, hybrid=0)
    run = case.submit()
    sound(case, "paused")
    last = case.steps()[-1]
    assert BREAKS + HOLD < last < BREAKS + 3 * HOLD
    assert all(line.keys() >= set(READ) for line in read_lines(run.metrics))
    good = max(step for step, _ in run.complete_checkpoints() if step < last - 2 * 10)
    assert good == BREAKS - 11, "older than the newest two"
    assert "equal rewards: nothing is learned" in case.message()
    assert case.message().endswith(f"with `--from-step {good}` from the last good checkpoint")
    for screen in ("list", "status"):
        shown = " ".join(case.cli(screen, *([] if screen == "list" else [run.name])).stdout.split())
        assert "paused" in shown, screen
        assert "the reward fell" in shown, screen
    assert not case.events("job_requeued")
    case.resume("--from-step", str(good), "-o", f"run.steps={last - 5}")
    assert case.steps() == list(range(1, last - 4))
