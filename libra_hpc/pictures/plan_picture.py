"""Pictures of plans: the scaling curve of a sweep, and seconds per batch of each split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from libra_hpc.policies.search.run_plan import RunPlan
from libra_hpc.policies.search.scaling_curve import ScalingPoint, knee

from .figure_style import GREEN, GREY, GRID, PINK, ROLLOUT, TRAIN, figure, save, style


def draw_sweep(points: Sequence[ScalingPoint], title: str, out: Path) -> None:
    drawn, panel = _panel(title)
    known = [(p.devices, p.plan.tokens_s) for p in points if p.plan is not None]
    x, y = [k[0] for k in known], [k[1] for k in known]
    panel.plot(x, [y[0] * n / x[0] for n in x], color=GREY, linestyle=":", label="proportional to the first")
    panel.plot(x, y, "o-", color=GREEN, label="best plan")
    at = knee(points)
    if at is not None:
        devices = points[at].devices
        panel.axvline(devices, color=PINK, linestyle="--", linewidth=1.2, label=f"knee at {devices} GPUs")
    panel.set_xlabel("GPUs")
    panel.set_ylabel("trained tokens per second")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8, frameon=False)
    save(drawn, out)


def draw_plans(plans: Sequence[RunPlan], title: str, out: Path) -> None:
    drawn, panel = _panel(title)
    ordered = sorted((p for p in plans if p.pool == plans[0].pool), key=lambda p: p.trains)
    x = [p.trains for p in ordered]
    panel.plot(x, [p.train.time.total for p in ordered], "o-", color=TRAIN, label="train")
    panel.plot(x, [p.rollout_s for p in ordered], "o-", color=ROLLOUT, label="rollout")
    panel.plot(x, [p.seconds for p in ordered], color=GREEN, linewidth=4, alpha=0.3, label="batch")
    panel.axvline(plans[0].trains, color=GREY, linestyle="--", linewidth=1.2, label="best")
    panel.set_xlabel("training nodes")
    panel.set_xticks(x)
    panel.set_ylabel("seconds per batch")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8, frameon=False)
    save(drawn, out)


def _panel(title: str) -> tuple[Figure, Axes]:
    drawn = figure(4.5, 8.0)
    panel: Axes = drawn.subplots()
    style(panel, title)
    panel.grid(alpha=GRID)
    return drawn, panel
