"""Nodes that serve both stages of every step: which can, and the price of their switches.

- All nodes, as one core that rolls out, too (``components.train.roll_out``); on GPUs with ``optimizer.host`` or LoRA.
- Else hybrid nodes, beside a core that only trains (``planner.time_sharing``); and where nodes are of two kinds.
- Seconds of a pair of switches: given, else assumed: `ASSUMED_S` for `ASSUMED_PARAMS` over the link of an A800 to host
  memory, in proportion to the parameters and to that link.
"""

from __future__ import annotations

from msgspec.structs import replace

from libra_hpc.config.run import RunConfig

from .request import InTurn, PlanRequest, PlanResult, RunPlan

ASSUMED_S, ASSUMED_PARAMS, ASSUMED_LINK = 80.0, 14.8e9, 25e9
"""Switch seconds of verl with 14B on A800: weights, optimizer and caches of both stages move. Half, double: `plan`
prints the seconds at which the best split is as fast."""


def assumed_s(asked: PlanRequest) -> float:
    """Seconds of a pair of switches."""
    slowest = min(pool.device.host_bytes_s for pool in asked.pools)
    return ASSUMED_S * asked.shape.params / ASSUMED_PARAMS * ASSUMED_LINK / slowest


def asked_in_turn(asked: PlanRequest, config: RunConfig, switch_s: float | None = None) -> PlanRequest:
    """``asked`` with plans in turn; ``switch_s``: of a pair of switches, None: assumed."""
    on_gpus = config.run.engine == "real" and (config.slurm.device == "cuda" or config.components.train.gpus > 0)
    can_roll = not on_gpus or ((config.optimizer.host or config.lora.rank > 0) and config.model.dtype != "float32")
    core = can_roll and len(asked.pools) == 1
    if switch_s is not None:
        return replace(asked, in_turn=InTurn(switch_s, core), switch_from="given")
    return replace(asked, in_turn=InTurn(assumed_s(asked), core))


def in_turn_of(result: PlanResult) -> list[tuple[RunPlan, float]]:
    """The best plan in turn, if there is one, and seconds of switches at which the best split is as fast.

    They are infinite where no split is among the plans.
    """
    split = min((plan.seconds for plan in result.plans if not plan.in_turn), default=float("inf"))
    found = sorted((plan for plan in result.plans if plan.in_turn), key=lambda plan: plan.seconds)[:1]
    return [(plan, plan.in_turn.switch_s + split - plan.seconds) for plan in found if plan.in_turn]
