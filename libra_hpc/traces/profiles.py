"""Presets of the generator: length of trajectories, their tools, and what the tools return.

* ``r2e``: coding agent, fitted to measurements of coding agents.  Tool seconds: 0.05 at the median, 10 at p95 (measured
  0.04, 11).  Tokens of a tool answer: 420 at the median, 1,480 at p90 (409, 1,468).  Failing calls: 17 % (14 %).
* ``search``: few turns with large answers, lighter tail.
* ``math``: one turn, long tail, no tools.
* ``documents``: a short answer to a prompt of thousands of tokens.
"""

from __future__ import annotations

import msgspec

from libra_hpc.errors import invalid


class Lognormal(msgspec.Struct, frozen=True):
    """exp(N(log median, sigma^2)), clipped at ``most``."""

    median: float
    sigma: float
    most: float


class Tool(msgspec.Struct, frozen=True):
    name: str
    weight: float
    seconds: Lognormal
    payload: Lognormal
    """Tokens it returns."""
    error_rate: float
    """Share of calls that fail, averaged over a trace; ignored by a tool with ``tests``."""
    tests: int = 0
    """Size of its test suite (0: none); the call then fails if one test fails, and reports both counts."""
    timeout_rate: float = 0.0
    """Share of calls that reach ``seconds.most``."""


class Profile(msgspec.Struct, frozen=True):
    name: str
    generated: float
    sigma: float
    """Of the log of the generated tokens.  The longest tenth of a lognormal has Phi(sigma - 1.2816) of the sum: 50 %
    at 1.28, 64 % at 1.65."""
    turns: float
    """Mean turns of a trajectory before any is cut; 1: a single turn without tools."""
    turns_power: float
    """Turns grow as (generated tokens) ** turns_power."""
    prompt: Lognormal
    tools: tuple[Tool, ...]


TURN_SIGMA = 0.6
"""Sigma of the tokens of one turn around the mean of its trajectory."""
TURNS_SIGMA = 0.25
"""Sigma of the number of turns at equal length."""

R2E = Profile(
    name="r2e",
    generated=1500,
    sigma=1.65,
    turns=22,
    turns_power=0.9,
    prompt=Lognormal(2000, 0.4, 8000),
    tools=(
        Tool(
            name="bash",
            weight=0.32,
            seconds=Lognormal(0.10, 2.0, 60),
            payload=Lognormal(350, 1.0, 4000),
            error_rate=0.12,
            timeout_rate=0.005,
        ),
        Tool(
            name="read",
            weight=0.28,
            seconds=Lognormal(0.02, 0.7, 5),
            payload=Lognormal(700, 0.8, 4000),
            error_rate=0.04,
        ),
        Tool(
            name="edit",
            weight=0.14,
            seconds=Lognormal(0.03, 0.7, 5),
            payload=Lognormal(150, 0.6, 2000),
            error_rate=0.10,
        ),
        Tool(
            name="grep",
            weight=0.08,
            seconds=Lognormal(0.05, 1.0, 10),
            payload=Lognormal(300, 1.0, 8000),
            error_rate=0.05,
        ),
        Tool(
            name="test",
            weight=0.18,
            seconds=Lognormal(5.0, 1.0, 120),
            payload=Lognormal(600, 0.8, 8000),
            error_rate=0.0,
            tests=20,
            timeout_rate=0.01,
        ),
    ),
)
SEARCH = Profile(
    name="search",
    generated=900,
    sigma=1.1,
    turns=6,
    turns_power=0.85,
    prompt=Lognormal(400, 0.4, 2000),
    tools=(
        Tool(
            name="search",
            weight=0.6,
            seconds=Lognormal(0.8, 0.6, 20),
            payload=Lognormal(1200, 0.5, 6000),
            error_rate=0.08,
        ),
        Tool(
            name="open",
            weight=0.4,
            seconds=Lognormal(1.5, 0.9, 30),
            payload=Lognormal(2500, 0.8, 12000),
            error_rate=0.15,
            timeout_rate=0.01,
        ),
    ),
)
MATH = Profile(
    name="math", generated=2500, sigma=1.35, turns=1, turns_power=0.0, prompt=Lognormal(150, 0.4, 1000), tools=()
)
DOCUMENTS = Profile(
    name="documents",
    generated=200,
    sigma=0.8,
    turns=1,
    turns_power=0.0,
    prompt=Lognormal(12_000, 0.4, 28_000),
    tools=(),
)
PROFILES = {profile.name: profile for profile in (R2E, SEARCH, MATH, DOCUMENTS)}


def profile(name: str) -> Profile:
    """Look up a preset; raises `UserError` naming the nearest."""
    try:
        return PROFILES[name]
    except KeyError:
        raise invalid("preset", name, "unknown preset", PROFILES) from None
