"""Which servers the run borrows (``borrow.lenders``), by the rule of `spot_choice`.

- Offers are ranked: those that lend, then the greatest gain per GPU. Each is evaluated beside those before it that pay.
- One saves more over the remaining steps than its start costs, times the margin, and its price -> it is borrowed.
- One that lends saves less than a start and its price -> it goes back.
- They have more GPUs than ``most_gpus`` -> the first ones are borrowed.
- A start has not passed since the last change -> hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Action, BorrowFact, OfferFact, PlanDecision, PlanSnapshot

from .plays import Plays, State
from .spot_choice import Worth, with_spot, worth


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
    """``held``, or another number of queued nodes, or other servers."""
    borrow = snapshot.borrow
    start_s = (borrow and borrow.start_s) or settings.switch_cost_s
    if borrow is None or now - borrow.since < start_s:
        return held
    found = with_spot(held, snapshot, plays, here, settings, start_s)
    if found.action != "hold" or not borrow.offers:
        return found
    return _with_lenders(found, snapshot, plays, here, settings, start_s, borrow)


def _with_lenders(
    held: PlanDecision,
    snapshot: PlanSnapshot,
    plays: Plays,
    here: State,
    settings: PlannerSection,
    start_s: float,
    borrow: BorrowFact,
) -> PlanDecision:
    """``held``, with what each offer is worth, or with other servers."""
    lend = {one.name for one in borrow.offers if one.lends}
    nodes = max(0.0, snapshot.lent - sum(one.nodes for one in borrow.offers if one.lends))
    found = dict[str, Worth]()
    for one in fitting(borrow.offers, borrow.most_gpus):
        saved_s = _batch_s(plays, here, nodes) - _batch_s(plays, here, nodes + one.nodes)
        margin, price_s = 1.0 if one.lends else settings.margin, one.gpus * borrow.gpu_price_s
        found[one.name] = worth(saved_s, snapshot.steps_left, start_s, margin, price_s)
        nodes += one.nodes * found[one.name].pays
    each = (f"{name} saves {one.saved_s:.0f} s and must save {one.needed_s:.0f} s" for name, one in found.items())
    what = f"over {snapshot.steps_left} steps {', '.join(each)}"
    lenders = {name: (one.saved_s, one.needed_s) for name, one in found.items()}
    paying = {name for name, one in found.items() if one.pays}
    if paying == lend:
        return replace(held, reason=f"{held.reason}; {what}", lenders=lenders)
    action: Action = "borrow" if paying - lend else "give_back"
    return replace(held, action=action, reason=f"{action}: {what}", lenders=lenders)


def _batch_s(plays: Plays, here: State, nodes: float) -> float:
    """Seconds of a batch with so many own nodes more: between those of whole nodes."""
    whole = floor(nodes)
    seconds = plays.at(here._replace(lent=whole)).batch
    if nodes > whole:
        seconds += (nodes - whole) * (plays.at(here._replace(lent=whole + 1)).batch - seconds)
    return seconds
