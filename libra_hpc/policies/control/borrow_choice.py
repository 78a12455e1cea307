"""What the run borrows: servers (``borrow.lenders``) and nodes that it queues (``borrow.spot``).

The rule of PEARL (2609.35158). Each is evaluated beside those before it that pay: first what is borrowed, then the
greatest gain per GPU; servers up to ``most_gpus``.

- One saves more over the remaining steps than its start costs, times the margin, and its price -> borrow.
- One that is borrowed saves less than a start and its price -> give it back.
- A start has not passed since the last change -> hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Action, OfferFact, PlanDecision, PlanSnapshot

from .plays import Plays, State

SHOWN = 8
"""Offers in a reason."""


Worth = dict[str, tuple[float, float]]
"""Seconds that each offer saves over the remaining steps, and must save: those of a start, times a margin, and the
price."""


def fitting(offers: Iterable[OfferFact], most_gpus: int) -> list[OfferFact]:
    """The best ones with so many GPUs together, 0: all; those that lend are not exchanged for what brings more."""
    found, gpus = list[OfferFact](), 0
    for one in sorted(offers, key=lambda one: (not one.lends, -one.nodes / one.gpus, one.name)):
        if not most_gpus or gpus + one.gpus <= most_gpus:
            found.append(one)
            gpus += one.gpus
    return found


def with_borrowed(
    held: PlanDecision, snapshot: PlanSnapshot, plays: Plays, here: State, settings: PlannerSection, now: float
) -> PlanDecision:
    """``held``, with what each offer is worth, or other servers and another number of queued nodes."""
    borrow = snapshot.borrow
    start_s = (borrow and borrow.start_s) or settings.switch_cost_s
    if borrow is None or now - borrow.since < start_s:
        return held
    spot = [OfferFact(f"spot node {n + 1}", borrow.node_gpus, 1.0, n < borrow.wanted) for n in range(borrow.most)]
    lend = {one.name: one.nodes for one in (*borrow.offers, *spot) if one.lends}
    nodes, found, old = max(0.0, snapshot.lent - sum(lend.values())), Worth(), {*lend, *borrow.taken}
    for one in fitting([*fitting(borrow.offers, borrow.most_gpus), *spot], 0):
        margin, price_s = 1.0 if one.name in old else settings.margin, one.gpus * borrow.gpu_price_s
        saved_s = _batch_s(plays, here, nodes) - _batch_s(plays, here, nodes + one.nodes)
        found[one.name] = saved_s * snapshot.steps_left, margin * start_s + price_s
        nodes += one.nodes * (one.name in _paying(found))
    held = replace(
        held,
        lenders={name: worth for name, worth in found.items() if name not in _names(spot)},
        spot_nodes=len(_paying(found) & _names(spot)),
    )
    # One that was taken may not lend yet; one beyond the most GPUs was not evaluated.
    return _decision(held, found, old & (lend.keys() | found.keys()), snapshot.steps_left, _batch_s(plays, here, nodes))


def _decision(held: PlanDecision, found: Worth, old: set[str], steps_left: int, after_s: float) -> PlanDecision:
    """``held``, with why nothing changes, or the change; ``after_s``: seconds of a batch after it."""
    each = [
        f"{name} saves {saved_s:.0f} s and must save {needed_s:.0f} s" for name, (saved_s, needed_s) in found.items()
    ]
    what, new = f"over {steps_left} steps {', '.join(each[:SHOWN])}", _paying(found)
    if old == new:
        return replace(held, reason=f"{held.reason}; {what}") if found else held
    action: Action = "borrow" if new - old else "give_back"
    return replace(held, action=action, reason=f"{action}: {what}", numbers=held.numbers | {"after_s": after_s})


def _paying(found: Worth) -> set[str]:
    return {name for name, (saved_s, needed_s) in found.items() if saved_s > needed_s}


def _names(offers: Iterable[OfferFact]) -> set[str]:
    return {one.name for one in offers}


def _batch_s(plays: Plays, here: State, nodes: float) -> float:
    """Seconds of a batch with so many own nodes more: between those of whole nodes."""
    whole = floor(nodes)
    seconds = plays.at(here._replace(lent=whole)).batch
    if nodes > whole:
        seconds += (nodes - whole) * (plays.at(here._replace(lent=whole + 1)).batch - seconds)
    return seconds
