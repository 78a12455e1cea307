"""Kinds of agentic work for the generator: how long trajectories are, which tools they call, and what those return.

Lognormals are given as median and sigma (standard deviation of the natural logarithm).  ``r2e`` follows what was
measured on coding agents: tools take 0.05 s in the median and 10 s at p95 (measured: 0.04 and 11), a tool returns 420
tokens in the median and 1,480 at p90 (409 and 1,468), one call in six fails (14 %).  Cutting at 128 K tokens of context
shortens 1 % of its trajectories and leaves the longest tenth 52 to 58 % of the tokens, and as much of the time at 50
tokens/s; a trajectory then has 19 turns on average.  ``search`` has fewer turns, larger answers and a lighter tail (41
%), ``math`` one long-tailed turn without tools (50 %), ``documents`` short answers (the longest tenth has 32 % of the
tokens, the lower end of the 31 to 47 % that are measured) to prompts of thousands of tokens.
"""

from __future__ import annotations

import msgspec

from libra_hpc.errors import invalid


class Lognormal(msgspec.Struct, frozen=True):
    """exp(N(log median, sigma^2)), cut at ``most``."""

    median: float
    sigma: float
    most: float


class Tool(msgspec.Struct, frozen=True):
    """One tool."""

    name: str
    weight: float
    """Share of the calls."""
    seconds: Lognormal
    payload: Lognormal
    """Tokens it returns."""
    error_rate: float
    """Share of calls that fail, averaged over a trace; not used by a tool that runs tests."""
    tests: int = 0
    """Size of the test suite it runs; it then reports passed and failed counts and fails if one test failed.  0: it
    runs none."""
    timeout_rate: float = 0.0
    """Share of calls that reach ``seconds.most``."""


class Profile(msgspec.Struct, frozen=True):
    """One kind of work."""

    name: str
    generated: float
    """Median of the tokens a trajectory generates."""
    sigma: float
    """Of the generated tokens of a trajectory.  The share of the longest tenth of a lognormal is Phi(sigma -
    1.2816): 50 % at 1.28, 64 % at 1.65."""
    turns: float
    """Mean turns of a trajectory before any is cut; 1: a single turn without tools."""
    turns_power: float
    """Turns grow as (generated tokens) ** this: the rest of a long trajectory is longer turns."""
    prompt: Lognormal
    tools: tuple[Tool, ...]


TURN_SIGMA = 0.6
"""Sigma of the tokens of one turn around its trajectory's mean."""
TURNS_SIGMA = 0.25
"""Sigma of the number of turns beside what the length explains."""

R2E = Profile(
    name="r2e",
    generated=1500,
    sigma=1.65,
    turns=22,
    turns_power=0.9,
    prompt=Lognormal(2000, 0.4, 8000),
    tools=(
        Tool("bash", 0.32, Lognormal(0.10, 2.0, 60), Lognormal(350, 1.0, 4000), 0.12, timeout_rate=0.005),
        Tool("read", 0.28, Lognormal(0.02, 0.7, 5), Lognormal(700, 0.8, 4000), 0.04),
        Tool("edit", 0.14, Lognormal(0.03, 0.7, 5), Lognormal(150, 0.6, 2000), 0.10),
        Tool("grep", 0.08, Lognormal(0.05, 1.0, 10), Lognormal(300, 1.0, 8000), 0.05),
        Tool("test", 0.18, Lognormal(5.0, 1.0, 120), Lognormal(600, 0.8, 8000), 0.0, tests=20, timeout_rate=0.01),
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
        Tool("search", 0.6, Lognormal(0.8, 0.6, 20), Lognormal(1200, 0.5, 6000), 0.08),
        Tool("open", 0.4, Lognormal(1.5, 0.9, 30), Lognormal(2500, 0.8, 12000), 0.15, timeout_rate=0.01),
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
