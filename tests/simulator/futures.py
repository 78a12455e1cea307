"""Step times and known futures of made-up trajectories, for tests of policies that have foresight."""

from __future__ import annotations

from libra_hpc.simulator.baselines.oracle import Foresight, OracleWork


class Linear:
    """Step times: a base, and a slope per sequence, per cached token and per prefilled token."""

    source = "made up"

    def __init__(self, tp: int, kv_capacity: int = 100_000) -> None:
        self.tp, self.kv_capacity = tp, kv_capacity
        self._base = 0.02 / float(tp**0.65)

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """See `StepTimes`."""
        return self._base * (1.0 + decodes / 64 + kv_tokens / 200_000 + prefill / 250)


class Truth:
    """Remaining work of the trajectories of `drive`."""

    def __init__(self, lengths: dict[str, list[int]]) -> None:
        self._lengths = lengths

    def __call__(self, trajectory: str, turns: int) -> OracleWork:
        left = self._lengths[trajectory][turns:]
        return OracleWork(sum(left), 50 if turns else 500, 50 * (len(left) - 1), 1.0 * (len(left) - 1))


def foresight(lengths: dict[str, list[int]]) -> Foresight:
    """The input of the oracle in `drive`."""
    return Foresight(Truth(lengths), {tp: Linear(tp) for tp in (1, 2, 4, 8)}, 64)
