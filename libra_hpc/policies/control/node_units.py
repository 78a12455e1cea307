"""Nodes that move together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra_hpc.protocol.plan import NodeFact


def units(nodes: Sequence[NodeFact], *roles: str, core: bool = False) -> list[list[NodeFact]]:
    """Hybrid nodes in these roles, with those that they move with; ``core``: also the core where it rolls out, too."""
    found: dict[int, list[NodeFact]] = {}
    for node in nodes:
        if node.component == "hybrid" or (core and node.shares):
            found.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    return [unit for unit in found.values() if all(node.role in roles for node in unit)]


def ranks(found: Iterable[list[NodeFact]]) -> tuple[int, ...]:
    return tuple(node.rank for unit in found for node in unit)
