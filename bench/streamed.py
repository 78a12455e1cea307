"""What streamed training gains in synchronous runs: seconds of a step with batches trained whole, and by portions.

    python -m bench.streamed

Simulated rollout on two nodes with the planner's fleet, as the steady rows of `bench.fleets`, and `TRAIN_S` of training
a step.
"""

from __future__ import annotations

import statistics

from bench.fleets_rows import GROUP, MAX_CONTEXT, NODE, Setting, engines_of, proposals
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import PROFILES

ROWS, SEEDS, BATCHES = ("r2e", "search"), 4, 4
TRAIN_S, GROUPS = 60.0, 16
PORTIONS = (0, 1, 2, 4)
"""Groups of a portion; 0: whole batches."""


def seconds(name: str, seed: int) -> list[float]:
    """Of a step, for each of `PORTIONS`."""
    row = Setting(preset=name, pools=(("a800", 2 * NODE),), trajectories=GROUPS * GROUP)
    dials = Dials(trajectories=BATCHES * row.trajectories, seed=seed, max_context=MAX_CONTEXT)
    found = generate(PROFILES[name], dials)
    fleet = next(one.fleet for one in proposals(row, found, MAX_CONTEXT) if not one.mixed)
    means = []
    for portion in PORTIONS:
        settings = SimulationSettings(
            max_model_len=MAX_CONTEXT, batch_groups=GROUPS, train_s=TRAIN_S, portion_groups=portion
        )
        steps = simulate(found, engines_of(row, fleet), make_policy("cmlfq"), settings).steps
        means.append((steps[-1].end_at - steps[0].end_at) / (len(steps) - 1))
    return means


def main() -> None:
    words = ["whole", *(f"{portion} groups" for portion in PORTIONS[1:])]
    print("| " + " | ".join(["seconds a step", *words]) + " |")
    print("| --- |" + " ---: |" * len(words))
    for name in ROWS:
        means = zip(*(seconds(name, seed) for seed in range(SEEDS)), strict=True)
        print("| " + " | ".join([name, *(f"{statistics.fmean(one):.0f}" for one in means)]) + " |")


if __name__ == "__main__":
    main()
