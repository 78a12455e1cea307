"""What a node has to do so that its row of the Layout becomes true: pure, ``row x observed -> actions``.

- It was declared lost -> everything ends, then it begins as a new one.
- Its trainers are of an earlier world -> they end.
- Another kind of engines is to be awake -> that of before goes into standby first.
- Another start was ordered -> the engines that are to be awake start, or wake.

Rows that it never saw change nothing: what they asked for is out of date.
"""

from __future__ import annotations

from typing import Union

import msgspec

from libra_hpc.protocol.engine_state import EngineKind
from libra_hpc.protocol.layout import Row


class StartEngines(msgspec.Struct, frozen=True):
    """Start or wake the engines of a kind; answered by the node's heartbeat."""

    kind: EngineKind
    world: int = 0


class StandbyEngines(msgspec.Struct, frozen=True):
    """Put the engines of a kind into warm standby."""

    kind: EngineKind


class StopTrainers(msgspec.Struct, frozen=True):
    """End the training processes, whose world has lost a part on another node."""


class Reset(msgspec.Struct, frozen=True):
    """End all engines."""


Action = Union[StartEngines, StandbyEngines, StopTrainers, Reset]


def reconcile(row: Row, observed: Row, trainers: bool) -> tuple[Row, tuple[Action, ...]]:
    """The actions that are due, in order, and the row that is true after them; ``trainers``: whether it has any.

    ``observed``: the row that was made true last.
    """
    actions: list[Action] = []
    if row.life > observed.life:
        actions.append(Reset())
        observed, trainers = Row(life=row.life), False
    if row.active is None:
        # A guest whose owner takes its device back.
        actions += [StandbyEngines(observed.active)] if observed.active is not None else []
        return msgspec.structs.replace(observed, active=None), tuple(actions)
    if row.world > observed.world and trainers:
        actions.append(StopTrainers())
    if observed.active not in (None, row.active):
        actions.append(StandbyEngines(observed.active))
    if row.starts > observed.starts:
        actions.append(StartEngines(row.active, row.world))
    return row, tuple(actions)
