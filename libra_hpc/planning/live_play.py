"""Seconds of a batch of a running job at another split: the simulator plays the coming work on measured step costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from random import Random
from statistics import fmean

from msgspec.structs import replace

from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.step_times.measured import Fit, MeasuredTimes
from libra_hpc.models.train_seconds import portion
from libra_hpc.policies.control.plays import PlayWork, State
from libra_hpc.policies.scheduling.costs import scaled_costs
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.play import Play
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.traces.cut import cut_at


class LivePlay:
    """Plays with the engines of the last nodes, which roll out the longest.

    ``engines``: (TP, engines) of each node that may roll out, in rank order; one entry stands for all of them.
    ``core``: the layout of training where groups are trained as soon as they are complete; None: batches are trained
    whole.
    """

    def __init__(
        self,
        engines: Sequence[tuple[int, int]],
        policy: str,
        settings: SimulationSettings,
        core: TrainLayout | None = None,
    ) -> None:
        self._engines, self._policy, self._settings, self._core = engines, policy, settings, core

    def __call__(self, work: PlayWork, state: State) -> Play:
        """The play of a state. Raises as `Play` does, where no engine holds a trajectory."""
        settings = replace(
            self._settings,
            batch_groups=work.groups,
            eta=work.eta,
            train_nodes=state.train,
            portion_groups=0 if state.in_turn or self._core is None else _portion(work, self._core),
            switch_s=work.switches_s if state.in_turn else None,
        )
        # What is expected of open trajectories knows no limit.
        records = cut_at(work.records, settings.max_model_len).trajectories if settings.max_model_len else work.records
        groups = [list(members) for _, members in groupby(records, key=lambda record: record.prompt_id)]

        def coming(part: int, batches: int) -> list[TrajectoryRecord]:
            """Coming groups, drawn with replacement: batches scatter as much as they are known."""
            return [
                replace(one, prompt_id=f"{part}/{n}")
                for n, group in enumerate(Random(f"{part}").choices(groups, k=batches * work.groups))
                for one in group
            ]

        engines = self._of(state.rollout + state.lent, work.costs)
        return Play(coming, engines, self._policy, settings, work.train_seconds)

    def _of(self, nodes: int, costs: Sequence[StepCosts]) -> list[EngineSpec]:
        each = self._engines
        last = tuple(each) * nodes if len(each) == 1 else each[max(0, len(each) - nodes) :]
        return [
            EngineSpec(f"{node}.{number}", tp, as_measured(costs_of(tp, costs)))
            for node, (tp, engines) in enumerate(last)
            for number in range(engines)
        ]


def costs_of(tp: int, costs: Sequence[StepCosts]) -> StepCosts:
    """Costs of a TP degree; of one that was not measured from the nearest."""
    near = min(costs, key=lambda one: max(one.tp / tp, tp / one.tp))
    scaled = scaled_costs((near.base_s, near.token_s, near.prefill_s), near.tp, tp)
    return StepCosts(tp, near.kv_tokens * tp // near.tp, *scaled)


def as_measured(costs: StepCosts) -> MeasuredTimes:
    """Step times of an engine as the run measured them."""
    fit = Fit(base=costs.base_s, per_sequence=0.0, per_kv=costs.token_s, per_prefill=costs.prefill_s, per_pair=0.0)
    return MeasuredTimes(fit, costs.tp, costs.kv_tokens, "measured while the run goes on")


def _portion(work: PlayWork, core: TrainLayout) -> int:
    """Groups that are trained together."""
    groups = len({record.prompt_id for record in work.records})
    found = ceil(portion(core, fmean(record.context for record in work.records)) * groups / len(work.records))
    return found if 2 * found <= work.groups else 0
