"""Rows of `bench.fleets`: the work, the GPUs, and the fleets that a user could build from them.

- One batch: the GPUs roll out; nothing is trained.
- ``256 each``: open trajectories for each TP8 engine, as in the examples for A800; in steady rows if one node trains.
- Steady: both stages.  Some nodes train (a *split*), or all nodes serve both stages in turn (`bench.fleets_training`).

A fleet is a list of `Part`: so many engines of one TP degree on one kind of GPU.  Only degrees whose KV cache holds the
longest context count, because vLLM would not start otherwise.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.settings import EngineSpec
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import MATH, PROFILES, R2E, Lognormal, Profile, Tool

DEGREES = (1, 2, 4, 8)
NODE = 8
"""GPUs of a node: a node has engines of one degree, as in a run file."""
MAX_CONTEXT = 131_072
GROUP = 8
STEADY = 12
"""Batches of a steady row; four measure the start, whose engines are empty."""
MIXES = ({1: 1, 2: 1, 4: 2}, {2: 1, 4: 1}, {2: 1, 8: 1}, {4: 1, 8: 1}, {1: 1, 2: 1, 4: 1, 8: 1})
"""Common mixes: shares of the GPUs by TP degree; the first is the published pattern 4xTP1,2xTP2,2xTP4."""


def _coding(name: str, generated: float, prompt: float, payload: float, tool_s: float = 1.0, **other: Any) -> Profile:
    """`R2E` with other lengths, and tools that return and take so many times as much."""
    tools = tuple(
        replace(
            tool,
            payload=replace(tool.payload, median=payload * tool.payload.median),
            seconds=replace(tool.seconds, median=tool_s * tool.seconds.median, most=tool_s * tool.seconds.most),
        )
        for tool in R2E.tools
    )
    return replace(R2E, name=name, generated=generated, prompt=Lognormal(prompt, 0.5, 60_000), tools=tools, **other)


OWN = {
    profile.name: profile
    for profile in (
        _coding("long", 6_000, 20_000, 1.6, sigma=0.7, turns=40),
        _coding("middle", 6_000, 14_000, 0.9, sigma=0.7, turns=40),
        _coding("slow tools", R2E.generated, R2E.prompt.median, 1.0, tool_s=10.0),
        Profile(
            name="sessions",
            generated=511,
            sigma=1.8,
            turns=6.5,
            turns_power=0.9,
            prompt=Lognormal(65_000, 0.6, 125_000),
            tools=(Tool("tool", 1.0, Lognormal(9, 1.0, 60), Lognormal(300, 1.6, 20_000), error_rate=0.0),),
        ),
        replace(MATH, name="short math", generated=700, sigma=0.6),
        replace(PROFILES["search"], name="deep search", generated=3_000, sigma=0.9, turns=28),
        Profile(
            name="small tools",
            generated=4_000,
            sigma=1.0,
            turns=60,
            turns_power=0.8,
            prompt=Lognormal(12_000, 0.4, 40_000),
            tools=(
                Tool("command", 0.85, Lognormal(0.3, 1.5, 60), Lognormal(180, 1.0, 3_000), error_rate=0.1),
                Tool("build", 0.15, Lognormal(30, 1.0, 600), Lognormal(500, 0.9, 6_000), error_rate=0.2),
            ),
        ),
    )
}
"""Profiles of this benchmark.

- ``long``, ``middle``: coding on large repositories, contexts of 63k and 46k tokens in the mean, up to 128k: more than
  the KV caches hold.
- ``slow tools``: builds and test suites that take minutes.
- ``deep search``: 28 calls with large answers, contexts of some 60k tokens.
- ``small tools``: 60 small calls, every seventh of half a minute: half of a task is its tools, as in AgentCgroup (arXiv
  2602.09345).
- ``sessions``: an agent's turns between two messages of a person, after a long history that no other one shares;
  fitted to 3,765 recorded coding sessions: median prompt, 50 % and 99 % of generated tokens, turns, tool seconds.
