"""Requests of users as public logs have them, scaled down to a model of a few million parameters.

* ``code``: on and off. Bursts of log-normal size, log-normal gaps between them, long prompts and short answers.
* ``conversation``: always on. A Poisson process whose rate varies slowly, short prompts and long answers.

Fitted to the Azure LLM log of 2023 (code: gaps 3.1, 49 and 172 s at p50, p90 and p99; bursts 27 and 150 requests at p50
and p90; conversation: variance of a second over its mean 1.4). Prompts are cut to a quarter, bursts and gaps too.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple


class UserRequest(NamedTuple):
    arrival: float
    """Seconds."""
    prompt: int
    output: int
    """Tokens."""


class Lengths(NamedTuple):
    """Log-normal (mu, sigma) of prompts and outputs, and their most tokens."""

    prompt: tuple[float, float]
    most_prompt: int
    output: tuple[float, float]
    most_output: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        prompt, output = (int(rng.lognormvariate(*one)) for one in (self.prompt, self.output))
        return min(self.most_prompt, max(4, prompt)), min(self.most_output, max(2, output))


LENGTHS = {
    "code": Lengths((5.6, 1.1), 1800, (2.8, 0.85), 80),
    "conversation": Lengths((5.2, 0.99), 1000, (3.7, 0.86), 200),
}
BURST = (math.log(6.0), 0.9)
BURST_LOAD = 0.8
"""Of the device, within a burst."""
OFF_SIGMA = 1.2
RATE_SIGMA, RATE_S = 0.25, 5.0
"""Of the logarithm of the rate, drawn anew so often."""


def traffic(kind: str, seed: int, seconds: float, duty: float, cost_s: float) -> list[UserRequest]:
    """Requests that keep a server alone busy for a share ``duty`` of the time, at ``cost_s`` each."""
    rng = random.Random(f"{kind}:{seed}")
    rate = duty / cost_s
    times = _bursts(rng, seconds, rate, cost_s) if kind == "code" else _steady(rng, seconds, rate)
    # The shape is drawn, the load is not: otherwise rows of few seconds differ in their load more than in anything.
    times = rng.sample(times, min(len(times), round(rate * seconds)))
    return [UserRequest(time, *LENGTHS[kind].draw(rng)) for time in sorted(times)]


def _bursts(rng: random.Random, seconds: float, rate: float, cost_s: float) -> list[float]:
    times: list[float] = []
    inside = BURST_LOAD / cost_s
    mean = math.exp(BURST[0] + BURST[1] ** 2 / 2)
    off = mean / rate - mean / inside
    now = rng.random() * off
    while len(times) < rate * seconds or now < seconds:
        for _ in range(max(1, round(rng.lognormvariate(*BURST)))):
            now += rng.expovariate(inside)
            times.append(now)
        now += off * rng.lognormvariate(-(OFF_SIGMA**2) / 2, OFF_SIGMA)
    # As many as the load needs, in as many seconds.
    return [time * seconds / now for time in times] if now > seconds else times


def _steady(rng: random.Random, seconds: float, rate: float) -> list[float]:
    times: list[float] = []
    now, until, current = 0.0, 0.0, rate
    while len(times) < rate * seconds or now < seconds:
        if now >= until:
            until, current = now + RATE_S, rate * rng.lognormvariate(0.0, RATE_SIGMA)
        now += rng.expovariate(current)
        times.append(now)
    return [time * seconds / now for time in times]
