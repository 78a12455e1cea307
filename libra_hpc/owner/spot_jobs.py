"""Jobs of one node that a run queues for itself, to roll out on them: ``borrow.spot.nodes`` at most.

- The planner wants other nodes (`Status.spot_nodes`) -> so many; without a planner all, from the start.
- Nodes of the job are missing, and ``planner.fewer_nodes`` allows it -> as many, until the job starts again.
- A job has ended, by preemption, time limit or fault -> another is queued.
- It lived less than `LIVES_S`, or Slurm refused it -> a pause comes first, twice as long each time.
- The run ends -> those that are left are cancelled.

Slurm's commands may take a minute, so they are called in a thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.retry import Retry
from libra_hpc.slurm.queue.command import call, clean_environment
from libra_hpc.slurm.queue.query import JobState, answered_job, own_jobs

from .owner_records import log_line

POLL_S = 5.0
"""Between two questions to the queue.  Half: more load on the controller; double: idle nodes stand for 5 s longer."""
LIVES_S = 60.0
"""A job that ends sooner after its start has brought nothing: an engine needs as long to start."""
PAUSE_S, LONGEST_S = 10.0, 600.0
CLOSE_S = 5.0
"""For the cancelling of the jobs: Slurm may end this process soon, and a guest sees the end of the run by itself."""


class SpotQueue:
    """Which jobs there are, and how many to queue: pure; times are monotonic seconds."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.jobs: dict[str, float | None] = {}
        """Queued ones, and since when each runs."""
        self.retry = Retry(PAUSE_S, LONGEST_S)

    def seen(self, running: dict[str, bool], now: float) -> list[str]:
        """What Slurm has of the jobs, by id; returns those that have ended."""
        ended = [job for job in self.jobs if job not in running]
        for job in ended:
            since = self.jobs.pop(job)
            if since is not None and now - since >= LIVES_S:
                self.retry.succeeded()
            else:
                self.retry.failed(now)
        for job in self.jobs:
            if running[job] and self.jobs[job] is None:
                self.jobs[job] = now
        return ended

    def due(self, now: float) -> int:
        """How many to queue now."""
        return max(0, self.wanted - len(self.jobs)) if self.retry.due(now) else 0

    def surplus(self) -> list[str]:
        """Jobs to cancel: those that wait, then those that run for the shortest time."""
        ordered = sorted(self.jobs, key=lambda job: -(self.jobs[job] or float("inf")))
        return ordered[: max(0, len(self.jobs) - self.wanted)]


class SpotJobs:
    def __init__(self, run: RunDir, config: RunConfig) -> None:
        most = config.borrow.spot.nodes
        self._run, self._script = run, run.spot_script
        self._wanted = 0 if config.planner.enabled else most
        self._queue = SpotQueue(self._wanted)
        self._environment = clean_environment(os.environ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="spot", daemon=True)
        self._logged = ""
        # A lost node may have been one of the environments, which no such job replaces.
        self.missing, self._replaces = 0, config.planner.fewer_nodes == "auto" and not config.components.env.nodes
        """Nodes that the job has lost."""
        if most or self._replaces:
            self._thread.start()

    def close(self) -> None:
        """Cancel what is left."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _keep(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._evaluate()
        finally:
            if self._queue.jobs:
                with contextlib.suppress(OperationError):
                    call(["scancel", *self._queue.jobs], self._environment)

    def _evaluate(self) -> None:
        queue = self._queue
        try:
            wanted = self._run.read_json(self._run.status).get("spot_nodes", -1)
            self._wanted = wanted if isinstance(wanted, int) and wanted >= 0 else self._wanted
            queue.wanted = self._wanted + (self.missing if self._replaces else 0)
            if queue.jobs:
                queue.seen(self._ask(), time.monotonic())
            if surplus := queue.surplus():
                call(["scancel", *surplus], self._environment)
                queue.jobs = {job: since for job, since in queue.jobs.items() if job not in surplus}
            for _ in range(queue.due(time.monotonic())):
                if self._stop.is_set():
                    return
                job = call(["sbatch", "--parsable", str(self._script)], self._environment, tries=1)
                queue.jobs[answered_job(job)[0]] = None
        except OperationError as error:
            queue.retry.failed(time.monotonic())
            if str(error) != self._logged:
                self._logged = str(error)
                log_line(f"no job is queued for borrow.spot: {error}")

    def _ask(self) -> dict[str, bool]:
        """Return the jobs that have not ended, and whether each runs."""
        jobs = own_jobs(self._environment)
        return {job: info.state is JobState.RUNNING for job, info in jobs.items() if not info.state.ended}
