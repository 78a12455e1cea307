"""The status snapshot: a pure function of the pool, the observations and the last heartbeats."""

from __future__ import annotations

import time
from collections.abc import Mapping

from libra_hpc.config.train_world import replicas
from libra_hpc.facts.estimate import StageEstimate, step_accuracy
from libra_hpc.facts.failed import FailedAttempts
from libra_hpc.facts.status import FINAL, BucketStatus, DecisionStatus, NodeStatus, StageStatus, Status
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.pool import states

from .node_facts import NodeFacts
from .observations import Observations


def compose_status(
    context: AgentContext,
    pool: states.Pool | None,
    nodes: Mapping[int, NodeFacts],
    seen: Observations,
    *,
    job_id: str,
    state: str,
    message: str,
    started_at: float,
    step: int,
    gen_tokens: float,
    decision: DecisionStatus | None,
    estimate: StageEstimate | None,
    repartitioned: str,
    notices: list[str],
    now: float,
) -> Status:
    """One snapshot.

    ``gen_tokens``: generated tokens of the last global batch; ``notices``: what went wrong lately, newest first.
    """
    report, rewards = seen.report, seen.rewards
    paused = report.paused if report else ""
    if paused and state == "running":
        message = f"{paused.removesuffix('.')}; {message}" if message else paused
    train, rollout = seen.train_speed(), seen.rollout_speed(gen_tokens)
    membership = pool.membership if pool else states.Membership(0, ())
    return Status(
        run=context.run.name,
        path=str(context.run.path),
        job_id=job_id,
        attempt=context.attempt,
        state=state,
        started_at=started_at,
        updated_at=now,
        step=step,
        steps=context.config.run.steps,
        version=step,
        reward=rewards[-1] if rewards else 0.0,
        generation=membership.generation,
        replicas=replicas(context.config, len(membership.ranks)),
        train=StageStatus(*train, nodes=len(membership.ranks)),
        rollout=StageStatus(*rollout, nodes=len(states.rollout_nodes(pool)) if pool else 0),
        open_trajectories=report.open_trajectories if report else 0,
        waiting_turns=report.waiting_turns if report else 0,
        tools_running=report.tools_running if report else 0,
        ready_groups=report.ready_groups if report else 0,
        staleness_mean=sum(m for m, _ in seen.staleness) / len(seen.staleness) if seen.staleness else 0.0,
        staleness_max=int(max((m for _, m in seen.staleness), default=0)),
        resubmitted=report.resubmitted if report else 0,
        trained_trajectories=seen.trained,
        buckets=[BucketStatus(*bucket) for bucket in report.buckets] if report else [],
        nodes=[_node(context, pool, rank, facts, over=state in FINAL, now=now) for rank, facts in nodes.items()],
        decision=decision,
        message=message,
        estimate=estimate,
        accuracy=step_accuracy(seen.expected),
        repartitioned=repartitioned,
        failures=[FailedAttempts(*found) for found in report.failures] if report else [],
        paused=paused,
        slow=[slow_sentence(nodes, *found) for found in report.slow] if report else [],
        notices=notices,
        waiting_for_room=report.waiting_for_room if report else 0,
        recomputed_tokens=report.recomputed_tokens if report else 0,
        evicted_tokens=report.evicted_tokens if report else 0,
    )


def slow_sentence(nodes: Mapping[int, NodeFacts], engine: str, rank: int, ratio: float, since: float) -> str:
    """One slow engine; local time of day, as in the log files."""
    began = time.strftime("%H:%M", time.localtime(since))
    node = f" ({nodes[rank].host})" if rank in nodes and nodes[rank].host else ""
    return f"engine {engine}{node} takes {ratio:.1f}x its class' time per step since {began}"


def _node(
    context: AgentContext, pool: states.Pool | None, rank: int, facts: NodeFacts, over: bool, now: float
) -> NodeStatus:
    component = context.layout.components[rank]
    role = component if pool is None or component == "planner" else str(pool.nodes[rank].state)
    if over and role != "lost":
        return NodeStatus(rank, facts.host, component, "ended", engines={}, version=-1, heartbeat_age_s=0.0)
    beat = facts.beat
    return NodeStatus(
        rank,
        facts.host,
        component,
        role,
        engines=beat.engines if beat else {},
        version=beat.version if beat else -1,
        heartbeat_age_s=max(0.0, now - facts.seen),
    )
