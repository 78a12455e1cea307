"""Nodes that serve both stages of every step: which ways there are, the keys that ask for them, their price.

- Hybrid nodes (``planner.time_sharing``); nodes of the core too (`ROLL_OUT`), on GPUs with ``optimizer.host`` or LoRA.
- Seconds of a pair of switches: given, else assumed: `ASSUMED_S` for `ASSUMED_PARAMS` over the link of an A800 to host
  memory, in proportion to the parameters and to that link.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig

from .request import InTurn, PlanRequest, PlanResult, RunPlan

ASSUMED_S, ASSUMED_PARAMS, ASSUMED_LINK = 80.0, 14.8e9, 25e9
"""Switch seconds of verl with 14B on A800: weights, optimizer and caches of both stages move. Half, double: `plan`
prints the seconds at which the best split is as fast."""
ROLL_OUT = "roll_out"
"""Key of ``components.train``."""


def ways(config: RunConfig, switch_s: float) -> tuple[InTurn, ...]:
    """Hybrid nodes alone, and all nodes where the state of the core has room meanwhile."""
    on_gpus = config.run.engine == "real" and (config.slurm.device == "cuda" or config.components.train.gpus > 0)
    core = not on_gpus or ((config.optimizer.host or config.lora.rank > 0) and config.model.dtype != "float32")
    return tuple(InTurn(switch_s, rolls) for rolls in (False, True)[: 1 + core])


def asked_in_turn(asked: PlanRequest, config: RunConfig, switch_s: float | None = None) -> PlanRequest:
    """``asked`` with plans in turn; ``switch_s``: of a pair of switches, None: assumed."""
    if switch_s is not None:
        return msgspec.structs.replace(asked, in_turn=ways(config, switch_s), switch_from="given")
    slowest = min(pool.device.host_bytes_s for pool in asked.pools)
    assumed_s = ASSUMED_S * asked.shape.params / ASSUMED_PARAMS * ASSUMED_LINK / slowest
    return msgspec.structs.replace(asked, in_turn=ways(config, assumed_s))


def keys(plan: RunPlan) -> dict[str, Any]:
    """What the run file says of a plan in turn, by dotted key."""
    core = {f"components.train.{ROLL_OUT}": True} if plan.in_turn and plan.in_turn.core_rolls else {}
    return {"planner.time_sharing": "auto", **core} if plan.in_turn else {}


def in_turn_of(result: PlanResult) -> list[tuple[RunPlan, float]]:
    """The best plan in turn, if there is one, and seconds of switches at which the best split is as fast.

    They are infinite where no split is among the plans.
    """
    split = min((plan.seconds for plan in result.plans if not plan.in_turn), default=float("inf"))
    found = sorted((plan for plan in result.plans if plan.in_turn), key=lambda plan: plan.seconds)[:1]
    return [(plan, plan.in_turn.switch_s + split - plan.seconds) for plan in found if plan.in_turn]
