"""The judge: what `libra-hpc plan` chooses, against the best that a user could have chosen, simulated on other batches.

- Ours: the plan's choice, and `cmlfq` with its defaults.
- ``layout``: the best of all layouts under `cmlfq`.
- ``split``: the best split, ``colocated``: all nodes in turn, as in verl; both with the best rule and limit of
  admission.  Chosen in hindsight on `CHOOSING`, played on other seeds.

Figures are their seconds over ours; ``predicted``: the plan's seconds over those played.

The search of an opponent: all layouts under `cmlfq`; the best ones with every rule; the best of these with every limit;
the finalists on all choosing seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from bench.policies import POLICIES
from bench.policies.admission import Admitted
from bench.questions import question
from libra_hpc.planning.best_plan import best_plans, scene
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.request import RunPlan
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.simulate import Simulation

OURS = "cmlfq"
CHOOSING = (10_000, 10_001)
"""Seeds for choosing; the planner has those from 0 on."""
FIRST = 20_000
"""The first seed for reporting."""
BATCHES, SCREENED = 8, 2
"""Batches that count, at least; of a first look."""
RULES = (OURS, "sticky", "least_loaded", "least_live", "fit", "thunder_agent")
LIMITS = ("", "share 0.1", "share 0.4", "live 14", "live 36", "live 100")
"""Of admission: none, a share of the KV cache, live trajectories per engine."""
PLACES = 2


class Contestant(NamedTuple):
    layout: str
    rule: str = OURS
    limit: str = ""
    """Of admission."""


def layout_name(plan: RunPlan) -> str:
    """``2+8xTP4``: two nodes train, the others have eight engines of TP4; ``colocated 12xTP4``: all nodes in turn."""
    engines = " ".join(f"{one.replicas}xTP{one.tp}" for one in plan.engines)
    return f"{plan.nodes}+{engines}" if plan.in_turn is None else f"colocated {engines}"


@lru_cache(maxsize=8)
def layouts(row: str) -> dict[str, RunPlan]:
    """All layouts of the planner by name."""
    (pool,) = question(row).pools
    return {layout_name(plan): plan for plan in LayoutSpace(question(row)).plans([pool.nodes], 0)}


def policy_of(one: Contestant) -> Policy:
    """Its rule, with its limit of admission."""
    policy = make_policy(POLICIES[one.rule])
    if not one.limit:
        return policy
    kind, value = one.limit.split()
    return Admitted(policy, share=float(value)) if kind == "share" else Admitted(policy, most=int(value))


def seconds(row: str, one: Contestant, seed: int, least: int = BATCHES, before: bool = False) -> float:
    """Seconds of a batch, over whole waves of at least so many after the first."""
    asked, plan = question(row, before), layouts(row)[one.layout]
    eta = asked.settings.eta
    counted = math.ceil(least / (eta + 1)) * (eta + 1)
    engines, settings = scene(asked, _space(row, before), plan)
    work = asked.work.batch((1 + counted + eta) * settings.batch_groups, seed)
    steps = Simulation(work, engines, policy_of(one), settings).run().steps
    return (steps[counted].end_at - steps[0].end_at) / counted


@lru_cache(maxsize=8)
def _space(row: str, before: bool) -> LayoutSpace:
    return LayoutSpace(question(row, before))


def chosen(row: str, before: bool = False, nodes: int = 0) -> dict[str, Any]:
    """The plan's choice, its seconds of a batch, and CPU seconds of the search."""
    asked, begin = question(row, before, nodes), time.process_time()
    best = best_plans(asked).plans[0]
    return {"choice": layout_name(best), "predicted_s": best.seconds, "cpu_s": time.process_time() - begin}


def rivals(row: str) -> dict[str, Contestant]:
    """The best layout, split and colocated nodes of a row."""
    known: dict[tuple[Contestant, int, int], float] = {}

    def ranked(some: Iterable[Contestant], seeds: Sequence[int], least: int = SCREENED) -> list[Contestant]:
        """By mean seconds, best first."""
        means = dict[Contestant, float]()
        for one in some:
            for seed in seeds:
                if (one, seed, least) not in known:
                    known[one, seed, least] = seconds(row, one, seed, least)
            means[one] = statistics.fmean(known[one, seed, least] for seed in seeds)
        return sorted(means, key=means.__getitem__)

    plain = ranked(map(Contestant, layouts(row)), CHOOSING[:1])
    found = {"layout": ranked(plain[:PLACES], CHOOSING, BATCHES)[0]}
    for kind, beginning in (("split", str.isdigit), ("colocated", "c".__eq__)):
        best = [one for one in plain if beginning(one.layout[0])][:PLACES]
        rules = ranked((one._replace(rule=rule) for one in best for rule in RULES), CHOOSING[:1])
        limited = ranked((one._replace(limit=limit) for one in rules[:PLACES] for limit in LIMITS), CHOOSING[:1])
        found[kind] = ranked(limited[:PLACES], CHOOSING, BATCHES)[0]
    return found


def compared(row: str, seed: int, choice: str, predicted_s: float, others: dict[str, Contestant]) -> dict[str, float]:
    """Seconds of the others over ours, and those predicted over ours, on the batches of a seed."""
    ours_s = seconds(row, Contestant(choice), FIRST + seed)
    found = {kind: seconds(row, one, FIRST + seed) / ours_s for kind, one in others.items()}
    return {**found, "predicted": predicted_s / ours_s}
