"""Keys of a run file that can do nothing beside its other keys: refused, or worth a warning.

A value that is the default counts as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from libra_hpc.config.job import LimitsSection
from libra_hpc.config.learn import AGENT, GYM, VERIFIERS
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid

Rows = Mapping[str, tuple[Callable[[RunConfig], object], str, str]]
"""By key: when it does nothing, why, and what is valid. Texts may name values of the run: ``{c.run.steps}``."""


def _kinds(config: RunConfig) -> set[str]:
    """What the tasks are: ``data``, `AGENT`, `VERIFIERS`, `GYM`, or a class of a file, which may be anything."""
    return {name.partition(":")[0] for name, _ in config.task.tables.values()}


def _without_agent(config: RunConfig) -> bool:
    return _kinds(config) <= {"data", GYM}


def _without_kl(config: RunConfig) -> bool:
    return not config.algorithm.kl_coef and not config.algorithm.has_reference


def _stays(config: RunConfig) -> bool:
    """Whether no node can change its role."""
    return not (config.planner.enabled and (config.components.hybrid.nodes or config.components.train.roll_out))


AN_AGENT = "a task.command or task.agent"
KL = "algorithm.kl_coef or algorithm.reference_kl_coef above 0"
REFUSED: Rows = {
    "components.env.nodes": (
        lambda c: c.components.one_node,
        "components.one_node = true has all agents on one node, and its environments are there",
        "0",
    ),
    "components.env.gpus": (lambda c: c.components.env.nodes, "environment nodes have no engines", "0"),
    "algorithm.advantage": (
        lambda c: c.algorithm.advantage == "none" and _without_kl(c),
        "nothing is trained",
        "another, or algorithm.reference_kl_coef > 0",
    ),
    "algorithm.kl": (
        lambda c: c.algorithm.kl == "k1" and c.algorithm.kl_in == "loss" and not _without_kl(c),
        "the mean of its gradient is 0",
        'k2, k3, or algorithm.kl_in = "reward"',
    ),
    "algorithm.minibatches": (
        lambda c: c.algorithm.minibatches > c.algorithm.prompts_per_step,
        "a minibatch has at least one of algorithm.prompts_per_step = {c.algorithm.prompts_per_step} whole groups",
        "1 to {c.algorithm.prompts_per_step}",
    ),
    "planner.fewer_after_s": (
        lambda c: c.planner.fewer_nodes == "never",
        'planner.fewer_nodes = "never" waits for every node',
        'no such key, or planner.fewer_nodes = "auto"',
    ),
    "optimizer.decay_steps": (
        lambda c: c.optimizer.decay == "none",
        'optimizer.decay = "none", so nothing decays',
        '0, or optimizer.decay = "linear" or "cosine"',
    ),
    "optimizer.warmup_steps": (
        lambda c: c.optimizer.decay == "none" and c.optimizer.warmup_steps > c.updates,
        "the run has {c.updates} updates, and would never reach optimizer.lr",
        "0 to {c.updates}",
    ),
}
"""Whoever gives these waits for an effect that cannot come."""
IDLE: Rows = {
    "algorithm.kl": (_without_kl, "no KL term has a weight", KL),
    "algorithm.kl_in": (_without_kl, "no KL term has a weight", KL),
    "algorithm.reference": (
        lambda c: not c.algorithm.has_reference,
        "its KL term has no weight",
        "algorithm.reference_kl_coef above 0",
    ),
    "algorithm.refill_batches": (lambda c: not c.algorithm.refill, "no group is replaced", "algorithm.refill = true"),
    "rollout.max_num_seqs": (
        lambda c: c.rollout.slots > c.rollout.most_inflight,
        "an engine has at most rollout.max_inflight = {c.rollout.most_inflight} turns",
        "a larger rollout.max_inflight",
    ),
    "planner.time_sharing": (_stays, "no node may change its role", "hybrid nodes, and planner.enabled = true"),
    "planner.hybrid_start": (
        lambda c: not c.components.hybrid.nodes,
        "there are no hybrid nodes",
        "components.hybrid.nodes above 0",
    ),
    "planner.repartition": (lambda c: not c.planner.enabled, "nothing is planned", "planner.enabled = true"),
    "components.env.nodes": (_without_agent, "no task has an agent, so they run rewards and tools alone", AN_AGENT),
    "components.env.seats": (
        lambda c: not c.components.env.nodes,
        "there are no environment nodes",
        "components.env.nodes above 0",
    ),
    "chat.thinking": (lambda c: _kinds(c) <= {"data"}, "no task is a chat", "a ChatTask or an agent"),
    "chat.max_bad_calls": (lambda c: _kinds(c) <= {"data", VERIFIERS, AGENT}, "no task is a chat", "a ChatTask"),
    **{
        f"env.{key}": (_without_agent, "no task has an agent, so none has a box", AN_AGENT)
        for key in (
            *("sandbox", "box", "mounts", "network", "unenforced"),
            *(f"limits.{limit}" for limit in LimitsSection.__struct_fields__),
        )
    },
    **{
        f"borrow.{key}": (lambda c: not c.borrow.lenders, "nothing is borrowed", "borrow.lenders")
        for key in ("most_gpus", "least_gain_s")
    },
    **{
        f"borrow.spot.{key}": (
            lambda c: not c.borrow.spot.nodes and c.planner.fewer_nodes == "never",
            "no job is queued",
            "borrow.spot.nodes above 0",
        )
        for key in ("partition", "qos", "time_limit")
    },
    **{
        f"track.wandb.{key}": (lambda c: not c.track.wandb.project, "nothing is tracked", "track.wandb.project")
        for key in ("entity", "mode")
    },
}
"""A study may vary what makes these idle, so they are a warning."""


def idle_keys(config: RunConfig, rows: Rows = REFUSED) -> Iterator[UserError]:
    """A sentence for each key that does nothing in this configuration."""
    for key, (when, why, valid) in rows.items():
        value, left_out = map(attrgetter(key), (config, RunConfig()))
        if value != left_out and when(config):
            yield invalid(key, value, why.format(c=config), valid.format(c=config))
