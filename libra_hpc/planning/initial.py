"""The split of ``components.split = "auto"``: the best plan for the nodes of a run file, as run-file values.

- All nodes of one kind -> the planner chooses how many train. Up to ``components.hybrid.nodes`` others are hybrid and
  start in rollout; one node stays rollout-only unless nodes serve both stages in turn.
- No training layout fits on a hybrid node by itself -> there are none.
- Rollout nodes of another kind -> training nodes that do not train become hybrid nodes.
- All engines of a rollout node have one TP degree, as a run file states it.
- Large TP, for the longest trajectories, goes to rollout nodes; hybrid nodes have the smallest TP, because their
  leaving costs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from libra_hpc.config.job import Component, ComponentsSection
from libra_hpc.config.load import parse_override, with_values
from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import as_toml, edited
from libra_hpc.errors import invalid
from libra_hpc.models.host_memory import HostRoom
from libra_hpc.models.supported import TRAINED

from . import in_turn
from .best_plan import Progress, best_plans, step_ends
from .measured_train_speed import with_train_speed
from .request import KIND, DevicePool, PlanRequest, PlanResult, RunPlan, as_planned, kind, request
from .train_layout import Hybrid

CANDIDATES = 5
"""Plans that are recorded and shown."""
CHOSEN = {
    "train": ("tp", "pp", "cp", "ep", "etp", "processes"),
    "rollout": ("tp", "engines_per_node"),
    "planner": ("hybrid_start",),
}
"""Keys that the plan fills in; a run file must not have them as well."""
SHARE = ("cpus", "mem")


class InitialPlan(msgspec.Struct, frozen=True):
    """A run file with its split filled in, and the search behind it."""

    config: RunConfig
    asked: PlanRequest
    result: PlanResult
    chosen: dict[str, Any]
    """Values by dotted key."""

    @property
    def plan(self) -> RunPlan:
        return self.result.plans[0]

    @property
    def record(self) -> dict[str, Any]:
        """`plan.json`: the question, the best plans, the choice, and the sources of the figures."""
        asked, plan = self.asked, self.plan
        return {
            "chosen": self.chosen,
            "predicted": {
                "batch_s": plan.seconds,
                "error_s": plan.error_s,
                "train_s": plan.train.time.total,
                "rollout_s": plan.rollout_s,
                "played_batches": plan.played,
                "step_ends_s": step_ends(asked, plan),
                "tokens_s": plan.tokens_s,
                "switch_s": plan.in_turn.switch_s if plan.in_turn else 0.0,
            },
            "plan": msgspec.to_builtins(plan),
            "best": msgspec.to_builtins(self.result.plans),
            "straggler_s": self.result.straggler,
            "excluded": msgspec.to_builtins(self.result.excluded),
            "sources": list(self.result.sources),
            "train_factor": asked.train_factor,
            "inputs": {**asked.facts(), "notes": list(asked.notes)},
        }


def initial_plan(
    config: RunConfig,
    *,
    progress: Progress = lambda plays: None,
    cache: Path | None = None,
    rooms: Mapping[str, HostRoom] = MappingProxyType({}),
) -> InitialPlan:
    """Fill in the split of a run file with ``components.split = "auto"``.

    ``cache``: see `best_plans`. ``rooms``: see `request`.

    Raises `UserError` for unknown hardware or models, for nodes that cannot be divided, for keys that the plan chooses,
    and when nothing fits.
    """
    _check(config)
    parts = config.components
    alike = kind(parts.train) == kind(parts.rollout)
    planned = as_planned(config)
    asked = with_train_speed(request(planned, rooms=rooms), planned.planner.train_speed)
    if asked.shape.untrained and config.run.engine == "real":
        why = f"this version cannot train {asked.shape.name} ({asked.shape.untrained})"
        raise invalid("components.split", "auto", why, f"a model of type {', '.join(TRAINED)}")
    pools = _pools(planned, asked.pools, alike)
    asked = replace(asked, pools=pools, hybrid=hybrid_of(config, pools))
    if planned.planner.time_sharing == "auto":
        asked = in_turn.asked_in_turn(asked, config)
    result = best_plans(asked, trainers=(0,), progress=progress, cache=cache)
    result = replace(result, plans=result.plans[:CANDIDATES])
    chosen = run_file_values(config, asked.pools, result.plans[0], alike)
    return InitialPlan(with_values(config, {**chosen, "components.split": "explicit"}), asked, result, chosen)


def run_file_values(config: RunConfig, pools: Sequence[DevicePool], plan: RunPlan, alike: bool) -> dict[str, Any]:
    """``plan`` as run-file values, by dotted key. ``alike``: every node may train.

    Raises `UserError` when no engine on a remaining node holds the longest trajectories.
    """
    values = _nodes(config, pools, plan, alike) | _training(config, plan) | _engines(pools, plan)
    values |= plan.in_turn.keys if plan.in_turn else {}
    # Nodes without GPUs, or with more than replicas of a run file take.
    processes, whole = core_world(with_values(config, values)).processes, pools[plan.pool].node_devices
    return values if processes == whole else values | {"train.processes": whole}


def row_values(config: RunConfig, pools: tuple[DevicePool, ...], plan: RunPlan) -> dict[str, Any]:
    """``plan`` as run-file values, by dotted key: every key that its figures assume.

    Training on the rollout nodes' kind exchanges the two kinds.  Raises `UserError` for hybrid nodes of a third kind.
    """
    check_hybrid_kind(config)
    values, parts = dict[str, Any](), config.components
    if plan.pool:
        values = kind_of("train", parts.rollout, parts) | kind_of("rollout", parts.train, parts)
        values["components.rollout.nodes"] = parts.train.nodes + parts.hybrid.nodes
        config, pools = with_values(config, values), (pools[1], pools[0])
        exchanged = tuple(replace(one, pool=1 - one.pool) for one in reversed(plan.engines))
        plan = replace(plan, pool=0, engines=exchanged)
    values |= run_file_values(config, pools, plan, alike=len(pools) == 1)
    layout = plan.train.layout
    values |= {"train.micro_tokens": layout.micro_tokens, "train.recompute": layout.recompute}
    if values["components.hybrid.nodes"]:
        values["planner.hybrid_start"] = "rollout"
    return {"components.split": "explicit", **values}


def run_file_text(path: Path, overrides: Sequence[str], config: RunConfig, values: Mapping[str, Any]) -> str:
    """The run file ``path`` with overrides and ``values``, and with its comments where its form allows.

    ``config`` is what ``path`` and the overrides say.  Raises `UserError` when the result is not valid.
    """
    whole = with_values(config, values)
    changed = {**dict(parse_override(override) for override in overrides), **values}
    text = edited(path.read_text(encoding="utf-8-sig"), changed)
    return as_toml(whole, changed) + "\n" if text is None else text


def hybrid_of(config: RunConfig, pools: Sequence[DevicePool]) -> Hybrid:
    """Which nodes are hybrid in a plan for these pools."""
    world = elastic_world(config).nodes
    return Hybrid(rest=True, world=world) if len(pools) > 1 else Hybrid(config.components.hybrid.nodes, world=world)


def planned_pools(config: RunConfig, merged: tuple[DevicePool, ...]) -> tuple[DevicePool, ...]:
    """The pools of a question as a run file can state their division, in the order train, rollout.

    ``merged`` pools stay where hybrid nodes are of a third kind: then no row can be written.
    """
    parts = config.components
    if parts.hybrid.nodes and kind(parts.hybrid) != kind(parts.train):
        return merged
    return _pools(config, merged, kind(parts.train) == kind(parts.rollout))


def _check(config: RunConfig) -> None:
    for section, keys in CHOSEN.items():
        for key in sorted(key for key in keys if f"{section}.{key}" in config.given):
            value = getattr(getattr(config, section), key)
            raise invalid(
                f"{section}.{key}",
                value,
                "components.split = 'auto' chooses it",
                "no such key, or components.split = 'explicit'",
            )
    if config.run.engine == "real" and config.slurm.device == "cpu" and not config.planner.device:
        raise invalid(
            "components.split",
            "auto",
            "slurm.device is 'cpu' and the planner has no figures for CPU nodes",
            "planner.device (a GPU to plan as, or an entry of a file named by planner.devices), or 'explicit' with the"
            " nodes of each component",
        )
    check_hybrid_kind(config)


def check_hybrid_kind(config: RunConfig) -> None:
    train, hybrid = config.components.train, config.components.hybrid
    for key in KIND if hybrid.nodes else ():
        own, valid = getattr(hybrid, key), getattr(train, key)
        if own != valid:
            raise invalid(
                f"components.hybrid.{key}",
                own,
                "where the planner divides the nodes, hybrid nodes are of the training nodes' kind",
                repr(valid),
            )


def interchangeable(*parts: Component) -> bool:
    """Whether the nodes of these components can change places: one kind, and equal shares of each node."""
    return len({tuple(getattr(c, key) for key in (*KIND, *SHARE)) for c in parts if c.nodes}) == 1


def _pools(config: RunConfig, merged: tuple[DevicePool, ...], alike: bool) -> tuple[DevicePool, ...]:
    """One pool of equal nodes; else those that may train and those that only roll out, even with the same GPUs."""
    parts = config.components
    if alike:
        (pool,) = merged
        return (pool,)
    trainers = parts.train.nodes + parts.hybrid.nodes
    first, last = merged[0], merged[-1]
    return (replace(first, nodes=trainers), replace(last, nodes=parts.rollout.nodes))


def kind_of(name: str, source: Component, parts: ComponentsSection) -> dict[str, Any]:
    """What turns the nodes of a component into nodes like those of ``source``."""
    own = getattr(parts, name)
    keys = [key for key in (*KIND, *SHARE) if getattr(source, key) != getattr(own, key)]
    return {f"components.{name}.{key}": getattr(source, key) for key in keys}


def _nodes(config: RunConfig, pools: Sequence[DevicePool], plan: RunPlan, alike: bool) -> dict[str, Any]:
    parts = config.components
    left = pools[0].nodes - plan.nodes
    # The run file may have had no hybrid nodes, and so no kind of them.
    kinds = kind_of("hybrid", parts.train, parts) if plan.hybrid and kind(parts.hybrid) != kind(parts.train) else {}
    return kinds | {
        "components.train.nodes": plan.nodes,
        "components.hybrid.nodes": plan.hybrid,
        "components.rollout.nodes": left - plan.hybrid if alike else parts.rollout.nodes,
    }


def _training(config: RunConfig, plan: RunPlan) -> dict[str, Any]:
    """Degrees of the training replicas, and micro-batches and recomputation where they are not given.

    Without room for snapshots there are none.
    """
    layout, train = plan.train.layout, config.train
    other = {key: getattr(layout, key) for key in ("cp", "ep", "etp") if getattr(layout, key) != getattr(train, key)}
    free = [key for key in ("micro_tokens", "recompute") if f"train.{key}" not in config.given]
    chosen = {"tp": layout.tp, "pp": layout.pp, **other, **{key: getattr(layout, key) for key in free}}
    without = {} if plan.snapshots else {"snapshot_every": 0}
    return {f"train.{key}": value for key, value in (chosen | without).items()}


def _engines(pools: Sequence[DevicePool], plan: RunPlan) -> dict[str, Any]:
    """TP and engines of every node that rolls out, in rank order."""
    degrees, engines = list[int](), list[int]()
    for one in plan.engines:
        pool = pools[one.pool]
        nodes = plan.rolls(pool.nodes) if one.pool == plan.pool else pool.nodes
        degrees += [one.tp] * nodes
        engines += [pool.node_devices // one.tp] * nodes
    return {"rollout.tp": _one(degrees), "rollout.engines_per_node": _one(engines)}


def _one(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values
