"""The causal tree: how much work a trajectory has left, given its prompt and what its tools answered so far.

The estimate goes from coarse to fine:

1. *attained service* (`survival`): what is left after so many tokens, from all trajectories of the task that got as
   far; a task with fewer than `TASK_ENDS` = 16 finished ones takes the table of all tasks.  This is the fallback: it
   needs no signal and is all there is while nothing else pays.
2. *prompt* (`groups`): its history and the siblings of its group stretch that table by a factor.
3. *signals* (`signals`, `context`): how many tests failed when they last ran; the last symbol, then the last two, then
   the last symbol within this prompt. Sequences are read newest first, because paths from the first signal on are
   almost all unique and would fill the tree with nodes seen once.
4. *blend* (`blend`): a regression on held-out predictions says how far each of these moves the estimate.  Signals are
   used only while they lower the held-out quantile loss.  The regression knows finished trajectories alone, which early
   in a batch are the short ones, so its correction (on the logarithm) counts by the share of those who got as far and
   have ended (`Survival.known`).

5. *room*: of m expected tokens m b / (m + b) count, b being what the context has room for when the tools go on adding
   to it as they did: the mean of a rest with a Pareto tail of index 2 (as in `survival`) and mean m when it is cut off
   at b.  Long trajectories tend to end at the limit of the context, so the nearer one comes to it the better it is
   known what is left.

What a trajectory may *reach* is `UPPER` = 1.3 times the m expected (the fourth root of the mean fourth power where the
error of m is some half of it), and at most b.

A running trajectory holds a `Cursor`; a turn costs one step of it (three dictionary lookups), whatever the number of
turns before.  The cursor also notes what was known at each signal.  When the trajectory ends, `finish` learns from at
most `LEARNED` = 3 of those moments, spread over its turns and shifted from one trajectory to the next: the turns of one
trajectory are too much alike for more to be worth their time.

Bounds: `MAX_PROMPTS` = 8,192 prompts with `MAX_OWN` = 8 contexts each, and per task 1,023 single contexts and
`MAX_PAIRS` = 8,192 pairs, the least recently learned going first.  Before more than one task is known, the statistics
of all tasks are those of the only one.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, inf, log
from typing import Final

from libra_hpc.protocol.env import Signal

from .blend import CENTRE
from .groups import PromptGroup, TaskStats
from .protocol import Finished
from .signal_effect import SignalEffect
from .signals import SignalState, Vocabulary
from .survival import cell_of

MAX_LEARNED: Final = 3
REACH_FACTOR: Final = 1.3
MAX_PROMPTS: Final = 8192
MAX_PROMPT_EFFECTS: Final = 8
MAX_PAIRS: Final = 8192
MIN_TASK_ENDS: Final = 16
RUNNING_WEIGHT: Final = 0.25
"""A running sibling against a finished one: its imputed total is a guess, and the trajectory itself is among those
that are counted."""
_SHIFT: Final = 10


class Cursor(SignalState):
    """Where a running trajectory stands in the tree."""

    __slots__ = (
        "cell",
        "effect",
        "future",
        "left",
        "payload",
        "prompt",
        "reach",
        "start",
        "symbol",
        "task",
        "trail",
        "weight",
        "weighted",
    )

    def __init__(self, prompt: PromptGroup) -> None:
        super().__init__()
        self.prompt = prompt
        self.task = prompt.task
        self.symbol = 0
        self.effect: float | None = None
        """Of its contexts, on the logarithm; None until it is asked for."""
        self.left = 0.0
        """Expected tokens to generate, as of the last `RemainingWorkEstimator.advance`."""
        self.reach = 0.0
        """Tokens it may have to generate."""
        self.future = 0.0
        """Tokens its tools are expected to add yet."""
        self.payload = 0
        """Tokens its tools added so far."""
        self.cell = 0
        """Where it is in the task's survival table."""
        self.weight = self.weighted = 0.0
        """What it adds to its prompt's running sums."""
        self.start = (0.0, 0.0)
        """Log of what was left by attained service and prompt at its first turn, and log scale of the prompt then."""
        self.trail: list[Moment] = []

    def work(self, context: float) -> float:
        """Tokens it is expected to generate, times its mean context while it does; ``context`` is that of now."""
        return self.left * (context + 0.5 * (self.left + self.future))


