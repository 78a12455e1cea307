"""The player of a live run, from its run file.

- It plays with the engines of the run, and with step times that these measured.
- Device and model are in the tables, and all nodes of one kind -> it searches other layouts too (`OtherLayouts`).
- Unequal shares of the nodes -> what it finds is advice only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.memory import core_layout
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.policies.control.player import Player
from libra_hpc.simulator.settings import run_settings

from .live_play import LivePlay
from .other_layouts import OtherLayouts

REPORT_S = 5.0
"""Seconds between two reports of a played engine: batches of large runs take many minutes."""


def live_player(
    config: RunConfig, repartition_after: float = -inf, table: StepLookup = lookup, report_s: float = REPORT_S
) -> Player:
    """The player for a run file whose split is filled in; KV capacities of other engines are those of ``table``.

    Never raises `UserError`.
    """
    settings, core, engines = replace(run_settings(config), report_s=report_s), core_layout(config), _engines(config)
    play = LivePlay(engines, config.rollout.policy, settings, core if config.streamed else None)
    return Player(config.planner, play, _layouts(config, engines, table), repartition_after)


def _layouts(config: RunConfig, engines: Sequence[tuple[int, int]], table: StepLookup) -> OtherLayouts | None:
    """None where no layout can be found for the run."""
    # Under other policies than this one, long trajectories do not go to large TP.
    if len(engines) > 1 and config.rollout.policy != "cmlfq":
        return None
    if without_tables(config):
        return None
    try:
        return OtherLayouts(config, table, {tp for tp, _ in engines})
    except UserError:
        return None


def without_tables(config: RunConfig) -> bool:
    """Whether the nodes are in no table of devices."""
    return config.run.engine == "real" and config.slurm.device == "cpu"


def _engines(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(TP, engines) of every hybrid and rollout node in rank order; one entry where they are alike."""
    nodes = config.components.hybrid.nodes + config.components.rollout.nodes
    each = tuple(config.rollout.on_node(i) for i in range(nodes))
    return each[:1] if len(set(each)) == 1 else each
