"""How long the exact search takes on one core, and how far its answer can be from the optimum.

Qwen3-14B on A800 nodes of eight, 4,096 observed trajectories with a heavy tail, compressed in every run as in the live
planner. CPU seconds, best and worst of `RUNS`; tables are loaded before. Batches grow with the cluster.

    python -m bench.planner [--model qwen3-14b] [--device a800]
"""

from __future__ import annotations

import time

from bench.harness import options, report
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.policies.costs.lengths import BatchWork, lognormal, sketch
from libra_hpc.policies.search.best_plan import ROLLOUT_TP, PlanSearch
from libra_hpc.policies.search.run_plan import DevicePool

RUNS = 5
ROWS = ((48, 512, 0.05), (1024, 4096, 1.0), (10240, 16384, 10.0))
"""GPUs, trajectories per global batch, goal in seconds."""
COLUMNS = ("GPUs", "batch", "eta", "ms", "goal ms", "proved within", "nodes", "train", "rollout")


def main() -> None:
    given = options("planner", __doc__, model="qwen3-14b", device="a800")
    shape, gpu = model_shape(given.model), device(given.device)
    for tp in ROLLOUT_TP:
        lookup(gpu, shape, tp)
    observed = lognormal(generated=4000, sigma=1.0, prompt=1000, turns=10, new_tokens=200, tool_s=1.0, longest=32768)
    rows, raw = [], []
    for gpus, trajectories, goal, eta in ((*row, eta) for row in ROWS for eta in (1, 0)):
        seconds = []
        for _ in range(RUNS):
            started = time.process_time()
            batch = BatchWork(trajectories, sketch(observed, trajectories, eta), eta)
            pool = DevicePool(gpu, gpus // gpu.devices_per_node, gpu.devices_per_node)
            result = PlanSearch(shape, [pool], batch).run()
            seconds.append(time.process_time() - started)
        best, gap = result.plans[0], "exact" if result.gap < 1e-6 else f"{result.gap:.2%}"
        rest = gpus // (best.train.layout.devices // best.nodes) - best.nodes
        took, times = (
            f"{1e3 * min(seconds):.0f}..{1e3 * max(seconds):.0f}",
            (best.train.time.total, best.rollout.seconds),
        )
        cells = (f"{1e3 * goal:.0f}", gap, f"{best.nodes}+{rest}", *times)
        rows.append((gpus, trajectories, eta, took, *cells))
        raw.append({"gpus": gpus, "eta": eta, "seconds": seconds, "gap": result.gap, "bound": result.bound})
    notes = ["proved within: exact is a proof by exhaustion; a share is what branch and bound left open."]
    title = f"Exact search, {shape.name} on {gpu.name}, 4,096 observed lengths"
    report(given, title, columns=COLUMNS, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
