"""What rank 0 remembers of the run for the planner and the status.

Sliding windows of steps, rollout, trajectories and moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Literal, NamedTuple

from msgspec.structs import replace

from libra_hpc.facts.series import Record
from libra_hpc.protocol.agents import RolloutReport
from libra_hpc.protocol.engine_state import WeightUpdate
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.plan import BorrowFact, NodeFact, PlanSnapshot, SwitchFact, TrainStepFact, TrajectoryFact

STEPS = 256
"""Entries of each window: a few minutes of a fast run, and all that the planner needs."""
WINDOWS = 256
TRAJECTORIES = 4096
LAST = 10
"""Windows of the present speed, about as many seconds."""

LENT_S = 120.0
"""Seconds over which guests must have been there. Half: lenders that flap count; double: new ones count late."""
LENT_QUANTILE = 0.1
"""Quantile of the windows of that time: who left is missed after 12 s."""


class Window(NamedTuple):
    """Work of the rollout nodes in a window of time with an unchanged set of nodes."""

    at: float
    seconds: float
    generated: int
    """Tokens of own engines."""
    busy: float
    """Share of the engines' time in which they had work, 0..1."""
    lent: float
    """Own nodes that the engines of guests stand for, each by its share of the time."""


Applied = tuple[int, WeightUpdate, float]
"""(node, weights that an engine of it got, when)."""


def slowest(updates: Iterable[WeightUpdate]) -> dict[str, float]:
    """Seconds of the slowest engine, and all tokens that were computed again."""
    found = list(updates)
    longest = {name: max(getattr(one, name) for one in found) for name in ("wire_s", "image_s", "stage_s", "pause_s")}
    return {**longest, "recomputed": sum(one.recomputed for one in found)}


