"""Nodes that move together, and train nodes that roll out too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra_hpc.protocol.plan import NodeFact


def units(nodes: Sequence[NodeFact], *roles: str) -> list[list[NodeFact]]:
    """Hybrid nodes in these roles, with those that they move with."""
    found: dict[int, list[NodeFact]] = {}
    for node in nodes:
        if node.component == "hybrid":
            found.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    return [unit for unit in found.values() if all(node.role in roles for node in unit)]


def sharing_core(nodes: Sequence[NodeFact]) -> list[NodeFact]:
    """The train nodes, where they roll out, too."""
    return [node for node in nodes if node.shares]


def ranks(found: Iterable[list[NodeFact]]) -> tuple[int, ...]:
    return tuple(node.rank for unit in found for node in unit)
