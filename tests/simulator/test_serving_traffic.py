"""Generated serving traffic has the statistics of the logs that it stands for."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter

import pytest

from libra_hpc.errors import UserError
from libra_hpc.simulator.serving_traffic import (
    CHAT,
    CODE,
    ROSE,
    LogNormal,
    Traffic,
    arrivals,
    idle_windows,
    requests,
    traffic,
)

TRACE_S = 3480
"""Length of Azure's traces."""


def peak(times: list[float], width_s: float) -> float:
    """Most arrivals in a window of ``width_s`` over their mean."""
    return max(Counter(time // width_s for time in times).values()) * math.ceil(TRACE_S / width_s) / len(times)


def at(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def measured(kind: Traffic, seed: int) -> dict[str, float]:
    """The statistics of a trace, as they were taken of Azure's."""
    times = arrivals(kind, TRACE_S, seed)
    each = Counter(map(int, times))
    counts = [each[second] for second in range(TRACE_S)]
    busy = [float(count) for count in counts if count]
    tens = [sum(counts[start : start + 10]) for start in range(0, TRACE_S, 10)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    long = [gap for gap in gaps if gap > 1.0]
    return {
        "rate": len(times) / TRACE_S,
        "empty": counts.count(0) / TRACE_S,
        "busy_p50": at(busy, 0.5),
        "busy_p95": at(busy, 0.95),
        "dispersion": statistics.pvariance(counts) / statistics.fmean(counts),
        "lag": statistics.correlation(tens[:-1], tens[1:]),
        "gap_cv": statistics.pstdev(gaps) / statistics.fmean(gaps),
        "gap_p90": at(long, 0.9),
        "peak_1s": peak(times, 1.0),
        "peak_60s": peak(times, 60.0),
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            CODE,
            {
                "rate": 2.57,
                "empty": 0.73,
                "busy_p50": 7,
                "busy_p95": 26,
                "dispersion": 13.2,
                "gap_cv": 13.2,
                "gap_p90": 49,
                "peak_60s": 4.2,
            },
        ),
        (
            CHAT,
            {
                "rate": 5.53,
                "busy_p50": 5,
                "busy_p95": 11,
                "dispersion": 1.4,
                "gap_cv": 1.09,
                "gap_p90": 1.7,
                "lag": 0.72,
                "peak_60s": 1.5,
            },
        ),
        (ROSE, {"peak_1s": 4.22, "peak_60s": 1.7}),
    ],
    ids=["code", "chat", "rose"],
)
def test_arrivals_have_the_statistics_of_the_log(kind: Traffic, expected: dict[str, float]) -> None:
    traces = [measured(kind, seed) for seed in range(8)]
    for name, value in expected.items():
        assert statistics.fmean(trace[name] for trace in traces) == pytest.approx(value, rel=0.2), name


@pytest.mark.parametrize(("kind", "prompt", "output"), [(CODE, 2048, 28), (CHAT, 1155, 211)], ids=["code", "chat"])
def test_requests_are_as_long_as_those_of_the_log(kind: Traffic, prompt: float, output: float) -> None:
    found = [one for seed in range(3) for one in requests(kind, TRACE_S, seed)[0]]
    assert statistics.fmean(one.prompt_tokens for one in found) == pytest.approx(prompt, rel=0.15)
    assert statistics.fmean(one.output_tokens for one in found) == pytest.approx(output, rel=0.15)


def test_a_burst_reaches_all_replicas_and_every_request_exactly_one() -> None:
    whole, dealt = arrivals(CODE, 600, 3, scale=2.0), requests(CODE, 600, 3, scale=2.0, replicas=4)
    assert sorted(one.at_s for replica in dealt for one in replica) == whole
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert requests(CODE, 600, 3, scale=2.0, replicas=4) == dealt
    assert arrivals(CODE, 600, 4, scale=2.0) != whole


def test_scale_multiplies_the_rate() -> None:
    once, twice = (len(arrivals(CHAT, 7200, 1, scale=scale)) for scale in (1.0, 2.0))
    assert twice == pytest.approx(2 * once, rel=0.03)


def test_idle_windows_are_those_of_the_log() -> None:
    found = [end - start for start, end in idle_windows(4e7, 5, busy=LogNormal(3.0, 1.0))]
    assert [at(found, share) for share in (0.5, 0.9)] == [pytest.approx(114, rel=0.1), pytest.approx(855, rel=0.1)]
    assert at(found, 0.99) == pytest.approx(5358, rel=0.25)
    windows = idle_windows(5000.0, 1, busy=LogNormal(3.0, 1.0))
    assert all(a < b <= c for (a, b), (c, _) in itertools.pairwise(windows))
    assert windows[-1][1] <= 5000.0


def test_an_unknown_kind_names_the_nearest() -> None:
    assert traffic("code") is CODE
    with pytest.raises(UserError, match="did you mean 'chat'"):
        traffic("chats")
