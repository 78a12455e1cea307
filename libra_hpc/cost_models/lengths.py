"""Lengths of a workload as a sketch whose size does not grow with the number of trajectories.

Finished trajectories are sorted by generated tokens and cut into bins; a bin is its share of the trajectories and the
mean of what is in it, so that totals are kept exactly.  The body of the distribution is cut into `BODY` = 16 equal
shares.  The last share is halved again and again, down to one trajectory of a global batch: the longest one decides
when a batch ends, and it has a bin of its own.  A batch of 512 has 21 bins, one of 8,192 has 25.

What else the cost models need are ratios and moments over all trajectories: prompts (per trajectory, and beside a
generated token), tool results, turns and tool seconds per generated token, and the mean and mean square of the context
that training attends over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.trace import TrajectoryRecord

BODY = 16
"""Equal shares; 64 of them change predicted times of a batch by less than 3 %, of a rollout by up to 4 %."""
SYNTHETIC = 4096
"""Quantiles a stated distribution is sampled at."""


class TrajectoryLengths(msgspec.Struct, frozen=True):
    """One finished trajectory."""

    generated: int
    """Tokens, all turns together."""
    context: int
    """Tokens of the whole context at the end, prompt included."""
    prompt: int
    turns: int = 1
    tool_s: float = 0.0
    """Seconds in tools, all turns together."""


class Bin(msgspec.Struct, frozen=True):
    """Trajectories of similar length."""

    share: float
    """Of all trajectories; the shares add up to 1."""
    generated: float
    """Mean tokens."""
    context: float
    """Mean context at the end, tokens."""
    longest: int
    """Largest context at the end, tokens: what must fit in a KV cache."""


class Lengths(msgspec.Struct, frozen=True):
    """The sketch; bins from short to long."""

    bins: tuple[Bin, ...]
    prompt: float
    """Mean prompt tokens."""
    prompt_beside: float
    """Mean prompt tokens beside a generated one: long answers count as often as they are long.  Where long prompts
    have short answers it is much less."""
    new_per_token: float
    """Tokens the environment adds per generated token."""
    turns_per_token: float
    tool_s_per_token: float
    context: float
    """Mean context at the end, tokens."""
    context_square: float
    """Mean square of the context at the end, tokens^2."""
    longest_context: int
    observed: int
    """Trajectories it was made from."""

    @property
    def generated(self) -> float:
        """Mean generated tokens."""
        return sum(b.share * b.generated for b in self.bins)

    @property
    def turn_tokens(self) -> float:
        """Mean tokens the environment adds before a turn."""
        return self.new_per_token / self.turns_per_token

    def context_at(self, generated: float) -> float:
        """Tokens of context of a trajectory that has generated so many: tool results come in proportion."""
        return self.prompt_beside + generated * (1.0 + self.new_per_token)


def sketch(observed: Sequence[TrajectoryLengths], batch: int) -> Lengths:
    """Compress ``observed`` for global batches of ``batch`` trajectories; raises `UserError` without any and for
    impossible counts."""
    if not observed:
        raise UserError("The lengths cannot be planned with: there is no finished trajectory; valid: at least one.")
    if batch < 1:
        raise invalid("batch", batch, "no trajectories in a global batch", "an integer >= 1")
    for one in observed:
        if (
            one.generated < 1
            or one.prompt < 1
            or one.turns < 1
            or one.tool_s < 0
            or one.context < one.generated + one.prompt
        ):
            raise invalid(
                "trajectory",
                msgspec.to_builtins(one),
                "its counts contradict each other",
                "generated, prompt and turns >= 1, their sum within the context",
            )
    ordered = sorted(observed, key=lambda o: (o.generated, o.context))
    total = sum([o.generated for o in ordered])
    bounds = _bounds(len(ordered), batch)
    bins = []
    for low, high in pairwise(bounds):
        contexts = [o.context for o in ordered[low:high]]
        generated = sum([o.generated for o in ordered[low:high]])
        count = high - low
        bins.append(Bin(count / len(ordered), generated / count, sum(contexts) / count, max(contexts)))
    contexts, prompts = [o.context for o in ordered], [o.prompt for o in ordered]
    context, prompt = sum(contexts), sum(prompts)
    return Lengths(
        tuple(bins),
        prompt / len(ordered),
        sum([o.prompt * o.generated for o in ordered]) / total,
        (context - prompt - total) / total,
        sum([o.turns for o in ordered]) / total,
        sum([o.tool_s for o in ordered]) / total,
        context / len(ordered),
        sum([c * c for c in contexts]) / len(ordered),
        max(contexts),
        len(ordered),
    )


def observe(trajectories: Iterable[TrajectoryRecord]) -> list[TrajectoryLengths]:
    """What a trace says about lengths; trajectories that generated nothing are left out."""
    result = []
    for t in trajectories:
        if t.generated > 0:
            prompt = max(t.prompt_tokens, 1)
            result.append(
                TrajectoryLengths(
                    t.generated,
                    max(t.context, prompt + t.generated),
                    prompt,
                    len(t.turns),
                    sum(turn.tool_s for turn in t.turns),
                )
            )
    return result


def lognormal(
    *,
    generated: float,
    sigma: float,
    prompt: int,
    turns: float = 1.0,
    new_tokens: float = 0.0,
    tool_s: float = 0.0,
    longest: int | None = None,
) -> list[TrajectoryLengths]:
    """A stated distribution as `SYNTHETIC` trajectories at its quantiles.

    Generated tokens are log-normal with mean ``generated`` and shape ``sigma`` (0: all equal; 1: the longest tenth has
    39 % of the tokens).  Turns are proportional to them, ``turns`` on average, each bringing ``new_tokens`` tokens and
    ``tool_s`` seconds of a tool.  No context exceeds ``longest``: a longer episode ends there. Raises `UserError` for a
    value out of range.
    """
    least = {
        "generated": (generated, 1),
        "sigma": (sigma, 0),
        "prompt": (prompt, 1),
        "turns": (turns, 1),
        "new_tokens": (new_tokens, 0),
        "tool_s": (tool_s, 0),
    }
    for name, (value, bound) in least.items():
        if not bound <= value < math.inf:
            raise invalid(name, value, "out of range", f"a number >= {bound}")
    if longest is not None and longest <= prompt:
        raise invalid("longest", longest, f"the prompt alone has {prompt} tokens", f"an integer > {prompt}")
    normal = NormalDist()
    mu = math.log(generated) - sigma**2 / 2
    result = []
    for i in range(SYNTHETIC):
        wanted = math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / SYNTHETIC)) if sigma > 0 else generated
        rounds = wanted / generated * turns
        added = new_tokens * rounds
        fits = 1.0 if longest is None else min(1.0, (longest - prompt) / (wanted + added))
        tokens = max(1, int(wanted * fits))
        result.append(
            TrajectoryLengths(
                tokens,
                prompt + tokens + int(added * fits),
                prompt,
                max(1, round(rounds * fits)),
                tool_s * rounds * fits,
            )
        )
    return result


def _bounds(count: int, batch: int) -> list[int]:
    """Ranks between which the bins lie, both ends included, strictly rising."""
    shares = [i / BODY for i in range(BODY)]
    rest = 1.0 / BODY
    while rest / 2 >= 1.0 / batch:
        rest /= 2
        shares.append(1.0 - rest)
    if batch > BODY and 1.0 - 1.0 / batch > shares[-1]:
        shares.append(1.0 - 1.0 / batch)
    ranks = {min(count - 1, round(share * count)) for share in shares}
    return [*sorted(ranks), count]
