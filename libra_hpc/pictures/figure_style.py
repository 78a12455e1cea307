"""How the project's pictures look and how they come onto disk; what they show is said where they are drawn.

A `Figure` without pyplot needs neither a display nor a choice of backend.  matplotlib takes half a second to import, so
verbs import the modules that draw only when a picture is asked for.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from libra_hpc.errors import UserError
from libra_hpc.files import write_atomic

GREEN, BLUE, PINK, AMBER, VIOLET, RED, GREY = (
    "#1a7f37",
    "#2a8fbd",
    "#b4478c",
    "#e6b84c",
    "#6e40c9",
    "#d1242f",
    "#8b949e",
)
TRAIN, ROLLOUT = PINK, BLUE
"""The stages have the same colours in every picture."""
WIDTH = 10.0
"""Inches."""
DPI = 130
GRID = 0.25
"""Opacity of grid lines."""


def figure(height: float, width: float = WIDTH) -> Figure:
    """An empty picture, inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def style(panel: Axes, title: str = "") -> None:
    """Dress a panel; the uppermost has the picture's title."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    if title:
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")


def save(drawn: Figure, out: Path) -> None:
    """Write a PNG, whole or not at all.  Raises `UserError` when it cannot be written."""
    data = BytesIO()
    drawn.savefig(data, format="png")
    try:
        write_atomic(out, data.getvalue())
    except OSError as error:
        raise UserError(f"{out}: the picture cannot be written ({error.strerror}).") from None
