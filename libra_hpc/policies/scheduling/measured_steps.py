"""Step costs of the run's own engines for the planner: the fit of `costs` over long windows of an engine.

The board has short windows, so that it sees a slow engine within seconds. Tokens count where their prefill ends: over
windows of 16 steps, prefill comes out 1.6 to 4 times too cheap.
"""

from __future__ import annotations

from libra_hpc.protocol.engine_state import EngineStats, StepCosts

from .costs import ClassFit, EngineFit, default_costs

WINDOW_S = 30.0
"""Busy seconds of a window, tens of prefills. Half: prefill comes out too cheap; double: less is known at the start."""
WINDOW_STEPS = 1024
"""Steps that are a window, too: a small model or a dry run does them in seconds."""


class MeasuredSteps:
    """`observe` takes the reports of all own engines."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[EngineFit, list[float]]] = {}
        self._classes: dict[int, tuple[ClassFit, int]] = {}
        """Fit and KV capacity, by TP."""

    def observe(self, engine: str, tp: int, kv_tokens: int, stats: EngineStats) -> None:
        """Take a report; a window is added once it is long enough."""
        fit, sums = self._engines.setdefault(engine, (EngineFit(), [0.0] * 4))
        window = fit.observe(stats, kv_tokens, 1)
        if window is None:
            return
        for index, value in enumerate(window):
            sums[index] += value
        if sums[0] >= WINDOW_S or sums[1] >= WINDOW_STEPS:
            known = self._classes.get(tp, (ClassFit(), 0))[0]
            known.add((sums[0], sums[1], sums[2], sums[3]), 1.0)
            self._classes[tp] = known, kv_tokens
            sums[:] = [0.0] * 4

    def lost(self, engine: str) -> None:
        self._engines.pop(engine, None)

    def costs(self) -> tuple[StepCosts, ...]:
        """Costs of every TP degree that was measured."""
        return tuple(
            StepCosts(tp, kv_tokens, *fit.solve(default_costs(tp, kv_tokens)))
            for tp, (fit, kv_tokens) in sorted(self._classes.items())
        )