"""
MIXED = "mixed tools"
"""Preset: every second group has slow tools, the others those of `R2E`."""


class Part(NamedTuple):
    pool: int
    """Index of the kind of GPU."""
    tp: int
    engines: int


Fleet = tuple[Part, ...]


class Setting(NamedTuple):
    """One row; ``batches`` = 0: one batch of all trajectories."""

    preset: str = "r2e"
    model: str = "qwen3-14b"
    pools: tuple[tuple[str, int], ...] = (("a800", 24),)
    """(device, GPUs); in a steady row those that train are among them."""
    trajectories: int = 256
    """Of one batch."""
    batches: int = 0
    eta: int = 0
    group: int = GROUP
    """Samples of a prompt."""
    dials: tuple[tuple[str, Any], ...] = ()
    slow: int = 0
    """GPUs at half the speed, which nobody knows."""
    change: str = ""
    """``giant`` | ``mislead``."""


THREE, SIX = (("a800", 24),), (("a800", 48),)
ROWS: dict[str, Setting] = {
    "r2e": Setting(dials=(("outcome", 1.0),)),
    "r2e, siblings": Setting(dials=(("outcome", 0.0),)),
    "r2e, nothing": Setting(dials=(("outcome", 0.0), ("sibling", 0.0))),
    "r2e, 8B": Setting(model="qwen3-8b"),
    "r2e, 32B": Setting(model="qwen3-32b"),
    "r2e, 30B-A3B": Setting(model="qwen3-30b-a3b"),
    "search": Setting(preset="search"),
    "math": Setting(preset="math"),
    "short math": Setting(preset="short math"),
    "documents": Setting(preset="documents"),
    "sessions": Setting(preset="sessions", group=1),
    "mixed tools": Setting(preset=MIXED),
    "long": Setting(preset="long", trajectories=512),
    "long, 8B": Setting(preset="long", model="qwen3-8b", trajectories=512),
    "long, 32B": Setting(preset="long", model="qwen3-32b"),
    "slow node": Setting(pools=SIX, trajectories=512, slow=8),
    "two kinds": Setting(pools=(("a800", 16), ("h200", 16)), trajectories=384),
    "giant": Setting(change="giant"),
    "misleading": Setting(dials=(("outcome", 1.0),), change="mislead"),
    "256 each": Setting(pools=THREE, trajectories=768),
    "512 each": Setting(pools=THREE, trajectories=1_536),
    "256 each, groups of one": Setting(pools=THREE, trajectories=768, group=1),
    "256 each, search": Setting(preset="search", pools=THREE, trajectories=768),
    "256 each, eta 0": Setting(pools=THREE, trajectories=512, batches=STEADY),
    "256 each, eta 1": Setting(pools=THREE, trajectories=256, batches=STEADY, eta=1),
    "256 each, eta 2": Setting(pools=THREE, trajectories=168, batches=STEADY + 2, eta=2),
    "steady, eta 0": Setting(pools=THREE, trajectories=128, batches=STEADY),
    "steady, eta 1": Setting(pools=THREE, trajectories=128, batches=STEADY, eta=1),
    "steady, eta 2": Setting(pools=THREE, trajectories=128, batches=STEADY + 2, eta=2),
    "drift, eta 1": Setting(pools=THREE, trajectories=128, batches=STEADY, eta=1, dials=(("drift", 4.0),)),
    "mixed tools, eta 1": Setting(preset=MIXED, pools=THREE, trajectories=128, batches=STEADY, eta=1),
    "sessions, eta 1": Setting(preset="sessions", pools=SIX, trajectories=256, batches=STEADY, eta=1, group=1),
    "32B, eta 1": Setting(model="qwen3-32b", pools=SIX, batches=STEADY, eta=1),
    "30B-A3B, eta 1": Setting(model="qwen3-30b-a3b", pools=SIX, batches=STEADY, eta=1),
    "46k, eta 0": Setting(preset="middle", pools=SIX, trajectories=512, batches=STEADY),
    "46k, eta 1": Setting(preset="middle", pools=SIX, trajectories=512, batches=STEADY, eta=1),
    "63k, eta 0": Setting(preset="long", pools=SIX, trajectories=512, batches=STEADY),
    "63k, eta 1": Setting(preset="long", pools=SIX, trajectories=512, batches=STEADY, eta=1),
}


@lru_cache(maxsize=16)
def work(name: str, seed: int) -> tuple[list[list[TrajectoryRecord]], list[TrajectoryRecord]]:
    """(batches from which the policies learned before, the work); there are none before in most rows."""
    row = ROWS[name]
    count = row.trajectories * max(1, row.batches)
    before = []
    if row.change == "mislead":
        before = [generated(row, count, seed + 1_000)]
    made = generated(row, count, seed)
    if row.change == "mislead":
        made = [replace(one, turns=tuple(_opposite(turn) for turn in one.turns)) for one in made]
    if row.change == "giant":
        made[-1] = replace(made[-1], turns=(TurnRecord(0, MAX_CONTEXT - made[-1].prompt_tokens - 1),))
    return before, made


def generated(row: Setting, count: int, seed: int) -> list[TrajectoryRecord]:
    """Generate so many trajectories of the row's work."""
    dials = Dials(trajectories=count, group=row.group, seed=seed, max_context=MAX_CONTEXT, **dict(row.dials))
    if row.preset != MIXED:
        return generate(OWN.get(row.preset) or PROFILES[row.preset], dials)
    halves = [generate(profile, replace(dials, trajectories=count // 2)) for profile in (R2E, OWN["slow tools"])]
    firsts = range(0, count // 2, row.group)
    return [one for first in firsts for half in halves for one in half[first : first + row.group]]


def _opposite(turn: TurnRecord) -> TurnRecord:
    outcome = {"ok": "error", "error": "ok"}.get(turn.outcome or "", turn.outcome)
    code = None if turn.exit_code is None else int(not turn.exit_code)
    return replace(turn, outcome=outcome, exit_code=code, passed=turn.failed, failed=turn.passed)


# --- fleets


class _Slow:
    """Step times of an engine that takes twice as long."""

    def __init__(self, steps: StepTimes) -> None:
        self.tp, self.kv_capacity, self.source = steps.tp, steps.kv_capacity, steps.source
        self._step_s = steps.step_s

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return 2.0 * self._step_s(decodes, kv_tokens, prefill, context)


def less_nodes(row: Setting, train: int) -> Setting:
    """The row without so many nodes of its first kind of GPU."""
    (device, gpus), *others = row.pools
    return row._replace(pools=((device, gpus - train * NODE), *others))


def homogeneous(row: Setting) -> list[Fleet]:
    """Every fleet with one degree on each kind of GPU, whose KV caches hold the longest context."""
    able = [[tp for tp in DEGREES if lookup(d, row.model, tp).kv_capacity > MAX_CONTEXT] for d, _ in row.pools]
    return [tuple(Part(pool, tp, row.pools[pool][1] // tp) for pool, tp in enumerate(tps)) for tps in product(*able)]


def fleets_of(row: Setting) -> list[Fleet]:
    """Every homogeneous fleet; with one kind of GPU the common mixes too."""
    found = homogeneous(row)
    if len(row.pools) > 1:
        return found
    able, nodes = {fleet[0].tp for fleet in found}, row.pools[0][1] // NODE
    for shares in MIXES:
        whole, left, counts = sum(shares.values()), nodes, dict[int, int]()
        for tp, share in shares.items():
            counts[tp] = min(left, max(1, round(nodes * share / whole)))
            left -= counts[tp]
        counts[max(counts)] += left
        fleet = tuple(Part(0, tp, n * NODE // tp) for tp, n in counts.items() if n)
        if set(shares) <= able and len(fleet) > 1 and fleet not in found:
            found.append(fleet)
    return found


def engines_of(row: Setting, fleet: Fleet) -> list[EngineSpec]:
    """The engines, from the largest to the smallest; slow nodes are in the middle."""
    first = row.pools[0][1] // (2 * NODE) * NODE
    engines, gpu = [], 0
    for pool, tp, count in sorted(fleet, key=lambda part: (part.pool, -part.tp)):
        steps: StepTimes = lookup(row.pools[pool][0], row.model, tp)
        for number in range(count):
            is_slow = row.slow and gpu < first + row.slow and gpu + tp > first
            name = f"{row.pools[pool][0]}-tp{tp}-{number}"
            engines.append(EngineSpec(name, tp, _Slow(steps) if is_slow else steps))
            gpu += tp
    return engines


def fleet_name(row: Setting, fleet: Fleet) -> str:
    kinds = len(row.pools) > 1
    return "+".join(f"{p.engines}xTP{p.tp}" + (f" {row.pools[p.pool][0]}" if kinds else "") for p in fleet)


def window(batches: int, eta: int) -> tuple[int, int]:
    """The batches whose ends are the first and the last that count: beyond the start, if there are enough, and while
    new groups still start."""
    last = batches - 1 - eta
    return (eta + 1 if last > 2 * (eta + 1) else 0), last


@lru_cache(maxsize=64)
def quantile_thresholds(name: str, seed: int) -> tuple[int, int, int]:
    """Buckets by the lengths themselves: half, nine tenths and 97 % of the trajectories."""
    cuts = statistics.quantiles([one.generated for one in work(name, seed)[1]], n=100)
    return int(cuts[49]), int(cuts[89]), int(cuts[96])
