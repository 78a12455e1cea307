"""Whether the run queues nodes for itself (``borrow.spot``), by the rule of PEARL (2609.35158).

- They save more over the remaining steps than their start costs, and at least ``min_gain`` of a batch -> borrow.
- They save less than half of that, or less than a start -> give them back.
- A start has not passed since the last change -> hold.
"""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Action, PlanDecision, PlanSnapshot

from .stage_times import ONE_SIDED_95, Correction, Estimate, Split, predict, with_lent

ENOUGH = 0.95
"""Share of the gain of all nodes: fewer that bring as much are borrowed."""
KEEP = 0.5
"""Share of ``min_gain`` at which nodes are kept: hysteresis."""


class Worth(NamedTuple):
    """Worth of borrowed engines."""

    saved_s: float
    """Over the remaining steps, until they are over."""
    needed_s: float
    """Activation, times a margin."""

    @property
    def pays(self) -> bool:
        return self.saved_s > self.needed_s


def worth(saved_s: float, steps_left: int, activation_s: float, margin: float) -> Worth:
    """``saved_s``: of each batch; ``activation_s``: until borrowed engines take turns."""
    return Worth(saved_s * steps_left, margin * activation_s)


def borrowing(
    hold: PlanDecision, estimate: Estimate, snapshot: PlanSnapshot, settings: PlannerSection, now: float
) -> PlanDecision:
    """``hold``, with why nothing changes, or another number of queued nodes."""
    spot = snapshot.spot
    assert spot is not None
    start_s = spot.start_s or settings.switch_cost_s
    if now - spot.since < start_s:
        return hold
    without = with_lent(estimate, max(0.0, estimate.lent - spot.wanted))
    gains = [least_gain(without, without.split, Correction(), without.lent + n) for n in range(spot.most + 1)]
    nodes = spot.wanted or max(1, next(n for n, (saved, _) in enumerate(gains) if saved >= ENOUGH * gains[-1][0]))
    saved, share = gains[nodes]
    price = worth(saved, snapshot.steps_left, start_s, 1.0 if spot.wanted else settings.margin)
    pays = price.pays and share >= settings.min_gain * (KEEP if spot.wanted else 1.0)
    there = with_lent(without, without.lent + nodes).times
    what = (
        f"{nodes} spot nodes take a batch from {without.times.batch:.2f} s to {there.batch:.2f} s, at least"
        f" {saved:.2f} s ({share:.0%}) less; over {snapshot.steps_left} steps {price.saved_s:.0f} s, and their start"
        f" must bring {price.needed_s:.0f} s"
    )
    numbers = {"spot_nodes": float(nodes), "spot_saved_s": price.saved_s, "spot_needed_s": price.needed_s}
    numbers = hold.numbers | numbers
    if pays == bool(spot.wanted):
        return replace(hold, reason=f"{hold.reason}; {what}", numbers=numbers)
    action: Action = "borrow" if pays else "give_back"
    after = (there if pays else without.times).batch
    return replace(
        hold,
        action=action,
        reason=f"{action}: {what}",
        numbers=numbers | {"after_s": after},
        spot_nodes=nodes if pays else 0,
    )


def least_gain(estimate: Estimate, to: Split, correction: Correction, lent: float | None = None) -> tuple[float, float]:
    """Least seconds saved per batch, and their share of the present batch time; ``lent``: with so many guests then.

    Three readings count: as measured, and with the ratio of the two times `ONE_SIDED_95` standard errors off either
    way.
    """
    if to.train < estimate.split.train:
        # The fixed part is uncertain; where trainers leave, 0 is its unfavourable end.
        estimate = estimate._replace(fixed=0.0)
    readings = []
    later = estimate if lent is None else with_lent(estimate, lent)
    spread = max(hypot(estimate.train_error, estimate.rollout_error), 1e-9)
    for sign in (0.0, ONE_SIDED_95, -ONE_SIDED_95):
        train, rollout = sign * estimate.train_error / spread, -sign * estimate.rollout_error / spread
        now = predict(estimate, estimate.split, Correction(), train_shift=train, rollout_shift=rollout)
        then = predict(later, to, correction, train_shift=train, rollout_shift=rollout)
        here = now.expected(estimate.scatter)
        saved = here - then.expected(estimate.scatter)
        readings.append((saved, saved / here))
    return min(readings)
