"""The charts of `plan` and `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from libra_hpc.planning.request import RunPlan
from libra_hpc.simulator.result import SimulationResult

from .svg_chart import Chart, Line, Mark, draw, stair

COLOURS = 7
"""Colours ``c0`` .. of the style sheet, distinct for colour-blind readers (Okabe and Ito)."""
SHAPES = ("line", "broken", "dotted")
"""The next line has the next colour and the next shape: of two equal lines, both are seen."""


def draw_scaling(points: Sequence[tuple[int, float]], knee: int | None, title: str, out: Path) -> None:
    """The scaling curve of a sweep: (GPUs, tokens/s), and the GPUs at its knee."""
    xs, ys = zip(*points, strict=True)
    known = f"knee at {knee} GPUs" if knee is not None else ""
    chart = Chart(
        title="Trained tokens per second of the best plan",
        described=f"From {xs[0]} to {xs[-1]} GPUs: {ys[0]:,.0f} to {ys[-1]:,.0f} tokens/s. {known}",
        x_label="GPUs",
        y_label="tokens per second",
        lines=[
            Line("proportional to the first", "note", xs, [ys[0] * x / xs[0] for x in xs], "dashed"),
            Line("best plan", "reward", xs, ys, "points"),
            Line("best plan", "reward", xs, ys),
        ],
        marks=[] if knee is None else [Mark(knee, "drift", known, known)],
    )
    draw([chart], title, out)


def draw_splits(plans: Sequence[RunPlan], title: str, out: Path) -> None:
    """Seconds per batch of each split; the first plan is the best."""
    best = plans[0]
    ordered = sorted((plan for plan in plans if plan.pool == best.pool), key=lambda plan: plan.trains)
    xs = [plan.trains for plan in ordered]
    stages = (
        ("batch", "reward", [plan.seconds for plan in ordered]),
        ("train", "train", [plan.train.time.total for plan in ordered]),
        ("rollout", "rollout", [plan.rollout_s for plan in ordered]),
    )
    words = f"best: {best.trains} training nodes"
    chart = Chart(
        title="Seconds per batch of each split",
        described=f"Of {len(ordered)} splits; {words}, {best.seconds:.1f} s.",
        x_label="training nodes",
        y_label="seconds per batch",
        lines=[Line(name, style, xs, ys, shape) for name, style, ys in stages for shape in ("points", "line")],
        marks=[Mark(best.trains, "drift", words, words)],
    )
    draw([chart], title, out)


def draw_simulations(results: Mapping[str, SimulationResult], title: str, out: Path) -> None:
    """Finished trajectories, and engines at work, over simulated time under each policy."""
    done, busy = [], []
    for number, (name, result) in enumerate(results.items()):
        style, shape = f"c{number % COLOURS}", SHAPES[number % len(SHAPES)]
        ended = ((at, 100.0 / len(result.finish_s)) for at in sorted(result.finish_s))
        done.append(Line(name, style, *stair([(0.0, 0.0), *ended]), shape))
        work = [
            (at, by) for one in result.engines for start, end, _ in one.segments for at, by in ((start, 1), (end, -1))
        ]
        busy.append(Line(name, style, *stair(sorted(work)), shape))
    words = "; ".join(f"{name} {result.makespan_s:,.0f} s" for name, result in results.items())
    charts = [
        Chart("Trajectories done", f"Until all are done: {words}.", "simulated time", "%", done, clock=True),
        Chart("Engines at work", "Engines with a turn.", "simulated time", "engines", busy, clock=True, whole=True),
    ]
    draw(charts, title, out)
