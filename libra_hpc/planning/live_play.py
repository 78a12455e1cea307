"""Seconds of a batch of a running job at another split: the simulator plays the coming work on measured step costs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean

from msgspec.structs import replace

from libra_hpc.policies.control.plays import PlayWork, State
from libra_hpc.policies.scheduling.costs import scaled_costs
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.simulator.play import play
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.traces.cut import cut_at


class MeasuredStepTimes:
    """`StepTimes` of an engine as the run measured them."""

    source = "measured while the run goes on"

    def __init__(self, costs: StepCosts) -> None:
        self.tp, self.kv_capacity, self._costs = costs.tp, costs.kv_tokens, costs

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Linear in the tokens, as they were fitted."""
        costs = self._costs
        return costs.base_s + costs.token_s * kv_tokens + costs.prefill_s * prefill


class LivePlay:
    """Plays with the engines of the last nodes, which roll out the longest.

    ``engines``: (TP, engines) of each node that may roll out, in rank order; one entry stands for all of them.
    ``packs``: micro-batches of ``micro_tokens`` that are trained as soon as they are complete; 0: batches are trained
    whole.
    """

    def __init__(
        self,
        engines: Sequence[tuple[int, int]],
        policy: str,
        settings: SimulationSettings,
        *,
        packs: int = 0,
        micro_tokens: int = 0,
    ) -> None:
        self._engines, self._policy, self._settings = engines, policy, settings
        self._packs, self._micro_tokens = packs, micro_tokens

    def __call__(self, work: PlayWork, state: State) -> tuple[float, float]:
        """Seconds of a batch and of its rollout. Raises as `play` does, where no engine holds a trajectory."""
        settings = replace(
            self._settings,
            batch_groups=work.groups,
            eta=work.eta,
            train_nodes=state.train,
            portion_groups=0 if state.in_turn else self._portion(work),
        )
        engines = self._of(state.rollout + state.lent, work.costs)
        # What is expected of open trajectories knows no limit.
        records = cut_at(work.records, settings.max_model_len).trajectories if settings.max_model_len else work.records
        played = play(records, engines, self._policy, settings, work.train_seconds)
        return played.batch_s, played.rollout_s

    def _portion(self, work: PlayWork) -> int:
        """Groups that are trained together (`TrainCost.portion`)."""
        mean = fmean(record.context for record in work.records)
        groups = len({record.prompt_id for record in work.records})
        trajectories = self._packs * max(1.0, self._micro_tokens / mean)
        portion = ceil(trajectories * groups / len(work.records))
        return portion if 2 * portion <= work.groups else 0

    def _of(self, nodes: int, costs: Sequence[StepCosts]) -> list[EngineSpec]:
        each = self._engines
        last = tuple(each) * nodes if len(each) == 1 else each[max(0, len(each) - nodes) :]
        return [
            EngineSpec(f"{node}.{number}", tp, MeasuredStepTimes(costs_of(tp, costs)))
            for node, (tp, count) in enumerate(last)
            for number in range(count)
        ]


def costs_of(tp: int, costs: Sequence[StepCosts]) -> StepCosts:
    """Costs of a TP degree; of one that was not measured from the nearest."""
    near = min(costs, key=lambda one: max(one.tp / tp, tp / one.tp))
    scaled = scaled_costs((near.base_s, near.token_s, near.prefill_s), near.tp, tp)
    return StepCosts(tp, near.kv_tokens * tp // near.tp, *scaled)
