"""Lengths of a workload as a sketch whose size does not grow with the number of trajectories.

Finished trajectories are sorted by generated tokens and cut into bins, each a share of them with their means. Totals
stay exact. The body has `BODY_BINS` equal shares. The last share is halved down to one trajectory of a global batch,
because the longest one decides when a batch ends. A batch of 512 has 21 bins, one of 8,192 has 25.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.models.train_seconds import TrainWork
from libra_hpc.protocol.trace import TrajectoryRecord

BODY_BINS = 16
"""Equal shares of the body; 64 change a batch's time by less than 3 %, a rollout's by up to 4 %."""
QUANTILES = 4096
"""Trajectories sampled from a stated distribution."""

HALVINGS = 24
"""Halvings of the interval of generated tokens: to a hundredth of a token of the longest trajectories."""
MAX_SIGMA = 5.0
"""Widest log-normal: at 5 half of the trajectories have less than a quarter of a millionth of the mean."""


class TrajectoryLengths(msgspec.Struct, frozen=True):
    """Token counts of one finished trajectory."""

    generated: int
    """Tokens of all turns."""
    context: int
    """Tokens at the end, prompt included."""
    prompt: int
    turns: int = 1
    tool_s: float = 0.0


class Bin(msgspec.Struct, frozen=True):
    """Trajectories of similar length."""

    share: float
    """Share of all trajectories; shares add up to 1."""
    generated: float
    context: float
    """Mean tokens of the context at the end."""
    longest: int
    """Largest context at the end, tokens: it must fit in a KV cache."""
    prompt: float
    """Mean prompt tokens."""
    turns: float
    tool_s: float
    """Mean seconds of tools."""
    most_tool_s: float
    """Tool seconds of that trajectory of a global batch which has the most, mean."""
    open_tool_s: float
    """The same of all batches that are open at a time."""


class Rates(NamedTuple):
    """What a trajectory needs per generated token, besides decoding it."""

    new: float
    """Tokens that the environment adds."""
    turns: float
    tool_s: float

    @property
    def turn_tokens(self) -> float:
        """Tokens that the environment adds before a turn."""
        return self.new / self.turns


class Lengths(msgspec.Struct, frozen=True):
    """The sketch: bins from short to long, and ratios over all trajectories."""

    bins: tuple[Bin, ...]
    prompt: float
    """Mean prompt tokens."""
    prompt_beside: float
    """Mean prompt tokens, weighted by generated tokens. Far below `prompt` where long prompts have short answers."""
    new_per_token: float
    """Tokens that the environment adds per generated token."""
    turns_per_token: float
    tool_s_per_token: float
    context: float
    """Mean tokens of the context at the end."""
    context_square: float
    """Mean square of the context at the end, tokens^2: attention work."""
    longest_context: int
    open_generated: float
    """Tokens of the longest trajectory of all batches that are open at a time, mean."""
    observed: int
    """Trajectories in the sketch."""

    @property
    def generated(self) -> float:
        """Mean tokens."""
        return sum(b.share * b.generated for b in self.bins)

    @property
    def rates(self) -> Rates:
        """Return the rates of a generated token, whichever trajectory it belongs to."""
        return Rates(self.new_per_token, self.turns_per_token, self.tool_s_per_token)

    def context_at(self, generated: float) -> float:
        """Context tokens of a trajectory that has generated so many; tool results grow in proportion."""
        return self.prompt_beside + generated * (1.0 + self.new_per_token)

    def open_at(self, generated: float) -> tuple[float, Rates]:
        """Mean context and rates, there, of the trajectories that generate at least so many tokens.

        Long trajectories have fewer turns per token than short ones. Beyond the longest bin: those of that bin.
        """
        still = [b for b in self.bins if b.generated >= generated] or self.bins[-1:]
        whole = sum(b.share for b in still)

        def mean(values: Iterable[float]) -> float:
            return sum(b.share * value for b, value in zip(still, values, strict=True)) / whole

        new = mean((b.context - b.prompt - b.generated) / b.generated for b in still)
        rates = Rates(new, mean(b.turns / b.generated for b in still), mean(b.tool_s / b.generated for b in still))
        return mean(b.prompt for b in still) + generated * (1.0 + new), rates

    def generated_at(self, context: float) -> float:
        """Tokens after which the open trajectories have ``context`` tokens on average; within the longest bin."""
        low, high = 0.0, self.bins[-1].generated
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.open_at(middle)[0] < context else (low, middle)
        return high


class BatchWork(msgspec.Struct, frozen=True):
    """Work of one global batch, for both stages."""

    trajectories: int
    """Prompts times group size."""
    lengths: Lengths
    eta: int = 1
    """Staleness bound: batches that rollout may be ahead. With 0, the stages take turns."""
    minibatches: int = 1
    forwards: int = 0
    """See `TrainWork`."""

    @property
    def streamed(self) -> bool:
        """Whether groups are trained as they are complete, and not when the batch is (`RunConfig.streamed`)."""
        return self.eta == 0 and self.minibatches == 1 and not self.forwards

    @property
    def tokens(self) -> float:
        return self.trajectories * self.lengths.context

    @property
    def generated(self) -> float:
        return self.trajectories * self.lengths.generated

    @property
    def training(self) -> TrainWork:
        count, lengths, last = self.trajectories, self.lengths, self.lengths.bins[-1]
        return TrainWork(
            sizes=tuple((count * b.share, b.context) for b in lengths.bins),
            squares=count * lengths.context_square,
            loss=self.generated,
            longest=lengths.longest_context,
            longest_loss=lengths.longest_context * last.generated / last.context,
            minibatches=self.minibatches,
            forwards=self.forwards,
        )


def sketch(observed: Sequence[TrajectoryLengths], batch: int, eta: int = 0) -> Lengths:
    """Compress ``observed`` for global batches of ``batch`` trajectories, of which eta + 1 are open at a time;
    `UserError` for none and for impossible counts."""
    if not observed:
        raise UserError("The lengths cannot be planned with: there is no finished trajectory; valid: at least one.")
    if batch < 1:
        raise invalid("batch", batch, "no trajectories in a global batch", "an integer >= 1")
    for one in observed:
        _check(one)
    ordered = sorted(observed, key=lambda o: (o.generated, o.context))
    total = sum([o.generated for o in ordered])
    most = [len(ordered) / (batch * batches) for batches in (1, eta + 1)]
    bins = [_bin(ordered[low:high], len(ordered), most) for low, high in pairwise(_bounds(len(ordered), batch))]
    contexts, prompts = [o.context for o in ordered], [o.prompt for o in ordered]
    context, prompt = sum(contexts), sum(prompts)
    return Lengths(
        bins=tuple(bins),
        prompt=prompt / len(ordered),
        prompt_beside=sum([o.prompt * o.generated for o in ordered]) / total,
        new_per_token=(context - prompt - total) / total,
        turns_per_token=sum([o.turns for o in ordered]) / total,
        tool_s_per_token=sum([o.tool_s for o in ordered]) / total,
        context=context / len(ordered),
        context_square=sum([c * c for c in contexts]) / len(ordered),
        longest_context=max(contexts),
        open_generated=_mean_of_most([o.generated for o in ordered], most[1]),
        observed=len(ordered),
    )


def _check(one: TrajectoryLengths) -> None:
    least = min(one.generated, one.prompt, one.turns)
    if least < 1 or one.tool_s < 0 or one.context < one.generated + one.prompt:
        raise invalid(
            "trajectory",
            msgspec.to_builtins(one),
            "its counts contradict each other",
            "generated, prompt and turns >= 1, their sum within the context",
        )


def _bin(part: Sequence[TrajectoryLengths], whole: int, most: Sequence[float]) -> Bin:
    count, contexts, tools = len(part), [o.context for o in part], [o.tool_s for o in part]
    # A batch has one of the ``most[0]`` slowest, all open ones together one of ``most[1]``.
    of_one, of_open = (_mean_of_most(tools, few) for few in most)
    return Bin(
        share=count / whole,
        generated=sum([o.generated for o in part]) / count,
        context=sum(contexts) / count,
        longest=max(contexts),
        prompt=sum([o.prompt for o in part]) / count,
        turns=sum([o.turns for o in part]) / count,
        tool_s=sum(tools) / count,
        most_tool_s=of_one,
        open_tool_s=of_open,
    )


def _mean_of_most(values: Sequence[float], few: float) -> float:
    """Mean of the ``few`` largest, at least one."""
    largest = sorted(values)[-max(1, round(few)) :]
    return sum(largest) / len(largest)


def observe(trajectories: Iterable[TrajectoryRecord]) -> list[TrajectoryLengths]:
    """Lengths of a trace's trajectories, without those that generated nothing."""
    result = []
    for t in trajectories:
        if t.generated > 0:
            prompt = max(t.prompt_tokens, 1)
            result.append(
                TrajectoryLengths(
                    generated=t.generated,
                    context=max(t.context, prompt + t.generated),
                    prompt=prompt,
                    turns=len(t.turns),
                    tool_s=sum(turn.tool_s for turn in t.turns),
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
    """A stated distribution as `QUANTILES` trajectories at its quantiles.

    Generated tokens are log-normal with mean ``generated`` and shape ``sigma`` (0: all equal; 1: the longest tenth has
    39 % of the tokens). Turns are proportional to them, ``turns`` on average. Each brings ``new_tokens`` tokens and
    ``tool_s`` seconds of a tool. A trajectory ends at ``longest`` tokens of context. `UserError` for a value out of
    range.
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
    if sigma > MAX_SIGMA:
        raise invalid("sigma", sigma, "too wide for a mean that is stated", f"a number from 0 to {MAX_SIGMA:g}")
    if longest is not None and longest <= prompt:
        raise invalid("longest", longest, f"the prompt alone has {prompt} tokens", f"an integer > {prompt}")
    if longest is not None and generated > longest - prompt:
        room = f"a context of {longest:,} has room for {longest - prompt:,} after a prompt of {prompt:,}"
        raise invalid("generated", generated, room, f"a number from 1 to {longest - prompt}")
    normal = NormalDist()
    mu = math.log(generated) - sigma**2 / 2
    result = []
    for i in range(QUANTILES):
        wanted = math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / QUANTILES)) if sigma > 0 else generated
        rounds = wanted / generated * turns
        added = new_tokens * rounds
        fits = 1.0 if longest is None else min(1.0, (longest - prompt) / (wanted + added))
        tokens = max(1, int(wanted * fits))
        result.append(
            TrajectoryLengths(
                generated=tokens,
                context=prompt + tokens + int(added * fits),
                prompt=prompt,
                turns=max(1, round(rounds * fits)),
                tool_s=tool_s * rounds * fits,
            )
        )
    return result


def _bounds(count: int, batch: int) -> list[int]:
    """Ranks between the bins, both ends included, strictly rising."""
    shares = [i / BODY_BINS for i in range(BODY_BINS)]
    rest = 1.0 / BODY_BINS
    while rest / 2 >= 1.0 / batch:
        rest /= 2
        shares.append(1.0 - rest)
    if batch > BODY_BINS and 1.0 - 1.0 / batch > shares[-1]:
        shares.append(1.0 - 1.0 / batch)
    ranks = {min(count - 1, round(share * count)) for share in shares}
    return [*sorted(ranks), count]
