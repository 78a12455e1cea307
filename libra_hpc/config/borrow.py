"""Section of the run file about engines that the run does not own."""

from __future__ import annotations

from pydantic import Field

from .section import Section


class SpotSection(Section):
    """``[borrow.spot]``: jobs of one node each that the run queues for itself while it runs, to roll out on them
    (docs/idle-nodes.md)."""

    nodes: int = Field(0, ge=0, le=1_000)
    """Most nodes; 0: none is queued."""
    partition: str = ""
    """Slurm partition of the jobs, for instance one whose jobs are preempted; empty: that of ``components.rollout``."""
    qos: str = ""
    """Quality of service of the jobs; empty: that of ``components.rollout``, ``none``: no option."""
    time_limit: str = "01:00:00"
    """Slurm time limit of each job, after which another one is queued."""


class BorrowSection(Section):
    """``[borrow]``: engines that join the running job."""

    spot: SpotSection = SpotSection()
