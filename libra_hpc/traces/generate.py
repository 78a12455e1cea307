"""Generate a workload with known structure; `Dials` set what a scheduler can learn from it.

N is a standard normal draw, independent each time; the profile is one of `libra_hpc.traces.profiles`.

* Length: log tokens = log median + sigma * (sqrt(sibling) * D + sqrt(1 - sibling) * N).  D is the difficulty of the
  prompt: N, stratified over the prompts, so that small traces have the tail of large ones.
* Drift: the log length gains log(drift) * (position - 1/2), with position from 0 to 1 over the trace.
* Turns: proportional to (length / median) ** turns_power * exp(TURNS_SIGMA * N); their tokens to exp(TURN_SIGMA * N).
* Tools: one per turn but the last, by weight; seconds and payload are independent lognormals.
* Outcomes: each call has a score z = outcome * n + sqrt(1 - outcome^2) * N, n: standardised log of remaining tokens.
  A call fails above the quantile of the tool's error rate; a test run has tests * (1.6 * Phi(z) - 0.6) failures.
* Reward: 1 with probability Phi(0.3 - 0.8 * D), else 0.
* Cut: a trajectory ends when its context reaches ``max_context``, as in training.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from . import profiles
from .profiles import TURN_SIGMA, TURNS_SIGMA, Lognormal, Profile, Tool

EXIT_FAILED, EXIT_TIMEOUT = 1, 124
"""Exit codes of a failed process and of one that `timeout` ended."""

_normal = NormalDist()


class Dials(msgspec.Struct, frozen=True):
    """Options of the generator; see the module for their effect."""

    trajectories: int = 512
    group: int = 8
    seed: int = 0
    sibling: float = 0.69
    """Share of the variance of the log length that the prompt explains; measured on tau-bench."""
    outcome: float = 0.2
    """Correlation of outcomes with the log of the remaining tokens; measured on two software sets: at most 0.17."""
    drift: float = 1.0
    """Typical length at the end of the trace over that at its start."""
    max_context: int = 131_072
    """Tokens."""

    def check(self, profile: Profile) -> None:
        for name, count in (("trajectories", self.trajectories), ("group", self.group)):
            if count < 1:
                raise invalid(name, count, "out of range", "an integer >= 1")
        for name, share in (("sibling", self.sibling), ("outcome", self.outcome)):
            if not 0 <= share <= 1:
                raise invalid(name, share, "out of range", "a number from 0 to 1")
        if not (self.drift > 0 and math.isfinite(self.drift)):
            raise invalid("drift", self.drift, "out of range", "a number > 0")
        if self.trajectories % self.group:
            why, valid = "not a whole number of groups", f"a multiple of group = {self.group}"
            raise invalid("trajectories", self.trajectories, why, valid)
        least = int(profile.prompt.most) + 1
        if self.max_context < least:
            raise invalid(
                "max_context",
                self.max_context,
                "the longest prompt leaves no room for an answer",
                f"an integer >= {least}",
            )


class _Draft(msgspec.Struct):
    prompt_id: str
    sample: int
    prompt_tokens: int
    difficulty: float
    length: float
    """Generated tokens over the median."""
    generated: list[int]


def generate(preset: str | Profile, dials: Dials = Dials()) -> list[TrajectoryRecord]:  # noqa: B008
    """Generate trajectories, the siblings of a prompt next to each other; equal arguments give equal ones.

    Raises `UserError` for an unknown preset or a dial out of range.
    """
    profile = profiles.profile(preset) if isinstance(preset, str) else preset
    dials.check(profile)
    # Separate random streams, so that one dial does not change the rest of the trace.
    lengths, calls, scores = (random.Random(f"{dials.seed}/{name}") for name in ("lengths", "calls", "scores"))
    drafts = _drafts(profile, dials, lengths)
    _deal(drafts, profile, lengths)
    mean, spread = _remaining(drafts)
    result = []
    for draft in drafts:
        turns: list[TurnRecord] = []
        context, left = draft.prompt_tokens, sum(draft.generated)
        new = 0
        for index, tokens in enumerate(draft.generated):
            left -= tokens
            room = dials.max_context - context - new
            if room < 1:
                break
            context += new + min(tokens, room)
            if index + 1 == len(draft.generated):
                turns.append(TurnRecord(new, min(tokens, room)))
                break
            tool = _choose(profile.tools, calls)
            score = dials.outcome * (math.log(left) - mean) / spread + math.sqrt(1 - dials.outcome**2) * scores.gauss(
                0, 1
            )
            turns.append(_call(tool, score, TurnRecord(new, min(tokens, room)), calls))
            new = max(round(_draw(tool.payload, calls)), 1)
        turns[-1] = TurnRecord(turns[-1].new_tokens, turns[-1].gen_tokens)
        reward = float(calls.random() < _normal.cdf(0.3 - 0.8 * draft.difficulty))
        result.append(
            TrajectoryRecord(
                prompt_id=draft.prompt_id,
                sample=draft.sample,
                prompt_tokens=draft.prompt_tokens,
                turns=tuple(turns),
                reward=reward,
            )
        )
    return result


def _drafts(profile: Profile, dials: Dials, rng: random.Random) -> list[_Draft]:
    prompts = dials.trajectories // dials.group
    difficulties = [
        _normal.inv_cdf(min(max((index + rng.random()) / prompts, 1e-9), 1 - 1e-9)) for index in range(prompts)
    ]
    rng.shuffle(difficulties)
    tokens = [max(round(_draw(profile.prompt, rng)), 1) for _ in range(prompts)]
    drafts = []
    for prompt, difficulty in enumerate(difficulties):
        position = prompt / max(prompts - 1, 1)
        for sample in range(dials.group):
            x = math.sqrt(dials.sibling) * difficulty + math.sqrt(1 - dials.sibling) * rng.gauss(0, 1)
            drafts.append(
                _Draft(
                    prompt_id=f"{profile.name}/{prompt}",
                    sample=sample,
                    prompt_tokens=tokens[prompt],
                    difficulty=difficulty,
                    length=math.exp(profile.sigma * x + math.log(dials.drift) * (position - 0.5)),
                    generated=[],
                )
            )
    return drafts


def _deal(drafts: Sequence[_Draft], profile: Profile, rng: random.Random) -> None:
    shares = [draft.length**profile.turns_power * math.exp(TURNS_SIGMA * rng.gauss(0, 1)) for draft in drafts]
    scale = profile.turns * len(shares) / sum(shares)
    for draft, share in zip(drafts, shares, strict=True):
        turns = max(round(share * scale), 1) if profile.turns > 1 else 1
        weights = [math.exp(TURN_SIGMA * rng.gauss(0, 1)) for _ in range(turns)]
        per_weight = profile.generated * draft.length / sum(weights)
        draft.generated = [max(round(weight * per_weight), 1) for weight in weights]


def _remaining(drafts: Sequence[_Draft]) -> tuple[float, float]:
    """Mean and standard deviation of the log of the remaining tokens, over all tool calls."""
    logs = [math.log(left) for draft in drafts for left in itertools.accumulate(reversed(draft.generated[1:]))]
    if not logs:
        return 0.0, 1.0
    mean = sum(logs) / len(logs)
    return mean, math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs)) or 1.0


def _call(tool: Tool, score: float, turn: TurnRecord, rng: random.Random) -> TurnRecord:
    seconds = _draw(tool.seconds, rng)
    late = rng.random() < tool.timeout_rate
    outcome, exit_code, passed, failed = "ok", 0, None, None
    if late:
        seconds, outcome, exit_code = tool.seconds.most, "timeout", EXIT_TIMEOUT
    elif tool.tests:
        failed = max(round(tool.tests * (1.6 * _normal.cdf(score) - 0.6)), 0)
        passed = tool.tests - failed
    if not late and (failed or (not tool.tests and score > _threshold(tool.error_rate))):
        outcome, exit_code = "error", EXIT_FAILED
    return TurnRecord(
        new_tokens=turn.new_tokens,
        gen_tokens=turn.gen_tokens,
        tool=tool.name,
        outcome=outcome,
        tool_s=round(seconds, 4),
        exit_code=exit_code,
        passed=passed,
        failed=failed,
    )


def _threshold(rate: float) -> float:
    return _normal.inv_cdf(1 - rate) if 0 < rate < 1 else math.inf if rate <= 0 else -math.inf


def _choose(tools: Sequence[Tool], rng: random.Random) -> Tool:
    place = rng.random() * sum(tool.weight for tool in tools)
    for tool in tools[:-1]:
        place -= tool.weight
        if place < 0:
            return tool
    return tools[-1]


def _draw(distribution: Lognormal, rng: random.Random) -> float:
    return min(distribution.median * math.exp(distribution.sigma * rng.gauss(0, 1)), distribution.most)
