"""The layout of a run on the nodes that Slurm has left it: pure, and the nearest to the one before.

``python -m libra_hpc.preflight.fewer_nodes CONFIG WHY NEEDED NOW`` prints a `FewerNodes`; lists of numbers are nodes
of each component of the job.  The owner of the run calls it: it has no checks of its own.

- Nodes can change places -> rollout nodes go first, then hybrid ones: the core keeps its layout, and so its snapshots.
- Still too few -> the core is smaller, with the same degrees.  Its ranks go on from the newest checkpoint.
- They cannot -> a component has the nodes that are left of it.
- The checks of a run file pass no such layout -> the same with the degrees that `plan` finds for the core's GPUs.
- They pass none of these -> there is none, with the reason of the last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from operator import sub
from pathlib import Path

import msgspec

from libra_hpc.config.load import load_resolved, with_values
from libra_hpc.config.node_groups import COMPONENTS, STAGES, core_world
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.planning.initial import interchangeable
from libra_hpc.protocol.ranks_stop import FewerNodes

from .checks import check_layout, check_run
from .gpu_memory import fastest_layout, stage_gpu


def fewer_nodes(config: RunConfig, loss: str, needed: Sequence[int], now: Sequence[int]) -> FewerNodes:
    """The nearest layout for ``now`` nodes of each component of the job, of ``needed`` ones; ``loss``: a sentence."""
    have, why = sum(getattr(config.components, name).nodes for name in COMPONENTS[1:]), "each stage needs one"
    left = f"{have - sum(needed) + sum(now)} of {have} nodes"
    for planned, changes in product((False, True), [*_candidates(config, [*map(sub, needed, now)])]):
        try:
            found = with_values(config, changes)
            if planned and (own := stage_gpu(found, "train", check_layout(config))):
                found = with_values(config, changes := changes | fastest_layout(found, own))
            check_run(found)
        except UserError as error:
            why = str(error)
        else:
            train, both, rollout = (changes[f"components.{name}.nodes"] for name in STAGES)
            layout = f"{train} train with {core_world(found).degrees}, {both} hybrid, {rollout} roll out"
            return FewerNodes(f"{loss}: going on with {left}: {layout}", changes, tuple(now))
    return FewerNodes(f"{loss}: no layout fits {left} ({why})")


def _candidates(config: RunConfig, missing: Sequence[int]) -> Iterator[dict[str, object]]:
    """Layouts as run-file values, the nearest first; ``missing``: nodes of each component of the job."""
    parts = config.components
    train, hybrid, rollout = before = [getattr(parts, name).nodes for name in STAGES]
    # Environment nodes are the last component of the job, but for a plain one.
    apart = bool(parts.env.nodes) and len(missing) > 1
    env, left = parts.env.nodes - missing[-1] * apart, sum(before) - sum(missing[: len(missing) - apart])
    alike = len(missing) - apart == 1 or interchangeable(parts.train, parts.hybrid, parts.rollout)
    lost = dict(zip([name for name in COMPONENTS if getattr(parts, name).nodes], missing, strict=False))
    for core, both in product(range(train, 0, -1), range(hybrid, -1, -1)):
        counts = dict(zip((*STAGES, "env"), (core, both, left - core - both, env), strict=True))
        if 1 <= counts["rollout"] <= rollout and (
            alike or all(counts[name] == getattr(parts, name).nodes - lost.get(name, 0) for name in STAGES)
        ):
            # The requests of the job's script are those of all nodes, so no other layout is written.
            yield {
                "planner.repartition": "advise",
                **{f"components.{name}.nodes": count for name, count in counts.items()},
                **{
                    f"rollout.{name}": [*value[:both], *value[hybrid : hybrid + counts["rollout"]]]
                    for name in ("tp", "engines_per_node")
                    if isinstance(value := getattr(config.rollout, name), list)
                },
            }


if __name__ == "__main__":
    print(
        msgspec.json.encode(
            fewer_nodes(load_resolved(Path(sys.argv[1])), sys.argv[2], *map(msgspec.json.decode, sys.argv[3:]))
        ).decode()
    )
