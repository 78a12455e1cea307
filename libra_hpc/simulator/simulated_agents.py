"""What the node agents are in a live run: turns go to simulated engines, answers and load reports come back.

Engines apply weights here too.  `Simulation` receives answers, new weights and free slots by callbacks.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_hpc.errors import OperationError
from libra_hpc.models.devices import blocks_of
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest

from .event_queue import STEP, Events
from .result import Recorder
from .settings import EngineSpec, SimulationSettings
from .simulated_trajectory import SentTurn, SimulatedTrajectory


class Agents:
    """The engines of a simulation and the turns in flight.

    Callbacks: ``answered(sent)`` for every turn that ends, ``applied()`` when an engine has new weights, ``freed()``
    when a report frees a slot.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        board: Board,
        recorder: Recorder,
        events: Events,
        answered: Callable[[SentTurn], None],
        applied: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self._settings, self._board, self._recorder, self._events = settings, board, recorder, events
        self._answered, self._applied, self._freed = answered, applied, freed
        self._at = events.at
        self._count = 0
        self._requests: dict[SimulatedRequest, SentTurn] = {}

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def up(self, spec: EngineSpec, version: int) -> Engine:
        self._count += 1
        engine = Engine(
            name=spec.name,
            tp=spec.tp,
            steps=spec.steps,
            settings=self._settings,
            number=self._count,
            version=version,
            now=self._events.now,
        )
        self.engines[spec.name] = engine
        self._board.up(
            spec.name, tp=spec.tp, kv_capacity=engine.blocks * self._settings.block_size, version=engine.version
        )
        return engine

    def down(self, name: str) -> None:
        """An engine is gone; it has no turn that is not answered."""
        self._board.down(name)
        engine = self.engines.pop(name)
        self._recorder.gone(engine, self._events.now)
        self._events.drop(self._step, argument=engine)

    def send(self, trajectory: SimulatedTrajectory, turn: TurnView, decision: Decision) -> SentTurn:
        """Send a routed turn to its engine; raises `OperationError` when no engine can hold it to its end."""
        recorder, settings = self._recorder, self._settings
        engine = self._holder(turn, trajectory.left, decision.engine)
        again = "restart" if not turn.engine else "move"
        if turn.engine == engine.name:
            again = "eviction" if trajectory.version == engine.version else "swap"
        elif turn.engine:
            recorder.moves += 1
        later = f"/{trajectory.name}/{trajectory.sample}" if trajectory.sample else ""
        request = SimulatedRequest(
            trajectory=trajectory.name + later,
            prompt=turn.prompt_id + later,
            prompt_blocks=0 if later else trajectory.shared // settings.block_size,
            tokens=turn.context_tokens,
            left=trajectory.left,
            priority=decision.priority,
            high=trajectory.high,
            again=again,
        )
        trajectory.engine, trajectory.place = engine.name, "engine"
        sent = SentTurn(trajectory=trajectory, turn=turn, engine=engine, request=request)
        self._requests[request] = sent
        if settings.send_s > 0.0:
            self._at(self._events.now + settings.send_s, self._arrive, sent)
        else:
            self._arrive(sent)
        return sent

    def _holder(self, turn: TurnView, new: int, name: str) -> Engine:
        """The chosen engine if it can hold the turn to its end, else the able one with the fewest tokens in flight."""
        chosen = self.engines[name]
        need = blocks_of(turn.context_tokens + new, self._settings.block_size)
        if need <= chosen.blocks:
            return chosen
        able = [view for view in self._board.engines.values() if view.open and self.engines[view.engine].blocks >= need]
        if not able:
            raise OperationError(
                f"No engine that is left can hold a turn of {turn.context_tokens + new} tokens (trajectory"
                f" {turn.trajectory})."
            )
        best = min(able, key=lambda view: (view.inflight_tokens, view.engine))
        self._board.answered(name, turn.context_tokens)
        self._board.sent(best.engine, turn.context_tokens)
        return self.engines[best.engine]

    def abort(self, sent: SentTurn) -> None:
        """Abort a turn at its engine; it is answered with what was generated."""
        if sent.request.aborted:
            return
        sent.request.aborted = True
        if sent.request.serial:
            self._act(sent.engine, sent.engine.abort, sent.request)

    def swap(self, version: int) -> None:
        settings = self._settings
        for engine in self.engines.values():
            self._act(engine, engine.swap, version, settings.sync_s + settings.update.pause_s / engine.tp)

    def _act(self, engine: Engine, act: Callable[..., None], *arguments: object) -> None:
        before = engine.next_at
        act(*arguments, self._events.now)
        self._wake(engine, before)

    def _wake(self, engine: Engine, before: float) -> None:
        at = engine.next_at
        if at != before and at != IDLE:
            self._at(at, self._step, engine, rank=STEP, number=engine.number)

    def _arrive(self, sent: SentTurn) -> None:
        if sent.request.aborted:
            self._answer(sent)
            return
        self._act(sent.engine, sent.engine.submit, sent.request)

    def _step(self, engine: Engine) -> None:
        now, board = self._events.now, self._board
        if engine.next_at != now:
            return
        version = engine.version
        done = engine.advance(now)
        # The event of the boundary just passed is used up.
        self._wake(engine, IDLE)
        for request in done:
            sent = self._requests[request]
            sent.trajectory.version = engine.version
            if self._settings.answer_s > 0.0:
                self._at(now + self._settings.answer_s, self._answer, sent)
            else:
                self._answer(sent)
        if engine.version != version:
            board.applied(engine.name, engine.version)
            self._applied()
        stats = engine.report(now)
        if stats is not None:
            free = board.free
            board.report(engine.name, stats)
            if board.free > free:
                self._freed()

    def _answer(self, sent: SentTurn) -> None:
        del self._requests[sent.request]
        self._board.answered(sent.engine.name, sent.turn.context_tokens)
        self._answered(sent)
