"""How long the exact search takes on one core, and how far its answer can be from the optimum.

Qwen3-14B on A800 nodes of eight, 4,096 observed trajectories with a heavy tail, compressed in every run as in the live
planner. CPU seconds, best and worst of `RUNS`; tables are loaded before. Batches grow with the cluster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import report
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.policies.costs.lengths import lognormal, sketch
from libra_hpc.policies.costs.training_time import BatchWork
from libra_hpc.policies.search.best_plan import ROLLOUT_TP, DevicePool, PlanResult, PlanSearch

RUNS = 5
CASES = ((48, 512, 0.05), (1024, 4096, 1.0), (10240, 16384, 10.0))
"""GPUs, trajectories per global batch, goal in seconds."""


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="qwen3-14b")
    arguments.add_argument("--device", default="a800")
    asked = arguments.parse_args()
    shape, gpu = model_shape(asked.model), device(asked.device)
    for tp in ROLLOUT_TP:
        lookup(gpu, shape, tp)
    observed = lognormal(generated=4000, sigma=1.0, prompt=1000, turns=10, new_tokens=200, tool_s=1.0, longest=32768)
    rows, raw = [], []
    for gpus, trajectories, goal in CASES:
        for eta in (1, 0):
            seconds, result = [], None
            for _ in range(RUNS):
                started = time.process_time()
                batch = BatchWork(trajectories, sketch(observed, trajectories), eta)
                pool = DevicePool(gpu, gpus // gpu.devices_per_node, gpu.devices_per_node)
                result = PlanSearch(shape, [pool], batch).run()
                seconds.append(time.process_time() - started)
            assert result is not None
            rows.append(row(gpus, trajectories, eta=eta, seconds=seconds, goal=goal, result=result))
            raw.append({"gpus": gpus, "eta": eta, "seconds": seconds, "gap": result.gap, "bound": result.bound})
    columns = ["GPUs", "batch", "eta", "ms", "goal ms", "proved within", "nodes", "train", "rollout"]
    notes = ["proved within: exact is a proof by exhaustion; a share is what branch and bound left open."]
    report(
        "planner",
        f"Exact search, {shape.name} on {gpu.name}, 4,096 observed lengths",
        columns=columns,
        rows=rows,
        notes=notes,
        raw=raw,
    )


def row(gpus: int, trajectories: int, eta: int, seconds: Sequence[float], goal: float, result: PlanResult) -> list[Any]:
    """One line of the table."""
    best = result.plans[0]
    gap = "exact" if result.gap < 1e-6 else f"{result.gap:.2%}"
    rest = gpus // (best.train.layout.devices // best.nodes) - best.nodes
    times = (f"{best.train.time.total:.1f} s", f"{best.rollout.seconds:.1f} s")
    return [
        gpus,
        trajectories,
        eta,
        f"{1e3 * min(seconds):.0f}..{1e3 * max(seconds):.0f}",
        f"{1e3 * goal:.0f}",
        gap,
        f"{best.nodes}+{rest}",
        *times,
    ]


if __name__ == "__main__":
    main()
