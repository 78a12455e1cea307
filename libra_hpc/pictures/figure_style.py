"""Common style of the project's pictures, and how they are saved.

A `Figure` without pyplot needs no display and no backend.  matplotlib takes 0.5 s to import, so verbs import the
modules of this package only for a picture.
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
"""Inches, as all sizes here."""
DPI = 130
GRID = 0.25
"""Opacity of grid lines."""


def figure(height: float, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def style(panel: Axes, title: str = "") -> None:
    """Apply the common style to a panel; the uppermost gets the title of the picture."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    if title:
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")


def save(drawn: Figure, out: Path) -> None:
    """Write a PNG atomically.  Raises `UserError` when it cannot be written."""
    data = BytesIO()
    drawn.savefig(data, format="png")
    try:
        write_atomic(out, data.getvalue())
    except OSError as error:
        raise UserError(f"{out}: the picture cannot be written ({error.strerror}).") from None
