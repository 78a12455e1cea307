"""Statistics of traces in plain Python; each is None where the data do not determine it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float
    most: float
    mean: float


class OneWay(msgspec.Struct, frozen=True):
    """One-way analysis of variance of values in groups."""

    eta2: float
    """Share of the variance between the groups; by chance (groups - 1) / (n - 1)."""
    epsilon2: float
    """eta2 without chance (Kelley 1935); about 0, also below it, without an effect."""
    icc: float
    """ICC(1), the correlation of two members of a group (Fisher's estimate, mean size n0 of unequal groups)."""


def spread(values: Iterable[float]) -> Spread | None:
    """Describe values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    mean = math.fsum(ordered) / len(ordered)
    return Spread(p50=p50, p90=p90, p99=p99, most=ordered[-1], mean=mean)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, with linear interpolation (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Correlation; None for fewer than 3 pairs or a constant."""
    n = len(pairs)
    if n < 3:
        return None
    mean_x, mean_y = math.fsum(x for x, _ in pairs) / n, math.fsum(y for _, y in pairs) / n
    xx = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    yy = math.fsum((y - mean_y) ** 2 for _, y in pairs)
    if xx <= 0 or yy <= 0:
        return None
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / math.sqrt(xx * yy)


def centred(rows: Iterable[tuple[Hashable, float, float]]) -> list[tuple[float, float]]:
    """(x, y) minus their means within each stratum, for correlations at equal stratum."""
    strata: dict[Hashable, list[tuple[float, float]]] = {}
    for stratum, x, y in rows:
        strata.setdefault(stratum, []).append((x, y))
    result: list[tuple[float, float]] = []
    for members in strata.values():
        mean_x, mean_y = (
            math.fsum(x for x, _ in members) / len(members),
            math.fsum(y for _, y in members) / len(members),
        )
        result.extend((x - mean_x, y - mean_y) for x, y in members)
    return result


def one_way(rows: Iterable[tuple[Hashable, Hashable, float]]) -> OneWay | None:
    """Analyse (stratum, group, value) rows: sums of squares within strata, pooled over them.

    None without variance, without a stratum of two groups, or without a group of two values.
    """
    strata: dict[Hashable, dict[Hashable, list[float]]] = {}
    for stratum, group, value in rows:
        strata.setdefault(stratum, {}).setdefault(group, []).append(value)
    between = within = 0.0
    df_between = df_within = n = 0
    squares = 0.0
    for groups in strata.values():
        size = sum(len(values) for values in groups.values())
        mean = math.fsum(value for values in groups.values() for value in values) / size
        for values in groups.values():
            own = math.fsum(values) / len(values)
            between += len(values) * (own - mean) ** 2
            within += math.fsum((value - own) ** 2 for value in values)
            squares += len(values) ** 2 / size
        df_between += len(groups) - 1
        df_within += size - len(groups)
        n += size
    total = between + within
    if df_between < 1 or df_within < 1 or total <= 0:
        return None
    n0 = (n - squares) / df_between
    mean_within = within / df_within
    difference = between / df_between - mean_within
    return OneWay(
        between / total, (between - df_between * mean_within) / total, difference / (difference + n0 * mean_within)
    )
