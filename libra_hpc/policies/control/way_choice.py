"""Whether hybrid nodes serve both stages of every step (time-sharing).

- A batch in turn, with a pair of switches, is shorter than at the best split by ``min_gain`` -> ``time_share``.
- It is longer by as much -> ``split``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Action, NodeFact, PlanDecision, PlanSnapshot

from .node_units import ranks, units
from .plays import BOTH, Plays, State, hold


class _Ways(NamedTuple):
    """Both ways, and the nodes that can serve in turn."""

    splits: list[State]
    """With more and more training nodes; one node in each stage at least."""
    both: State
    hybrid: list[list[NodeFact]]
    core: list[NodeFact]

    def trains(self, split: State) -> tuple[int, ...]:
        """Ranks that train at a split."""
        return (*ranks(self.hybrid)[: split.train - self.splits[0].train], *ranks([self.core]))


def way_choice(snapshot: PlanSnapshot, plays: Plays, here: State, settings: PlannerSection) -> PlanDecision | None:
    """``time_share``, ``split``, or hold while nodes share; None where each stage keeps its nodes."""
    wanted = here.in_turn or settings.time_sharing == "auto"
    ways = _ways(snapshot, here) if wanted else None
    if ways is None:
        return None
    splits = ways.splits
    found = plays.downhill(splits, splits.index(here) if here in splits else len(splits) // 2)
    split = min(found, key=lambda state: found[state].batch)
    shared_s, alone_s = plays.at(ways.both).batch, found[split].batch
    before, after = (shared_s, alone_s) if here.in_turn else (alone_s, shared_s)
    gain = 1.0 - after / before
    if gain < settings.min_gain and not here.in_turn:
        return None
    nodes = ranks([*ways.hybrid, ways.core])
    switches_s = plays.work.switches_s
    what = (
        f"a batch takes {shared_s:.1f} s where {len(nodes)} nodes share their time, with {switches_s:.1f} s"
        f" of switches, and {alone_s:.1f} s with {split.train} training and {split.rollout} rollout nodes"
    )
    seconds = {"shared_s": shared_s, "split_s": alone_s, "switches_s": switches_s}
    numbers = plays.numbers(here) | seconds
    if gain < settings.min_gain:
        return hold(f"time-sharing, {what}", numbers)
    action: Action = "split" if here.in_turn else "time_share"
    return PlanDecision(action, -1, f"{action}: {what}", numbers, ways.trains(split) if here.in_turn else nodes)


def _ways(snapshot: PlanSnapshot, here: State) -> _Ways | None:
    """None where no node can serve in turn, or nothing is left of a stage."""
    core = [node for node in snapshot.nodes if node.shares]
    hybrid = units(snapshot.nodes, BOTH) if here.in_turn else units(snapshot.nodes, "train", "rollout")
    fixed = ["train" if node.shares else node.role for node in snapshot.nodes if node.component != "hybrid"]
    train, rollout, movable = fixed.count("train"), fixed.count("rollout"), sum(map(len, hybrid))
    counts = accumulate(map(len, hybrid), initial=0)
    states = [State(train + n, rollout + movable - n, here.lent) for n in counts]
    splits = [state for state in states if min(state.train, state.rollout) >= 1]
    both = State(train + movable, rollout + movable + len(core), here.lent, in_turn=True)
    return _Ways(splits, both, hybrid, core) if splits and (hybrid or core) else None
