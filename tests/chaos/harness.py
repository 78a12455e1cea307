"""Whole runs that are disturbed: a small run file with simulated engines, faults to inject, and what must hold
afterwards, whatever was injected."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from libra_hpc.facts.layout_log import LoggedLayout, replay
from libra_hpc.facts.rundir import RunDir, read_lines
from tests.cluster.runs import Case

PROMPTS = 4
SIMULATED = """
[run]
name = "t"
dir = "{runs}"
steps = {steps}
engine = "simulated"
[slurm]
restarts = 3
[components]
planner = {{ partition = "cpu", mem = "2G" }}
train = {{ partition = "a800", gpus = 8, gpu_type = "a800", mem = "4G" }}
hybrid = {{ partition = "a800", nodes = {hybrid}, gpus = 8, gpu_type = "a800", mem = "4G" }}
rollout = {{ partition = "a800", nodes = {rollout}, gpus = 8, gpu_type = "a800", mem = "4G" }}
[algorithm]
prompts_per_step = 4
group_size = 4
eta = 1
skip_zero_advantage = false
[train]
tp = 2
processes = 2
recompute = true
[rollout]
tp = 8
max_model_len = 4096
[planner]
model = "qwen3-4b"
enabled = false
hybrid_start = "{hybrid_start}"
[checkpoint]
every = 5
[deadlines]
floor_s = 4.0
first_s = 30.0
[simulated]
presets = ["search"]
speedup = 100.0
start_s = 20.0
"""


class Chaos(Case):
    """A run with simulated engines on the local executor, unless told otherwise."""

    def __init__(self, folder: Path, executor: str = "local", text: str = SIMULATED, **values: Any) -> None:
        super().__init__(folder, Path(), executor)
        values = {"steps": 120, "hybrid": 1, "rollout": 2, "hybrid_start": "rollout", "runs": folder / "runs", **values}
        self.values = values
        self.fault_at: float | None = None
        """Epoch seconds; the table then counts from there."""
        self.run_file.write_text(text.format(**values))

    def reach(self, step: int) -> None:
        """Wait until that step is committed."""
        self.wait(lambda: self.steps()[-1:] >= [step], f"step {step}")

    def agent(self, rank: int) -> int:
        """Process id of a rank's agent."""
        return int(next(event["pid"] for event in reversed(self.events("agent_joined")) if event["rank"] == rank))

    def signal_agent(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.agent(rank), number)

    def guest_tokens(self) -> int:
        """Tokens of trained batches that guests generated."""
        assert self.run is not None
        return int(sum(line["guest_tokens"] for line in read_lines(self.run.metrics)))

    def status(self) -> dict[str, Any]:
        assert self.run is not None
        return self.run.read_json(self.run.status)

    def layouts(self) -> list[LoggedLayout]:
        assert self.run is not None
        return [*replay(self.run)]

    def message(self) -> str:
        """What the run says of its end."""
        assert self.run is not None
        return str(self.run.read_json(self.run.result).get("message", ""))


PATCH = """
import os, sys
link = os.environ.get("LIBRA_HPC_OWNER_LINK", "").split()
if "libra_hpc.agent.agent" in sys.orig_argv and link and int(link[3]) in {ranks}:
{code}
"""

SHARING_PAYS = """
from libra_hpc.planning.live_child import PlayerProcess
from libra_hpc.policies.control.plays import BOTH
from libra_hpc.protocol.plan import PlanDecision
def decide(self, snapshot, now):
    roles = {node.role for node in snapshot.nodes}
    action = "hold" if roles & {BOTH, "to_train", "to_rollout", "starting"} else "time_share"
    return PlanDecision(action, -1, f"{action}: as the test has it", {})
PlayerProcess.decide = decide
"""
"""The planner chooses time-sharing at once and for good: the nodes of this machine share its cores."""


def patched(folder: Path, code: str, *ranks: int) -> list[str]:
    """Options by which the agents of these ranks run ``code`` before anything else."""
    text = PATCH.format(ranks=list(ranks), code=textwrap.indent(code, "    "))
    (folder / "sitecustomize.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return ["-o", f"compute.env={{PYTHONPATH = '{path}'}}"]


Row = tuple[str, float, str]
"""A test, the seconds of its run without a step, at most, and how the run ended."""
ROWS: list[Row] = []


def standstill(run: RunDir, since: float | None = None) -> float:
    """The longest time without a step, in seconds; between two of them, or with the one from ``since`` to the first
    that follows."""
    times = [float(line["t"]) for line in read_lines(run.metrics)]
    if since is not None:
        times = [since, *(time for time in times if time > since)]
    return max((b - a for a, b in pairwise(times)), default=0.0)


def sound(case: Chaos, state: str = "completed") -> None:
    """What holds after any fault: a true final state with a reason, each step once, each group at most once, the
    staleness bound, and nothing left behind."""
    run = case.run
    assert run is not None
    assert case.ended() == state, (case.message(), case.logs())
    steps = case.steps()
    assert steps == list(range(1, len(steps) + 1)), "every step once, in order"
    newest = run.latest_checkpoint()
    if newest is not None:
        position = run.read_json(newest[1] / "state.json")
        assert len(set(position["extra"])) == len(position["extra"])
        if state == "completed":
            assert newest[0] == len(steps) == case.values["steps"]
            assert position["low"] + len(position["extra"]) >= PROMPTS * len(steps)
    for line in read_lines(run.metrics):
        assert line["staleness_max"] <= 1
    assert case.message(), "the end has a reason"
    seen, layouts = dict[tuple[int, str], list[float]](), case.layouts()
    for one in layouts:
        assert one.number == one.layout.number, "no line is missing"
        for rank, row in one.layout.rows.items():
            seen.setdefault((rank, row.state), []).append(one.t)
    for event in case.events("move_done"):
        assert min(abs(t - event["t"]) for t in seen[event["rank"], event["role"]]) < 1.0, "the log replays the move"
    nothing_left(run)
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::test_")[2].partition(" ")[0]
    ROWS.append((name.replace("_", " "), standstill(run, case.fault_at), state))


def nothing_left(run: RunDir) -> None:
    """No process of the run lives, and no shared memory of it is left; both may take a moment after the verdict."""
    agents = {str(event["pid"]) for event in read_lines(run.events) if event["kind"] == "agent_joined"}
    deadline = time.monotonic() + 60.0
    while (left := [*processes(run), *memory(agents)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, left


def processes(run: RunDir) -> list[str]:
    """Command lines that name the run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        # The folders of tests have the word in their names, too.
        if str(run.path) in command and "pytest" not in command.replace(str(run.path), ""):
            found.append(command)
    return found


def memory(agents: set[str]) -> list[Path]:
    """Folders in shared memory of agents with these process ids."""
    return [path.parent for path in Path("/dev/shm").glob("libra-*/owner.lock") if path.read_text() in agents]
