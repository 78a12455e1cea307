"""Picture of simulations: completed trajectories over time under each policy, and the load of each engine.

The upper panel has completions.  Below it, one panel per policy has a row per engine, the largest TP degree on top,
dark where many sequences run at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from libra_hpc.simulator.result import SimulationResult

from .figure_style import AMBER, BLUE, GREEN, GREY, GRID, PINK, RED, VIOLET, figure, save, style

COLOURS = (GREEN, BLUE, PINK, AMBER, VIOLET, RED, GREY, "#0a3069", "#953800", "#116329", "#5a32a3", "#24292f")
MOST_PANELS = 4
"""Most policies whose engines are drawn; the upper panel has all."""


def draw(results: Mapping[str, SimulationResult], title: str, out: Path) -> None:
    """Write the picture as PNG; raises `UserError` when the file cannot be written."""
    shown = list(results)[:MOST_PANELS]
    rows = max(len(result.engines) for result in results.values())
    height = 0.8 + 0.05 * rows
    drawn = figure(3.4 + len(shown) * (height + 0.35))
    panels: list[Axes] = list(
        drawn.subplots(1 + len(shown), 1, sharex=True, gridspec_kw={"height_ratios": [2.6, *([height] * len(shown))]})
    )
    _completions(panels[0], results)
    for panel, name in zip(panels[1:], shown, strict=True):
        _engines(panel, results[name])
        panel.set_title(
            f"{name}: {results[name].makespan_s:,.0f} s, engines idle {results[name].idle_share:.0%}",
            loc="left",
            fontsize=9,
        )
    for panel in panels:
        style(panel, title if panel is panels[0] else "")
    panels[-1].set_xlim(0, 1.02 * max(result.makespan_s for result in results.values()))
    panels[-1].set_xlabel("simulated seconds")
    save(drawn, out)


def _completions(panel: Axes, results: Mapping[str, SimulationResult]) -> None:
    for colour, (name, result) in zip(COLOURS, results.items(), strict=False):
        count = len(result.finish_s)
        panel.step(
            [0.0, *result.finish_s],
            [100 * i / count for i in range(count + 1)],
            where="post",
            color=colour,
            label=name,
            linewidth=1.6,
        )
    panel.set_ylabel("trajectories done, %")
    panel.set_ylim(0, 101)
    panel.grid(alpha=GRID)
    panel.legend(fontsize=8, frameon=False, loc="lower right", ncols=2)


def _engines(panel: Axes, result: SimulationResult) -> None:
    top = max((load for engine in result.engines for _, _, load in engine.segments), default=1.0)
    patches, shades = [], []
    for row, engine in enumerate(result.engines):
        for start, end, load in engine.segments:
            patches.append(Rectangle((start, row + 0.06), end - start, 0.88))
            shades.append((load / top) ** 0.5)
    collection = PatchCollection(patches, cmap="Blues", linewidth=0)
    collection.set_array(shades)
    collection.set_clim(-0.25, 1.0)
    panel.add_collection(collection)
    panel.set_ylim(0, len(result.engines))
    degrees = sorted({engine.tp for engine in result.engines})
    first = {tp: next(row for row, engine in enumerate(result.engines) if engine.tp == tp) for tp in degrees}
    edges = [*first.values(), len(result.engines)]
    panel.set_yticks([(low + high) / 2 for low, high in pairwise(edges)], [f"TP{tp}" for tp in degrees])
    panel.tick_params(axis="y", length=0)
    for edge in edges[1:-1]:
        panel.axhline(edge, color=GREY, linewidth=0.6)
