"""One row of `libra-hpc plan` as values of a run file, and the run file's text with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from libra_hpc.config.load import parse_override, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import as_toml, edited

from .initial import check_hybrid_kind, kind_of, run_file_values
from .run_plan import DevicePool, RunPlan


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
