"""How large the project is: ``python -m tests.house.sizes`` prints the statements of every room.

A statement is counted once however it is wrapped; docstrings and explanations of constants are none.
"""

from __future__ import annotations

import ast
from pathlib import Path

from .sources import ROOT, nodes, sources
from .test_rooms import table

PRODUCT = ("libra_hpc", "cli", "envs", "sbatch", "examples")
CHECKS = ("tests", "bench")


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a string that nobody uses."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(*folders: str) -> int:
    """Statements of Python below folders of the repository."""
    return sum(isinstance(node, ast.stmt) and not is_text(node) for path in sources(*folders) for node in nodes(path))


def words(*pages: Path) -> int:
    """Words of pages, generated ones too."""
    return sum(len(page.read_text().split()) for page in pages)


def user_pages() -> list[Path]:
    """README and the pages; the log of each quarter lies below them, in ``docs/log``."""
    return [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


if __name__ == "__main__":
    for room in table():
        print(f"{statements(room):7,} {room}")
    print(
        f"{statements(*PRODUCT):7,} product\n{statements(*CHECKS):7,} tests and bench\n{words(*user_pages()):7,} words"
    )
