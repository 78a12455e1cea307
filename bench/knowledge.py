"""What knowing more would bring: C-MLFQ told the true lengths from the k-th turn of every trajectory on, against the
clairvoyant oracle.

The same engines, batches and seeds as `bench.policies`.  Told are the tokens that are left and those that tools will
add, not the seconds in tools, nor anything about the engines; decisions, costs and margins are those of the policy as
it is.  ``never`` is the policy itself: the distance to the columns left of it is what knowledge would bring, and the
distance of ``0`` to 1 is what the decisions lose.  ``its prompt`` is told, from the start, the law of its prompt's
lengths (a lognormal with the mean and the scatter of all its samples, those to come included) and nothing of its own
length but that it is not over yet: the most that anybody can know where siblings alone tell.  A clean start each time.

    python -m bench.knowledge [--seeds 5] [--work NAME|NAME] [--jobs 2]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

from libra_hpc import compiled

# Before the scheduler is imported: nobody can inherit from compiled classes.
os.environ[compiled.INTERPRETED] = "1"

from bench.harness import by_work, report
from bench.policies import BUCKETS, DEVICE, GPUS, MAX_CONTEXT, MODEL, WORK, interval, work_of
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.sched.cmlfq import CausalMlfq
from libra_hpc.sched.protocol import TurnView
from libra_hpc.sched.tree import UPPER, CausalTree, Cursor
from libra_hpc.simulator.compare import compare
from libra_hpc.simulator.settings import SimSettings, trajectory_ids
from libra_hpc.simulator.sim_engines import build_engines
from libra_hpc.simulator.simulate import simulate

PROMPT = "its prompt"
FROM: dict[str, float] = {"0": 0, "1": 1, "4": 4, "10": 10, PROMPT: inf, "never": inf}
"""Turns done when the truth is told."""
NORMAL = NormalDist()
SHOWN = "r2e, outcomes tell|r2e, siblings alone tell|search, outcomes tell|math, siblings tell"


class Law(NamedTuple):
    """A lognormal: mean and standard deviation of the natural logarithm."""

    mean: float
    scatter: float

    def left(self, attained: int) -> float:
        """Expected rest of what is longer than ``attained``."""
        if not attained:
            return exp(self.mean + 0.5 * self.scatter**2)
        beyond = (self.mean - log(attained)) / self.scatter
        if beyond < -6.0:
            return attained * self.scatter / -beyond
        return (
            exp(self.mean + 0.5 * self.scatter**2) * NORMAL.cdf(beyond + self.scatter) / NORMAL.cdf(beyond) - attained
        )


def laws(work: Sequence[TrajectoryRecord]) -> dict[str, Law]:
    """The law of every prompt; all prompts scatter alike."""
    groups: dict[str, list[float]] = {}
    for spec in work:
        groups.setdefault(spec.prompt_id, []).append(log(spec.generated))
    scatter = sqrt(fmean(variance(group) for group in groups.values()))
    return {prompt: Law(fmean(group), scatter) for prompt, group in groups.items()}


class ToldTree(CausalTree):
    """Estimates as they are until ``turns`` tools have answered, the truth from then on."""

    def __init__(self, truth: Mapping[str, TrajectoryRecord], turns: float, laws: Mapping[str, Law]) -> None:
        super().__init__()
        self._truth, self._turns, self._laws = truth, turns, laws
        self.names: dict[Cursor, str] = {}
        """The trajectory of each cursor."""

    def advance(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> float:
        """See `CausalTree.advance`."""
        super().advance(cursor, signals, attained, room)
        return self._tell(cursor, self.names.get(cursor, ""), signals, attained, room)

    def ahead(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> Cursor:
        """See `CausalTree.ahead`."""
        middle = super().ahead(cursor, signals, attained, room)
        self._tell(middle, self.names.get(cursor, ""), signals, attained, room)
        return middle

    def _tell(self, cursor: Cursor, name: str, signals: tuple[Signal, ...], attained: int, room: float) -> float:
        if name and self._laws:
            left = self._laws[self._truth[name].prompt_id].left(attained)
            cursor.left, cursor.reach = left * room / (left + room) if room < inf else left, min(UPPER * left, room)
        elif name and len(signals) >= self._turns:
            spec = self._truth[name]
            cursor.left = cursor.reach = max(1.0, float(spec.generated - attained))
            cursor.future = float(sum(turn.new_tokens for turn in spec.turns[len(signals) + 1 :]))
        return cursor.left


class Told(CausalMlfq):
    """C-MLFQ with such a tree."""

    def __init__(self, tree: ToldTree) -> None:
        super().__init__(tree)
        self._names = tree.names

    def key(self, turn: TurnView, now: float) -> float:
        """See `CausalMlfq.key`."""
        if turn.trajectory not in self._tracked:
            self._names[self._track(turn).cursor] = turn.trajectory
        return super().key(turn, now)


def play(job: tuple[str, int]) -> dict[str, float]:
    """Makespans over the oracle's."""
    name, seed = job
    engines, settings = build_engines(BUCKETS, GPUS, DEVICE, MODEL).engines, SimSettings(max_model_len=MAX_CONTEXT)
    work = work_of(name, seed, 512)
    truth = dict(zip(trajectory_ids(work), work, strict=True))
    best = compare(work, engines, ["oracle"], settings)["oracle"].result.makespan_s
    trees = {label: ToldTree(truth, turns, laws(work) if label == PROMPT else {}) for label, turns in FROM.items()}
    return {label: simulate(work, engines, Told(tree), settings).makespan_s / best for label, tree in trees.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", default=SHOWN, help=f"names separated by |, of {'|'.join(WORK)}")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in options.work.split("|") if name]
    jobs = [(name, seed) for name in names for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = by_work(pool, play, jobs, lambda row: ", ".join(f"{label} {ratio:.3f}" for label, ratio in row.items()))
    lines = [[name, *(interval([row[label] for row in found]) for label in FROM)] for name, found in rows.items()]
    notes = [
        f"makespan over the oracle's, told from the k-th turn on; {options.seeds} seeds, 512 trajectories, {GPUS} x"
        f" {DEVICE}, {MODEL}, {BUCKETS} repeated"
    ]
    report("knowledge", "C-MLFQ that is told the truth", ("work", *FROM), lines, notes, rows)


if __name__ == "__main__":
    main()
