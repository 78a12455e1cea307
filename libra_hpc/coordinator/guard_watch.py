"""The guards of learning of a run, from its first step on, and what their decisions mean for it.

- A start -> they read the steps of the starts before, up to the one at which this start begins.
- The task names another phase of its mix -> their history begins again: rewards of two mixes are not compared.
- They paused or stopped the run, and rank 0 was lost before it had ended -> it ends at the next start of this attempt.
- They did in an earlier attempt -> who resumed the run wants it to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from libra_hpc.config.run import RunConfig
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.policies.learning.guards import GuardDecision, LearningGuards
from libra_hpc.process.retry import cannot, patiently
from libra_hpc.protocol.ranks_stop import Why
from libra_hpc.state.store import newest_until, states

ENDS: dict[str, Why] = {"pause": "paused", "stop": "broken"}
"""Why the ranks end, by what the guards decided."""
NOTICE = "learning notice"
"""How the notices of `learning_notice` begin."""


class GuardWatch:
    """Feed it every line of ``metrics.jsonl``; ``guard`` is ``algorithm.guard``, ``kv_dtype`` ``rollout.kv_dtype``."""

    def __init__(self, guard: Literal["off", "notice", "pause", "stop"], kv_dtype: str = "auto") -> None:
        self._off, action = guard == "off", "notice" if guard == "off" else guard
        self._begin = partial(LearningGuards, action, kv_dtype == "fp8")
        self._action, self._guards, self._phase = action, self._begin(), ""
        self.decided: GuardDecision | None = None
        """Because of which the run ends."""

    def observe(self, line: series.Record) -> GuardDecision | None:
        """Judge a step; None: nothing new."""
        if self._off or self.decided is not None:
            return None
        if (phase := series.phase(line)) != self._phase:
            self._guards, self._phase = self._begin(), phase
        decision = self._guards.observe(line)
        if decision is not None and decision.action in ENDS:
            self.decided = decision
        return decision

    @property
    def good_step(self) -> int:
        """The newest checkpoint up to this step has to stay; -1: none has to."""
        step = self._guards.good_step if self.decided is None else self.decided.good_step
        return -1 if step is None else step

    def shown(self, notices: Sequence[str]) -> list[str]:
        """The notices of the status: what holds is shown as long as it does."""
        if self.good_step < 0 or self.decided is not None:
            return list(notices)
        at = self._guards.acts_at
        follows = "" if at is None else f"; unless that ends, the run {self._action}s at step {at}"
        others = [notice for notice in notices if not notice.startswith(NOTICE)]
        return [f"{NOTICE}: {'; '.join(self._guards.active.values())}{follows}", *others]

    def advice(self, run: RunDir) -> str:
        """How to go on; reads which checkpoints there are."""
        goes_on = f"`libra-hpc submit --resume {run.name}` goes on"
        try:
            good = newest_until(states(run.checkpoints), self.good_step)
        except OSError as error:
            return f"{goes_on}; {cannot(error)}"
        if good is None:
            beginning = "with `--from-step 0` from the beginning"
            return f"{goes_on}, {beginning}; no checkpoint is as old as step {self.good_step}, the last good one"
        return f"{goes_on}, with `--from-step {good.step}` from the last good checkpoint"


def read_guards(config: RunConfig, run: RunDir, attempt: int, step: int) -> GuardWatch:
    """Guards that have read the steps up to the one at which this start begins; raises `OSError`."""
    return patiently(
        lambda: _read(GuardWatch(config.algorithm.guard, config.rollout.kv_dtype), run, attempt, step),
        config.deadlines.storage_s,
    )


def _read(watch: GuardWatch, run: RunDir, attempt: int, step: int) -> GuardWatch:
    decided, at = None, 0
    for line in series.steps(run):
        if line["step"] <= step:
            watch.observe(line)
        if watch.decided is not None:
            decided, at, watch.decided = watch.decided, line["step"], None
    if decided is not None:
        started = (e for e in read_lines(run.events) if e.get("kind") == "job_started")
        begun = next((e["step"] for e in started if e.get("attempt") == attempt), at)
        watch.decided = decided if at > begun else None
    return watch
