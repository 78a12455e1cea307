"""The remaining-work estimator: tokens that a trajectory has left, from its prompt and its tool results.

From coarse to fine:

1. *attained service* (`survival`), of its task or, with few ends, of all tasks.
2. *prompt* (`groups`): its history and its siblings stretch the survival table.
3. *signals* (`signals`, `signal_effect`): failing tests; the last symbol.
4. *blend* (`blend`): a regression weighs these.  It counts by `Survival.known`, because only finished trajectories
   teach it, early in a batch the short ones.
5. *room*: of m expected tokens m b / (m + b) remain if the context has room for b: a Pareto tail of index 2, cut at b.

While there is one task, its statistics are those of all tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from math import exp, inf, log
from typing import Final

from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.env import Signal

from .blend import CENTRE
from .groups import PromptGroup, TaskStats
from .signal_effect import SignalEffect
from .signals import SignalState, Vocabulary
from .survival import cell_of

MAX_LEARNED: Final = 3
"""Moments learned per trajectory; its turns are too much alike for more."""
REACH_FACTOR: Final = 1.3
"""Reach over expected tokens: fourth root of the mean fourth power, for errors of about half the estimate."""
MAX_PROMPTS: Final = 8192
"""The least recently learned prompt is dropped first."""
MIN_TASK_ENDS: Final = 16
"""Finished trajectories before a task uses its own survival table."""
RUNNING_WEIGHT: Final = 0.25
"""Of a running sibling against a finished one: its total is an estimate."""


class Cursor(SignalState):
    """Estimator state of one running trajectory."""

    def __init__(self, prompt: PromptGroup) -> None:
        super().__init__()
        self.prompt = prompt
        self.task = prompt.task
        self.effect: float | None = None
        """Effect of its last symbol, on the logarithm; None until it is needed."""
        self.left = 0.0
        """Expected tokens to generate, as of the last `RemainingWorkEstimator.advance`."""
        self.reach = 0.0
        """Tokens it may generate, an upper estimate."""
        self.future = 0.0
        """Tokens its tools are expected to add."""
        self.payload = 0
        """Tokens its tools have added."""
        self.cell = 0
        """Its cell in the survival table."""
        self.weight = self.weighted = 0.0
        """Its part of the running sums of its prompt."""
        self.start = (0.0, 0.0)
        """At its first turn: log of the tokens left by steps 1 and 2, and log scale of its prompt."""
        self.trail: list[Moment] = []

    def work(self, context: float) -> float:
        """Expected tokens times its mean context meanwhile; ``context`` is the present one."""
        return self.left * (context + 0.5 * (self.left + self.future))


Moment = tuple[int, float, float, int | None]
"""Symbol of a signal, log of what is left by steps 1 and 2, log scale of the prompt, failed tests."""


class RemainingWorkEstimator:
    """Learns from finished trajectories and estimates the tokens that running ones have left."""

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self.vocabulary = Vocabulary()
        self.everything = TaskStats()
        """Statistics of all tasks."""
        self.learned = 0
        """Total number of finished trajectories."""
        self._max_prompts = max_prompts
        self._tasks: dict[str, TaskStats] = {}
        self._prompts: OrderedDict[str, PromptGroup] = OrderedDict()

    def __len__(self) -> int:
        """Number of prompts and signal effects."""
        stats = {id(s): s for s in (self.everything, *self._tasks.values())}
        return len(self._prompts) + sum(len(s.effects) for s in stats.values())

    def cursor(self, prompt_id: str, task: str) -> Cursor:
        """A cursor for a trajectory that starts."""
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            prompt = self._prompts[prompt_id] = PromptGroup(self._task(task))
            if len(self._prompts) > self._max_prompts:
                self._prompts.popitem(last=False)
        prompt.task.tables[0].started += 1.0
        return Cursor(prompt)

    def advance(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> float:
        """Read the new signals; returns the expected tokens left (``cursor.left``) after ``attained`` generated ones.

        ``room``: tokens that the context has room for.
        """
        stats, prompt, trail = cursor.task, cursor.prompt, cursor.trail
        cell = cell_of(attained)
        if cell > cursor.cell:
            self._pass(cursor, cell)
        if stats.tables[0].ends < MIN_TASK_ENDS:
            stats = self.everything
        log_rest = stats.tables[1 if prompt.finished and stats.tables[1].ends >= MIN_TASK_ENDS else 0].log_rest
        log_scale = prompt.log_scale
        base = log_rest[cell] if log_scale == 0.0 else log_scale + log_rest[cell_of(attained / prompt.scale)]
        seen = len(trail)
        if seen < len(signals):
            self._read(cursor, signals, base, log_scale)
            seen = len(trail)
        if seen and stats.gate.open:
            blend = stats.full
            w = blend.weights
            failed, effect = cursor.failed, cursor.effect
            if effect is None:
                effect = cursor.effect = _effect(stats, trail[-1][0])
            correction = w[0] + w[1] * (base - CENTRE) + w[2] * log_scale + w[6] * effect
            if failed is not None:
                correction += _tests_part(w, failed)
        else:
            if not attained:
                cursor.start = (base, log_scale)
            blend = stats.plain
            w = blend.weights
            correction = w[0] + w[1] * (base - CENTRE) + w[2] * log_scale
        left = exp(base + stats.tables[0].known[cell] * (correction + blend.log_smear))
        reach = REACH_FACTOR * left
        if room < inf:
            room = max(room, 1.0)
            if attained:
                room *= attained / (attained + cursor.payload)
            left *= room / (left + room)
            reach = min(reach, room)
        cursor.left, cursor.reach = left, reach
        if seen:
            # Two turns of the task's mean smooth the trajectory's own tokens per turn.
            turns_left = left * (seen + 2) / (attained + 2.0 * stats.tokens_per_turn)
            cursor.future = cursor.payload / seen * turns_left
        return left

    def _read(self, cursor: Cursor, signals: tuple[Signal, ...], base: float, log_scale: float) -> None:
        """Take in the signals behind those that the cursor has."""
        for i in range(len(cursor.trail), len(signals)):
            signal = signals[i]
            symbol = self.vocabulary.number(cursor.read(signal))
            cursor.payload += signal.payload_tokens
            cursor.trail.append((symbol, base, log_scale, cursor.failed))
        cursor.effect = None

    def peek(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> Cursor:
        """A separate cursor for the middle of a turn, from which nothing is learned; no signal may be new."""
        copy = Cursor(cursor.prompt)
        copy.failed, copy.effect = cursor.failed, cursor.effect
        copy.payload, copy.trail = cursor.payload, cursor.trail
        # Cells count as passed at the end of a turn.
        copy.cell = max(cursor.cell, cell_of(attained))
        self.advance(copy, signals, attained, room)
        return copy

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory that had no cursor, such as one of an earlier run."""
        cursor = self.cursor(record.prompt_id, record.task)
        self.advance(cursor, (), 0)
        for count, at in enumerate(record.at_signal[: len(record.signals)]):
            self.advance(cursor, record.signals[: count + 1], at)
        self.finish(cursor, record)

    def finish(self, cursor: Cursor, record: Finished) -> None:
        """Learn from a completed trajectory."""
        self.learned += 1
        total = float(max(1, record.generated_tokens))
        self._learn_moments(cursor, record, total)
        self._learn_total(cursor, total, record.version)
        if record.prompt_id in self._prompts:
            self._prompts.move_to_end(record.prompt_id)
        stats = cursor.task
        stats.tokens_per_turn += 0.05 * (total / max(1, record.turns) - stats.tokens_per_turn)

    def drop(self, cursor: Cursor) -> None:
        """A trajectory was aborted: it no longer counts as running for its prompt."""
        prompt = cursor.prompt
        prompt.running = max(0.0, prompt.running - cursor.weight)
        prompt.running_sum = prompt.running_sum - cursor.weighted if prompt.running > 1e-9 else 0.0
        cursor.weight = cursor.weighted = 0.0

    def _pass(self, cursor: Cursor, cell: int) -> None:
        """A running trajectory has reached another cell of the survival table."""
        task, prompt = cursor.task, cursor.prompt
        task.tables[0].passed(cursor.cell, cell)
        cursor.cell = cell
        table = task.tables[0]
        weight = RUNNING_WEIGHT * table.below[cell]
        weighted = weight * (table.log_total[cell] - table.log_total[0])
        prompt.running += weight - cursor.weight
        prompt.running_sum += weighted - cursor.weighted
        cursor.weight, cursor.weighted = weight, weighted
        prompt.rescale()

    def _learn_total(self, cursor: Cursor, total: float, version: int) -> None:
        prompt, task, log_total = cursor.prompt, cursor.task, log(total)
        self.drop(cursor)
        gap, count = prompt.gap()
        everything = self.everything
        if count:
            task.evaluate(log_total, gap, count)
        prompt.rescale()
        cell = cell_of(total)
        task.tables[0].passed(cursor.cell, cell)
        task.tables[0].ended(cell, version)
        if prompt.finished:
            scaled = cell_of(total / prompt.scale)
            task.tables[1].passed(0, scaled)
            task.tables[1].ended(scaled, version)
        if task is not everything:
            everything.tables[0].passed(0, cell)
            everything.tables[0].ended(cell, version)
        prompt.learn(log_total, version)

    def _learn_moments(self, cursor: Cursor, record: Finished, total: float) -> None:
        """Evaluate, then learn the estimates at its start and at up to `MAX_LEARNED` signals."""
        trail, at_signal, version = cursor.trail, record.at_signal, record.version
        count = min(len(trail), len(at_signal))
        stride = -(-count // MAX_LEARNED) if count else 1
        everything, task = self.everything, cursor.task
        for stats in (task,) if task is everything else (everything, task):
            weight = stats.tables[0].weight[cell_of(total)]
            base, log_scale = cursor.start
            if base != 0.0:
                x, target = [1.0, base - CENTRE, log_scale], log(total) - base
                stats.plain.learn(x, target, target - stats.plain.predict(x), weight)
            # One moment stands for all those that are skipped.
            weight *= stride
            for i in range(self.learned % stride, count, stride):
                rest = total - at_signal[i]
                # No decision follows the last token, so there is nothing to learn.
                if rest > 0.0:
                    self._learn_moment(stats, trail[i], rest=rest, weight=weight, version=version)

    @staticmethod
    def _learn_moment(stats: TaskStats, moment: Moment, rest: float, weight: float, version: int) -> None:
        symbol, base, log_scale, failed = moment
        plain, full = stats.plain, stats.full
        target = log(rest) - base
        effect = _effect(stats, symbol)
        green, fails, how_many = _tests(failed)
        x = [1.0, base - CENTRE, log_scale, green, fails, how_many, effect]
        without, within = plain.predict(x), full.predict(x)
        below, above = target - within, target - without
        stats.gate.learn(full.loss(below), plain.loss(above))
        plain.learn(x, target, above, weight)
        full.learn(x, target, below, weight)
        node = stats.effects.get(symbol)
        if node is None:
            node = stats.effects[symbol] = SignalEffect()
        node.learn(below + full.weights[-1] * effect, version)

    def _task(self, name: str) -> TaskStats:
        stats = self._tasks.get(name)
        if stats is None:
            if not self._tasks:
                stats = self.everything
            else:
                if len(self._tasks) == 1:
                    # From the second task on, the statistics of all tasks are separate.
                    self.everything = deepcopy(self.everything)
                stats = TaskStats()
            self._tasks[name] = stats
        return stats


def _effect(stats: TaskStats, symbol: int) -> float:
    node = stats.effects.get(symbol)
    return node.effect if node is not None else 0.0


def _tests_part(weights: list[float], failed: int) -> float:
    """Part of the correction for the last run of tests."""
    return weights[4] + weights[5] * log(float(failed)) if failed else weights[3]


def _tests(failed: int | None) -> tuple[float, float, float]:
    """Features of the last test run: green, failing, log of the number of failing tests."""
    if failed is None:
        return 0.0, 0.0, 0.0
    return (0.0, 1.0, log(float(failed))) if failed else (1.0, 0.0, 0.0)
