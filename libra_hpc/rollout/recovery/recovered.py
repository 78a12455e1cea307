"""Which trajectories of earlier starts count for this one.

All ranks restart from the newest checkpoint, of step s. A trajectory from before the restart goes on when

* its prompt is not trained at s (else dropped as ``trained``),
* the digest of everything that prompts and trajectories depend on is the same (else ``configuration``),
* its weight versions exist in this start: at most s, and at most the lowest step that a start in between went back to
  (else ``weights``),
* its first token is of version s - eta or later, so that the staleness bound holds (else ``staleness``).

An unfinished one also needs an environment that can be replayed (`libra_hpc.rollout.replay`). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from libra_hpc.protocol.codec import Codec
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.rollout.trajectory import Trajectory

TRAINED, DAMAGED = "trained", "damaged"


records: Codec[Trajectory] = Codec(Trajectory)


class RecordedStart(msgspec.Struct, frozen=True):
    step: int
    """Step of the checkpoint it began with."""
    digest: str
    """Digest of everything that prompts and trajectories depend on."""


def drop_reason(
    record: Trajectory, number: int, starts: Sequence[RecordedStart], *, position: ResumePoint, eta: int
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
            "tokens": sum(trajectory.all_tokens for trajectory in finished),
            "generated_tokens": sum(trajectory.generated for trajectory in finished),
            "unfinished": len(begun),
            "unfinished_tokens": sum(trajectory.generated for trajectory in begun),
            "dropped": dict(self.dropped),
        }


def gather(found: Iterable[tuple[Trajectory | None, str]]) -> Recovered:
    """Trajectories of the records (oldest first) without a `drop_reason`; of one sample's records the last counts."""
    chosen: dict[int, dict[int, Trajectory]] = {}
    dropped: Counter[str] = Counter()
    for record, reason in found:
        if record is not None and not reason:
            chosen.setdefault(record.index, {})[record.sample] = record
        elif reason != TRAINED:
            dropped[reason] += 1
    return Recovered({index: list(samples.values()) for index, samples in chosen.items()}, dropped)
