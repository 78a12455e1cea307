"""What of the trajectories of earlier starts counts for this one: a record of each, and the rules.

All ranks start anew after a time limit, a crash, a requeue or a repartition, from the newest checkpoint, the one after
step s.  A trajectory that is not trained there need not be sampled again, as far as it has come, when

* its prompt is not trained at s (else the weights have it already, and it counts nowhere),
* its start made the same prompts: the digest of everything they depend on is the same (else reason ``configuration``),
* all its tokens were sampled under weights that this start has: versions up to s, and, where earlier starts went back
  to a lower step after it was sampled, up to the lowest of these, because what was trained beyond that step is not what
  was trained there later (``weights``),
* it can still be trained within the staleness bound: its first token is of version s - eta or later (``staleness``).

A finished one is taken as it is.  One in mid-course goes on if its environment can be brought back
(`libra_hpc.rollout.replay`).  Where a start ended without a word (a crash) there are no records of those, and they are
drawn again; since it is the long ones that are cut off, the batches sampled around it then lean towards short
trajectories, at most eta + 1 of them.

Pure: records and positions in, trajectories out.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from libra_hpc.protocol.codec import Codec
from libra_hpc.protocol.trace import signals_of

from .trajectory import ServedTurn, Trajectory, unusable_reward

TRAINED, DAMAGED = "trained", "damaged"


class SavedTrajectory(msgspec.Struct, frozen=True, array_like=True):
    """One finished trajectory; arrays as in `libra_hpc.protocol.trainer.Sample`, ``n`` tokens."""

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
    """Finished, waiting for the answer to its last turn, or for (the rest of) a turn."""

    @classmethod
    def of(cls, t: Trajectory) -> SavedTrajectory:
        """The record of a trajectory, as far as it has come."""
        arrays = t.context.tobytes(), bytes(t.mask), t.logprobs.tobytes()
        place = t.place if t.place == "done" or t.place == "tool" else "before"
        return cls(
            t.index,
            t.sample,
            t.attempt,
            t.prompt_id,
            t.prompt_tokens,
            *arrays,
            t.reward,
            t.info,
            tuple(t.turns),
            tuple(t.versions),
            place,
        )

    @property
    def sound(self) -> bool:
        """Whether the arrays agree in length, the versions and the turns with the mask, and every number is finite."""
        generated, turns = self.mask.count(1), self.turns
        return (
            4 * len(self.mask) == len(self.tokens) == len(self.logprobs)
            and generated == sum(count for _, count in self.versions) == sum(turn.gen_tokens for turn in turns) > 0
            and self.prompt_tokens + sum(turn.new_tokens for turn in turns) == len(self.mask) - generated
            and min(min(turn.gen_tokens, turn.new_tokens) for turn in turns) >= 0 < self.prompt_tokens
            and math.isfinite(sum(array("f", self.logprobs)))
            and not unusable_reward(self.reward, self.info)
        )

    @property
    def oldest(self) -> int:
        """Lowest version a token was sampled under."""
        return min(version for version, _ in self.versions)

    @property
    def newest(self) -> int:
        """Highest version a token was sampled under."""
        return max(version for version, _ in self.versions)

    def trajectory(self) -> Trajectory:
        """What training and its statistics need of it, or to go on with it; of finished ones the scheduler learns
        from ``trajectories.jsonl``."""
        t = Trajectory(self.index, self.sample, self.attempt)
        t.prompt_id, t.prompt_tokens, t.reward, t.info = self.prompt_id, self.prompt_tokens, self.reward, self.info
        t.context, t.mask, t.logprobs = array("i", self.tokens), bytearray(self.mask), array("f", self.logprobs)
        t.turns, t.versions, t.first_version, t.attained = (
            list(self.turns),
            list(self.versions),
            self.oldest,
            self.mask.count(1),
        )
        t.place = self.place
        if self.place != "done":
            t.turn = list(t.context[len(t.context) - t.turns[-1].gen_tokens :])
            t.signals, t.at_signal = signals_of(t.turns)
        return t


records: Codec[SavedTrajectory] = Codec(SavedTrajectory)


class Start(msgspec.Struct, frozen=True):
    """One start of all ranks."""

    step: int
    """It went on from."""
    digest: str
    """Of what its prompts and trajectories were made from."""


class TrainedPrompts(msgspec.Struct, frozen=True):
    """Where the data order stands at a checkpoint: prompts below ``low`` and those in ``extra`` are trained."""

    step: int
    low: int
    extra: frozenset[int]

    def trained(self, index: int) -> bool:
        """Whether the checkpoint has a prompt."""
        return index < self.low or index in self.extra


def drop_reason(
    record: SavedTrajectory, number: int, starts: Sequence[Start], position: TrainedPrompts, eta: int
) -> str:
    """Why a record of start ``number`` (from 0) does not count for the last of ``starts``, which is at ``position``;
    empty when it does."""
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
    """What counts."""

    groups: Mapping[int, Sequence[Trajectory]]
    """Trajectories by prompt, finished and unfinished ones (`Trajectory.place`), each sample once."""
    dropped: Mapping[str, int]
    """Trajectories that count no more, by reason; ``damaged``: files with a part that cannot be read."""

    def event(self, group_size: int) -> dict[str, int | dict[str, float]]:
        """Fields of the event log's record."""
        both = [trajectory for group in self.groups.values() for trajectory in group]
        kept = [trajectory for trajectory in both if trajectory.place == "done"]
        begun = [trajectory for trajectory in both if trajectory.place != "done"]
        finished = Counter(trajectory.index for trajectory in kept)
        return {
            "trajectories": len(kept),
            "groups": len(finished),
            "whole_groups": sum(count == group_size for count in finished.values()),
            "tokens": sum(len(trajectory.context) for trajectory in kept),
            "generated_tokens": sum(trajectory.attained for trajectory in kept),
            "unfinished": len(begun),
            "unfinished_tokens": sum(trajectory.attained for trajectory in begun),
            "dropped": dict(self.dropped),
        }


def gather(found: Iterable[tuple[SavedTrajectory | None, str]]) -> Recovered:
    """Trajectories of those records, oldest first, whose verdict is empty; of a sample with several the last counts."""
    chosen: dict[int, dict[int, Trajectory]] = {}
    dropped: Counter[str] = Counter()
    for record, reason in found:
        if record is not None and not reason:
            chosen.setdefault(record.index, {})[record.sample] = record.trajectory()
        elif reason != TRAINED:
            dropped[reason] += 1
    return Recovered({index: list(samples.values()) for index, samples in chosen.items()}, dropped)
