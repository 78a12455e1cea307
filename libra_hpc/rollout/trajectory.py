"""One trajectory: the record that rollout fills, the scheduler reads, training uses, and the recovery log has whole.

A line of `decisions.jsonl` has a turn, its engine, and the policy's reason with its numbers. Times are epoch seconds,
durations seconds.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, chain, pairwise, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.env import BRANCH, EVALUATIONS, Signal
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord, all_signals, recorded, sample_tokens
from libra_hpc.protocol.trainer import Sample


class Routed(msgspec.Struct, frozen=True):
    """A turn that was sent to an engine at ``at``, after ``waited_s`` in the queue."""

    turn: TurnView
    decision: Decision
    at: float
    waited_s: float


def decision_line(routed: Routed) -> dict[str, Any]:
    turn, decision = routed.turn, routed.decision
    return {
        "t": routed.at,
        "trajectory": turn.trajectory,
        "prompt_id": turn.prompt_id,
        "turn": turn.turns,
        "engine": decision.engine,
        "from": turn.engine,
        "level": decision.level,
        "priority": decision.priority,
        "reason": decision.reason,
        "numbers": {name: round(v, 6) if isinstance(v, float) else v for name, v in decision.numbers.items()},
        "context_tokens": turn.context_tokens,
        "waited_s": round(routed.waited_s, 6),
    }


TOKEN_BYTES = 4
"""Bytes of an int32 token id."""

NEAREST = 8
"""Newest samples of a trajectory whose engine another may go to: each costs a comparison of two contexts."""

Place = Literal["waiting", "engine", "tool", "before", "done"]
"""In the dispatcher's queue; at an engine; at its environment; recovered before (the rest of) a turn; finished."""


