"""Which trajectories of earlier starts count for this one: a record of each, and the rules.

All ranks restart from the newest checkpoint, of step s. A trajectory from before the restart goes on when

* its prompt is not trained at s (else dropped as ``trained``),
* the digest of everything that prompts and trajectories depend on is the same (else ``configuration``),
* its weight versions exist in this start: at most s, and at most the lowest step that a start in between went back to
  (else ``weights``),
* its first token is of version s - eta or later, so that the staleness bound holds (else ``staleness``).

An unfinished one also needs an environment that can be replayed (`libra_hpc.rollout.replay`). Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from libra_hpc.protocol.codec import Codec
from libra_hpc.protocol.trace import all_signals, sample_tokens
from libra_hpc.rollout.trajectory import ServedTurn, Trajectory, unusable_reward

TRAINED, DAMAGED = "trained", "damaged"


class SavedTrajectory(msgspec.Struct, frozen=True, array_like=True):
    """The record of one trajectory; arrays as in `libra_hpc.protocol.trainer.Sample`, those of its samples joined."""

    index: int
    sample: int
    attempt: int
    prompt_id: str
    prompt_tokens: int
    tokens: bytes
    mask: bytes
    logprobs: bytes
    reward: float
    info: dict[str, float]
    turns: tuple[ServedTurn, ...]
    versions: tuple[tuple[int, int], ...]
    place: Literal["done", "tool", "before"] = "done"
    """Finished; waits for the answer to its last turn; waits for (the rest of) a turn."""

    @classmethod
    def of(cls, t: Trajectory) -> SavedTrajectory:
        """The record of a trajectory, as far as it has come."""
        return cls(
            index=t.index,
            sample=t.sample,
            attempt=t.attempt,
            prompt_id=t.prompt_id,
            prompt_tokens=t.prompt_tokens,
            tokens=t.tokens.tobytes(),
            mask=bytes(t.mask),
            logprobs=t.logprobs.tobytes(),
            reward=t.reward,
            info=t.info,
            turns=tuple(t.turns),
            versions=tuple(t.versions),
            place=t.place if t.place == "done" or t.place == "tool" else "before",
        )

    @property
    def sound(self) -> bool:
        """Whether lengths, versions, turns and mask agree, and every number is finite."""
        generated, turns = self.mask.count(1), self.turns
        return (
            4 * len(self.mask) == len(self.tokens) == len(self.logprobs)
            and generated == sum(count for _, count in self.versions) == sum(turn.gen_tokens for turn in turns) > 0
            and self.prompt_tokens + sum(turn.new_tokens for turn in turns) == len(self.mask) - generated
            and min(min(turn.gen_tokens, turn.new_tokens) for turn in turns) >= 0 < self.prompt_tokens
            and not turns[0].new_sample
            and math.isfinite(sum(array("f", self.logprobs)))
            and not unusable_reward(self.reward, self.info)
        )

    @property
    def oldest(self) -> int:
        return min(version for version, _ in self.versions)

    @property
    def newest(self) -> int:
        return max(version for version, _ in self.versions)

    def trajectory(self) -> Trajectory:
        """What training needs, or what is needed to go on; the scheduler learns from ``trajectories.jsonl``."""
        t = Trajectory(self.index, self.sample, self.attempt)
        t.prompt_id, t.prompt_tokens, t.reward, t.info = self.prompt_id, self.prompt_tokens, self.reward, self.info
        t.tokens, t.mask, t.logprobs = array("i", self.tokens), bytearray(self.mask), array("f", self.logprobs)
        t.turns, t.versions, t.first_version, t.attained = (
            list(self.turns),
            list(self.versions),
            self.oldest,
            self.mask.count(1),
        )
        t.begins = list(accumulate(sample_tokens(self.prompt_tokens, self.turns)[:-1], initial=0))
        t.place = self.place
        if self.place != "done":
            t.truncated = self.place == "tool" and not self.turns[-1].gen_tokens
            t.turn = list(t.tokens[len(t.tokens) - t.turns[-1].gen_tokens :])
            t.signals, t.at_signal = all_signals(t.turns)
        return t


records: Codec[SavedTrajectory] = Codec(SavedTrajectory)


class RecordedStart(msgspec.Struct, frozen=True):
    step: int
    """Step of the checkpoint it began with."""
    digest: str
    """Digest of everything that prompts and trajectories depend on."""


class TrainedPrompts(msgspec.Struct, frozen=True):
    """Position of the data order at a checkpoint: prompts below ``low`` and those in ``extra`` are trained."""

    step: int
    low: int
    extra: frozenset[int]

    def trained(self, index: int) -> bool:
        return index < self.low or index in self.extra


def drop_reason(
    record: SavedTrajectory, number: int, starts: Sequence[RecordedStart], *, position: TrainedPrompts, eta: int
) -> str:
    """Why a record of start ``number`` (from 0) does not count for the last start (at ``position``); empty: it does."""
    if position.trained(record.index):
        return TRAINED
    if starts[number].digest != starts[-1].digest:
        return "configuration"
    if record.newest > min(start.step for start in starts[number + 1 :]):
        return "weights"
    if record.oldest + eta < position.step:
        return "staleness"
    return ""


class Recovered(msgspec.Struct, frozen=True):
    """The trajectories that count, and how many do not."""

    groups: Mapping[int, Sequence[Trajectory]]
    """Trajectories by prompt, finished and unfinished ones (`Trajectory.place`), each sample once."""
    dropped: Mapping[str, int]
    """Dropped trajectories by reason; ``damaged``: files with a part that cannot be read."""

    def event(self, group_size: int) -> dict[str, int | dict[str, float]]:
        both = [trajectory for group in self.groups.values() for trajectory in group]
        finished = [trajectory for trajectory in both if trajectory.place == "done"]
        begun = [trajectory for trajectory in both if trajectory.place != "done"]
        per_group = Counter(trajectory.index for trajectory in finished)
        return {
            "trajectories": len(finished),
            "groups": len(per_group),
            "whole_groups": sum(count == group_size for count in per_group.values()),
            "tokens": sum(len(trajectory.tokens) for trajectory in finished),
            "generated_tokens": sum(trajectory.attained for trajectory in finished),
            "unfinished": len(begun),
            "unfinished_tokens": sum(trajectory.attained for trajectory in begun),
            "dropped": dict(self.dropped),
        }


def gather(found: Iterable[tuple[SavedTrajectory | None, str]]) -> Recovered:
    """Trajectories of the records (oldest first) without a `drop_reason`; of one sample's records the last counts."""
    chosen: dict[int, dict[int, Trajectory]] = {}
    dropped: Counter[str] = Counter()
    for record, reason in found:
        if record is not None and not reason:
            chosen.setdefault(record.index, {})[record.sample] = record.trajectory()
        elif reason != TRAINED:
            dropped[reason] += 1
    return Recovered({index: list(samples.values()) for index, samples in chosen.items()}, dropped)
