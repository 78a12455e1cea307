"""Keys of a run file that do nothing beside its other keys: refused where the run would be another one, else a warning.

A value that is the default counts as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from libra_hpc.config.job import LimitsSection
from libra_hpc.config.learn import AGENT, GYM, VERIFIERS
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid


class Idle(NamedTuple):
    """What makes a key do nothing, and with what it counts (``valid``); texts may name values: ``{c.run.steps}``."""

    key: str
    when: Callable[[RunConfig], bool]
    why: str
    valid: str
    refused: bool = False


def _kinds(config: RunConfig) -> set[str]:
    """What the tasks are: ``data``, `AGENT`, `VERIFIERS`, `GYM`, or a class of a file, which may be anything."""
    return {name.partition(":")[0] for name, _ in config.task.tables.values()}


def _without_agent(config: RunConfig) -> bool:
    return _kinds(config) <= {"data", GYM}


def _without_kl(config: RunConfig) -> bool:
    return not config.algorithm.kl_coef and not config.algorithm.has_reference


def _stays(config: RunConfig) -> bool:
    """Whether no node can change its role."""
    nodes = config.components.hybrid.nodes or config.components.train.roll_out or config.components.split == "auto"
    return not (config.planner.enabled and nodes)


AN_AGENT = "a task.command or task.agent"
KL = "algorithm.kl_coef or algorithm.reference_kl_coef above 0"
TRACE = "simulated.trace has the trajectories"
IDLE = (
    Idle(
        "optimizer.decay_steps",
        lambda c: c.optimizer.decay == "none",
        'optimizer.decay = "none", so nothing decays',
        '0, or optimizer.decay = "linear" or "cosine"',
        refused=True,
    ),
    Idle(
        "optimizer.warmup_steps",
        lambda c: c.optimizer.warmup_steps > c.updates,
        "the run has {c.updates} updates, and would never reach optimizer.lr",
        "0 to {c.updates}",
        refused=True,
    ),
    Idle(
        "algorithm.minibatches",
        lambda c: c.algorithm.minibatches > c.algorithm.prompts_per_step,
        "a minibatch has at least one of algorithm.prompts_per_step = {c.algorithm.prompts_per_step} whole groups",
        "1 to {c.algorithm.prompts_per_step}",
        refused=True,
    ),
    Idle("algorithm.kl", _without_kl, "no KL term has a weight", KL),
    Idle("algorithm.kl_in", _without_kl, "no KL term has a weight", KL),
    Idle(
        "algorithm.reference",
        lambda c: not c.algorithm.has_reference,
        "its KL term has no weight",
        "algorithm.reference_kl_coef above 0",
    ),
    Idle(
        "algorithm.refill_batches", lambda c: not c.algorithm.refill, "no group is replaced", "algorithm.refill = true"
    ),
    Idle(
        "rollout.max_num_seqs",
        lambda c: c.rollout.max_num_seqs > c.rollout.max_inflight,
        "an engine has at most rollout.max_inflight = {c.rollout.max_inflight} turns",
        "a larger rollout.max_inflight",
    ),
    Idle("rollout.weights_mb_s", lambda c: not c.rollout.weights_port, "no port is open", "a rollout.weights_port"),
    Idle("planner.time_sharing", _stays, "no node may change its role", "hybrid nodes, and planner.enabled = true"),
    Idle(
        "planner.hybrid_start",
        lambda c: c.components.split == "explicit" and not c.components.hybrid.nodes,
        "there are no hybrid nodes",
        "components.hybrid.nodes above 0",
    ),
    Idle("planner.repartition", lambda c: not c.planner.enabled, "nothing is planned", "planner.enabled = true"),
    Idle("borrow.most_gpus", lambda c: not c.borrow.lenders, "nothing is borrowed", "borrow.lenders"),
    Idle("borrow.least_gain_s", lambda c: not c.borrow.lenders, "nothing is borrowed", "borrow.lenders"),
    *(
        Idle(f"borrow.spot.{key}", lambda c: not c.borrow.spot.nodes, "no job is queued", "borrow.spot.nodes above 0")
        for key in ("partition", "qos", "time_limit")
    ),
    Idle("components.env.nodes", _without_agent, "no task has an agent, so they run rewards and tools alone", AN_AGENT),
    Idle(
        "components.env.seats",
        lambda c: not c.components.env.nodes,
        "there are no environment nodes",
        "components.env.nodes above 0",
    ),
    *(
        Idle(f"env.{key}", _without_agent, "no task has an agent, so none has a box", AN_AGENT)
        for key in (
            "sandbox",
            "box",
            "mounts",
            "network",
            *(f"limits.{key}" for key in LimitsSection.__struct_fields__),
        )
    ),
    Idle("chat.thinking", lambda c: _kinds(c) <= {"data", VERIFIERS}, "no task is a chat", "a ChatTask or an agent"),
    Idle("chat.max_bad_calls", lambda c: _kinds(c) <= {"data", AGENT, VERIFIERS}, "no task is a chat", "a ChatTask"),
    *(
        Idle(f"track.wandb.{key}", lambda c: not c.track.wandb.project, "nothing is tracked", "track.wandb.project")
        for key in ("entity", "mode")
    ),
    *(
        Idle(f"simulated.{key}", lambda c: bool(c.simulated.trace), TRACE, "no simulated.trace")
        for key in ("presets", "sibling", "outcome", "drift")
    ),
    Idle(
        "simulated.source",
        lambda c: bool(c.simulated.calibration),
        "simulated.calibration has the step times",
        "no simulated.calibration",
    ),
)
"""A study may vary what makes a key idle, so most rows are warnings."""


def idle_keys(config: RunConfig) -> Iterator[UserError]:
    """Keys whose user waits for an effect that cannot come."""
    for row, value in _idle(config):
        if row.refused:
            yield invalid(row.key, value, row.why.format(c=config), row.valid.format(c=config))


def idle_warnings(config: RunConfig) -> list[str]:
    """A warning for each of the others."""
    return [
        f"{row.key} = {value!r}: {row.why.format(c=config)}; it counts with {row.valid}"
        for row, value in _idle(config)
        if not row.refused
    ]


def _idle(config: RunConfig) -> Iterator[tuple[Idle, object]]:
    """Rows whose key does nothing in this configuration, and its value."""
    for row in IDLE:
        value, left_out = map(attrgetter(row.key), (config, RunConfig()))
        if value != left_out and row.when(config):
            yield row, value
