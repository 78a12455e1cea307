"""``components.split = "auto"``: ask the planner for the split, and print it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.status import Status
from rich.text import Text

from libra_hpc.config.run import RunConfig
from libra_hpc.models.host_memory import HostRoom
from libra_hpc.planning.initial import InitialPlan, initial_plan

from . import plan_tables
from .output import WIDTH, PlainConsole, busy, console


def planned(config: RunConfig, rooms: Mapping[str, HostRoom], quick: bool = False) -> InitialPlan:
    """The plan of a run file with ``components.split = "auto"``, with a spinner; raises `UserError`."""
    with busy("planning") as status:
        return initial_plan(config, quick=quick, progress=lambda plays: simulating(status, plays), rooms=rooms)


def show_split(made: InitialPlan, *, stderr: bool = False) -> None:
    """Print the compared plans, best first, and the keys of the chosen one; ``stderr``: stdout has another result."""
    (PlainConsole(file=sys.stderr, width=WIDTH, highlight=False) if stderr else console()).print(_screen(made))


def simulating(status: Status, plays: int) -> None:
    """Show in the spinner how many plans have been played."""
    status.update(f"playing plans: {plays}")


def words(made: InitialPlan) -> str:
    """The filled-in keys in one line."""
    return ", ".join(f"{key.removeprefix('components.')} = {value}" for key, value in made.chosen.items())


def _screen(made: InitialPlan) -> RenderableType:
    asked, best = made.asked, made.plan
    head = (
        f"split = auto: {plan_tables.title(asked)}; {asked.batch.trajectories:,} trajectories a batch, lengths:"
        f" {asked.lengths}"
    )
    switches = f", switches {best.in_turn.switch_s:.1f}" if best.in_turn else ""
    tail = (
        f"chosen: {words(made)}; predicted {best.seconds:.1f} s a batch (train {best.train.time.total:.1f}, rollout"
        f" {best.rollout_s:.1f}{switches})"
    )
    return Group(Text(head), plan_tables.plans(asked, made.result), Text(tail))
