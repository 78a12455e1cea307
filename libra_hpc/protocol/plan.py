"""Input and output of the planner: times (``at``, ``since``) and durations in seconds, lengths in tokens."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .engine_state import StepCosts

Action = Literal["hold", "to_train", "to_rollout", "time_share", "split", "repartition", "borrow", "give_back"]


class NodeFact(msgspec.Struct, frozen=True):
    rank: int
    component: str
    """``train`` | ``hybrid`` | ``rollout``; only hybrid nodes move, and those that share within a step."""
    role: str
    """Value of `libra_hpc.policies.pool.states.NodeState`; ``both``: in each stage for a part of every step."""
    since: float
    unit: int = -1
    """First rank of the nodes that it moves with; -1: it moves alone."""
    shares: bool = False
    """A train node that can serve both stages of a step (``components.train.roll_out``)."""


class TrainStepFact(msgspec.Struct, frozen=True):
    at: float
    tokens: int
    """Tokens that went through the model, summed over replicas."""
    nodes: int
    """Nodes that trained it."""
    seconds: float
    """The stage's own work: compute, reduce and optimizer of the slowest replica, without waits for data; and diff."""
    diff_s: float = 0.0
    """Seconds out of ``seconds`` for writing what changed in the weights, whatever the number of nodes."""


class TrajectoryFact(msgspec.Struct, array_like=True, frozen=True):
    index: int
    """Ordinal of finishing over the run, from 0."""
    at: float
    generated: int
    context: int
    """Tokens of the final context."""
    turns: int
    tool_s: float = -1.0
    """Seconds in tools over all turns; -1.0: not measured."""
    group: int = -1
    """Place of its group in the order of admission; -1: unknown."""
    prompt: int = 0
    """Tokens of its prompt; 0: unknown."""


class GroupFact(msgspec.Struct, array_like=True, frozen=True):
    """An admitted group that is not finished."""

    index: int
    """See `TrajectoryFact.group`."""
    prompt: int
    waiting: int
    """Trajectories that no engine has received yet."""
    running: int
    """Other unfinished trajectories."""
    generated: int
    """Tokens of ``running`` so far; turns in flight are estimated."""


class SwitchFact(msgspec.Struct, frozen=True):
    at: float
    direction: Literal["to_train", "to_rollout"]
    seconds: float
    """From the order until the node worked in its new role: lost node time."""


class OfferFact(msgspec.Struct, frozen=True):
    """A server that would lend to the run, or does."""

    name: str
    gpus: int
    nodes: float
    """Own nodes that its engines stand for, by the share of the time that its users leave."""
    lends: bool


class BorrowFact(msgspec.Struct, frozen=True):
    """Nodes that the run may queue for itself (``borrow.spot``), and servers that lend (``borrow.lenders``)."""

    most: int
    wanted: int
    """Nodes that it queues now."""
    since: float
    """When that number, or the servers, were decided."""
    start_s: float
    """From the start of borrowed engines until they serve; 0.0: not measured."""
    node_gpus: int = 1
    offers: tuple[OfferFact, ...] = ()
    taken: frozenset[str] = frozenset()
    """Servers that the run decided to borrow, also while their engines start."""
    most_gpus: int = 0
    """Most GPUs of servers; 0: no limit."""
    gpu_price_s: float = 0.0
    """Seconds that each borrowed GPU must save beside its start."""


class PlanSnapshot(msgspec.Struct, frozen=True):
    """Input of one decision; lists are in order of time, possibly sliding windows."""

    nodes: tuple[NodeFact, ...]
    steps: tuple[TrainStepFact, ...]
    trajectories: tuple[TrajectoryFact, ...]
    switches: tuple[SwitchFact, ...]
    prompts_per_step: int
    """B: groups of one global batch."""
    group_size: int
    """Trajectories of one group, n."""
    eta: int
    """Staleness bound: with 0 the stages alternate, with more they overlap."""
    steps_left: int
    """Steps until the run ends: the horizon in which a move must pay."""
    groups: tuple[GroupFact, ...] = ()
    """Admitted unfinished groups, by index; empty: unknown."""
    sampled_groups: float = 1.0
    """Groups sampled for each one that is trained: more than 1 where groups of equal rewards are replaced."""
    borrow: BorrowFact | None = None
    lent: float = 0.0
    """Own nodes that the engines of guests stand for, lately."""
    step_costs: tuple[StepCosts, ...] = ()
    """Costs of the own engines, by TP degree; empty: not measured yet."""


class Candidate(msgspec.Struct, frozen=True):
    """A split that was evaluated; seconds are per global batch unless a field differs."""

    train: int
    rollout: int
    train_s: float
    rollout_s: float
    batch_s: float
    gain_s: float
    """Seconds saved over the horizon; may be negative."""
    needed_s: float
    """Seconds that it must save: switch cost times margin."""
    layout: str = ""
    """Training and rollout layout, when the split needs a repartition."""
    blocked: str = ""
    """Why it is impossible now, else empty."""


class PlanDecision(msgspec.Struct, frozen=True):
    """What to do now, and why."""

    action: Action
    """``repartition``: another layout of core nodes, at the next step boundary; ``time_share``: hybrid nodes serve both
    stages of every step; ``split``: they stay in one again, ``nodes`` in training; ``borrow``, ``give_back``: other
    `BorrowFact.wanted`, or other servers."""
    node: int
    """Rank that moves first; -1 for ``hold`` and ``repartition``."""
    reason: str
    """A sentence with the decisive numbers."""
    numbers: dict[str, float]
    """Inputs of the decision; seconds unless the name differs."""
    nodes: tuple[int, ...] = ()
    """All ranks that should move, ``node`` first; later decisions ask for those not moved yet."""
    candidates: tuple[Candidate, ...] = ()
    """The best five, best first."""
    triggers: tuple[str, ...] = ()
    """Why the plan was evaluated: ``start``, ``split``, ``drift``, ``offers``, ``period``."""
    layout: str = ""
    """With ``repartition``: the new training layout and rollout TP classes."""
    changes: dict[str, Any] = {}
    """With ``repartition``: the same by dotted keys of the run file; empty where nodes cannot change their component.
    """
    spot_nodes: int = 0
    """Nodes to queue, where offers were evaluated."""
    lenders: dict[str, tuple[float, float]] = {}
    """Seconds over the remaining steps that each offer of a server saves, and must save."""
