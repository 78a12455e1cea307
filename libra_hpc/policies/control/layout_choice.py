"""Whether all ranks start again in another layout (repartition): for other work that hybrid nodes cannot answer.

- Gain over the horizon at most ``margin`` times the cost -> no proposal. Cost: the restart, and the time to generate
  in-flight work again.
- Engines of other degrees must gain `OTHER_ENGINES` more: their seconds are scaled, not measured.
- A layout was proposed before, or a node is lost -> no proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Candidate, PlanDecision, PlanSnapshot

from .move_choice import CANDIDATES
from .plays import Plays, Seconds, State

EVERY_S = 3600.0
"""Seconds between two repartitions, at least. A restart costs minutes and all measurements; the next decision should
not rest on the first new ones."""
OTHER_ENGINES = 0.1
"""Share of a batch. Half: an engine's seconds scaled to twice the TP degree are off by as much; double: a layout that
saves an eighth is never tried."""


class OtherLayout(msgspec.Struct, frozen=True):
    """A layout of all nodes, with the seconds of its play."""

    train: int
    """Nodes."""
    rollout: int
    seconds: Seconds
    words: str
    changes: dict[str, Any]
    """By dotted keys of the run file; empty where nodes cannot change their component."""
    same_engines: bool
    """Whether the run has engines of these degrees."""


def layout_choice(
    held: PlanDecision,
    snapshot: PlanSnapshot,
    plays: Plays,
    layouts: Sequence[OtherLayout],
    here: State,
    horizon: float,
    settings: PlannerSection,
) -> PlanDecision:
    """``held``, or the best of ``layouts`` where it pays."""
    before, ratio = plays.at(here), plays.ratio(in_turn=False)
    cost = settings.repartition_cost_s + (again := _again(snapshot, plays, before))
    needed = settings.margin * cost

    def surplus(one: OtherLayout) -> float:
        """Share of a batch that it gains at least."""
        return 1.0 - ratio * one.seconds.batch / before.batch - (0.0 if one.same_engines else OTHER_ENGINES)

    best = max(layouts, key=surplus)
    share, after = surplus(best), Seconds(*(ratio * value for value in best.seconds))
    if share < settings.min_gain or horizon * share <= needed:
        return held
    candidates = tuple(
        Candidate(
            train=one.train,
            rollout=one.rollout,
            train_s=ratio * one.seconds.train,
            rollout_s=ratio * one.seconds.rollout,
            batch_s=ratio * one.seconds.batch,
            gain_s=horizon * surplus(one),
            needed_s=needed,
            layout=one.words,
        )
        for one in sorted(layouts, key=surplus, reverse=True)
    )
    reason = (
        f"repartition: at the next step boundary, {best.words} instead of {here.train}+{here.rollout} nodes in the"
        f" present layout takes a batch from {before.batch:.2f} s to {after.batch:.2f} s; that is {share:.0%} at least,"
        f" and {horizon * share:.0f} s over the horizon, more than {settings.margin:.1f} x {cost:.1f} s:"
        f" {settings.repartition_cost_s:.1f} for the restart, {again:.1f} to generate in-flight work again"
    )
    numbers = held.numbers | {
        "after_train_s": after.train,
        "after_rollout_s": after.rollout,
        "after_s": after.batch,
        "pays_s": horizon * share,
        "again_s": again,
        "needed_s": needed,
    }
    found = PlanDecision("repartition", -1, reason, numbers, layout=best.words, changes=best.changes)
    return replace(found, candidates=(*candidates, *held.candidates)[:CANDIDATES])


def _again(snapshot: PlanSnapshot, plays: Plays, before: Seconds) -> float:
    """Seconds to generate what is in flight."""
    batch = sum(record.generated for record in plays.work.records) * plays.work.share
    return before.rollout * sum(group.generated for group in snapshot.groups) / batch
