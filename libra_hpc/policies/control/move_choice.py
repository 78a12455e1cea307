"""Whether hybrid nodes move to the other stage.

- The best split is not faster by two standard errors of as many plays as it takes (`Race`) -> hold.
- Gain below ``min_gain``, or over the horizon at most ``margin`` switches as measured -> hold.
- A node younger than ``min_dwell_s``, or the hour's moves used up -> hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from statistics import median
from typing import Literal

from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Candidate, NodeFact, PlanDecision, PlanSnapshot

from .node_units import units
from .plays import Plays, Seconds, State, hold

HOUR = 3600.0
"""Seconds."""
CANDIDATES = 5
"""Splits that a decision lists."""
SWITCHES = 3
"""Newest measured moves of a direction: the median of three ignores one outlier."""

Direction = Literal["to_train", "to_rollout"]


def switch_cost(settings: PlannerSection, direction: Direction, snapshot: PlanSnapshot) -> float:
    """Seconds of a move, from its order until the node works in its new stage; before any was measured
    ``switch_cost_s``.  Nodes that move together take as long as one.
    """
    seen = [s.seconds for s in snapshot.switches if s.direction == direction][-SWITCHES:]
    return median(seen) if seen else settings.switch_cost_s


def move_choice(
    snapshot: PlanSnapshot, plays: Plays, here: State, settings: PlannerSection, *, horizon: float, now: float
) -> PlanDecision:
    """The decision for the best split, with its numbers and the best candidates; ``horizon`` in seconds."""
    times = plays.downhill(*_reachable(snapshot, here))
    chosen = next(iter(times))
    best = sorted(times, key=lambda state: (state != chosen, times[state].batch))[:CANDIDATES]
    before, after = times[here], times[chosen]
    gain = 1.0 - after.batch / before.batch
    to_train = chosen.train > here.train
    direction: Direction = "to_train" if to_train else "to_rollout"
    source, stage = ("rollout", "train") if to_train else ("train", "rollout")
    movable = list(chain.from_iterable(_units(snapshot, source)))[: abs(chosen.train - here.train)]
    cost = switch_cost(settings, direction, snapshot) * len(movable) / getattr(here, source)
    needed = settings.margin * cost
    numbers = plays.numbers(here) | {
        "after_train_s": after.train,
        "after_rollout_s": after.rollout,
        "after_s": after.batch,
        "pays_s": horizon * gain,
        "cost_s": cost,
        "needed_s": needed,
        "moves_left": float(_moves_left(snapshot, settings, now)),
    }
    who = f"node{'s' * (len(movable) > 1)} {', '.join(str(node.rank) for node in movable)}"
    what = (
        f"moving {who} to {stage} takes a batch from {in_words(before)} to {in_words(after)}; that is {gain:.0%},"
        f" and {horizon * gain:.0f} s over the horizon"
    )
    price, blocked = f"{settings.margin:.1f} x {cost:.1f} s switch cost", ""
    if not movable:
        why = f"a batch takes {in_words(before)}, and no other split clearly less"
    elif gain < settings.min_gain:
        why = f"{what}, below the least gain of {settings.min_gain:.0%}"
    elif horizon * gain <= needed:
        why = f"{what}, which does not pay {price}"
    else:
        blocked = _blocked(snapshot, movable, settings, now)
        why = f"{blocked}: {what}" if blocked else ""
    found = hold(why, numbers)
    if not why:
        ranks = tuple(node.rank for node in movable)
        found = PlanDecision(direction, ranks[0], f"{direction}: {what}, more than {price}", numbers, nodes=ranks)
    return replace(found, candidates=_candidates(best, times, before, horizon, needed, blocked))


def _moves_left(snapshot: PlanSnapshot, settings: PlannerSection, now: float) -> int:
    """Node moves that this hour still allows."""
    return max(0, settings.moves_per_hour - sum(switch.at > now - HOUR for switch in snapshot.switches))


def _blocked(snapshot: PlanSnapshot, nodes: list[NodeFact], settings: PlannerSection, now: float) -> str:
    """Why these nodes must not move now, else empty: dwell time, or moves per hour."""
    young, left = max(nodes, key=lambda node: node.since), _moves_left(snapshot, settings, now)
    if now - young.since < settings.min_dwell_s:
        stayed = f"node {young.rank} has been in {young.role} for {now - young.since:.0f} s"
        return f"{stayed} of at least {settings.min_dwell_s:.0f} s"
    if len(nodes) > left:
        return f"{left} of the {settings.moves_per_hour} moves an hour are left"
    return ""


def in_words(seconds: Seconds) -> str:
    return f"{seconds.batch:.2f} s (train {seconds.train:.2f}, rollout {seconds.rollout:.2f})"


def _candidates(
    best: list[State], times: Mapping[State, Seconds], before: Seconds, horizon: float, needed: float, blocked: str
) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            train=state.train,
            rollout=state.rollout,
            train_s=times[state].train,
            rollout_s=times[state].rollout,
            batch_s=times[state].batch,
            gain_s=horizon * (1.0 - times[state].batch / before.batch),
            needed_s=needed,
            blocked=blocked if state == best[0] else "",
        )
        for state in best
    )


def _reachable(snapshot: PlanSnapshot, here: State) -> tuple[list[State], int]:
    """Splits with fewer to those with more training nodes, and the place of this one."""

    def after(source: str, way: int) -> list[State]:
        moved, found = 0, list[State]()
        for unit in _units(snapshot, source):
            moved += way * len(unit)
            state = here._replace(train=here.train + moved, rollout=here.rollout - moved)
            if min(state.train, state.rollout) < 1:
                break
            found.append(state)
        return found

    fewer = after("train", -1)
    return [*reversed(fewer), here, *after("rollout", 1)], len(fewer)


def _units(snapshot: PlanSnapshot, role: str) -> list[list[NodeFact]]:
    """Hybrid nodes in this role, with those that they move with; the ones that moved longest ago first."""
    return sorted(units(snapshot.nodes, role), key=lambda nodes: max((node.since, node.rank) for node in nodes))
