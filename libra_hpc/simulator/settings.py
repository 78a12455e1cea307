"""Settings of a simulation: engines, limits, training; and the check of settings and work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from libra_hpc.config.rollout import SLOTS
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, invalid
from libra_hpc.models.devices import STEP_TOKENS, blocks_of
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.models.update_time import NO_UPDATE, UpdateTime
from libra_hpc.protocol.trace import TrajectoryRecord

Training = Callable[[int, int], float]
"""(tokens of the batch, training nodes) -> seconds of one training step."""


class EngineSpec(msgspec.Struct, frozen=True):
    name: str
    tp: int
    steps: StepTimes


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and delays; the defaults are those of a run file, but for steps ahead, which are of step times too."""

    max_inflight: int = SLOTS * 3 // 2
    max_num_seqs: int = SLOTS
    max_num_batched_tokens: int = STEP_TOKENS
    """Most tokens of one engine step, decoded and prefilled; at least one a sequence."""
    async_steps: bool = False
    """Whether a batch is formed a step ahead: what arrives in a step takes part in the one after the next."""
    block_size: int = 32
    max_model_len: int = 0
    """Longest context in tokens, which policies see; 0: unknown, the engines' KV caches are the limit."""
    send_s: float = 0.002
    """Seconds from the routing of a turn to its arrival in the engine: two hops over TCP and a Unix socket."""
    answer_s: float = 0.002
    """Seconds from the last token to the start of the environment: the same hops back."""
    tick_s: float = 1.0
    """Interval at which waiting turns are routed again without any event, as the leader does with each report."""
    batch_groups: int = 0
    """Groups per training step; 0: everything starts at once and nothing is trained."""
    eta: int = 0
    max_open_groups: int = 0
    """Most groups sampled at once; 0: no bound but the staleness gate's."""
    seats: int = 0
    """Trajectories at once on environment nodes; admitted ones wait for a seat. 0: no bound."""
    train_s: float = 0.0
    """Seconds of a training step, unless a training function is given."""
    portion_groups: int = 0
    """With ``eta`` = 0: groups that are trained as soon as they are complete; 0: batches are trained whole."""
    train_nodes: int = 1
    sync_s: float = 0.0
    """Further pause of every engine for a weight update, between two steps."""
    update: UpdateTime = NO_UPDATE
    """From the end of a training step until engines have its weights."""
    keep_kv: bool = False
    """Whether KV caches outlive an update, as with ``rollout.kv_after_update = "keep"``; else it empties them, and
    running requests are computed again. No group finds the caches of another one, so there are no salts."""
    switch_s: float | None = None
    """The nodes of all engines serve both stages in turn: seconds from rollout to training, and back with the new
    weights. None: training has nodes of its own."""
    seed: int = 0
    """Order of the groups: 0 as given, else shuffled by this seed."""
    report_s: float = 0.5
    """Shortest time between two reports of a busy engine, as in a live run."""
    max_stretch: int = 1 << 30
    """Most decode steps of an unchanged batch in one event; 1 simulates step by step, with the same result."""


def run_settings(config: RunConfig) -> SimulationSettings:
    """Limits of a run's engines, and its batches."""
    rollout, algorithm = config.rollout, config.algorithm
    return SimulationSettings(
        max_inflight=rollout.most_inflight,
        max_num_seqs=rollout.slots,
        max_model_len=rollout.max_model_len,
        block_size=rollout.block_size,
        async_steps=config.steps_ahead,
        batch_groups=algorithm.prompts_per_step,
        eta=algorithm.eta,
        seats=config.components.env.all_seats,
        keep_kv=rollout.kv_after_update == "keep",
    )


def trajectory_ids(work: Sequence[TrajectoryRecord]) -> list[str]:
    """Names of the trajectories: ``prompt_id/sample``, with ``#2``, ``#3`` ... when the pair occurs again."""
    seen: dict[str, int] = {}
    names = []
    for spec in work:
        name = f"{spec.prompt_id}/{spec.sample}"
        count = seen[name] = seen.get(name, 0) + 1
        names.append(name if count == 1 else f"{name}#{count}")
    return names


def check(work: Sequence[TrajectoryRecord], engines: Sequence[EngineSpec], settings: SimulationSettings) -> None:
    """Raise `UserError` for what cannot be simulated.

    What the readers of traces and the options of `libra-hpc simulate` refuse is not looked for again.
    """
    if not work:
        raise UserError("The workload is empty: there is no trajectory to simulate.")
    if not engines:
        raise UserError("There is no engine to simulate.")
    for engine in engines:
        if engine.steps.kv_capacity < 2 * settings.block_size:
            raise invalid(
                f"engine {engine.name}: KV capacity",
                engine.steps.kv_capacity,
                "too small",
                f"at least 2 blocks of {settings.block_size} tokens",
            )
    room = max(engine.steps.kv_capacity // settings.block_size for engine in engines)
    for name, spec in zip(trajectory_ids(work), work, strict=True):
        if spec.prompt_tokens + spec.turns[0].new_tokens < 1:
            raise UserError(f"Trajectory {name} has an empty prompt.")
        if settings.max_model_len and spec.context > settings.max_model_len:
            raise UserError(
                f"Trajectory {name} is {spec.context} tokens long; max_model_len (`--max-context`) is"
                f" {settings.max_model_len}."
            )
        if blocks_of(spec.context, settings.block_size) > room:
            most = (room - 1) * settings.block_size
            raise UserError(
                f"Trajectory {name} is {spec.context} tokens long; the KV cache of the largest engine holds one of at"
                f" most {most}."
            )