class Trajectory(TrajectoryRecord, kw_only=True, dict=True, eq=False):
    """A trajectory of a group: its samples, the newest of which grows.

    Its fields are the record, which the recovery log has; they are replaced, never changed. Other attributes are what
    only the leader that runs it needs.
    """

    prompt_id: str = ""
    prompt_tokens: int = 0
    turns: tuple[TurnRecord, ...] = ()
    reward: float = 0.0
    tokens: bytes = b""
    """int32: all its samples, one after the other."""
    logprobs: bytes = b""
    """float32, of the same length; 0.0 where the policy did not generate the token."""
    place: Place = "tool"
    branch: str = ""
    """What its environment calls it, if it is a sample of another trajectory; empty: it is a trajectory."""
    branches: tuple[Trajectory, ...] = ()
    """Its samples that grow beside it, with turns of their own for the scheduler, until `join`."""

    def __post_init__(self) -> None:
        self.episode = f"{self.index}.{self.sample}.{self.attempt}{self.branch and BRANCH}{self.branch}"
        self.trunk: Trajectory | None = None
        """The trajectory that it is a sample of."""
        for one in self.branches:
            one.trunk = self
        self.begin = sum(sample_tokens(self.prompt_tokens, self.turns)[:-1])
        """Where the newest sample begins in `tokens`, in tokens; it is the context."""
        self.signals, _ = all_signals(self.turns)
        self.truncated = self.place == "tool" and bool(self.turns) and not self.turns[-1].gen_tokens
        """Whether the context has no room for another turn."""
        if self.place != "done" and self.place != "tool":
            self.place = "before"
        self.host = self.errors = self.max_tokens = 0
        self.stop_ids: tuple[int, ...] = ()
        self.admitted = -1
        """Weight version at the admission of its group; -1: of none."""
        self.engine = ""
        self.computed = 0
        """Tokens of the context that an engine has computed since all ranks started."""
        self.replays = self.overdue = 0
        """Losses of its host that its own turn may have caused; deadlines of its turns with nothing generated."""
        self.experts, self.routed = bytearray(), bytearray(max(0, len(self.tokens) // TOKEN_BYTES - 1))
        """Rows of its tokens, and which are known, as of `Sample`, up to the last computed one; no log has them."""
        self._row = 0
        """Bytes of a row."""
        self.ready_at = self.sent_at = self.stepped_at = 0.0
        """When its newest turn was ready, went to an engine, and went to the environment; 0.0: never."""
        self.error = ""
        """Why it failed."""

    @property
    def whole(self) -> Trajectory:
        return self.trunk or self

    @property
    def growing(self) -> tuple[Trajectory, ...]:
        """It and its branches."""
        return self, *self.branches

    def sprout(self, branch: str) -> Trajectory:
        """A new branch."""
        new = Trajectory(
            index=self.index, sample=self.sample, attempt=self.attempt, task=self.task, branch=branch, place="tool"
        )
        new.trunk, new.host, new.admitted = self, self.host, self.admitted
        self.branches += (new,)
        return new

    def join(self) -> None:
        """Make its branches samples of its own, in the order in which they began."""
        parts = [one for one in self.branches if one.generated]
        turns = (
            (replace(one.turns[0], new_tokens=one.prompt_tokens, new_sample=True), *one.turns[1:]) for one in parts
        )
        self._row, at = max(one._row for one in (self, *parts)), len(self.tokens) // TOKEN_BYTES
        for one in parts:
            self.routed += bytes(at - len(self.routed)) + one.routed
            self.experts += bytes(self._row * at - len(self.experts)) + one.experts
            at += len(one.tokens) // TOKEN_BYTES
        self.turns = (*self.turns, *chain.from_iterable(turns))
        self.tokens = b"".join((self.tokens, *(one.tokens for one in parts)))
        self.logprobs = b"".join((self.logprobs, *(one.logprobs for one in parts)))
        self.clipped += sum(one.clipped for one in parts)
        self.branches = ()

    def copied(self) -> Trajectory:
        """A copy that does not change when it goes on."""
        found = copy(self)
        found.branches = tuple(map(copy, self.branches))
        return found

    def again(self) -> Trajectory:
        """The next attempt of the trajectory."""
        again = Trajectory(index=self.index, sample=self.sample, attempt=self.attempt + 1, task=self.task)
        again.admitted = self.admitted
        return again

    @property
    def uid(self) -> str:
        return f"{self.index}.{self.sample}"

    @property
    def named(self) -> str:
        """The trajectory's prompt, for people."""
        return self.prompt_id or f"number {self.index} of the data order"

    @property
    def evaluation(self) -> str:
        """The evaluation that it is part of; empty: it is trained on."""
        return self.task if self.index >= EVALUATIONS else ""

    @property
    def oldest(self) -> int:
        """Oldest weight version of its tokens, and of the KV that these used; -1: it has no token."""
        kept = [turn.kv_version for one in self.growing for turn in one.turns if turn.kv_version >= 0]
        return min([*(version for one in self.growing for version, _ in one.versions), *kept], default=-1)

    @property
    def newest(self) -> int:
        return max([version for one in self.growing for version, _ in one.versions], default=-1)

    @property
    def context_ids(self) -> bytes:
        return self.tokens[TOKEN_BYTES * self.begin :]

    @property
    def context_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES - self.begin

    @property
    def known_experts(self) -> int:
        """First tokens of the context whose experts are known, or lost."""
        return max(0, len(self.routed) - self.begin)

    @property
    def turn(self) -> bytes:
        """Token ids that its newest turn has generated."""
        return self.tokens[len(self.tokens) - TOKEN_BYTES * self.turns[-1].gen_tokens :]

    @property
    def mask(self) -> bytes:
        """uint8 for each token; 1: the policy generated it."""
        return self.mask_by_engine({})

    def mask_by_engine(self, numbers: Mapping[str, int]) -> bytes:
        """The mask with the number of its engine for each token that the policy generated, where it has one."""
        return bytes(self.prompt_tokens) + b"".join(
            bytes(turn.new_tokens) + bytes([numbers.get(turn.engine, 1)]) * turn.gen_tokens for turn in self.turns
        )

    @property
    def sound(self) -> bool:
        """Whether lengths, versions and turns agree, and every number is finite."""
        return sum(one.generated for one in self.growing) > 0 and all(one._agrees for one in self.growing)

    @property
    def _agrees(self) -> bool:
        return (
            TOKEN_BYTES * self.all_tokens == len(self.tokens) == len(self.logprobs)
            and all(turn.gen_tokens == sum(count for _, count in turn.versions) for turn in self.turns)
            and min((min(turn.gen_tokens, turn.new_tokens) for turn in self.turns), default=-1) >= 0
            and self.prompt_tokens > 0 < len(self.turns)
            and not (self.turns[0].new_tokens or self.turns[0].new_sample)
            and math.isfinite(sum(array("f", self.logprobs)))
            and not unusable_reward(self.reward, self.info)
        )

    def room(self, max_model_len: int) -> int:
        """Tokens that the turn may still generate."""
        return min(self.max_tokens - self.turns[-1].gen_tokens, max_model_len - self.context_tokens)

    def _change_turn(self, **fields: Any) -> None:
        self.turns = (*self.turns[:-1], replace(self.turns[-1], **fields))

    def open(self, prompt_id: str, tokens: bytes) -> None:
        """Begin with the prompt; in a mixture its id begins with the task."""
        self.prompt_id, self.task = prompt_id, self.task or prompt_id.partition("/")[0]
        if self.trunk is not None:
            self._share(self.trunk.growing[-1 - NEAREST : -1], tokens)
        self.add_environment(tokens)

    def add_environment(self, tokens: bytes, new_sample: bool = False) -> None:
        """Append the prompt or an answer of a tool (int32 bytes), or begin a sample, and open the next turn."""
        if new_sample:
            self._begin_sample(tokens)
        count = len(tokens) // TOKEN_BYTES
        self.prompt_tokens = self.prompt_tokens if self.turns else count
        self.turns += (TurnRecord(count if self.turns else 0, 0, new_sample=new_sample),)
        self.tokens += tokens
        self.logprobs += bytes(len(tokens))

    def _begin_sample(self, tokens: bytes) -> None:
        self._share((self,), tokens)
        self.begin = len(self.tokens) // TOKEN_BYTES

    def _share(self, others: Sequence[Trajectory], tokens: bytes) -> None:
        """Its context is ``tokens`` now, whose beginning an engine may have computed for one of others."""
        best = max(others, key=lambda one: one.computes(tokens))
        self.computed = best.computes(tokens)
        # Else its engine has little of the context cached.
        self.engine = best.engine if 2 * TOKEN_BYTES * self.computed >= len(tokens) else ""

    def computes(self, tokens: bytes) -> int:
        """How many of the first ``tokens`` an engine has computed in its context."""
        before, sizes = self.context_ids, range(min(self.computed, len(tokens) // TOKEN_BYTES) + 1)
        return bisect_left(sizes, True, key=lambda n: before[: TOKEN_BYTES * n] != tokens[: TOKEN_BYTES * n]) - 1

    def add_generated(self, generated: Generated, engine: str, block_size: int = 1) -> None:
        """Append (a part of) a turn; an engine finds only whole blocks of ``block_size`` tokens in its KV cache."""
        turn, count = self.turns[-1], len(generated.tokens) // TOKEN_BYTES
        again = max(0, self.computed // block_size * block_size - generated.cached_tokens) if count else 0
        before = turn.engine or (self.turns[-2].engine if again and self.turns[1:] else "")
        versions = self.versions  # of a branch none, where an engine has its beginning from another sample
        stayed = again and engine == before and versions and generated.versions[0][0] == versions[-1][0]
        self._change_turn(
            gen_tokens=turn.gen_tokens + count,
            engine=engine,
            versions=(*turn.versions, *generated.versions),
            kv_version=min({turn.kv_version, generated.kv_version} - {-1}, default=-1),
            recomputed=turn.recomputed + again,
            evicted=turn.evicted + (again if stayed else 0),
        )
        self.tokens += generated.tokens
        self.logprobs += generated.logprobs
        if count:
            self._route(generated.experts)
            # The last token enters the cache only with the next one.
            self.computed = self.context_tokens - 1

    def _route(self, rows: bytes) -> None:
        """Append experts of the context after those that are known, up to the last token."""
        end, begin = len(self.tokens) // TOKEN_BYTES - 1, max(len(self.routed), self.begin)
        if rows:
            self._row = len(rows) // (end - begin)
            self.experts += bytes(self._row * begin - len(self.experts)) + rows
        self.routed += bytes(begin - len(self.routed)) + bytes([bool(rows)]) * (end - begin)

    def drop(self, count: int) -> None:
        """Remove the last ``count`` tokens of its newest turn: they are neither trained nor in the context."""
        turn, end = self.turns[-1], len(self.tokens) - TOKEN_BYTES * count
        kept, begins = turn.gen_tokens - count, accumulate((made for _, made in turn.versions), initial=0)
        parts = zip(turn.versions, begins, strict=False)
        left = tuple((version, min(made, kept - at)) for (version, made), at in parts if at < kept)
        self._change_turn(gen_tokens=kept, versions=left)
        self.tokens, self.logprobs = self.tokens[:end], self.logprobs[:end]
        self.computed = min(self.computed, self.context_tokens)
        known = end // TOKEN_BYTES - 1
        del self.experts[self._row * known :], self.routed[known:]

    def add_signals(self, signals: Sequence[Signal], reward: float = 0.0) -> None:
        """Record the tool calls of its newest turn, the slowest first, and the turn's own reward."""
        if not signals:
            self._change_turn(reward=reward)
            return
        slowest, *others = sorted(signals, key=lambda signal: -signal.seconds)
        self._change_turn(
            reward=reward,
            tool=slowest.tool,
            outcome=slowest.outcome,
            tool_s=round(slowest.seconds, 6),
            exit_code=slowest.exit_code,
            passed=slowest.passed,
            failed=slowest.failed,
            parallel=tuple(others) or None,
        )
        self.signals += (slowest, *others)

    def view(self, max_context: int) -> TurnView:
        """The turn that needs an engine now, for the scheduler."""
        return TurnView(
            trajectory=self.episode,
            # Of a branch the first context is what the same branches of its group share.
            prompt_id=self.prompt_id + (self.branch and BRANCH) + self.branch.partition(".")[0],
            sample=self.sample,
            task=self.task,
            context_tokens=self.context_tokens,
            attained_tokens=self.generated,
            turns=len(self.turns) - 1,
            ready_at=self.ready_at,
            engine=self.engine,
            signals=tuple(self.signals),
            max_context=max_context,
        )

    def _bounds(self) -> list[tuple[int, int]]:
        """First and last token of each sample."""
        return list(pairwise(accumulate(sample_tokens(self.prompt_tokens, self.turns), initial=0)))

    def experts_of(self, part: int) -> bytes:
        """`Sample.experts` of one of its samples."""
        begin, end = (self._row * at for at in self._bounds()[part])
        return bytes(self.experts[begin:end]).ljust(end - begin, b"\0")

    def samples_for_training(
        self, advantage: float | list[float], numbers: Mapping[str, int] = MappingProxyType({})
    ) -> list[Sample]:
        """Its samples in which something was generated, with one advantage, or one for each turn."""
        found, by_token, mask = list[Sample](), array("f"), self.mask_by_engine(numbers)
        if isinstance(advantage, list):
            of_tokens = chain.from_iterable(map(repeat, advantage, (turn.gen_tokens for turn in self.turns)))
            by_token = array("f", (next(of_tokens) if own else 0.0 for own in mask))
            advantage = max(by_token, key=abs)
        for part, (begin, end) in enumerate(self._bounds()):
            if any(mask[begin:end]):
                own = slice(TOKEN_BYTES * begin, TOKEN_BYTES * end)
                found.append(
                    Sample(
                        uid=f"{self.uid}.{part}",
                        tokens=self.tokens[own],
                        loss_mask=mask[begin:end],
                        logprobs=self.logprobs[own],
                        advantage=advantage,
                        trajectory_tokens=self.generated,
                        advantages=by_token[begin:end].tobytes(),
                        routed=bytes(self.routed[begin:end]).ljust(end - begin, b"\0") if self._row else b"",
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


MAX_RECORDS = 20_000
"""Most trajectories to learn from; older evidence has decayed."""


def history(own: Path, task: str) -> list[Finished]:
    """The last `MAX_RECORDS` trajectories of the run, oldest first; ``task``: the task of lines that name none."""
    return list(deque(records(own, task), MAX_RECORDS))


def records(path: Path, task: str = "") -> Iterator[Finished]:
    """What each trajectory of `recorded` teaches; ``task``: the task of lines that name none."""
    for one in recorded(path):
        if one.turns:
            yield Finished.of(one, f"{one.prompt_id}/{one.index}-{one.sample}-{one.attempt}", task)
