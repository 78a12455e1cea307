"""A device that a server and a borrowed engine share: one step at a time, the server's first.

- A request arrives -> the server waits for the end of the rollout step that has begun, and for no further one.
- The borrowed engine would begin a step -> the live gate (`policies.serving.step_gate`) decides with how many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.policies.serving.step_cost import StepWork
from libra_hpc.policies.serving.step_gate import GateLimits, StepGate
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest

from .event_queue import STEP, Events
from .serving_traffic import ServingRequest
from .settings import EngineSpec, SimulationSettings
from .simulated_agents import Agents

SERVER = STEP + 1
"""Rank of the server's events: a rollout step that ends at the same moment has ended."""
NEVER_S = 1e9
"""The server reports to nobody."""
CHANGED = Callable[[bool], None]
"""(whether the borrowed engine may step) -> None."""


class Served:
    """What users saw."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.tpot_s: list[float] = []
        """Mean seconds per token after the first one, by request."""


class _Open:
    def __init__(self, arrival: float) -> None:
        self.arrival, self.first = arrival, -1.0


class LentEngine:
    """The server of one lender, and the gate before its borrowed engine."""

    def __init__(
        self,
        spec: EngineSpec,
        limits: GateLimits,
        requests: Sequence[ServingRequest],
        *,
        settings: SimulationSettings,
        events: Events,
        agents: Agents,
        changed: CHANGED,
    ) -> None:
        self.served = Served()
        self.is_open = True
        self.engine: Engine | None = None
        self._events, self._requests, self._agents, self._changed = events, requests, agents, changed
        self._gate = StepGate(limits)
        limits_of_server = SimulationSettings(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            report_s=NEVER_S,
            max_stretch=settings.max_stretch,
        )
        self._server = Engine(
            name=f"{spec.name}-server",
            tp=spec.tp,
            steps=spec.steps,
            settings=limits_of_server,
            number=0,
            version=0,
            now=events.now,
        )
        self._open: dict[SimulatedRequest, _Open] = {}
        self._number = 0
        self._at = IDLE
        self._next_arrival()

    def lend(self, engine: Engine | None) -> None:
        """Lend the device to an engine, or to none."""
        self.engine = engine
        if engine is not None and self._requests:
            engine.before, engine.after = self._may, self._stepped

    # --- the borrowed engine

    def _may(self, now: float) -> int:
        assert self.engine is not None
        view = ServingView(written=now, served=len(self._open))
        return self._gate.decide(view, StepWork(*self.engine.work), now).tokens

    def _stepped(self, seconds: float) -> None:
        assert self.engine is not None
        self._gate.stepped(StepWork(*self.engine.work), seconds, self._events.now)

    def _set_open(self, is_open: bool) -> None:
        if is_open != self.is_open:
            self.is_open = is_open
            self._changed(is_open)

    # --- the server

    def _next_arrival(self) -> None:
        if self._number < len(self._requests):
            self._events.at(self._requests[self._number].at_s, self._arrive, None)

    def _arrive(self, _: None) -> None:
        now, request = self._events.now, self._requests[self._number]
        self._number += 1
        simulated = SimulatedRequest(
            trajectory=f"user-{self._number}",
            prompt=f"user-{self._number}",
            prompt_blocks=0,
            tokens=request.prompt_tokens,
            left=request.output_tokens,
        )
        idle = not self._open
        self._open[simulated] = _Open(now)
        self._server.submit(simulated, now)
        if idle:
            self._set_open(False)
            self._schedule(now if self.engine is None else self._agents.cut(self.engine))
        elif self._at != IDLE and self._server.next_at < self._at:
            self._schedule(self._server.next_at)
        self._next_arrival()

    def _schedule(self, at: float) -> None:
        self._at = at
        self._events.at(at, self._serve, at, rank=SERVER)

    def _serve(self, at: float) -> None:
        """A step of the server has ended, or the device is its own again."""
        if at != self._at:
            return
        now = self._events.now
        self._at = IDLE
        self._settle(now)
        if self._server.next_at != IDLE:
            self._schedule(self._server.next_at)
        else:
            self._set_open(True)
            if self.engine is not None:
                self._agents.offer(self.engine)

    def _settle(self, now: float) -> None:
        for ended in self._server.advance(now):
            self._got(self._open[ended], now)
            one = self._open.pop(ended)
            if ended.generated > 1:
                self.served.tpot_s.append((now - one.first) / (ended.generated - 1))
        for request, one in self._open.items():
            if request.generated:
                self._got(one, now)

    def _got(self, one: _Open, now: float) -> None:
        if one.first < 0.0:
            one.first = now
            self.served.ttft_s.append(now - one.arrival)
