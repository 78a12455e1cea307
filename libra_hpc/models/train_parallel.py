"""The training layouts that the runtime can run, as one predicate for `check`, the planner's search and the trainer.

A world of Megatron is ``nodes`` nodes of ``processes`` processes each, divided into replicas of ``tp * pp * cp``.

- Tensor ranks share a node: ``tp`` divides its processes.
- All processes are a whole number of replicas, which may span nodes.
- ``ep * etp`` divides the processes of a stage; with ``ep`` 1 tensor ranks share the experts.
- ``tp`` divides what Megatron-Core cuts, and every stage has a layer.
"""

from __future__ import annotations

from libra_hpc.config.node_groups import Degrees
from libra_hpc.errors import UserError, invalid

from .shapes import ModelShape


def world_fault(degrees: Degrees, nodes: int, processes: int) -> UserError | None:
    """Why ``nodes`` nodes of ``processes`` training processes cannot form a world; None when they can."""
    tp, whole = degrees.tp, nodes * processes
    if processes % tp:
        why = f"tensor ranks share a node, and it does not divide the {processes} training processes of a node"
        return invalid("train.tp", tp, why, f"divisors of {processes}, or other train.processes")
    if whole % degrees.replica:
        keys = [f"train.{key}" for key in ("tp", "pp", "cp") if getattr(degrees, key) > 1]
        count = f"{nodes} node{'s' if nodes > 1 else ''} x {processes} training processes are {whole}"
        why = f"{count}, no whole number of replicas of {degrees.replica} processes"
        return invalid(" * ".join(keys), degrees.replica, why, f"a product that divides {whole}, or other nodes")
    return None


def expert_fault(experts: int, width: int, degrees: Degrees, ranks: int, where: str = "") -> UserError | None:
    """Why ``experts`` of MLP width ``width`` cannot be spread over the ``ranks`` processes of a stage.

    ``where``: the beginning of the reason.
    """
    tp, ep, etp = degrees.tp, degrees.ep, degrees.etp or degrees.tp
    if not experts:
        return _without_experts(tp, ep, etp, f"{where}the model has no experts")
    if experts % ep:
        why = f"{where}it does not divide the model's {experts} experts"
        return invalid("train.ep", ep, why, f"divisors of {experts}")
    if ep == 1 and tp > 1 and width == 1:
        why = f"{where}tensor ranks cannot share the experts of the model, so expert ranks must"
        return invalid("train.ep", ep, why, "2 or more, or train.tp = 1")
    if ep == 1 and etp != tp:
        why = f"{where}without expert parallelism tensor ranks share the experts too"
        return invalid("train.etp", etp, why, str(tp))
    if etp not in (1, tp) or width % etp:
        why = f"{where}it must be 1 or tp = {tp}, and divide the experts' {width} MLP columns"
        return invalid("train.etp", etp, why, f"1 or {tp}" if width % tp == 0 else "1")
    if ranks % (ep * etp):
        why = f"{where}ep x etp = {ep * etp} does not divide the {ranks} processes of a stage"
        return invalid("train.ep", ep, why, f"divisors of {ranks // etp}")
    return None


def _without_experts(tp: int, ep: int, etp: int, none: str) -> UserError | None:
    if ep == 1 and etp != tp:
        return invalid("train.etp", etp, none, f"0 or {tp}")
    return None if ep == 1 else invalid("train.ep", ep, none, "1")


def cut_fault(degrees: Degrees, tokens: int) -> UserError | None:
    """Why context ranks cannot share a micro-batch of at most ``tokens`` tokens; None when they can."""
    least = 2 * degrees.cp * degrees.tp
    if degrees.cp == 1 or tokens >= least:
        return None
    why = f"{2 * degrees.cp} pieces for {degrees.tp} tensor ranks need {least} tokens, and a micro-batch has {tokens:,}"
    return invalid("train.cp", degrees.cp, why, f"1 to {max(1, tokens // (2 * degrees.tp))}")


def runs(shape: ModelShape, degrees: Degrees, nodes: int, processes: int) -> bool:
    """Whether a world of these nodes can train ``shape``."""
    return (
        shape.trains(degrees.tp, degrees.pp)
        and world_fault(degrees, nodes, processes) is None
        and expert_fault(shape.experts, shape.expert_columns, degrees, nodes * processes // degrees.pp) is None
    )
