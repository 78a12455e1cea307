"""What the planner sees and what it answers.  Plain structs; times are seconds of one clock (``at``, ``since``),
durations seconds, lengths tokens."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Action = Literal["hold", "to_train", "to_rollout", "repartition"]


class NodeFact(msgspec.Struct, frozen=True):
    """One node of the pool."""

    rank: int
    component: str
    """``train`` | ``hybrid`` | ``rollout``; only hybrid nodes ever move."""
    role: str
    """A `libra_hpc.runtime.states.NodeState` value: ``starting`` | ``train`` | ``to_rollout`` | ``rollout`` |
    ``to_train`` | ``lost``."""
    since: float
    """When it took this role."""


class TrainStepFact(msgspec.Struct, frozen=True):
    """One committed training step of one global batch."""

    at: float
    """When it was committed."""
    tokens: int
    """All tokens of the global batch that were trained on (forward and backward), summed over replicas."""
    loss_tokens: int
    """Those the policy generated."""
    replicas: int
    seconds: float
    """The stage's own work: compute, reduce and optimizer of the slowest replica, without waiting for data."""


class RolloutWindowFact(msgspec.Struct, frozen=True):
    """What the rollout nodes did in one window of time with an unchanged set of nodes."""

    at: float
    """End of the window."""
    seconds: float
    nodes: int
    """Rollout nodes that accepted turns all through the window."""
    generated_tokens: int
    """Summed over nodes."""
    prefilled_tokens: int
    """Computed, not taken from the prefix cache."""
    busy: float
    """Share of ``seconds * nodes`` in which an engine had work, 0..1."""
    decode_s: float = 0.0
    """Seconds per decoded token of one sequence; 0.0 when not measured."""


class TrajectoryFact(msgspec.Struct, frozen=True):
    """One finished trajectory."""

    index: int
    """Ordinal of finishing over the run, from 0: tells the planner which ones it has seen."""
    at: float
    generated: int
    context: int
    """Tokens of the whole context at the end."""
    turns: int
    tool_s: float = -1.0
    """Seconds in tools, all turns together; -1.0 when not measured."""
    group: int = -1
    """Place of its group in the order of admission; -1 when not known."""
    prompt: int = 0
    """Tokens of its first prompt; 0 when not known."""


class GroupFact(msgspec.Struct, frozen=True):
    """One admitted group that is not finished."""

    index: int
    """Place in the order of admission, as `TrajectoryFact.group`."""
    prompt: int
    """Tokens of the prompt."""
    waiting: int
    """Trajectories that no engine has seen yet."""
    running: int
    """Others that have not finished."""
    generated: int
    """Tokens of ``running`` so far; of the turns under way estimated, by their time and the engines' speed."""


class SwitchFact(msgspec.Struct, frozen=True):
    """One completed move of a node."""

    at: float
    direction: Literal["to_train", "to_rollout"]
    seconds: float
    """From the order until the node worked in its new role: node time that produced nothing."""


class QueueFact(msgspec.Struct, frozen=True):
    """How the two stages wait for each other, over the last looks."""

    ready_groups: int
    outstanding_groups: int
    trainer_wait: float
    """Share of the trainers' time spent waiting for a batch, 0..1."""
    gate_blocked: float
    """Share of time in which the staleness gate kept rollout from starting another group, 0..1."""


class PlanSnapshot(msgspec.Struct, frozen=True):
    """Everything one decision is made from.  Lists are in order of time and may be sliding windows; the planner
    skips what is too old to count."""

    nodes: tuple[NodeFact, ...]
    steps: tuple[TrainStepFact, ...]
    windows: tuple[RolloutWindowFact, ...]
    trajectories: tuple[TrajectoryFact, ...]
    switches: tuple[SwitchFact, ...]
    queue: QueueFact
    prompts_per_step: int
    """Groups of one global batch, B."""
    group_size: int
    """Trajectories of one group, n."""
    eta: int
    """Staleness bound; with 0 the stages take turns, with more they overlap."""
    steps_left: int
    """Steps until the run ends: a move must pay before that."""
    groups: tuple[GroupFact, ...] = ()
    """Admitted and not finished, by index; empty when not known."""


class Candidate(msgspec.Struct, frozen=True):
    """A split that was considered; seconds are those of one global batch unless said otherwise."""

    train: int
    """Nodes that train."""
    rollout: int
    train_s: float
    rollout_s: float
    batch_s: float
    gain_s: float
    """Seconds it saves over the horizon, at the unfavourable end of the measurement error; negative when it loses."""
    needed_s: float
    """Seconds it would have to save: switch cost times margin."""
    layout: str = ""
    """Training and rollout layout, when the core would be repartitioned."""
    blocked: str = ""
    """Why it is out of the question now, else empty."""


class PlanDecision(msgspec.Struct, frozen=True):
    """What to do now and why."""

    action: Action
    """``repartition``: another layout of core nodes, at the next step boundary."""
    node: int
    """Rank that moves first; -1 for ``hold`` and ``repartition``."""
    reason: str
    """A sentence with the numbers that decided."""
    numbers: dict[str, float]
    """The inputs: seconds unless the name says otherwise."""
    nodes: tuple[int, ...] = ()
    """All ranks that should move, ``node`` first.  Who moves one at a time may do so: the next looks ask for the
    rest."""
    candidates: tuple[Candidate, ...] = ()
    """The best five, best first."""
    triggers: tuple[str, ...] = ()
    """Why the plan was looked at: ``drift``, ``period``, ``queues``, ``imbalance``."""
    layout: str = ""
    """With ``repartition``: the training layout and the rollout TP classes to change to."""
    changes: dict[str, Any] = {}
    """With ``repartition``: dotted keys of the run file and their values, which say the same; empty where nodes
    cannot change places."""
