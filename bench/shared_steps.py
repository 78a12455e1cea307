"""What a synchronous run gains whose nodes serve both stages of every step: seconds of a batch, in dry runs.

    python -m bench.shared_steps --splits 3 --switches 80

Real agents and protocols, simulated times, the work of a row of `bench.fleets`.  Six nodes: every static split asked
for, with groups trained as they are complete and with whole batches; then time-sharing, at some seconds of a pair of
switches.  The nodes have a quarter of that row's GPUs, and the batches a quarter of its trajectories.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.fleets_rows import GROUP, MAX_CONTEXT, NODE, ROWS, work
from bench.harness import Options, options, progress, report
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.traces.read import write_trace

NODES, WARM, SCALE = 6, 1, 4
"""The second: first steps, which start engines and trainers, do not count.  The third divides GPUs and trajectories."""
RUN_FILE = """
[run]
name = "t"
dir = "{folder}"
steps = {steps}
engine = "simulated"
[compute]
env = {{ PYTHONPATH = "{path}" }}
[components]
planner = {{ mem = "2G" }}
train = {{ nodes = {train}, gpus = {gpus}, gpu_type = "a800", roll_out = {shares} }}
hybrid = {{ nodes = {hybrid}, gpus = {gpus}, gpu_type = "a800" }}
rollout = {{ nodes = {rollout}, gpus = {gpus}, gpu_type = "a800" }}
[algorithm]
prompts_per_step = {prompts}
group_size = {group}
minibatches = {minibatches}
eta = 0
[train]
tp = {gpus}
micro_tokens = 4096
recompute = "full"
snapshot_every = 0
[rollout]
tp = {gpus}
max_model_len = {longest}
[planner]
enabled = {shares}
time_sharing = "{time_sharing}"
interval_s = 20.0
switch_cost_s = {switch}
[checkpoint]
every = 0
[simulated]
model = "{model}"
trace = "{trace}"
speedup = {speedup}
start_s = 20.0
wake_s = {wake}
mfu = {mfu}
"""
SHARING_PAYS = """
import sys
if "libra_hpc.agent.agent" in sys.orig_argv:
    from libra_hpc.policies.control import within_step
    from libra_hpc.protocol.plan import PlanDecision
    def decide(self, snapshot, estimate, now):
        action = "hold" if any(node.role == within_step.BOTH for node in snapshot.nodes) else "time_share"
        return PlanDecision(action, -1, f"{action}: as the benchmark has it", {})
    within_step.TimeSharing.decide = decide
"""
"""The planner takes time-sharing at once and for good, also where it does not pay."""


class Way(NamedTuple):
    """What the nodes do."""

    train: int = 1
    """Nodes that train; in time-sharing those of the core."""
    streamed: bool = True
    """Groups are trained as they are complete."""
    switch_s: float = 0.0
    """Of a pair; above 0: time-sharing, in which one node rolls out alone."""

    @property
    def words(self) -> str:
        if self.switch_s:
            return f"in turn, {self.switch_s:g} s of switches"
        return f"{self.train} train, {NODES - self.train} roll out, {'streamed' if self.streamed else 'whole batches'}"


def dry_run(own: Options, way: Way) -> dict[str, Any]:
    """A whole run on this machine; simulated seconds of a batch."""
    row, folder = ROWS[own.row], Path(tempfile.mkdtemp(prefix="shared-steps-"))
    prompts = row.trajectories // GROUP // SCALE
    write_trace(folder / "trace.jsonl", work(own.row, own.seed)[1][: own.steps * prompts * GROUP])
    shared = way.switch_s > 0
    hybrid = NODES - 2 if shared else 0
    if shared:
        (folder / "sitecustomize.py").write_text(SHARING_PAYS)
    values = {
        "folder": folder,
        "trace": folder / "trace.jsonl",
        "path": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])),
        "model": own.model,
        "prompts": prompts,
        "group": GROUP,
        "longest": MAX_CONTEXT,
        "gpus": NODE // SCALE,
        "steps": own.steps,
        "train": way.train,
        "hybrid": hybrid,
        "rollout": NODES - way.train - hybrid,
        "minibatches": 1 if way.streamed else 2,
        "shares": str(shared).lower(),
        "time_sharing": "auto" if shared else "off",
        "switch": way.switch_s or 1.0,
        # Half of a pair: one stage falls asleep at once, the other one wakes.
        "wake": way.switch_s / 2,
        "speedup": own.speedup,
        "mfu": own.mfu,
    }
    (folder / "run.toml").write_text(RUN_FILE.format(**values))
    program = str(Path(sys.executable).with_name("libra-hpc"))
    command = [program, "submit", str(folder / "run.toml"), "--executor", "local", "--wait"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return figures(RunDir(folder / "t-001"), own.speedup)


def figures(run: RunDir, speedup: float) -> dict[str, Any]:
    """Simulated seconds of the steps that count, and of a pair of switches as it was measured."""
    rows = list(read_lines(run.metrics))[WARM:]
    moves = [event for event in read_lines(run.events) if event["kind"] == "move_done"]
    pair = [[move["seconds"] for move in moves if move["role"] == role] for role in ("train", "rollout")]
    return {
        "steps_s": [speedup * row["step_s"] for row in rows],
        "batch_s": speedup * statistics.fmean(row["step_s"] for row in rows),
        "train_s": speedup * statistics.fmean(row["train_s"] for row in rows),
        "pair_s": speedup * sum(map(statistics.median, pair)) if all(pair) else None,
    }


def main() -> None:
    own = options(
        "shared_steps",
        __doc__,
        row="63k, eta 0",
        model="qwen3-8b",
        speedup=60.0,
        switches=[80.0, 6.0, 20.0, 160.0],
        steps=3,
        mfu=0.32,
        splits=[3, 2, 4],
        seed=0,
    )
    ways = [Way(train, streamed) for train in own.splits for streamed in (True, False)]
    ways += [Way(switch_s=switch) for switch in own.switches]
    found = {}
    for way in ways:
        found[way] = dry_run(own, way)
        progress(f"{way.words}: {json.dumps(found[way])}")
    # The static splits asked for, streamed and whole; time-sharing is compared with the best of either.
    best = [
        min((found[way]["batch_s"] for way in ways if not way.switch_s and way.streamed == streamed), default=math.nan)
        for streamed in (True, False)
    ]
    rows = [
        [way.words, one["batch_s"], one["pair_s"], *(b / one["batch_s"] for b in best)] for way, one in found.items()
    ]
    report(
        own,
        f"Seconds of a batch in dry runs, {own.row}, {own.model}",
        columns=["", "s a batch", "a pair, measured", "x streamed", "x whole"],
        rows=rows,
        notes=["x: the best static split, whose groups are streamed, or whose batches are whole, over this."],
        raw={way.words: one for way, one in found.items()},
    )


if __name__ == "__main__":
    main()
