"""Work of one global batch, from a sample of its trajectories."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.train_seconds import TrainWork, work_of
from libra_hpc.protocol.trace import TrajectoryRecord


class BatchWork(msgspec.Struct, frozen=True):
    trajectories: int
    """Prompts times group size."""
    sample: tuple[tuple[int, int], ...]
    """(Context at the end, generated) tokens of trajectories like those of a batch."""
    eta: int = 1
    """Staleness bound: batches that rollout may be ahead. With 0, the stages take turns."""
    minibatches: int = 1
    reference: ModelShape | None = None
    """See `TrainWork`."""

    @property
    def streamed(self) -> bool:
        """Whether groups are trained as they are complete, and not when the batch is (`RunConfig.streamed`)."""
        return self.eta == 0 and self.minibatches == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(context for context, _ in self.sample)

    @property
    def tokens(self) -> float:
        return self.trajectories * sum(context for context, _ in self.sample) / len(self.sample)

    @property
    def training(self) -> TrainWork:
        return work_of(
            self.sample, trajectories=self.trajectories, minibatches=self.minibatches, reference=self.reference
        )


def sample_of(trajectories: Iterable[TrajectoryRecord]) -> tuple[tuple[int, int], ...]:
    """`BatchWork.sample`, without those that generated nothing. Raises `UserError` where none is left."""
    found = tuple((one.context, one.generated) for one in trajectories if one.generated)
    if not found:
        raise UserError("The lengths cannot be planned with: there is no finished trajectory; valid: at least one.")
    return found
