"""The plan against all plans: of every layout that fits, `libra-hpc plan`'s choice, played on other batches.

Eight rows of 48 A800 with 512 trajectories a batch. Regret: seconds of the choice over those of the best layout, both
played for `JUDGED` rounds; predicted: seconds that the plan shows over those. CPU seconds of the search; tables are
loaded before.

    python -m bench.planner [--rows NAME|NAME] [--trace FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from msgspec.structs import replace

from bench.harness import ROOT, options, progress, report
from libra_hpc.config.load import load_run_file, with_values
from libra_hpc.planning.best_plan import best_plans, scene
from libra_hpc.planning.initial import hybrid_of, planned_pools
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.request import PlanRequest, as_planned, request
from libra_hpc.simulator.play import Play

JUDGED, SEED = 6, 1_000
ROWS: dict[str, dict[str, Any]] = {
    "14b, eta 2": {},
    "14b, eta 0": {"algorithm.eta": 0},
    "14b, eta 1": {"algorithm.eta": 1},
    "14b, 256 slots": {"algorithm.eta": 1, "rollout.max_num_seqs": 256, "rollout.max_inflight": 256},
    "8b, 32k": {"algorithm.eta": 1, "planner.model": "qwen3-8b", "rollout.max_model_len": 32768},
    "32b": {"algorithm.eta": 1, "planner.model": "qwen3-32b"},
    "30b-a3b": {"algorithm.eta": 1, "planner.model": "qwen3-30b-a3b"},
}
TRACE = {"algorithm.eta": 1, "rollout.max_model_len": 32768}
"""Of a row with a recorded trace."""
COLUMNS = ("row", "layouts", "choice", "s", "best", "s", "regret", "predicted", "CPU s")


def question(changes: dict[str, Any]) -> PlanRequest:
    """Of the example of 48 A800."""
    values = {"planner.model": "qwen3-14b", "rollout.max_num_seqs": 64, **changes}
    config = with_values(load_run_file(ROOT / "examples" / "a800-48-qwen3-14b.toml"), values)
    asked = request(as_planned(config))
    pools = planned_pools(config, asked.pools)
    return replace(asked, pools=pools, hybrid=hybrid_of(config, pools))


def judged(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    asked = question(changes)
    space, groups, begin = LayoutSpace(asked), asked.settings.batch_groups, time.process_time()
    chosen = best_plans(asked).plans[0]
    took, truth = time.process_time() - begin, {}
    for plan in space.plans([pool.nodes for pool in asked.pools], 0):
        engines, settings = scene(asked, space, plan)
        play = Play(lambda part, n: asked.work.batch(n * groups, SEED + part), engines, asked.policy, settings)
        truth[plan.nodes, plan.engines] = statistics.fmean(play.rounds(JUDGED))
        progress(f"{name}: {len(truth)} layouts")
    best = min(truth, key=truth.__getitem__)
    real = truth[chosen.nodes, chosen.engines]
    return {
        "row": name,
        "layouts": len(truth),
        "choice": words(chosen.nodes, chosen.engines),
        "best": words(*best),
        "seconds": (real, truth[best]),
        "regret": real / truth[best] - 1.0,
        "predicted": chosen.seconds / real,
        "cpu_s": took,
    }


def words(nodes: int, engines: Any) -> str:
    return f"{nodes}+" + " ".join(f"{one.replicas}xTP{one.tp}" for one in engines)


def main() -> None:
    given = options("planner", __doc__, rows=ROWS, trace=True)
    done = [judged(name, ROWS.get(name, {**TRACE, "task.work.trace": name})) for name in given.rows]
    rows = [
        (
            one["row"].rpartition("/")[2],
            one["layouts"],
            one["choice"],
            f"{one['seconds'][0]:.0f}",
            one["best"],
            f"{one['seconds'][1]:.0f}",
            f"{one['regret']:.1%}",
            f"{one['predicted']:.2f}",
            f"{one['cpu_s']:.1f}",
        )
        for one in done
    ]
    notes = [f"mean regret {statistics.fmean(one['regret'] for one in done):.1%}"]
    report(given, "The plan against all layouts, 48 A800", columns=COLUMNS, rows=rows, notes=notes, raw=done)


if __name__ == "__main__":
    main()
