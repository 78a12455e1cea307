"""Pictures of plans; matplotlib is imported only here and only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra_hpc.errors import UserError

from .search import Plan
from .sweep import Point, knee

TRAIN, ROLLOUT, TOTAL, IDEAL = "#b4478c", "#2a8fbd", "#1a7f37", "#8b949e"


def draw_sweep(points: Sequence[Point], title: str, out: Path) -> None:
    """Tokens per second over devices, with the straight line from the first point and the knee."""
    figure, panel = _figure(title)
    known = [(p.devices, p.plan.tokens_s) for p in points if p.plan is not None]
    x, y = [k[0] for k in known], [k[1] for k in known]
    panel.plot(x, [y[0] * n / x[0] for n in x], color=IDEAL, linestyle=":", label="proportional to the first")
    panel.plot(x, y, "o-", color=TOTAL, label="best plan")
    at = knee(points)
    if at is not None:
        devices = points[at].devices
        panel.axvline(devices, color=TRAIN, linestyle="--", linewidth=1.2, label=f"knee at {devices} GPUs")
    panel.set_xlabel("GPUs")
    panel.set_ylabel("trained tokens per second")
    panel.set_ylim(bottom=0)
    _save(figure, panel, out)


def draw_plans(plans: Sequence[Plan], title: str, out: Path) -> None:
    """Seconds per batch of both stages over the number of training nodes."""
    figure, panel = _figure(title)
    ordered = sorted((p for p in plans if p.pool == plans[0].pool), key=lambda p: p.nodes)
    x = [p.nodes for p in ordered]
    panel.plot(x, [p.train.time.total for p in ordered], "o-", color=TRAIN, label="train")
    panel.plot(x, [p.rollout.seconds for p in ordered], "o-", color=ROLLOUT, label="rollout")
    panel.plot(x, [p.seconds for p in ordered], color=TOTAL, linewidth=4, alpha=0.3, label="batch")
    panel.axvline(plans[0].nodes, color=IDEAL, linestyle="--", linewidth=1.2, label="best")
    panel.set_xlabel("training nodes")
    panel.set_xticks(x)
    panel.set_ylabel("seconds per batch")
    panel.set_ylim(bottom=0)
    _save(figure, panel, out)


def _figure(title: str) -> tuple[Any, Any]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot: matplotlib is not installed here; install it, or leave --plot out.") from None
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    panel = figure.subplots()
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    return figure, panel


def _save(figure: Any, panel: Any, out: Path) -> None:
    panel.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(out, format="png")
    except OSError as error:
        raise UserError(f"--plot = {str(out)!r}: the picture cannot be written ({error.strerror}).") from None