Moment = tuple[int, int, float, float, int | None]
"""A signal's symbol, the one before, log of what was left by attained service and prompt, log scale of the prompt,
failing tests when they last ran."""


class RemainingWorkEstimator:
    """Learns from finished trajectories, estimates what a running one has left; see the module."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_pairs: int = MAX_PAIRS) -> None:
        self.vocabulary = Vocabulary()
        self.everything = TaskStats()
        """Statistics of all tasks."""
        self.learned = 0
        """Trajectories, ever."""
        self._max_prompts, self._max_pairs = max_prompts, max_pairs
        self._tasks: dict[str, TaskStats] = {}
        self._prompts: OrderedDict[str, PromptGroup] = OrderedDict()

    def __len__(self) -> int:
        """Nodes: prompts and contexts."""
        stats = {id(s): s for s in (self.everything, *self._tasks.values())}
        return sum(1 + len(p.effects) for p in self._prompts.values()) + sum(
            len(s.singles) + len(s.pairs) for s in stats.values()
        )

    def cursor(self, prompt_id: str, task: str) -> Cursor:
        """The start of a trajectory."""
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            prompt = self._prompts[prompt_id] = PromptGroup(self._task(task))
            if len(self._prompts) > self._max_prompts:
                self._prompts.popitem(last=False)
        prompt.task.tables[0].started += 1.0
        return Cursor(prompt)

    def advance(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> float:
        """Take in the signals that are new; returns the expected tokens left (also ``cursor.left``) after ``attained``
        generated ones.

        ``room``: tokens that its context has room for.
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
            for i in range(seen, len(signals)):
                signal = signals[i]
                before = cursor.symbol
                cursor.symbol = symbol = self.vocabulary.number(cursor.read(signal))
                cursor.payload += signal.payload_tokens
                trail.append((symbol, before, base, log_scale, cursor.failed))
            seen = len(trail)
            cursor.effect = None
        if seen and stats.gate.open:
            blend = stats.full
            w = blend.weights
            failed, effect = cursor.failed, cursor.effect
            if effect is None:
                effect = cursor.effect = _effect(stats, prompt, trail[-1][0], trail[-1][1])
            correction = w[0] + w[1] * (base - CENTRE) + w[2] * log_scale + w[6] * effect
            if failed is not None:
                correction += w[4] + w[5] * log(float(failed)) if failed else w[3]
        else:
            if not attained:
                cursor.start = (base, log_scale)
            blend = stats.plain
            w = blend.weights
            correction = w[0] + w[1] * (base - CENTRE) + w[2] * log_scale
        left = exp(base + stats.tables[0].known[cell] * (correction + blend.log_smear))
        reach = REACH_FACTOR * left
        if room < inf:
            if room < 1.0:
                room = 1.0
            if attained:
                room *= attained / (attained + cursor.payload)
            left *= room / (left + room)
            if reach > room:
                reach = room
        cursor.left, cursor.reach = left, reach
        if seen:
            # Two turns of the task's mean stand in for a trajectory's own pace.
            turns_left = left * (seen + 2) / (attained + 2.0 * stats.tokens_per_turn)
            cursor.future = cursor.payload / seen * turns_left
        return left

    def peek(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> Cursor:
        """Where a trajectory stands in the middle of a turn: a cursor of its own, from which nothing is learned.  No
        signal may be new."""
        copy = Cursor(cursor.prompt)
        copy.symbol, copy.failed, copy.effect, copy.payload, copy.trail = (
            cursor.symbol,
            cursor.failed,
            cursor.effect,
            cursor.payload,
            cursor.trail,
        )
        # Cells count as passed when a turn is over.
        copy.cell = max(cursor.cell, cell_of(attained))
        self.advance(copy, signals, attained, room)
        return copy

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory that had no cursor (warm start, another leader's)."""
        cursor = self.cursor(record.prompt_id, record.task)
        self.advance(cursor, (), 0)
        for count, at in enumerate(record.at_signal[: len(record.signals)]):
            self.advance(cursor, record.signals[: count + 1], at)
        self.finish(cursor, record)

    def finish(self, cursor: Cursor, record: Finished) -> None:
        """Learn from a completed trajectory; its predictions were made before."""
        self.learned += 1
        total = float(max(1, record.generated_tokens))
        self._learn_moments(cursor, record, total)
        self._learn_total(cursor, total, record.version)
        if record.prompt_id in self._prompts:
            self._prompts.move_to_end(record.prompt_id)
        stats = cursor.task
        stats.tokens_per_turn += 0.05 * (total / max(1, record.turns) - stats.tokens_per_turn)

    def drop(self, cursor: Cursor) -> None:
        """A trajectory was given up: it no longer counts among the running of its prompt."""
        prompt = cursor.prompt
        prompt.running = max(0.0, prompt.running - cursor.weight)
        prompt.running_sum = prompt.running_sum - cursor.weighted if prompt.running > 1e-9 else 0.0
        cursor.weight = cursor.weighted = 0.0

    def _pass(self, cursor: Cursor, cell: int) -> None:
        """A running trajectory reached another cell of the survival table."""
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
        """Judge and learn the estimates at some of its signals, and at its start."""
        trail, at_signal, version, prompt = cursor.trail, record.at_signal, record.version, cursor.prompt
        count = min(len(trail), len(at_signal))
        stride = -(-count // MAX_LEARNED) if count else 1
        everything, task = self.everything, cursor.task
        for stats in (task,) if task is everything else (everything, task):
            weight = stats.tables[0].weight[cell_of(total)]
            base, log_scale = cursor.start
            if base != 0.0:
                x, target = [1.0, base - CENTRE, log_scale], log(total) - base
                stats.plain.learn(x, target, target - stats.plain.predict(x), weight)
            # One moment stands for all those that are passed over.
            weight *= stride
            for i in range(self.learned % stride, count, stride):
                rest = total - at_signal[i]
                # After the last token there is nothing to decide, so nothing to learn.
                if rest > 0.0:
                    self._learn_moment(stats, prompt, trail[i], rest, weight, version)

    def _learn_moment(
        self, stats: TaskStats, prompt: PromptGroup, moment: Moment, rest: float, weight: float, version: int
    ) -> None:
        symbol, before, base, log_scale, failed = moment
        plain, full = stats.plain, stats.full
        target = log(rest) - base
        effect = _effect(stats, prompt, symbol, before)
        green, fails, how_many = _tests(failed)
        x = [1.0, base - CENTRE, log_scale, green, fails, how_many, effect]
        without, within = plain.predict(x), full.predict(x)
        below, above = target - within, target - without
        stats.gate.learn(full.loss(below), plain.loss(above))
        plain.learn(x, target, above, weight)
        full.learn(x, target, below, weight)
        residual = below + full.weights[-1] * effect
        node = stats.singles.get(symbol)
        if node is None:
            node = stats.singles[symbol] = SignalEffect()
        node.learn(residual, version)
        residual -= node.effect
        key = symbol << _SHIFT | before
        node = stats.pairs.get(key)
        if node is None:
            node = stats.pairs[key] = SignalEffect()
            if len(stats.pairs) > self._max_pairs:
                stats.pairs.popitem(last=False)
        else:
            stats.pairs.move_to_end(key)
        node.learn(residual, version)
        if stats is prompt.task:
            residual -= node.effect
            node = prompt.effects.get(symbol)
            if node is None:
                if len(prompt.effects) >= MAX_PROMPT_EFFECTS:
                    return
                node = prompt.effects[symbol] = SignalEffect()
            node.learn(residual, version)

    def _task(self, name: str) -> TaskStats:
        stats = self._tasks.get(name)
        if stats is None:
            if not self._tasks:
                stats = self.everything
            else:
                if len(self._tasks) == 1:
                    # From the second task on, what is known of all tasks goes its own way.
                    self.everything = self.everything.copied()
                stats = TaskStats()
            self._tasks[name] = stats
        return stats


def _effect(stats: TaskStats, prompt: PromptGroup, symbol: int, before: int) -> float:
    """Sum of the effects of the contexts of a symbol."""
    node = stats.singles.get(symbol)
    if node is None:
        return 0.0
    effect = node.effect
    node = stats.pairs.get(symbol << _SHIFT | before)
    if node is not None:
        effect += node.effect
        node = prompt.effects.get(symbol)
        if node is not None:
            effect += node.effect
    return effect


def _tests(failed: int | None) -> tuple[float, float, float]:
    """Features of the last test run: green, failing, log of how many."""
    if failed is None:
        return 0.0, 0.0, 0.0
    return (0.0, 1.0, log(float(failed))) if failed else (1.0, 0.0, 0.0)
