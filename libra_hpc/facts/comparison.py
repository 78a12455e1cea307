"""Runs side by side: the keys in which they differ, the results of each, and the medians over seeds.

- A key that a repartition of one of the runs changed -> no setting, unless a sweep set it.
- Runs that differ in nothing but ``run.seed`` -> one group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from libra_hpc.config.load import flat, without_removed
from libra_hpc.config.run_file_text import HIDDEN, without_secrets

from . import series
from .columns import Value, compared, values_of
from .failed import failed_in
from .rundir import RunDir
from .series import first_and_last
from .starts import job_gpus, job_seconds, starts
from .sweep_record import read_member

OWN_KEYS = ("run.name", "run.dir")
"""Keys for the place of a run, and nothing about its results."""
SEED = "run.seed"


class ComparedRun(msgspec.Struct, frozen=True):
    """One run beside others.  Times in seconds; None: not measured."""

    run: str
    path: str
    values: dict[str, Any]
    """The keys in which the compared runs differ."""
    steps: int
    steps_wanted: int
    speedup: float
    """How many times faster than the clock its simulated seconds passed; 1.0: a real run."""
    last: float | None
    """Mean of the metric over the last fifth of the steps so far."""
    highest: float | None
    step_s: float | None
    """Mean over all steps but the first, which has the start of the engines.

    No median: with a staleness bound steps come in bursts, and most of them seem short.
    """
    tokens_per_s: float | None
    """Trained tokens, prompts included, over the same steps."""
    numbers: dict[str, Value]
    """By the names in `columns`; in JSON they stand beside the other keys."""
    failed_attempts: int
    wall_s: float
    gpu_hours: float
    """GPUs of the job times the time in which it had nodes."""


class SeedGroup(msgspec.Struct, frozen=True):
    """Runs that differ in nothing but ``run.seed``, by their place among the compared runs."""

    values: dict[str, Any]
    """The differing keys without ``run.seed``."""
    members: list[int]
    last: list[float]
    """Lowest, median and highest of the members; empty without steps."""
    step_s: float | None
    """Median of the members."""


class MetricCurve(msgspec.Struct, frozen=True):
    """A metric of one run."""

    steps: list[int]
    wall_s: list[float]
    """Since the first event of the run."""
    values: list[float]


class Comparison(msgspec.Struct, frozen=True):
    """All runs, and one metric of each."""

    metric: str
    keys: list[str]
    """Dotted keys in which the runs differ."""
    runs: list[ComparedRun]
    groups: list[SeedGroup]


class Settings(NamedTuple):
    """What a run was started with."""

    config: dict[str, Any]
    """By dotted key."""
    changed: frozenset[str]
    """Keys that a repartition changed since, and no sweep set."""


def compare(runs: Sequence[RunDir], metric: str) -> tuple[Comparison, list[MetricCurve]]:
    """Read ``runs`` and lay their facts side by side; the curves are in the order of the runs."""
    found = [settings(run) for run in runs]
    keys = differing([one.config for one in found], frozenset().union(*(one.changed for one in found)))
    shown = [{key: _shown(key, one, [other.config.get(key) for other in found]) for key in keys} for one in found]
    read = [read_run(run, values, metric) for run, values in zip(runs, shown, strict=True)]
    facts = [one for one, _ in read]
    return Comparison(metric, keys, facts, seed_groups(facts)), [curve for _, curve in read]


def _shown(key: str, one: Settings, values: Sequence[Any]) -> Any:
    """The value of a key; of one that may be a secret only which of the ``values`` it is.

    Options of the task are what sweeps vary.
    """
    value = one.config.get(key)
    known = without_secrets(key.removeprefix("task.options."), value)
    return value if known == value or value is None else f"{HIDDEN} {values.index(value) + 1}"


def settings(run: RunDir) -> Settings:
    """The configuration of a run; a key that a sweep set and a repartition changed has the sweep's value."""
    changed: set[str] = set()
    for event in series.events(run):
        if event["kind"] == "repartitioned" and isinstance(event.get("changes"), dict):
            changed |= set(event["changes"])
    member = read_member(run)
    swept = {} if member is None else {key: value for key, value in member.values.items() if key in changed}
    return Settings({**flat(without_removed(run.resolved())), **swept}, frozenset(changed - set(swept)))


def differing(configs: Sequence[Mapping[str, Any]], unless: frozenset[str] = frozenset()) -> list[str]:
    """Dotted keys whose values are not the same in all configurations, sorted."""
    return [
        key
        for key in sorted({key for one in configs for key in one})
        if key not in OWN_KEYS and key not in unless and any(one.get(key) != configs[0].get(key) for one in configs)
    ]


def read_run(run: RunDir, values: dict[str, Any], metric: str) -> tuple[ComparedRun, MetricCurve]:
    """Facts and curve of one run, whose differing keys have ``values``."""
    rows, log, start, end, speedup = series.read(run)
    known = flat(without_removed(run.resolved()))
    measured = [(row, value) for row in rows if math.isfinite(value := series.number(row, metric))]
    timed = [row for row in rows[1:] if series.number(row, "step_s") > 0.0]
    trained, seconds = (sum(series.number(row, key, 0.0) for row in timed) for key in ("tokens", "step_s"))
    facts = ComparedRun(
        run=run.name,
        path=str(run.path),
        values=values,
        steps=len(rows),
        steps_wanted=int(known.get("run.steps", 0)),
        speedup=speedup,
        last=first_and_last([value for _, value in measured])[1],
        highest=max((value for _, value in measured), default=None),
        step_s=seconds / len(timed) if timed else None,
        tokens_per_s=trained / seconds if timed else None,
        numbers=values_of(compared(), rows, log),
        failed_attempts=sum(found.count for found in failed_in(log, run.read_json(run.status))),
        wall_s=end - start,
        gpu_hours=job_gpus(run.resolved()) * job_seconds(starts(rows, log)) / 3600.0,
    )
    curve = MetricCurve(
        [int(row["step"]) for row, _ in measured],
        [series.number(row, "t") - start for row, _ in measured],
        [value for _, value in measured],
    )
    return facts, curve


def seed_groups(runs: Sequence[ComparedRun]) -> list[SeedGroup]:
    """The runs by their settings without the seed, in the order of their first members."""
    groups: list[list[int]] = []
    for place, run in enumerate(runs):
        same = next((each for each in groups if _without_seed(runs[each[0]]) == _without_seed(run)), None)
        if same is None:
            groups.append([place])
        else:
            same.append(place)
    return [_seed_group(runs, members) for members in groups]


def _seed_group(runs: Sequence[ComparedRun], members: list[int]) -> SeedGroup:
    last = sorted(value for place in members if (value := runs[place].last) is not None)
    seconds = [value for place in members if (value := runs[place].step_s) is not None]
    return SeedGroup(
        _without_seed(runs[members[0]]),
        members,
        [last[0], statistics.median(last), last[-1]] if last else [],
        statistics.median(seconds) if seconds else None,
    )


def _without_seed(run: ComparedRun) -> dict[str, Any]:
    return {key: value for key, value in run.values.items() if key != SEED}
