"""The live planner in the simulator: drifting workloads on 48 A800 in 12 nodes, against splits that stay.

Workloads drift (`bench.replan_work`). Every rule gets the same trajectories and pays for its moves. All nodes but one
at either end are hybrid, Qwen3-14B. The planner starts from an even split.

- ``static``: seconds of the best static split in hindsight, over ours.
- ``verl``: of verl's rule, at the better of that number of training nodes and one more.
- ``moves``: node moves that the planner ordered.
"""

from __future__ import annotations

from bench.replan_pool import Site
from bench.replan_rules import SETTINGS, Live, Played, Rule, Static, VerlLike, play
from bench.replan_work import WORKLOADS, drifting

STEPS = 80
WORSE = 1.25
"""Static splits are tried outwards from the even one until two in a row take this much longer than the best."""
DRIFTS: dict[str, tuple[str, Site]] = {
    "curriculum": ("curriculum", Site()),
    "steady": ("steady", Site()),
    "steady, a slow node": ("steady", Site(slow=True)),
    "curriculum, costs x0.7": ("curriculum", Site(believed=0.7)),
    "curriculum, costs x1.4": ("curriculum", Site(believed=1.4)),
}
"""Workload and nodes; costs: step costs that the planner takes for the measured ones."""


def compare(name: str, seed: int, steps: int = STEPS) -> dict[str, float]:
    """All rules on one workload and seed."""
    workload, site = DRIFTS[name]
    work, middle = drifting(WORKLOADS[workload], steps, site.prompts, site.group, seed), site.nodes // 2

    def run(rule: Rule, train: int) -> Played:
        return play(site, work, rule=rule, train=train, seed=seed)

    fixed = {middle: run(Static(), middle).seconds}
    for direction in (-1, 1):
        worse, train = 0, middle + direction
        while 1 <= train < site.nodes and worse < 2:
            fixed[train] = run(Static(), train).seconds
            worse = worse + 1 if fixed[train] > WORSE * min(fixed.values()) else 0
            train += direction
    best = min(fixed, key=fixed.__getitem__)
    verl = min(run(VerlLike(), train).seconds for train in (best, best + 1) if train < site.nodes)
    ours = run(Live(SETTINGS, site), middle)
    return {"static": fixed[best] / ours.seconds, "verl": verl / ours.seconds, "moves": ours.moves}
