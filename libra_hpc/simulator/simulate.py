"""The simulator of the rollout stage: discrete events around the live policy, dispatcher, board and staleness gate.

This module is what the rollout leader and the coordinator are in a live run:

* the gate admits a group -> its trajectories start, as seats allow
* a turn is ready -> the policy routes it to an engine (`agents`); its answer goes to the tool; the next turn is ready
* a batch is complete -> it is trained (`training_stage`); then all engines apply new weights (`models.update_time`)
* nodes serve both stages in turn (``switch_s``), a batch is complete -> running turns are aborted, all nodes train it
  and further complete ones, then all roll out again: unfinished turns go on with the new weights
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from libra_hpc.errors import OperationError
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .event_queue import ROUTING, Events
from .result import Recorder, SimulationResult
from .settings import EngineSpec, SimulationSettings, Training, check
from .simulated_agents import Agents
from .simulated_trajectory import SentTurn, SimulatedTrajectory, grouped
from .training_stage import TrainingStage

STALLED_S = 3600.0
"""Simulated seconds that turns may wait with nothing running; after that the policy would wait for ever."""


class Simulation:
    """One simulated rollout stage.  Raises `UserError` for input that cannot be simulated."""

    def __init__(
        self,
        work: Sequence[TrajectoryRecord],
        engines: Sequence[EngineSpec],
        policy: Policy,
        settings: SimulationSettings,
        training: Training | None = None,
    ) -> None:
        check(work, engines, settings)
        self.settings = settings
        self.board = Board(settings.max_inflight)
        self.recorder = Recorder()
        self._policy = policy
        self._queue = Dispatcher(policy, self.board)
        self._groups = dict[str, list[SimulatedTrajectory]]()
        self._trajectories = dict[str, SimulatedTrajectory]()
        self.training = TrainingStage(settings, training)
        self._events = Events()
        self._at = self._events.at
        self._agents = Agents(
            settings=settings,
            board=self.board,
            recorder=self.recorder,
            events=self._events,
            answered=self._answered,
            applied=self._applied,
            freed=self._freed,
        )
        self.engines = self._agents.engines
        self._sent: dict[str, SentTurn] = {}
        self._routing = self._ticking = False
        self._active_at = 0.0
        self._unseated: deque[SimulatedTrajectory] = deque()
        """Admitted trajectories that wait for a seat."""
        self._seated = 0
        for spec in engines:
            self._agents.up(spec, self.training.version)
        self.add(work)

    def run(self) -> SimulationResult:
        """Simulate to the end.  Raises as `until` does."""
        self.until(inf)
        for engine in self.engines.values():
            self.recorder.gone(engine, self.now)
        return self.recorder.result(self._policy.name, self.now, self.training.steps)

    def until(self, version: float) -> None:
        """Simulate until so many steps were trained, or all. Raises `OperationError` when turns would wait for ever."""
        training, following = self.training, self._events.next
        while not training.done and training.version < version:
            if not following():
                raise self._stalled()

    def add(self, work: Sequence[TrajectoryRecord]) -> None:
        """Put trajectories of further groups behind all others."""
        groups = grouped(work, self.settings.seed)
        self._groups |= groups
        self._trajectories |= {one.name: one for trajectories in groups.values() for one in trajectories}
        self.training.add(groups)
        self._at(self.now, self._admit, None)

    @property
    def now(self) -> float:
        return self._events.now

    @property
    def busy_share(self) -> float:
        """Share of the engines' device-seconds so far with a step or a weight update."""
        return sum(engine.tp * engine.counters.busy_s for engine in self.engines.values()) / sum(
            engine.tp * (self.now - engine.up_at) for engine in self.engines.values()
        )

    # --- events

    def _kick(self) -> None:
        if not self._routing:
            self._routing = True
            self._at(self.now, self._route, None, rank=ROUTING)

    def _freed(self) -> None:
        if len(self._queue):
            self._kick()

    def _tick(self, _: None) -> None:
        self._ticking = False
        self._check_stall()
        self._kick()

    # --- trajectories

    def _admit(self, _: None = None) -> None:
        for group in self.training.admit():
            for trajectory in self._groups[group]:
                trajectory.opened_at = self.now
                self._unseated.append(trajectory)
        self._seat()

    def _seat(self) -> None:
        """Begin what has a seat, first come, first served."""
        while self._unseated and not 0 < self.settings.seats <= self._seated:
            self._seated += 1
            trajectory = self._unseated.popleft()
            self.recorder.seat_s += self.now - trajectory.opened_at
            self._ready(trajectory)

    def _ready(self, trajectory: SimulatedTrajectory) -> None:
        trajectory.ready(self.now)
        self._queue.ready(trajectory.view(self.settings), self.now)
        self._kick()

    def _route(self, _: None) -> None:
        self._routing = False
        now = self.now
        routed = self._queue.dispatch(now)
        for turn, decision in routed:
            view = self.board.engines[decision.engine]
            if not view.open or view.inflight > view.cap:
                raise ValueError(
                    f"policy {self._policy.name} sent {turn.trajectory} to {decision.engine}, which has no free slot"
                )
            self.recorder.decisions += 1
            self._sent[turn.trajectory] = self._agents.send(self._trajectories[turn.trajectory], turn, decision)
        if routed:
            self._active_at = now
        if len(self._queue) and self.board.free > 0 and not self._ticking:
            self._ticking = True
            self._at(now + self.settings.tick_s, self._tick, None)

    def _answered(self, sent: SentTurn) -> None:
        trajectory = sent.trajectory
        now = self._active_at = self.now
        self._freed()
        del self._sent[trajectory.name]
        if self.settings.switch_s is not None:
            self._train()
        if sent.request.left:
            trajectory.interrupted(sent.request.generated, sent.request.high, trajectory.version)
            self._ready(trajectory)
            return
        self.recorder.turn_s.append(now - trajectory.asked_at)
        tool_s = trajectory.answered(sent.request.high, trajectory.version)
        trajectory.place = "tool"
        after = self._end if trajectory.last else self._ready
        if tool_s > 0.0:
            self._at(now + tool_s, after, trajectory)
        else:
            after(trajectory)

    def _end(self, trajectory: SimulatedTrajectory) -> None:
        now, recorder = self.now, self.recorder
        trajectory.place = "done"
        self._seated -= 1
        self._seat()
        recorder.generated += trajectory.attained
        recorder.finish_s.append(now)
        recorder.completion_s.append(now - trajectory.opened_at)
        self._queue.finished(trajectory.finished(), now)
        self._kick()
        if self.training.close(trajectory.spec.prompt_id, now):
            self._train()
            self._admit()

    # --- training and engines

    def _train(self) -> None:
        if self.settings.switch_s is not None and not (self.training.due and self._nodes_free()):
            return
        seconds = self.training.begin(self.now)
        if seconds is not None:
            self._at(self.now + seconds + self.settings.update.diff_s, self._trained, None)

    def _trained(self, _: None) -> None:
        version = self.training.end(self.now)
        self._active_at = self.now
        update, switch_s = self.settings.update, self.settings.switch_s
        if switch_s is not None:
            self._at(self.now + switch_s, self._agents.swap, version)
            self._train()
            return
        # All engines get a version at the time of the slowest, which has the fewest GPUs.
        arrival_s = update.wire_s + update.stage_s / min((engine.tp for engine in self.engines.values()), default=1)
        if arrival_s > 0.0:
            self._at(self.now + arrival_s, self._agents.swap, version)
        else:
            self._agents.swap(version)
        self._train()

    def _nodes_free(self) -> bool:
        """Whether the nodes of all engines can train now; running turns are aborted, and no other ones begin."""
        self._events.drop(self._agents.swap)
        for name in self.engines:
            self.board.set_open(name, False)
        for sent in self._sent.values():
            self._agents.abort(sent)
        return not self._sent

    def _applied(self) -> None:
        version = min(engine.version for engine in self.engines.values())
        if self.settings.switch_s is not None and version == self.training.version and self.training.idle:
            for name in self.engines:
                self.board.set_open(name, True)
        self.training.applied(version)
        self._admit()
        self._kick()

    # --- stalls

    def _progresses(self) -> bool:
        if self._agents.in_flight or not self.training.idle:
            return True
        return any(trajectory.place == "tool" for trajectory in self._trajectories.values())

    def _check_stall(self) -> None:
        if self._progresses():
            self._active_at = self.now
        elif self.now - self._active_at > STALLED_S:
            raise self._stalled()

    def _stalled(self) -> OperationError:
        return OperationError(
            f"Policy {self._policy.name} leaves {len(self._queue)} turns waiting with {self.board.free} free slots and"
            " nothing running."
        )


def simulate(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policy: Policy,
    settings: SimulationSettings | None = None,
    training: Training | None = None,
) -> SimulationResult:
    """Simulate ``work`` on ``engines`` under ``policy``; raises as `Simulation` does."""
    return Simulation(work, engines, policy, settings or SimulationSettings(), training).run()
