"""Work of the benchmarks: the presets of the library, and profiles of their own, mixed by ``+``."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from libra_hpc.traces.profiles import PROFILES, R2E, Lognormal, Profile, Tool
from libra_hpc.traces.run_work import Work, WorkPart

MAX_CONTEXT = 131_072
GROUP = 8


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
"""Profiles of the benchmarks.

- ``long``: coding on large repositories, contexts of 63k tokens in the mean, up to 128k: more than the KV caches hold.
- ``slow tools``: builds and test suites that take minutes.
- ``deep search``: 28 calls with large answers, contexts of some 60k tokens.
- ``small tools``: 60 small calls, every seventh of half a minute: half of a task is its tools, as in AgentCgroup (arXiv
  2602.09345).
- ``sessions``: an agent's turns between two messages of a person, after a long history that no other one shares;
  fitted to 3,765 recorded coding sessions: median prompt, 50 % and 99 % of generated tokens, turns, tool seconds.
"""


def work_named(names: str, group: int = GROUP) -> Work:
    """The work of a profile, or of several alike in number: ``r2e+slow tools``."""
    parts = tuple(WorkPart(profile=OWN.get(name) or PROFILES[name]) for name in names.split("+"))
    return Work(parts, group, MAX_CONTEXT, names)
