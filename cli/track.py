"""`libra-hpc track`: send a run's metrics to its trackers from this machine."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.config.load import load_resolved
from libra_hpc.errors import UserError
from libra_hpc.tracking import sidecar

from . import jobs
from .output import busy, print_line
from .runs import RUNS, RunArgument, RunsOption, find_run


def track(run: RunArgument = None, runs: RunsOption = Path(RUNS)) -> None:
    found = find_run(run, runs)
    wanted = load_resolved(found.config).track
    if not wanted.wanted:
        raise UserError(f"{found.name} has no tracker; set track.tensorboard = true, or another key of [track].")
    with busy(f"sending the metrics of {found.name}"):
        names = sidecar.follow(found, lambda: jobs.state(found).over)
    for name in names:
        print_line(f"{name}: step {sidecar.Sent(found).last(name)[0]}  {found.path / 'track' / name}")
