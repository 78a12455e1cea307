"""Presets of the generator (`profiles.toml`): length of trajectories, their tools, and what the tools return.

* ``r2e``: coding agent, fitted to measurements of coding agents.  Tool seconds: 0.05 at the median, 10 at p95 (measured
  0.04, 11).  Tokens of a tool answer: 420 at the median, 1,480 at p90 (409, 1,468).  Failing calls: 17 % (14 %).
* ``search``: few turns with large answers, lighter tail.
* ``math``: one turn, long tail, no tools.
* ``documents``: a short answer to a prompt of thousands of tokens.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

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
    """Spread of the log of the generated tokens.  The longest tenth of a lognormal has Phi(sigma - 1.2816) of the sum:
    50 % at 1.28, 64 % at 1.65."""
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

PROFILES: dict[str, Profile] = {
    name: msgspec.convert({**fields, "name": name}, Profile)
    for name, fields in tomllib.loads(Path(__file__).with_name("profiles.toml").read_text()).items()
}
R2E, MATH, DOCUMENTS = (PROFILES[name] for name in ("r2e", "math", "documents"))


def profile(name: str) -> Profile:
    """Look up a preset; raises `UserError` naming the nearest."""
    try:
        return PROFILES[name]
    except KeyError:
        raise invalid("preset", name, "unknown preset", PROFILES) from None
