"""The node agent: one process per node, which owns the engines of its node."""
