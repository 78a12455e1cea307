"""The planner's snapshot of a simulated run: the same facts, gathered as on rank 0 of a live run.

- Trajectories and running turns come from the simulation, steps from the training stage.
- Step costs come from the engines' counters.
"""

from __future__ import annotations

from msgspec.structs import replace

from bench.controlled_simulation import ControlledSimulation
from bench.replan_pool import ReplanPool, StepTruth
from libra_hpc.policies.scheduling.measured_steps import MeasuredSteps
from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, TrainStepFact, TrajectoryFact

STEPS, TRAJECTORIES = 256, 4096


class View:
    """The planner's view; call `look` at regular times."""

    def __init__(self, pool: ReplanPool, truth: StepTruth, steps: int) -> None:
        self._pool, self._truth, self._total = pool, truth, steps
        self._places: dict[str, int] = {}
        self._ended: list[TrajectoryFact] = []
        self._measured = MeasuredSteps()

    def look(self, sim: ControlledSimulation) -> None:
        """Read the engines' counters, and which trajectories have ended."""
        for name in self._pool.serving():
            if name in sim.engines:
                engine = sim.engines[name]
                self._measured.observe(name, engine.tp, sim.board.engines[name].kv_capacity, engine.snapshot())
        for at, one in sim.ended[len(self._ended) :]:
            fact = TrajectoryFact(
                index=len(self._ended),
                at=at,
                generated=one.attained,
                context=one.context,
                turns=one.turn,
                tool_s=sum(turn.tool_s for turn in one.spec.turns),
                group=self._place(one.spec.prompt_id),
                prompt=one.spec.prompt_tokens + one.spec.turns[0].new_tokens,
            )
            self._ended.append(fact)

    def snapshot(self, sim: ControlledSimulation) -> PlanSnapshot:
        site, pool = self._pool.site, self._pool
        done = [s for s in sim.training.steps if s.end_at > 0.0]
        first = max(0, len(done) - STEPS)
        steps = tuple(
            TrainStepFact(at=s.end_at, tokens=s.tokens, nodes=nodes, seconds=s.end_at - s.start_at)
            for s, nodes in zip(done[first:], self._truth.train_nodes[first : len(done)], strict=True)
        )
        return PlanSnapshot(
            nodes=tuple(pool.nodes),
            steps=steps,
            trajectories=tuple(self._ended[-TRAJECTORIES:]),
            switches=tuple(pool.switches[-32:]),
            prompts_per_step=site.prompts,
            group_size=site.group,
            eta=site.eta,
            steps_left=self._total - len(done),
            groups=self._groups(sim),
            step_costs=tuple(
                replace(
                    one, **{name: site.believed * getattr(one, name) for name in ("base_s", "token_s", "prefill_s")}
                )
                for one in self._measured.costs()
            ),
        )

    def _place(self, prompt_id: str) -> int:
        """Index of a group in the order of admission."""
        return self._places.setdefault(prompt_id, len(self._places))

    def _groups(self, sim: ControlledSimulation) -> tuple[GroupFact, ...]:
        """Admitted, unfinished groups; a running turn has the tokens so far."""
        found: dict[int, list[int]] = {}
        running = sim.running()
        for one in sim.open_trajectories():
            prompt = one.spec.prompt_tokens + one.spec.turns[0].new_tokens
            group = found.setdefault(self._place(one.spec.prompt_id), [prompt, 0, 0, 0])
            if one.turn == 0 and one.place == "queue":
                group[1] += 1
            else:
                group[2] += 1
                group[3] += one.attained + running.get(one.name, 0)
        return tuple(GroupFact(index, *values) for index, values in sorted(found.items()))
