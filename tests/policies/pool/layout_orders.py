"""What a Layout asks of whom, beyond the one before it: the orders that agents and leaders find in their rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from libra_hpc.policies.pool import reconcile as pure
from libra_hpc.policies.pool.states import Pool
from libra_hpc.protocol.layout import Layout, Row

FIRST = Layout()


class StartEngine(NamedTuple):
    rank: int
    kind: str
    world: int = 0


class StandbyEngine(NamedTuple):
    rank: int
    kind: str


class StopTrainers(NamedTuple):
    rank: int


class Reset(NamedTuple):
    rank: int


class DrainTurns(NamedTuple):
    rank: int
    abort: bool = False


class RankLost(NamedTuple):
    rank: int


class RankBack(NamedTuple):
    rank: int


class FormGeneration(NamedTuple):
    generation: int
    ranks: tuple[int, ...]


class RestCore(NamedTuple):
    pass


class AwaitMembers(NamedTuple):
    ranks: tuple[int, ...]
    limit_s: float


def layout_of(pool: Pool) -> Layout:
    return Layout(rows=pool.rows, generation=pool.newest.generation, rest=pool.rests)


def orders(before: Layout, after: Layout, ended: Collection[int] = ()) -> list[Any]:
    """``ended``: nodes whose trainers have just ended by themselves."""
    found: list[Any] = []
    for rank, row in after.rows.items():
        was = before.rows.get(rank, Row())
        if row.life > was.life:
            found.append(RankLost(rank))
        elif was.state == "lost" != row.state:
            found.append(RankBack(rank))
        if row.drain and (row.drain, row.starts) != (was.drain, was.starts):
            found.append(DrainTurns(rank, row.drain == "abort"))
        # A node that was lost has dropped all when its row gets engines again.
        life = Row(life=row.life) if row.life > was.life or was.active is None else was
        for action in pure.reconcile(row, life, rank not in ended and was.active is not None)[1]:
            match action:
                case pure.StartEngines(kind=kind, world=world):
                    found.append(StartEngine(rank, kind, world if kind == "train" else 0))
                case pure.StandbyEngines(kind=kind):
                    found.append(StandbyEngine(rank, kind))
                case pure.StopTrainers():
                    found.append(StopTrainers(rank))
    found += [RankLost(rank) for rank in before.rows.keys() - after.rows.keys()]
    if after.generation > before.generation:
        found.append(FormGeneration(after.generation, after.members))
    if after.rest and not before.rest:
        found.append(RestCore())
    if (after.awaited, after.await_s) != (before.awaited, before.await_s):
        found.append(AwaitMembers(after.awaited, after.await_s))
    return found


def all_orders(layouts: Iterable[Layout], newest: Layout = FIRST) -> list[Any]:
    """The orders of Layouts that were published after ``newest``; repeats have none."""
    found: list[Any] = []
    for layout in layouts:
        if layout.number > newest.number:
            found += orders(newest, layout)
            newest = layout
    return found
