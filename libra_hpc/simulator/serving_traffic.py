"""Requests of a serving job, generated: like the public Azure traces of 2023 (58 minutes each), and like ROSE's.

The rate of each second is drawn first, then its arrivals: Poisson, uniform in the second.

- code: bursts of a log-normal number of requests, and log-normal gaps without any; bursts hit all replicas at once.
- chat (Azure's conversations): never empty for long; the log of the rate is a random walk around its mean.
- rose: as chat, with peaks of 1.7 times the mean in a minute and 4.2 times in a second (ROSE, arXiv 2605.06534).

Day and night multiply the rates.  `idle_windows` are the times in which a whole job is idle, as of a public GenAI log.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec

from libra_hpc.errors import invalid

WALK_S = 95.0
"""Seconds after which the walk of the rate has forgotten all but 1/e: Azure's 10-s counts correlate by 0.72."""
GAP_MOST_S = 190.0
"""Longest gap of code traffic; the measured p99 is 172 s."""
BURST_MOST = 67.0
"""Most requests in a second of a burst."""


class LogNormal(msgspec.Struct, frozen=True):
    """exp(N(mu, sigma^2)), cut at ``most``."""

    mu: float
    sigma: float
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        return min(self.most, math.exp(rng.gauss(self.mu, self.sigma)))


class ServingRequest(msgspec.Struct, frozen=True):
    at_s: float
    prompt_tokens: int
    output_tokens: int


class Traffic(msgspec.Struct, frozen=True):
    """One kind of traffic; rates in requests per second of the whole service."""

    name: str
    rate: float
    """Mean."""
    prompt: LogNormal
    output: LogNormal
    burst: LogNormal | None = None
    """Requests of a burst; None: there is always traffic."""
    gap: LogNormal = LogNormal(0.0, 0.0)
    """Seconds from a burst to the next, beyond the first second."""
    second: LogNormal = LogNormal(0.0, 0.0)
    """Rate of a second of a burst; without bursts a factor on the rate, of mean 1."""
    walk: float = 0.0
    """Standard deviation of the log of the rate: of a burst, or over minutes."""


CODE = Traffic(
    "code",
    2.57,
    prompt=LogNormal(7.00, 1.36, 7437),
    output=LogNormal(2.79, 1.0),
    burst=LogNormal(math.log(32), 1.338),
    gap=LogNormal(math.log(3.6), 2.2, GAP_MOST_S),
    second=LogNormal(math.log(8.0), 0.62),
    walk=0.5,
)
CHAT = Traffic("chat", 5.53, prompt=LogNormal(6.63, 0.99, 4142), output=LogNormal(5.02, 0.86), walk=0.27)
ROSE = msgspec.structs.replace(CHAT, name="rose", walk=0.24, second=LogNormal(-0.036, 0.27))
KINDS = {traffic.name: traffic for traffic in (CODE, CHAT, ROSE)}

IDLE_WINDOW = LogNormal(math.log(114), 1.572, 6 * 3600)
"""Seconds: p50 114, p90 855; p99 4,417, of the log 5,358."""


def traffic(name: str) -> Traffic:
    """A kind by its name; raises `UserError`."""
    if name not in KINDS:
        raise invalid("traffic", name, "unknown kind", list(KINDS))
    return KINDS[name]


def arrivals(kind: Traffic, seconds: float, seed: int, *, scale: float = 1.0) -> list[float]:
    """Times of the requests in ``seconds``, in order.

    ``scale`` multiplies the rate.  ``day``: how far the rate swings around its mean in a day, 0 to 1; it starts at its
    mean, rising.
    """
    rng = random.Random(f"{seed}/{kind.name}/arrivals")
    found: list[float] = []
    for second, rate in enumerate(_bursts(kind, seconds, rng) if kind.burst else _walk(kind, seconds, rng)):
        count = _poisson(rate * scale, rng)
        found += sorted(second + rng.random() for _ in range(count))
    return found


def requests(
    kind: Traffic, seconds: float, seed: int, *, replicas: int = 1, scale: float = 1.0
) -> list[list[ServingRequest]]:
    """The requests of each replica of a service: they are dealt in turns, so bursts reach all replicas."""
    rng = random.Random(f"{seed}/{kind.name}/tokens")
    dealt: list[list[ServingRequest]] = [[] for _ in range(replicas)]
    for number, at_s in enumerate(arrivals(kind, seconds, seed, scale=scale)):
        prompt, output = max(1, round(kind.prompt.draw(rng))), max(1, round(kind.output.draw(rng)))
        dealt[number % replicas].append(ServingRequest(at_s, prompt, output))
    return dealt


def idle_windows(
    seconds: float, seed: int, *, busy: LogNormal, idle: LogNormal = IDLE_WINDOW
) -> list[tuple[float, float]]:
    """(start, end) of the idle times of a job in ``seconds``; ``busy``: seconds between them."""
    rng = random.Random(f"{seed}/idle")
    at, found = busy.draw(rng) * rng.random(), []
    while at < seconds:
        end = at + idle.draw(rng)
        found.append((at, min(end, seconds)))
        at = end + busy.draw(rng)
    return found


def _bursts(kind: Traffic, seconds: float, rng: random.Random) -> Iterator[float]:
    """Rates of code traffic, second by second."""
    assert kind.burst is not None
    gap, left, level = 0, 0.0, 1.0
    for _ in range(math.ceil(seconds)):
        if not gap and left <= 0.0:
            gap, left = 1 + int(kind.gap.draw(rng)), kind.burst.draw(rng)
            level = math.exp(rng.gauss(0.0, kind.walk))
        if gap:
            gap -= 1
            yield 0.0
        else:
            rate = min(left, BURST_MOST, level * kind.second.draw(rng))
            left -= rate
            yield rate


def _walk(kind: Traffic, seconds: float, rng: random.Random) -> Iterator[float]:
    """Rates of traffic that never stops, second by second."""
    keep = math.exp(-1.0 / WALK_S)
    step = kind.walk * math.sqrt(1.0 - keep * keep)
    level = rng.gauss(0.0, kind.walk)
    for _ in range(math.ceil(seconds)):
        yield kind.rate * math.exp(level - 0.5 * kind.walk**2) * kind.second.draw(rng)
        level = keep * level + rng.gauss(0.0, step)


def _poisson(mean: float, rng: random.Random) -> int:
    if mean > 50.0:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count
