"""One trajectory: the token-level record that rollout fills, the scheduler reads, and training uses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from typing import Literal

from msgspec.structs import replace

from libra_hpc.policies.scheduling.protocol import Finished, TurnView
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.protocol.trainer import Sample


class ServedTurn(TurnRecord, frozen=True):
    """A turn, the engine that generated (the end of) it, the weight versions, and what was computed twice."""

    engine: str = ""
    versions: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens generated under it), in order."""
    recomputed: int = 0
    """Context tokens that an engine had computed before the turn and that had to be computed again."""
    evicted: int = 0
    """Tokens out of ``recomputed`` that the KV cache of the same engine had lost under the same weights."""
    reward: float = 0.0
    """What the environment gave for it, other than the trajectory's reward."""


TOKEN_BYTES = 4
"""Bytes of an int32 token id."""

Place = Literal["waiting", "engine", "tool", "before", "done"]
"""In the dispatcher's queue; at an engine; at its environment; recovered before (the rest of) a turn; finished."""


class Trajectory:
    """Mutable state of one trajectory of a group: its samples, the newest of which grows.

    `tokens` (int32), `mask` (uint8; 1: the policy generated the token) and `logprobs` (float32) are of one length, and
    have all its samples, one after the other.
    """

    def __init__(self, index: int, sample: int, attempt: int, host: int = 0, now: float = 0.0) -> None:
        self.index, self.sample, self.attempt, self.host = index, sample, attempt, host
        self.episode = f"{index}.{sample}.{attempt}"
        self.prompt_id = self.evaluation = ""
        self.tokens, self.mask, self.logprobs = array("i"), bytearray(), array("f")
        self.begins = [0]
        """Where each sample begins in `tokens`; the newest one is the context."""
        self.prompt_tokens = self.attained = self.max_tokens = self.errors = 0
        self.stop_ids: tuple[int, ...] = ()
        self.turn: list[int] = []
        self.turns: list[ServedTurn] = []
        self.signals: list[Signal] = []
        self.at_signal: list[int] = []
        self.versions: list[tuple[int, int]] = []
        self.first_version = -1
        self.admitted = -1
        """Weight version at the admission of its group; -1: of none."""
        self.engine = ""
        self.place: Place = "tool"
        self.clipped = 0
        """Tokens of the last answer that the context had no room for."""
        self.truncated = False
        """Whether the context has no room for another turn."""
        self.computed = 0
        """Tokens of the context that an engine has computed since all ranks started."""
        self.replays = 0
        """Losses of its host that its own turn may have caused."""
        self.overdue = 0
        """Deadlines of its turns that passed with nothing generated."""
        self.started_at = self.ready_at = now
        self.sent_at = 0.0
        """When the newest turn went to an engine; 0.0 before the first."""
        self.stepped_at = 0.0
        """When the newest turn went to the environment; 0.0 before the first."""
        self.reward = 0.0
        self.info: dict[str, float] = {}
        self.error = ""
        """Why it failed."""

    def again(self) -> Trajectory:
        """Its next attempt."""
        again = Trajectory(self.index, self.sample, self.attempt + 1)
        again.evaluation, again.admitted = self.evaluation, self.admitted
        return again

    @property
    def part(self) -> str:
        """In a mixture, the task that its prompt belongs to."""
        return self.prompt_id.partition("/")[0]

    @property
    def context(self) -> array[int]:
        return self.tokens[self.begins[-1] :]

    @property
    def context_tokens(self) -> int:
        return len(self.tokens) - self.begins[-1]

    @property
    def sample_tokens(self) -> list[int]:
        """Tokens of each sample."""
        return [end - begin for begin, end in pairwise([*self.begins, len(self.tokens)])]

    def room(self, max_model_len: int) -> int:
        """Tokens that the turn may still generate."""
        return min(self.max_tokens - len(self.turn), max_model_len - self.context_tokens)

    def add_environment(self, tokens: bytes, new_sample: bool = False) -> None:
        """Append the prompt or an answer of a tool (int32 bytes), or begin a sample, and open the next turn."""
        if new_sample:
            self._begin_sample(tokens)
        count = len(tokens) // TOKEN_BYTES
        self.tokens.frombytes(tokens)
        self.mask.extend(bytes(count))
        self.logprobs.extend([0.0] * count)
        self.turn = []
        self.turns.append(ServedTurn(count if self.turns else 0, 0, new_sample=new_sample))

    def _begin_sample(self, tokens: bytes) -> None:
        before, after = self.context, array("i", tokens)
        same = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        self.computed = min(self.computed, same, len(before))
        if 2 * self.computed < len(after):
            self.engine = ""  # its engine has little of the context cached
        self.begins.append(len(self.tokens))

    def add_generated(self, generated: Generated, engine: str, block_size: int = 1) -> None:
        """Append (a part of) a turn; an engine finds only whole blocks of ``block_size`` tokens in its KV cache."""
        tokens = array("i", generated.tokens)
        if tokens:
            self._count_recomputed(generated, engine, block_size)
        self.tokens.extend(tokens)
        self.mask.extend(b"\x01" * len(tokens))
        self.logprobs.frombytes(generated.logprobs)
        self.turn.extend(tokens)
        self.attained += len(tokens)
        turn = self.turns[-1]
        versions = (*turn.versions, *generated.versions)
        self.turns[-1] = replace(turn, gen_tokens=turn.gen_tokens + len(tokens), engine=engine, versions=versions)
        for version, count in generated.versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + count)
            else:
                self.versions.append((version, count))
            self.first_version = version if self.first_version < 0 else min(self.first_version, version)
        if tokens:
            # The last token enters the cache only with the next one.
            self.computed = self.context_tokens - 1

    def _count_recomputed(self, generated: Generated, engine: str, block_size: int) -> None:
        again = max(0, self.computed // block_size * block_size - generated.cached_tokens)
        if not again:
            return
        turn = self.turns[-1]
        before = turn.engine or self.turns[-2].engine
        stayed = engine == before and generated.versions[0][0] == self.versions[-1][0]
        self.turns[-1] = replace(
            turn, recomputed=turn.recomputed + again, evicted=turn.evicted + (again if stayed else 0)
        )

    def add_signals(self, signals: Sequence[Signal]) -> None:
        """Record the tool calls of its last turn, the slowest first."""
        if not signals:
            return
        slowest, *others = sorted(signals, key=lambda signal: -signal.seconds)
        self.turns[-1] = replace(
            self.turns[-1],
            tool=slowest.tool,
            outcome=slowest.outcome,
            tool_s=slowest.seconds,
            exit_code=slowest.exit_code,
            passed=slowest.passed,
            failed=slowest.failed,
            parallel=tuple(others) or None,
        )
        self.signals += (slowest, *others)
        self.at_signal += [self.attained] * len(signals)

    def view(self, task: str, max_context: int) -> TurnView:
        """The turn that needs an engine now, for the scheduler."""
        return TurnView(
            trajectory=self.episode,
            prompt_id=self.prompt_id,
            sample=self.sample,
            task=task,
            context_tokens=self.context_tokens,
            attained_tokens=self.attained,
            turns=len(self.turns) - 1,
            ready_at=self.ready_at,
            engine=self.engine,
            signals=tuple(self.signals),
            max_context=max_context,
        )

    def finished(self, task: str) -> Finished:
        return Finished(
            trajectory=self.episode,
            prompt_id=self.prompt_id,
            sample=self.sample,
            task=task,
            generated_tokens=self.attained,
            turns=len(self.turns),
            at_signal=tuple(self.at_signal),
            signals=tuple(self.signals),
            version=self.versions[-1][0] if self.versions else 0,
            context_tokens=max(self.sample_tokens),
        )

    def samples_for_training(self, advantage: float | list[float]) -> list[Sample]:
        """Its samples in which something was generated, with one advantage, or one for each turn."""
        found, by_token = list[Sample](), array("f")
        if isinstance(advantage, list):
            of_tokens = chain.from_iterable(map(repeat, advantage, (turn.gen_tokens for turn in self.turns)))
            by_token = array("f", (next(of_tokens) if own else 0.0 for own in self.mask))
            advantage = max(by_token, key=abs)
        for part, (begin, end) in enumerate(pairwise([*self.begins, len(self.tokens)])):
            own = slice(begin, end)
            if any(self.mask[own]):
                found.append(
                    Sample(
                        uid=f"{self.index}.{self.sample}.{part}",
                        tokens=self.tokens[own].tobytes(),
                        loss_mask=bytes(self.mask[own]),
                        logprobs=self.logprobs[own].tobytes(),
                        advantage=advantage,
                        trajectory_tokens=self.attained,
                        advantages=by_token[own].tobytes(),
                    )
                )
        return found


LARGEST_REWARD = 3.4e38
"""Largest float32: beyond it the advantages of a group are not finite either."""


def unusable(generated: Generated) -> str:
    """Why an engine's answer cannot be trained on; empty when it can."""
    if len(generated.logprobs) != len(generated.tokens) or len(generated.tokens) % 4:
        return (
            f"{len(generated.tokens)} bytes of tokens came with {len(generated.logprobs)} bytes of log-probabilities."
        )
    logprobs = array("f", generated.logprobs)
    # A float64 sum of float32 values is finite exactly when all of them are.
    if not math.isfinite(sum(logprobs)):
        place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
        return f"The log-probability of token {place} of the turn is {logprobs[place]}."
    return ""


def unusable_reward(reward: float, info: dict[str, float]) -> str:
    """Why an environment's reward and info cannot be trained on; empty when they can."""
    if not abs(reward) <= LARGEST_REWARD:
        return f"The reward is {reward}."
    wrong = [key for key, value in info.items() if not math.isfinite(value)]
    return f"info[{wrong[0]!r}] is {info[wrong[0]]}." if wrong else ""
