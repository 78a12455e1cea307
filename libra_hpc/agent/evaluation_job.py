"""Evaluations as a job of their own: engines and environment hosts of a run, without trainers and a coordinator.

- Policies are evaluated one after the other, each on all tasks, with engines of its own.
- A result is in ``evaluations.jsonl`` once it is there, so that another job goes on with what is left.

- Every node has engines, rank 0 also the rollout leader. It gives the few answers that a coordinator or trainer would.
- An engine is lost -> it is started again, as often as in a run. A node is lost -> the others have its turns.
- All results of a policy are written -> all ranks go on to the next.
- A part ends too often, or rank 0 is lost -> they end with the reason.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError
from libra_hpc.facts.journal import Journal
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import blank_status
from libra_hpc.mesh.agent_context import AgentContext, RankLayout
from libra_hpc.mesh.folder_meeting import FolderMeeting
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import World, meet
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.simulated.dry_run import in_wall_time

from .hosting.rollout_service import RolloutService
from .node import NodeAgent, Routes, add_rollout_service
from .node_carrier import NodeCarrier
from .rollout_node import RolloutNode

WATCH_S = 1.0
"""Between two looks for the result and for lost nodes."""
KEEP_EVENTS = 10_000


def evaluate(folder: str, policies: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Carry out the evaluations of a folder, whose configuration names the tasks; one call on each node.

    ``policies``: steps and folders. Returns the lines of ``evaluations.jsonl``. Raises `OperationError` with a reason.
    """
    run = RunDir(folder)
    config = load_resolved(run.config)
    layout = RankLayout(("rollout",) * config.components.rollout.nodes)
    world = meet(FolderMeeting(run.path / "meeting", os.environ), config.slurm.interface)
    run.logs(1).mkdir(parents=True, exist_ok=True)
    why = ""
    try:
        return asyncio.run(evaluate_all(world, layout, config, run, policies))
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        if world.rank == 0:
            end = {"state": "failed" if why else "completed", "message": why, "attempt": 1, "t": time.time()}
            run.write_json(run.result, end)


async def evaluate_all(
    world: World, layout: RankLayout, config: RunConfig, run: RunDir, policies: Sequence[tuple[int, str]]
) -> list[dict[str, Any]]:
    """Evaluate one policy after the other; returns the lines, none where this is not rank 0."""
    routes = [Routes()]
    # One mesh for all: a peer may call before this node begins with the same policy.
    mesh = Mesh(world, lambda source, message: routes[-1].deliver(message))
    accepting = asyncio.get_running_loop().create_task(mesh.run())
    for step, policy in policies:
        own = config.changed(model={"path": policy}) if config.run.engine == "real" else config
        routes.append(Routes())
        node = EvaluationNode(mesh, routes[-1], layout, own, run, step)
        accepting.add_done_callback(node.on_ended)
        await node.run()
    accepting.cancel()
    return list(read_lines(run.evaluations)) if world.rank == 0 else []


class EvaluationNode(NodeAgent):
    """One node of the job."""

    def __init__(
        self, mesh: Mesh, routes: Routes, layout: RankLayout, config: RunConfig, run: RunDir, step: int
    ) -> None:
        super().__init__(mesh, "rollout", routes, layout.listeners)
        self._run, self._step = run, step
        self._began = time.time()
        # What earlier runs measured is not needed.
        own = in_wall_time(config).changed(checkpoint={"experience": False})
        self._context = AgentContext(
            rank=mesh.rank,
            layout=layout,
            config=own,
            run=run,
            attempt=1,
            send=self.mesh.send,
            resume_point=ResumePoint(step, "", 0, ()),
            private=self.private,
            shared_memory=self.shared_memory,
            changed=self.changed,
        )
        # No version follows that of the start: the carrier is never started.
        self._engines = RolloutNode(self._context, NodeCarrier(self._context, lambda: None))
        self.engines.append(self._engines)
        # No step is left, so that no prompt of training is admitted.
        self._service = RolloutService(self._context, step) if mesh.rank == 0 else None
        self.leaders += [self._service] if self._service is not None else []
        self._events: Journal[dict[str, Any]] = Journal(run.events, dict, KEEP_EVENTS)
        self._why = ""
        """Why it failed; empty: it did not."""
        self._add_routes()

    def _add_routes(self) -> None:
        add, engines, send = self._routes.add, self._engines, self.mesh.send
        add(wire.Turns, engines.on_turns)
        add(wire.WeightsCurrent, engines.on_current)
        add(wire.StopAgent, lambda stop: self._end(stop.reason))
        if self._service is not None:
            add_rollout_service(self._routes, self._service)
            add(
                wire.WeightsWanted, lambda asked: send(asked.rank, wire.WeightsCurrent(self._context.resume_point.step))
            )
            add(wire.Log, lambda record: self._events.add({"t": record.t, "kind": record.kind, **record.fields}))
            add(wire.Fatal, lambda fatal: self._end(fatal.reason))

    async def run(self) -> None:
        """Serve until the results of this policy are written."""
        parts = [self._engines.watch(), self._engines.start(), self._watch()]
        for part in parts if self._service is None else [*parts, self._service.run()]:
            self._spawn(part)
        await self.live()
        if self._why:
            raise OperationError(self._why)

    async def leave(self) -> None:
        for rank in range(1, self.mesh.size if self._service is not None else 1):
            self.mesh.send(rank, wire.StopAgent(self._why))

    async def over(self) -> None:
        await self._events.flush()
        await self._events.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if any(one.state == "lost" for one in self._engines.observed.values()):
                self._spawn(self._engines.start())
            for rank in self.mesh.unreachable():
                self.mesh.drop(rank)
                if self._service is None and rank == 0:
                    self._end("the node of rank 0 is lost")
                if self._service is not None:
                    self._context.log("node_lost", rank=rank, reason="its connection broke")
                    self._service.leader.on_rank_lost(rank)
            if self._service is not None:
                await self._events.flush()
                if await asyncio.to_thread(self._write_status):
                    self._end("")

    def _write_status(self) -> bool:
        """Write how far it is; returns whether every task has a result of this step."""
        assert self._service is not None
        lines, tasks = list(read_lines(self._run.evaluations)), self._context.config.task.eval
        here = {line["task"] for line in lines if line["step"] == self._step}
        ended, wanted = self._service.leader.evaluations.progress
        job_id = str(self._run.read_json(self._run.job).get("job_id", ""))
        steps = len(tasks) * len(self._run.read_json(self._run.policies))
        blank = blank_status(self._run, 1, job_id=job_id, step=len(lines), steps=steps, now=time.time())
        message = f"evaluates step {self._step}: {len(here)} of {len(tasks)} tasks, {ended} of {wanted} trajectories"
        own = {"state": "running", "message": message, "started_at": self._began}
        self._run.write_json(self._run.status, blank | own)
        return len(here) == len(tasks)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._stop.set()

    def defect(self, reason: str, error: BaseException) -> None:
        self._end(reason)
