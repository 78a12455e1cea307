"""What lenders would bring to a plan: its engines alone, with lenders beside them, and with as many own ones.

Several batches of the plan's lengths are simulated with its training time, so that batches overlap as eta allows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.policies.control.borrow_choice import Worth, worth
from libra_hpc.policies.search.run_plan import RunPlan
from libra_hpc.simulator.borrowing import Borrow, Borrowing, borrowing

from .best_plan import scene
from .request import PlanRequest

LARGEST = 100_000
"""Turns that are played: three times take half a minute."""
BATCHES = 5
"""The first one fills the engines and does not count.  Half: the gain of one batch decides; double: twice as long."""


class BorrowedPlan(NamedTuple):
    borrow: Borrow
    policy: str
    found: Borrowing
    worth: Worth
    steps: int

    def facts(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        price = {"gain": self.found.gain, **self.worth._asdict(), "pays": self.found.pays and self.worth.pays}
        return {**msgspec.to_builtins(self.borrow), **msgspec.to_builtins(self.found), **price}


def borrowed_plan(
    config: RunConfig, asked: PlanRequest, plan: RunPlan, borrow: Borrow, steps: StepLookup = lookup
) -> BorrowedPlan:
    """Raises `UserError` where the batches are too large to simulate."""
    found, planner = _played(asked, plan, borrow, steps), config.planner
    price = worth(found.alone - found.borrowed, config.run.steps, planner.switch_cost_s, planner.margin)
    return BorrowedPlan(borrow, asked.policy, found, price, config.run.steps)


def _played(asked: PlanRequest, plan: RunPlan, borrow: Borrow, steps: StepLookup) -> Borrowing:
    group, size = asked.group, asked.batch.trajectories
    work = asked.work.batch(BATCHES * size, group, 0)
    if (turns := sum(len(one.turns) for one in work)) > LARGEST:
        raise UserError(f"--borrow: {BATCHES} batches have {turns:,} turns; valid: at most {LARGEST:,} are simulated.")
    engines, settings = scene(asked, asked.layouts(steps), plan)
    return borrowing(work, engines, borrow, asked.policy, settings)
