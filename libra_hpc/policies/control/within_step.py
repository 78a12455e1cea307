"""Which nodes in time-sharing (`way_choice`) move now, within a step.

- A step is committed -> the nodes that trained it go back; the core once no other one is on its way to it.
- The rest of a batch fits on fewer nodes (`TAIL`) -> the core goes to training, then nodes with few turns.
- The batch is complete -> all others follow; unfinished turns of later batches wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from libra_hpc.protocol.plan import NodeFact

from .node_units import ranks, units

TAIL = 8
"""Unfinished trajectories for each engine that stays: an engine runs eight about as fast as one. Half: nodes switch
later; double: the tail slows."""


class StepMoves(NamedTuple):
    """Ranks to move now."""

    to_train: tuple[int, ...] = ()
    to_rollout: tuple[int, ...] = ()
    reason: str = ""


class Rest(NamedTuple):
    """What is left of the present batch, and of those that the staleness bound lets begin beside it."""

    complete: bool
    """Whether all of it went to training."""
    admitted: bool
    """Whether all their groups were admitted."""
    trajectories: int
    """Unfinished."""
    running: Mapping[int, int]
    """Turns in flight of each rank."""
    fits: int
    """Trajectories that a node runs about as fast as one."""

    @property
    def ends(self) -> bool:
        """Whether nothing is added to it."""
        return self.complete or (self.admitted and self.trajectories > 0)


def moves_within_step(nodes: Sequence[NodeFact], rest: Rest, back: frozenset[int]) -> StepMoves:
    """Moves of nodes in time-sharing now; those in ``back`` trained the last step, or came too late for it."""
    if returning := _returning(nodes, back):
        return StepMoves(to_rollout=returning, reason="the step is committed")
    if not rest.ends:
        return StepMoves()
    fewest = 0 if rest.complete else ceil(rest.trajectories / rest.fits)
    few = f"{fewest} rollout nodes are enough for the last {rest.trajectories} trajectories"
    leaving = _leaving(nodes, fewest, rest.running)
    return StepMoves(to_train=leaving, reason="the batch is complete" if rest.complete else few)


def _returning(nodes: Sequence[NodeFact], back: frozenset[int]) -> tuple[int, ...]:
    """The nodes that go back, the core last: the generation without the others begins with it."""
    joining = bool(units(nodes, "to_train"))
    found = [unit for unit in units(nodes, "train", core=True) if not (unit[0].shares and joining)]
    return ranks(sorted((unit for unit in found if back.issuperset(ranks([unit]))), key=lambda unit: unit[0].shares))


def _leaving(nodes: Sequence[NodeFact], stay: int, running: Mapping[int, int]) -> tuple[int, ...]:
    """The nodes that go to training where ``stay`` are enough: the core first, as nobody trains without it."""
    idle = [
        (not unit[0].shares, sum(running.get(node.rank, 0) for node in unit), ranks([unit]))
        for unit in units(nodes, "rollout", core=True)
    ]
    most, leaving = sum(node.role == "rollout" for node in nodes) - stay, tuple[int, ...]()
    for *_, unit in sorted(idle):
        if len(leaving) + len(unit) > most:
            break
        leaving += unit
    return leaving
