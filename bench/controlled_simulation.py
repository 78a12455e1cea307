"""A simulation whose engines come and go: a controller, called every few seconds, drains and joins them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings, Training
from libra_hpc.simulator.simulate import Simulation
from libra_hpc.simulator.simulated_trajectory import SentTurn, SimulatedTrajectory

Controller = Callable[["ControlledSimulation", float], None]


class ControlledSimulation(Simulation):
    """Calls ``controller(simulation, now)`` every ``controller_s`` simulated seconds."""

    def __init__(
        self,
        work: Sequence[TrajectoryRecord],
        engines: Sequence[EngineSpec],
        policy: Policy,
        settings: SimulationSettings,
        *,
        training: Training | None = None,
        controller: Controller,
        controller_s: float = 5.0,
    ) -> None:
        self._leaving: dict[str, Callable[[], None]] = {}
        self._joining, self._held = 0, False
        self.ended: list[tuple[float, SimulatedTrajectory]] = []
        """When each trajectory ended."""
        super().__init__(work, engines, policy, settings, training)
        self._controller, self._controller_s = controller, controller_s
        self._at(controller_s, self._control, None)

    def drain(self, name: str, then: Callable[[], None]) -> None:
        """An engine gets no more turns and leaves when its last one has ended; ``then`` is called at that moment."""
        self.board.set_open(name, False)
        self._leaving[name] = then
        self._maybe_gone(name)

    def join(self, spec: EngineSpec, delay_s: float = 0.0) -> None:
        """A new engine accepts turns after a delay, with the newest weights."""
        self._joining += 1
        self._at(self.now + delay_s, self._joined, spec)

    def hold_training(self, held: bool) -> None:
        """Begin no further training step until it is called again."""
        self._held = held
        self._train()

    def open_trajectories(self) -> list[SimulatedTrajectory]:
        """Trajectories that started and have not ended, in order of admission."""
        return [one for one in self._trajectories.values() if one.place not in ("", "done")]

    def running(self) -> dict[str, int]:
        """Tokens so far of the turns at engines, by trajectory."""
        return {name: sent.request.generated for name, sent in self._sent.items()}

    def _control(self, _: None) -> None:
        self._controller(self, self.now)
        self._check_stall()
        self._at(self.now + self._controller_s, self._control, None)

    def _maybe_gone(self, name: str) -> None:
        if self.board.engines[name].inflight:
            return
        then = self._leaving.pop(name)
        self._agents.down(name)
        self._applied()
        then()

    def _joined(self, spec: EngineSpec) -> None:
        self._joining -= 1
        self._active_at = self.now
        self._agents.up(spec, self.training.version)
        self._kick()

    def _answered(self, sent: SentTurn) -> None:
        if sent.engine.name in self._leaving:
            self._maybe_gone(sent.engine.name)
        super()._answered(sent)

    def _end(self, trajectory: SimulatedTrajectory) -> None:
        self.ended.append((self.now, trajectory))
        super()._end(trajectory)

    def _applied(self) -> None:
        if self.engines:
            super()._applied()

    def _train(self) -> None:
        if not self._held:
            super()._train()

    def _progresses(self) -> bool:
        return bool(self._joining) or super()._progresses()
