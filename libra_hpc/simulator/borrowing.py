"""What would lenders bring?  The same work on the own engines, with borrowed ones beside them, and with as many own.

- `parse_borrow` reads ``16:code``: 16 engines, code-like traffic; ``16:code:0.5``: with that many requests a second at
  each of them; ``16:spot``: no traffic, but taken back now and then.
- `lent_engines` makes them; `borrowing` plays all three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from libra_hpc.errors import invalid
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .play import played
from .result import SimulationResult
from .serving_traffic import IDLE_WINDOW, KINDS, LogNormal, ServingRequest, idle_windows, requests
from .settings import EngineSpec, LenderSpec, SimulationSettings
from .simulate import Simulation

RATES = {"code": 0.25, "chat": 0.1, "rose": 0.1}
"""Requests a second at each engine unless given: an 8B model on an A800 is busy for 15 to 35 % of the time."""
FLAP_S = 6.0
"""Between two requests of traffic that pauses an engine every few seconds."""
SPOT_BUSY = LogNormal(math.log(60), 1.0)
"""Seconds that a spot engine is away."""
EXAMPLE = "a number of engines and a kind, such as 16:code, 16:chat:0.1 or 16:spot"
OTHERS = ("spot", "flap")
PAYS = 1.05
"""Gain below which it is not worth the trouble; batches differ by about as much."""
LONGER = 1.5
"""Traffic lasts for so many times the seconds without lenders."""


class Borrow(msgspec.Struct, frozen=True):
    """Engines to borrow."""

    engines: int
    kind: str
    rate: float = 0.0
    """Requests per second and engine."""


class Borrowing(msgspec.Struct, frozen=True):
    """Seconds of a batch."""

    alone: float
    borrowed: float
    own: float
    """With as many own engines."""
    share: float
    """Share of the time that the borrowed engines could run, at the end; mean."""
    leaves: int
    """How often the turns of an engine had to leave it."""
    tokens: float
    """Share of all generated tokens that is theirs."""

    @property
    def gain(self) -> float:
        return self.alone / self.borrowed

    @property
    def pays(self) -> bool:
        return self.gain >= PAYS

    @property
    def of_own(self) -> float:
        """Share of the gain of as many own engines; 1.0 where that is nothing."""
        most = self.alone / self.own - 1.0
        return (self.gain - 1.0) / most if most > 0.005 else 1.0


def parse_borrow(text: str) -> Borrow:
    """Raises `UserError`."""
    count, _, rest = text.partition(":")
    kind, _, rate = rest.partition(":")
    kind = kind or "code"
    if not count.isdecimal() or not int(count):
        raise invalid("--borrow", text, "no number of engines", EXAMPLE)
    if kind not in (*KINDS, *OTHERS):
        raise invalid("--borrow", kind, "unknown kind of lender", [*KINDS, *OTHERS])
    try:
        per_s = float(rate) if rate else RATES.get(kind, 0.0)
    except ValueError:
        per_s = -1.0
    if not 0.0 <= per_s < 1000.0:
        raise invalid("--borrow", text, "its rate is no number of requests a second", EXAMPLE)
    return Borrow(int(count), kind, per_s)


def lent_engines(borrow: Borrow, like: EngineSpec, seconds: float, *, seed: int = 0) -> list[EngineSpec]:
    """Borrowed engines of the shape of ``like``, with traffic for so many seconds."""
    count = borrow.engines
    served: list[list[ServingRequest]] = [[] for _ in range(count)]
    away: list[tuple[tuple[float, float], ...]] = [() for _ in range(count)]
    if borrow.kind in KINDS:
        kind = KINDS[borrow.kind]
        served = requests(kind, seconds, seed, replicas=count, scale=borrow.rate * count / kind.rate)
    elif borrow.kind == "flap":
        times = range(int(seconds / FLAP_S))
        served = [[ServingRequest(FLAP_S * (at + n / count), 2000, 160) for at in times] for n in range(count)]
    else:
        for n in range(count):
            windows = idle_windows(seconds, 1000 * seed + n, busy=SPOT_BUSY, idle=IDLE_WINDOW)
            edges = [0.0, *(edge for window in windows for edge in window), math.inf]
            away[n] = tuple(zip(edges[::2], edges[1::2], strict=True))
    return [
        replace(like, name=f"lent-{n}", lender=LenderSpec(requests=tuple(served[n]), away=away[n]))
        for n in range(count)
    ]


def borrowing(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    borrow: Borrow,
    policy: str,
    settings: SimulationSettings,
    *,
    seed: int = 0,
) -> Borrowing:
    """Raises as `Simulation` does."""

    def play(specs: Sequence[EngineSpec]) -> tuple[Simulation, SimulationResult]:
        simulation = Simulation(work, specs, make_policy(policy), settings)
        return simulation, simulation.run()

    alone = play(engines)[1]
    like = engines[0]
    more = [replace(like, name=f"{like.name}-more-{n}") for n in range(borrow.engines)]
    own = play([*engines, *more])[1]
    lent = lent_engines(borrow, like, LONGER * alone.makespan_s, seed=seed)
    simulation, result = play([*engines, *lent])
    theirs = sum(one.generated_tokens for one in result.engines if one.engine.startswith("lent-"))
    return Borrowing(
        alone=played(alone, settings).batch_s,
        borrowed=played(result, settings).batch_s,
        own=played(own, settings).batch_s,
        share=simulation.lenders.share,
        leaves=simulation.lenders.leaves,
        tokens=theirs / max(1, result.generated_tokens),
    )
