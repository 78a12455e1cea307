"""The planner's snapshot of a simulated run: the same facts, gathered as on rank 0 of a live run.

- Trajectories come from the policy's `finished` calls, steps from the training stage.
- Step costs come from the engines' counters.
"""

from __future__ import annotations

from collections import deque

from bench.controlled_simulation import ControlledSimulation
from bench.replan_pool import ReplanPool, StepTruth
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.measured_steps import MeasuredSteps
from libra_hpc.policies.scheduling.protocol import Decision, Finished, Policy, TurnView
from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, TrainStepFact, TrajectoryFact

STEPS, TRAJECTORIES = 256, 4096


class Watched:
    """A policy whose routed turns and finished trajectories are recorded."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name = policy, policy.name
        self.trajectories: deque[TrajectoryFact] = deque(maxlen=TRAJECTORIES)
        self._count = 0
        self._sent: dict[str, float] = {}
        self._prompts: dict[str, int] = {}
        self._places: dict[str, int] = {}

    def place(self, prompt_id: str) -> int:
        """Index of a group in the order of admission."""
        return self._places.setdefault(prompt_id, len(self._places))

    def groups(self, sim: ControlledSimulation, decode_s: float) -> tuple[GroupFact, ...]:
        """Admitted, unfinished groups; a running turn counts a token every ``decode_s`` seconds since it was sent."""
        found: dict[int, list[int]] = {}
        for run in sim.open_trajectories():
            group = found.setdefault(
                self.place(run.spec.prompt_id), [run.shared + run.spec.turns[0].new_tokens, 0, 0, 0]
            )
            if run.turn == 0 and run.place == "queue":
                group[1] += 1
                continue
            group[2] += 1
            turn = (sim.now - self._sent[run.name]) / decode_s if run.place == "engine" and decode_s > 0.0 else 0.0
            group[3] += run.attained + int(turn)
        return tuple(GroupFact(index, *values) for index, values in sorted(found.items()))

    def key(self, turn: TurnView, now: float) -> float:
        return self._policy.key(turn, now)

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        decision = self._policy.route(turn, board, now)
        if decision.engine:
            self._sent[turn.trajectory] = now
            self._prompts.setdefault(turn.trajectory, turn.context_tokens)
        return decision

    def finished(self, record: Finished, now: float) -> None:
        tools = sum(signal.seconds for signal in record.signals)
        del self._sent[record.trajectory]
        place, prompt = self.place(record.prompt_id), self._prompts.pop(record.trajectory)
        self.trajectories.append(
            TrajectoryFact(
                index=self._count,
                at=now,
                generated=record.generated_tokens,
                context=record.context_tokens,
                turns=record.turns,
                tool_s=tools,
                group=place,
                prompt=prompt,
            )
        )
        self._count += 1
        self._policy.finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._policy.forget(trajectory)


class View:
    """The planner's view; call `look` at regular times."""

    def __init__(self, pool: ReplanPool, watched: Watched, truth: StepTruth, steps: int) -> None:
        self._pool, self._watched, self._truth, self._total = pool, watched, truth, steps
        self._busy: dict[str, tuple[float, int]] = {}
        self._decode_s = 0.0
        self._measured = MeasuredSteps()

    def look(self, sim: ControlledSimulation) -> None:
        """Read the engines' counters."""
        now = {}
        for name in self._pool.serving():
            if name in sim.engines:
                engine, counted = sim.engines[name], sim.engines[name].counters
                self._measured.observe(name, engine.tp, sim.board.engines[name].kv_capacity, engine.snapshot())
                now[name] = counted.busy_s, counted.steps
        before = [self._busy.get(name, (0.0, 0)) for name in now]
        busy_s, steps = (sum(one[i] for one in now.values()) - sum(one[i] for one in before) for i in range(2))
        self._busy, self._decode_s = now, busy_s / steps if steps else 0.0

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
            trajectories=tuple(self._watched.trajectories),
            switches=tuple(pool.switches[-32:]),
            prompts_per_step=site.prompts,
            group_size=site.group,
            eta=site.eta,
            steps_left=self._total - len(done),
            groups=self._watched.groups(sim, self._decode_s),
            step_costs=self._measured.costs(),
        )
