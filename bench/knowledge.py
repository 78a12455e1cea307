"""What more information would bring: C-MLFQ with the true lengths from the k-th turn on, against the oracle.

Engines, batches and seeds are those of `bench.scheduling`; each policy starts without history.  The truth is the tokens
left and those that tools will add; not the seconds in tools, nor the engines.  Columns:

- ``0`` to ``10``: the truth from that turn on.  ``0`` minus 1 is what the decisions lose.
- ``its prompt``: from the start, the lognormal of the lengths of its prompt, but nothing of its own length.  Siblings
  cannot teach more.
- ``never``: the policy as it is.

    python -m bench.knowledge [--seeds 5] [--rows NAME|NAME] [--jobs 2]
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

from libra_hpc import compiled

# Before the scheduler is imported: compiled classes have no subclasses.
os.environ[compiled.INTERPRETED] = "1"

from bench.harness import by_row, interval, options, report, seeds
from bench.scheduling import BUCKETS, DEVICE, GPUS, MAX_CONTEXT, MODEL, work_of
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.cmlfq.remaining_work import REACH_FACTOR, Cursor, RemainingWorkEstimator
from libra_hpc.policies.scheduling.protocol import TurnView
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.compare import compare
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings, trajectory_ids
from libra_hpc.simulator.simulate import simulate

PROMPT = "its prompt"
FROM: dict[str, float] = {"0": 0, "1": 1, "4": 4, "10": 10, PROMPT: inf, "never": inf}
"""By column: finished turns from which the truth is used."""
NORMAL = NormalDist()
SHOWN = ("r2e, outcomes tell", "r2e, siblings alone tell", "search, outcomes tell", "math, siblings tell")


class Lognormal(NamedTuple):
    """A lognormal: mean and standard deviation of the natural logarithm."""

    mean: float
    deviation: float

    def left(self, attained: int) -> float:
        """Expected tokens left of a length above ``attained``."""
        if not attained:
            return exp(self.mean + 0.5 * self.deviation**2)
        beyond = (self.mean - log(attained)) / self.deviation
        if beyond < -6.0:
            return attained * self.deviation / -beyond
        return (
            exp(self.mean + 0.5 * self.deviation**2) * NORMAL.cdf(beyond + self.deviation) / NORMAL.cdf(beyond)
            - attained
        )


def lognormals(work: Sequence[TrajectoryRecord]) -> dict[str, Lognormal]:
    """The lognormal of every prompt; all have the same deviation."""
    groups: dict[str, list[float]] = {}
    for spec in work:
        groups.setdefault(spec.prompt_id, []).append(log(spec.generated))
    deviation = sqrt(fmean(variance(group) for group in groups.values()))
    return {prompt: Lognormal(fmean(group), deviation) for prompt, group in groups.items()}


class InformedEstimator(RemainingWorkEstimator):
    """Returns the truth once ``turns`` tools have answered, the usual estimates before."""

    def __init__(self, truth: Mapping[str, TrajectoryRecord], turns: float, known: Mapping[str, Lognormal]) -> None:
        super().__init__()
        self._truth, self._turns, self._lognormals = truth, turns, known
        self.names: dict[Cursor, str] = {}
        """The trajectory of each cursor."""

    def advance(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> float:
        """See `RemainingWorkEstimator.advance`."""
        super().advance(cursor, signals, attained, room)
        return self._use_truth(cursor, signals, attained, room, name=self.names.get(cursor, ""))

    def peek(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> Cursor:
        """See `RemainingWorkEstimator.ahead`."""
        middle = super().peek(cursor, signals, attained, room)
        self._use_truth(middle, signals, attained, room, name=self.names.get(cursor, ""))
        return middle

    def _use_truth(
        self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float, *, name: str
    ) -> float:
        if name and self._lognormals:
            left = self._lognormals[self._truth[name].prompt_id].left(attained)
            cursor.left, cursor.reach = (
                left * room / (left + room) if room < inf else left,
                min(REACH_FACTOR * left, room),
            )
        elif name and len(signals) >= self._turns:
            spec = self._truth[name]
            cursor.left = cursor.reach = max(1.0, float(spec.generated - attained))
            cursor.future = float(sum(turn.new_tokens for turn in spec.turns[len(signals) + 1 :]))
        return cursor.left


class Informed(CausalMlfq):
    """C-MLFQ with such an estimator."""

    def __init__(self, estimator: InformedEstimator) -> None:
        super().__init__(estimator)
        self._names = estimator.names

    def key(self, turn: TurnView, now: float) -> float:
        """See `CausalMlfq.key`."""
        if turn.trajectory not in self._tracked:
            self._names[self._track(turn).cursor] = turn.trajectory
        return super().key(turn, now)


def play(job: tuple[str, int]) -> dict[str, float]:
    """Makespans over the oracle's."""
    name, seed = job
    engines, settings = (
        build_engines(BUCKETS, GPUS, DEVICE, MODEL).engines,
        SimulationSettings(max_model_len=MAX_CONTEXT),
    )
    work = work_of(name, seed, 512)
    truth = dict(zip(trajectory_ids(work), work, strict=True))
    best = compare(work, engines, ["oracle"], settings)["oracle"].result.makespan_s
    estimators = {
        label: InformedEstimator(truth, turns, lognormals(work) if label == PROMPT else {})
        for label, turns in FROM.items()
    }
    return {
        label: simulate(work, engines, Informed(estimator), settings).makespan_s / best
        for label, estimator in estimators.items()
    }


def main() -> None:
    """Command line."""
    given = options("knowledge", __doc__, rows=SHOWN, seeds=5, jobs=2)
    jobs = [(name, seed) for name in given.rows for seed in seeds(given)]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = by_row(pool, play, jobs, lambda row: ", ".join(f"{label} {ratio:.3f}" for label, ratio in row.items()))
    rows = [[name, *(interval([row[label] for row in results]) for label in FROM)] for name, results in found.items()]
    notes = [
        "makespan over the oracle's, with the true lengths from the k-th turn on",
        f"{given.seeds} seeds, 512 trajectories, {GPUS} x {DEVICE}, {MODEL}, {BUCKETS} repeated",
    ]
    report(given, "C-MLFQ with the true lengths", columns=("work", *FROM), rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
