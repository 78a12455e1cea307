"""Questions to the planner: the shipped example of 48 A800 with other keys of the run file, or with other work.

Where batches are small, a question has a part of the example's nodes, or of their GPUs. All nodes may serve both stages
in turn.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from bench.harness import ROOT
from bench.profiles import GROUP, MAX_CONTEXT, work_named
from libra_hpc.config.load import load_run_file, with_values
from libra_hpc.models.train_seconds import work_of
from libra_hpc.planning.in_turn import assumed_s
from libra_hpc.planning.initial import hybrid_of, planned_pools
from libra_hpc.planning.request import InTurn, PlanRequest, as_planned, request

STAGES = ("train", "hybrid", "rollout")
THREE_NODES = {f"components.{stage}.nodes": 1 for stage in STAGES}
SMALL_NODES = {f"components.{stage}.gpus": 2 for stage in STAGES}
HALF = {"algorithm.prompts_per_step": 32}
"""256 trajectories a batch."""
LONG = {"rollout.max_model_len": MAX_CONTEXT}
BEFORE = {"rollout.max_num_seqs": 64, "rollout.max_inflight": 96, "rollout.async_steps": False}
"""Defaults of the engines until 29 November 2026."""


class Question(NamedTuple):
    changes: dict[str, Any]
    """Of the example, by dotted key."""
    work: str = ""
    """Profiles of `bench.profiles`; empty: what the run file says."""
    group: int = GROUP
    """Trajectories of a prompt, with such work."""


def _small(work: str, eta: int, nodes: dict[str, Any]) -> Question:
    """128 trajectories a batch on 24 or 12 GPUs."""
    return Question({"algorithm.eta": eta, "algorithm.prompts_per_step": 16, **nodes, **LONG}, work)


QUESTIONS = {
    "shipped 14B": Question({}),
    "shipped 32B": Question({"planner.model": "qwen3-32b"}),
    "shipped 30B-A3B": Question({"planner.model": "qwen3-30b-a3b"}),
    "heavy answers": Question({"algorithm.eta": 1, "task.work.spread": 1.6}),
    "tools of 60 s": Question(
        {"algorithm.eta": 1, "task.work.turns": 12, "task.work.answer_tokens": 500, "task.work.tool_s": 60, **HALF}
    ),
    "64k, eta 4": Question(
        {"algorithm.eta": 4, "rollout.max_model_len": 65_536, "task.work.answer_tokens": 20_000, **HALF}
    ),
    "sessions": Question({"algorithm.eta": 1, "algorithm.prompts_per_step": 256, **LONG}, "sessions", group=1),
    "quarter 63k, eta 0": _small("long", 0, SMALL_NODES),
    "quarter 63k, eta 1": _small("long", 1, SMALL_NODES),
    "steady, eta 0": _small("r2e", 0, THREE_NODES),
    "steady, eta 1": _small("r2e", 1, THREE_NODES),
    "mixed tools": _small("r2e+slow tools", 1, THREE_NODES),
}
"""Steady, quarter 63k, mixed tools: both stages of the rows of these names in docs/data/judge.toml."""


@lru_cache(maxsize=32)
def question(name: str, before: bool = False, nodes: int = 0) -> PlanRequest:
    """``before``: with the defaults of before; ``nodes``: so many, and a batch in proportion."""
    changes, work, group = QUESTIONS[name]
    if nodes:
        grown = {"components.rollout.nodes": nodes - 4, "algorithm.prompts_per_step": 64 * nodes // 6}
        changes = {**changes, **grown}
    values = {"planner.model": "qwen3-14b", **changes, **(BEFORE if before else {})}
    config = with_values(load_run_file(ROOT / "examples" / "a800-48-qwen3-14b.toml"), values)
    asked = request(as_planned(config))
    pools = planned_pools(config, asked.pools)
    asked = replace(asked, pools=pools, hybrid=hybrid_of(config, pools))
    if work:
        played = work_named(work, group)
        lengths = [(one.context, one.generated) for one in played.sample(asked.settings.batch_groups)]
        asked = replace(asked, work=played, batch=work_of(lengths, asked.settings.batch_groups * group))
    return replace(asked, in_turn=InTurn(assumed_s(asked)))
