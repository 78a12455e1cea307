"""Whether the run queues nodes for itself (``borrow.spot``), by the rule of PEARL (2609.35158).

- They save more over the remaining steps than their start costs, and at least ``min_gain`` of a batch -> borrow.
- They save less than half of that, or less than a start -> give them back.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Action, PlanDecision, PlanSnapshot

from .plays import Plays, State

ENOUGH = 0.95
"""Share of the gain of all nodes: fewer that bring as much are borrowed."""
KEEP = 0.5
"""Share of ``min_gain`` at which nodes are kept: hysteresis."""


class Worth(NamedTuple):
    """Worth of borrowed engines."""

    saved_s: float
    """Over the remaining steps, until they are over."""
    needed_s: float
    """Activation, times a margin, and the price."""

    @property
    def pays(self) -> bool:
        return self.saved_s > self.needed_s


def worth(saved_s: float, steps_left: int, activation_s: float, margin: float, price_s: float = 0.0) -> Worth:
    """``saved_s``: of each batch; ``activation_s``: until borrowed engines take turns; ``price_s``: beside that."""
    return Worth(saved_s * steps_left, margin * activation_s + price_s)


def with_spot(
    held: PlanDecision, snapshot: PlanSnapshot, plays: Plays, here: State, settings: PlannerSection, start_s: float
) -> PlanDecision:
    """``held``, with why nothing changes, or another number of queued nodes, whose start takes ``start_s``."""
    spot = snapshot.borrow
    if spot is None or not spot.most:
        return held
    without = here._replace(lent=max(0, here.lent - spot.wanted))
    batches = [plays.at(without._replace(lent=without.lent + n)).batch for n in range(spot.most + 1)]
    enough = batches[0] - ENOUGH * (batches[0] - batches[-1])
    nodes = spot.wanted or max(1, next(n for n, batch in enumerate(batches) if batch <= enough))
    saved = batches[0] - batches[nodes]
    share = saved / batches[0]
    margin, price_s = 1.0 if spot.wanted else settings.margin, nodes * spot.node_gpus * spot.gpu_price_s
    price = worth(saved, snapshot.steps_left, start_s, margin, price_s)
    pays = price.pays and share >= settings.min_gain * (KEEP if spot.wanted else 1.0)
    what = (
        f"{nodes} spot nodes take a batch from {batches[0]:.2f} s to {batches[nodes]:.2f} s, {share:.0%} less; over"
        f" {snapshot.steps_left} steps {price.saved_s:.0f} s, and they must bring {price.needed_s:.0f} s"
    )
    numbers = held.numbers | {
        "spot_nodes": float(nodes),
        "spot_saved_s": price.saved_s,
        "spot_needed_s": price.needed_s,
    }
    if pays == bool(spot.wanted):
        return replace(held, reason=f"{held.reason}; {what}", numbers=numbers)
    action: Action = "borrow" if pays else "give_back"
    return replace(
        held,
        action=action,
        reason=f"{action}: {what}",
        numbers=numbers | {"after_s": batches[nodes] if pays else batches[0]},
        spot_nodes=nodes if pays else 0,
    )