class Observations:
    """Feed it every report; `snapshot` is the planner's view, the other methods the status screen's."""

    def __init__(self) -> None:
        self.steps: deque[TrainStepFact] = deque(maxlen=STEPS)
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.trajectories: deque[TrajectoryFact] = deque(maxlen=TRAJECTORIES)
        self.switches: deque[SwitchFact] = deque(maxlen=32)
        self.lines: deque[Record] = deque(maxlen=STEPS)
        """Newest lines of ``metrics.jsonl``."""
        self.trained = 0
        self.report: RolloutReport | None = None
        self._report_at = 0.0
        self._report_nodes: tuple[int, ...] = ()
        self._finished = 0
        self.updates: list[Applied] = []
        """What engines that take turns got since the last step."""
        self._stepped: tuple[float, int] | None = None
        """When the last step was committed, else the first report came, and the tokens generated until then."""

    def on_step(self, line: Record, now: float) -> None:
        """A line of ``metrics.jsonl``."""
        self.lines.append(line)
        self._stepped = now, self.tokens()[0]
        self.trained += int(line["trajectories"])
        if line.get("train_s", 0.0) > 0.0:
            fact = TrainStepFact(
                at=now,
                tokens=int(line["trained_tokens"]),
                nodes=int(line["train_nodes"]),
                seconds=line["train_s"] + line.get("diff_s", 0.0),
                diff_s=line.get("diff_s", 0.0),
            )
            self.steps.append(fact)

    def on_rollout(self, report: RolloutReport, nodes: tuple[int, ...], now: float) -> None:
        """A second of rollout; a window counts only when the same nodes served all through it."""
        last = self.report
        if last is not None and nodes and nodes == self._report_nodes and now > self._report_at:
            seconds = now - self._report_at
            engines = sum(count for _, count, *_ in report.buckets)
            gpus = sum(tp * count for tp, count, *_ in report.buckets)
            busy = (report.busy_s - last.busy_s) / (seconds * max(1, engines))
            window = Window(
                at=now,
                seconds=seconds,
                generated=report.generated_tokens - last.generated_tokens,
                busy=min(1.0, busy),
                lent=len(nodes) * report.lent_gpus / gpus if gpus else 0.0,
            )
            self.windows.append(window)
        self.report, self._report_at, self._report_nodes = report, now, nodes
        self._stepped = self._stepped or (now, self.tokens()[0])
        for one in report.lengths:
            self.trajectories.append(replace(one, index=self._finished, at=now))
            self._finished += 1

    def update_costs(self, updates: Iterable[Applied]) -> dict[str, float]:
        """What new weights cost: of the slowest engine of the run's own nodes, and all tokens."""
        own = [(applied, at) for rank, applied, at in updates if not is_guest(rank)]
        if not own:
            return {}
        costs = slowest(applied for applied, _ in own)
        costs["dropped_kv_tokens"] = costs.pop("recomputed")
        commits = {line["step"]: line["t"] for line in self.lines}
        known = [at - commits[applied.version] for applied, at in own if applied.version in commits]
        return {**costs, **({"update_s": max(known)} if known else {})}

    def on_switch(self, direction: Literal["to_train", "to_rollout"], seconds: float, now: float) -> None:
        self.switches.append(SwitchFact(now, direction, seconds))

    def tokens(self) -> tuple[int, int]:
        """(generated, prefilled) so far; generated ones by guests too."""
        report = self.report
        return (report.generated_tokens + report.guest_tokens, report.prefilled_tokens) if report else (0, 0)

    @property
    def patient(self) -> bool:
        """Whether the rollout waits for what has a limit of its own: a tool, or the end of a pause."""
        return self.report is not None and bool(self.report.tools_running or self.report.paused)

    def lent(self) -> float:
        """Own nodes that guests have stood for in nearly all of the last windows."""
        recent = sorted(w.lent for w in self.windows if w.at > self.windows[-1].at - LENT_S)
        return recent[int(LENT_QUANTILE * len(recent))] if recent else 0.0

    def snapshot(
        self,
        nodes: tuple[NodeFact, ...],
        prompts_per_step: int,
        group_size: int,
        eta: int,
        steps_left: int,
        borrow: BorrowFact | None = None,
    ) -> PlanSnapshot:
        report = self.report or RolloutReport()
        replaced = [line.get("replaced_groups", 0.0) for line in list(self.lines)[-16:]]
        return PlanSnapshot(
            nodes=nodes,
            steps=tuple(self.steps),
            trajectories=tuple(self.trajectories),
            switches=tuple(self.switches),
            prompts_per_step=prompts_per_step,
            group_size=group_size,
            eta=eta,
            steps_left=steps_left,
            groups=report.open_groups,
            borrow=borrow,
            lent=self.lent(),
            step_costs=report.step_costs,
            sampled_groups=1.0 + (fmean(replaced) / prompts_per_step if replaced else 0.0),
        )

    def train_speed(self) -> tuple[float, float, float]:
        """(generated tokens trained per second of the stage's own time, seconds per global batch, busy share) over the
        last steps."""
        recent, lines = list(self.steps)[-16:], list(self.lines)[-16:]
        seconds, tokens = sum(s.seconds - s.diff_s for s in recent), sum(line["gen_tokens"] for line in lines)
        wall = sum(line["step_s"] for line in lines)
        return (
            tokens / seconds if seconds else 0.0,
            seconds / len(recent) if recent else 0.0,
            min(1.0, seconds / wall) if wall else 0.0,
        )

    def rollout_speed(self) -> tuple[float, float, float]:
        """(generated tokens per second, node-seconds per global batch, busy share) over the last windows."""
        recent = list(self.windows)[-LAST:]
        tokens_per_batch = self.lines[-1]["gen_tokens"] if self.lines else 0.0
        seconds, tokens = sum(w.seconds for w in recent), sum(w.generated for w in recent)
        busy = sum(w.busy * w.seconds for w in recent)
        per_token = busy / tokens if tokens else 0.0
        return (tokens / seconds if seconds else 0.0, per_token * tokens_per_batch, busy / seconds if seconds else 0.0)

    def step_speed(self, metrics: Mapping[str, float], now: float) -> float:
        """Generated tokens per second of the step that is committed now; of the last windows where it was short.

        - A long step may end long after its rollout: at the end of a run nothing else is rolled out.
        - A batch between two reports is in no window: its own tokens over the seconds of its step.
        """
        at, generated = self._stepped or (now, 0)
        if now - at > LAST:
            return (self.tokens()[0] - generated) / (now - at)
        own = metrics.get("gen_tokens", 0.0) / metrics["step_s"] if metrics["step_s"] else 0.0
        return self.rollout_speed()[0] or own
