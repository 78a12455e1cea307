"""One row of `libra-hpc plan` as values of a run file, and the run file's text with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.edit import edited
from libra_hpc.config.load import parse_override, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import as_toml
from libra_hpc.policies.search.run_plan import DevicePool, PlanResult

from .initial import check_hybrid_kind, kind_of, run_file_values


def row_values(config: RunConfig, pools: tuple[DevicePool, ...], result: PlanResult, row: int) -> dict[str, Any]:
    """Plan ``row`` (from 0) of ``result`` as run-file values, by dotted key: every key that its figures assume.

    Training on the rollout nodes' kind exchanges the two kinds.  Raises `UserError` for hybrid nodes of a third kind.
    """
    check_hybrid_kind(config)
    plan, values = result.plans[row], dict[str, Any]()
    parts = config.components
    if plan.pool:
        values = kind_of("train", parts.rollout, parts) | kind_of("rollout", parts.train, parts)
        values["components.rollout.nodes"] = parts.train.nodes + parts.hybrid.nodes
        config = with_values(config, values)
        pools, result = (pools[1], pools[0]), _exchanged(result)
    chosen = msgspec.structs.replace(result, plans=(result.plans[row],))
    values |= run_file_values(config, pools, chosen, alike=len(pools) == 1)
    layout = plan.train.layout
    values |= {"train.micro_tokens": layout.micro_tokens, "train.recompute": layout.recompute}
    if values["components.hybrid.nodes"]:
        values["planner.hybrid_start"] = "rollout"
    return {"components.split": "explicit", **values}


def _exchanged(result: PlanResult) -> PlanResult:
    """The same plans with the two pools in the other order."""
    plans = tuple(
        msgspec.structs.replace(
            plan,
            pool=1 - plan.pool,
            rollout=msgspec.structs.replace(
                plan.rollout, segments=tuple(msgspec.structs.replace(s, pool=1 - s.pool) for s in plan.rollout.segments)
            ),
        )
        for plan in result.plans
    )
    alone = tuple((1 - pool, tp, seconds) for pool, tp, seconds in result.alone)
    return msgspec.structs.replace(result, plans=plans, alone=alone, spare=result.spare[::-1])


def run_file_text(path: Path, overrides: Sequence[str], config: RunConfig, values: Mapping[str, Any]) -> str:
    """The run file ``path`` with overrides and ``values``, and with its comments where its form allows.

    ``config`` is what ``path`` and the overrides say.  Raises `UserError` when the result is not valid.
    """
    whole = with_values(config, values)
    changed = {**dict(parse_override(override) for override in overrides), **values}
    text = edited(path.read_text(encoding="utf-8-sig"), changed)
    return as_toml(whole, changed) + "\n" if text is None else text
