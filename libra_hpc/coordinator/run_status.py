"""The status snapshot: a pure function of the pool, the observations and the last heartbeats."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from libra_hpc.config.node_groups import replicas
from libra_hpc.facts.columns import declared, values_of
from libra_hpc.facts.status import (
    BLOCK,
    FINAL,
    BucketStatus,
    DecisionStatus,
    FailedAttempts,
    NodeStatus,
    StageEstimate,
    StageStatus,
    Status,
    as_ended,
    step_accuracy,
)
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.pool import states
from libra_hpc.protocol.agents import RolloutReport

from .guests import Guests, GuestState
from .liveness import NodeContact
from .observations import Observations


def compose_status(
    context: AgentContext,
    pool: states.Pool | None,
    nodes: Mapping[int, NodeContact],
    guests: Guests,
    seen: Observations,
    *,
    job_id: str,
    state: str,
    message: str,
    started_at: float,
    step: int,
    decision: DecisionStatus | None,
    estimate: StageEstimate | None,
    repartitioned: str,
    notices: list[str],
    spot_nodes: int,
    takes: list[str],
    now: float,
) -> Status:
    """One snapshot; ``notices``: what went wrong lately, newest first."""
    report = seen.report or RolloutReport()
    if report.paused and state == "running":
        message = f"{report.paused.removesuffix('.')}; {message}" if message else report.paused
    membership = pool.membership if pool else states.Membership(0, ())
    live = {
        **msgspec.structs.asdict(report),
        "trained_trajectories": seen.trained,
        "generation": membership.generation,
        "replicas": replicas(context.config, len(membership.ranks)),
    }
    numbers = values_of(declared("running"), seen.lines, live=live)
    status = Status(
        run=context.run.name,
        path=str(context.run.path),
        job_id=job_id,
        attempt=context.attempt,
        state=state,
        started_at=started_at,
        updated_at=now,
        step=step,
        steps=context.config.run.steps,
        version=report.joint_version,
        train=StageStatus(*seen.train_speed(), nodes=len(membership.ranks)),
        rollout=StageStatus(*seen.rollout_speed(), nodes=len(states.rollout_nodes(pool)) if pool else 0),
        numbers={name: value or 0 for name, value in numbers.items()},
        buckets=[BucketStatus(*bucket) for bucket in report.buckets],
        nodes=[
            *(_node(context, pool, rank, facts, now=now) for rank, facts in nodes.items()),
            *(_guest(guests.states[rank], rank, facts, now=now) for rank, facts in guests.contacts.items()),
        ],
        decision=decision,
        message=message,
        estimate=estimate,
        accuracy=step_accuracy(list(seen.lines)[-BLOCK:]),
        repartitioned=repartitioned,
        failures=[FailedAttempts(*found) for found in report.failures],
        paused=report.paused,
        slow=[*filter(None, [report.environments]), *(slow_sentence(nodes, *found) for found in report.slow)],
        notices=notices,
        lenders=list(report.lenders),
        spot_nodes=spot_nodes,
        takes=takes,
        orders=context.orders,
        speedup=context.config.speedup,
    )
    return as_ended(status) if state in FINAL else status


def slow_sentence(nodes: Mapping[int, NodeContact], engine: str, rank: int, ratio: float, since: float) -> str:
    """One slow engine; local time of day, as in the log files."""
    began = time.strftime("%H:%M", time.localtime(since))
    node = f" ({nodes[rank].host})" if rank in nodes and nodes[rank].host else ""
    return f"engine {engine}{node} takes {ratio:.1f}x its class' time per step since {began}"


def _node(context: AgentContext, pool: states.Pool | None, rank: int, facts: NodeContact, *, now: float) -> NodeStatus:
    component = context.layout.component(rank)
    role = component if pool is None or component == "planner" else str(pool.nodes[rank].state)
    return _status(rank, component, role, facts, now=now)


GUEST_ROLES: dict[GuestState, str] = {
    "starting": "to_guest",
    "serving": "guest",
    "leaving": "leaving",
    "standby": "standby",
}


def _guest(state: GuestState, rank: int, facts: NodeContact, *, now: float) -> NodeStatus:
    return _status(rank, "guest", GUEST_ROLES[state], facts, now=now)


def _status(rank: int, component: str, role: str, facts: NodeContact, *, now: float) -> NodeStatus:
    beat = facts.beat
    return NodeStatus(
        rank,
        facts.host,
        component,
        role,
        engines={name: one.state for name, one in facts.engines.items()} if beat else {},
        version=beat.version if beat else -1,
        heartbeat_age_s=max(0.0, now - facts.seen),
    )
