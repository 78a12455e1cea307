"""The coordinator, in the agent of rank 0: it carries out what the pure policies decide and writes what people read.

It owns the pool (`libra_hpc.runtime.states`): every message that tells of an engine or a node is an event, every effect
becomes an order to an agent or a leader. Every `PlannerSection.interval_s` it shows the planner a snapshot and turns
its decision into a move.  It is the only writer of the event log, the metrics and the status snapshot (in a thread,
`libra_hpc.telemetry.facts`), and it decides how the run ends.

- A node is lost (`liveness`) -> the others go on without it; when it led a stage, all ranks restart from the newest
  checkpoint (`recovery`).
- A lost node is heard again -> it ends its engines, says hello, and starts as a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from libra_hpc.planning.live import live_planner
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.plan import NodeFact
from libra_hpc.runtime import states
from libra_hpc.telemetry.estimate import StageEstimate

from .agent_context import AgentContext
from .attempt import copy_policy, forget_steps_after
from .decisions import DecisionLog, predicted_gain
from .ending import Ending
from .late_steps import late_step
from .liveness import discount, read_gone
from .nodes import NodePool, Role
from .observations import Observations
from .records import Records
from .recovery import Recovery
from .repartitioner import Repartitioner
from .screen import compose_status

GONE_HELLO_S = 10.0
"""The end of a rank that has not said hello counts from then on: what the launcher notes late may be of the start
before."""
HELLO_S = 120.0
"""All agents of one `srun` say hello within seconds of each other."""
STATUS_S = 1.0
ROLES_S = 2.0
"""The roles are repeated this often, which also tells the agents that the coordinator lives."""
GONE_S = 1.0
"""Between two looks at what the launcher saw."""
NOTICE_S = {"SIGTERM": 4.0, "SIGUSR1": 50.0}
"""How long a checkpoint may take after a notice.  A cancel is followed by SIGKILL after Slurm's KillWait (5 s is the
shortest in use); the notice before the time limit comes 60 s early."""
SAVE_S = 600.0
"""How long a checkpoint may take when nobody else waits for it."""


class Coordinator:
    """See the module docstring.  `run` returns when the run is over; ``state`` then says how."""

    def __init__(self, context: AgentContext, damaged: Sequence[tuple[int, str]] = ()) -> None:
        """``damaged``: checkpoints that were passed over at the start, as step and sentence."""
        self._context, self._config, self._run_dir = context, context.config, context.run
        forget_steps_after(context.run, context.start.step)
        self._records = Records(context)
        self._event = self._records.event
        for step, sentence in damaged:
            self._event("checkpoint_damaged", step=step, reason=sentence)
        now = time.time()
        self._observations = Observations()
        self._nodes = NodePool(context, self._event, self._observations.on_switch, lambda: self._records.recorded)
        self._planner = live_planner(self._config)
        self._decisions = DecisionLog(self._planner, self._event)
        self._repartitioner = Repartitioner(context, self._event, self._records.event_now)
        self._planner.repartition_after = self._repartitioner.not_before
        self._started_at = now
        self._step = context.start.step
        self._gen_tokens = 0
        self._finished = asyncio.Event()
        self._ending = Ending(self._config.run.steps, Recovery(self._config.slurm.restarts))
        self._stepped_at = now
        self._gone: dict[int, int] = {}
        self._job_id = ""
        self._polls: set[asyncio.Task[None]] = set()

    # --- messages
    # ----------------------------------------------------------------------------------------------

    def on_message(self, source: int, message: Any) -> None:
        """Everything that is addressed to the coordinator."""
        node = self._nodes.facts[source]
        node.seen = time.time()
        match message:
            case wire.Heartbeat():
                node.beat = message
            case wire.Log(kind=kind, t=t, fields=fields):
                self._records.record(kind, t, fields)
            case wire.StepReport():
                self._on_step(message)
            case wire.RolloutReport():
                self._observations.on_rollout(message, self._nodes.receivers, time.time())
            case wire.Hello(rank=rank, host=host, pid=pid, component=component):
                node.host, node.pid = host, pid
                self._context.send(rank, self._context.start)
                self._event("agent_joined", rank=rank, host=host, pid=pid, component=component)
                self._nodes.take_back(rank)
                self._maybe_start()
            case wire.EngineIsReady(rank=rank, kind=kind, seconds=seconds):
                self._event("engine_is_ready", rank=rank, engine_kind=kind, seconds=seconds)
                self._nodes.apply(states.EngineAnswers(rank, _role(kind)))
            case wire.EngineDied(rank=rank, kind=kind, reason=reason):
                self._nodes.apply(states.EngineEnded(rank, _role(kind)))
                self._event("engine_restarted", rank=rank, engine_kind=kind, reason=reason)
            case wire.TurnsDrained(rank=rank):
                self._nodes.apply(states.Drained(rank))
            case wire.MemberJoined(
                rank=rank, generation=generation, step=step, received_bytes=received, seconds=seconds
            ):
                self._event(
                    "member_joined",
                    rank=rank,
                    generation=generation,
                    step=step,
                    received_bytes=received,
                    seconds=seconds,
                )
                self._nodes.apply(states.StateArrived(rank))
                self._nodes.apply(states.MemberOf(rank, generation))
            case wire.TrainingFinished(step=step):
                self._step = step
                self._ending.finished(step, self._repartitioner.ordered, node.seen)
            case wire.Fatal(rank=rank, reason=reason, restart=restart):
                self._ending.fatal(f"node {rank}: {reason}", restart or self._repartitioner.ordered, node.seen)
        self._settle()

    def on_signal(self, name: str) -> None:
        """SIGTERM or the time-limit notice: save at the next step boundary, then stop."""
        if not self._ending.over:
            self._event("stop_requested", signal=name)
            self._stop(name, NOTICE_S[name])

    def _stop(self, reason: str, patience_s: float, state: str = "cancelled") -> None:
        self._ending.stop(reason, patience_s, time.time(), state)
        self._context.send(self._context.layout.train_leader, wire.StopTraining(reason))

    def _settle(self) -> None:
        """Nothing is ordered any more once the run is over."""
        if self._ending.over:
            self._nodes.frozen = True
            self._finished.set()

    @property
    def state(self) -> str:
        """``starting`` | ``running`` | ``completed`` | ``failed`` | ``cancelled`` | ``restarting``"""
        return self._ending.state

    def on_back(self, rank: int) -> None:
        """A node that was declared lost is heard again."""
        self._nodes.ask_back(rank)

    def _maybe_start(self) -> None:
        if self._nodes.pool is not None or not self._nodes.complete:
            return
        self._event("job_started", ranks=len(self._nodes.facts), step=self._step, attempt=self._context.attempt)
        if self._ending.recovery.cause:
            self._event(
                "recovered", restarts=self._ending.recovery.used, reason=self._ending.recovery.cause, step=self._step
            )
        self._ending.state, self._ending.message = "running", "starting engines"
        self._nodes.start(self._config.planner.hybrid_start)

    # --- planning
    # ----------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        assert self._nodes.pool is not None
        facts = self._nodes.facts
        nodes = tuple(
            NodeFact(rank, node.component, str(node.state), facts[rank].since)
            for rank, node in self._nodes.pool.nodes.items()
        )
        algorithm = self._config.algorithm
        steps_left = self._config.run.steps - self._step
        snapshot = self._observations.snapshot(
            nodes, algorithm.prompts_per_step, algorithm.group_size, algorithm.eta, steps_left
        )
        now = time.time()
        decision = self._planner.decide(snapshot, now)
        self._decisions.look(decision, now)
        carried_out = (
            decision.action == "repartition" and decision.changes and self._config.planner.repartition == "carry_out"
        )
        if carried_out and self._repartitioner.propose(decision):
            self._context.send(self._context.layout.train_leader, wire.StopTraining("repartition"))
        if decision.action not in ("to_train", "to_rollout"):
            return
        role: Role = "train" if decision.action == "to_train" else "rollout"
        gain = predicted_gain(decision)
        for rank in decision.nodes or (decision.node,):
            self._event(
                "move_started",
                rank=rank,
                to=role,
                reason=decision.reason,
                numbers=decision.numbers,
                predicted_gain_s=gain,
            )
            self._nodes.move(rank, role, now)

    def _blocked_by(self) -> str:
        """Why the ranks cannot be repartitioned at the moment."""
        return "the run is stopping" if self._ending.stopping else self._nodes.on_the_way

    # --- the loop
    # ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the run to its end."""
        next_status = next_roles = next_plan = 0.0
        self._poll(self._poll_gone())
        self._poll(self._poll_orders())
        slept_s = period = min(STATUS_S, self._config.planner.interval_s)
        while not self._finished.is_set():
            now = time.time()
            if stall := discount(self._nodes.facts, slept_s, period, now):
                self._event("own_stall", reason=f"rank 0 was stopped for {stall:.1f} s", seconds=stall)
            self._check(now)
            if self._nodes.pool is not None:
                if now >= next_roles:
                    next_roles = now + ROLES_S
                    self._nodes.announce()
                if self._config.planner.enabled and now >= next_plan and not (self._nodes.moves or self._stopping):
                    next_plan = now + self._config.planner.interval_s
                    self._plan()
            if now >= next_status:
                next_status = now + STATUS_S
                self._write_status()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), period)
            # By the clock that silences are measured with: a clock that was set forward is no silence either.
            slept_s = time.time() - now
        await self._close()

    @property
    def _stopping(self) -> bool:
        return bool(self._repartitioner.ordered or self._ending.recovery.reason) or self._ending.stopping

    def _check(self, now: float) -> None:
        """What time alone brings about."""
        waited_s = now - self._started_at
        if self._nodes.pool is None and waited_s > GONE_HELLO_S:
            missing = [rank for rank, node in self._nodes.facts.items() if not node.host]
            if waited_s > HELLO_S or any(rank in self._gone for rank in missing):
                self._ending.restart(f"no sign of life from rank(s) {missing} after {waited_s:.0f} s", now)
        for lost in self._nodes.lose(self._gone, now) if self._nodes.pool is not None else ():
            if lost.rank in (self._context.layout.train_leader, self._context.layout.rollout_leader):
                self._recover(lost.rank, lost.reason)
        self._ending.check(now)
        if (fault := self._records.check_storage()) and not (self._ending.stopping or self._ending.recovery.reason):
            self._stop(fault, SAVE_S, "failed")
        self._settle()

    def _poll(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._polls.add(task)
        task.add_done_callback(self._polled)

    def _polled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ending.end("failed", f"rank 0: {type(error).__name__}: {error}")
            self._settle()

    async def _poll_gone(self) -> None:
        """Read what the launcher saw, in a thread: the file system may hang."""
        while not self._finished.is_set():
            self._gone = await asyncio.to_thread(read_gone, self._run_dir.gone(self._context.attempt))
            if not self._job_id:
                # The launcher writes it once it knows the id, which may be after this start.
                self._job_id = str(
                    (await asyncio.to_thread(self._run_dir.read_json, self._run_dir.job)).get("job_id", "")
                )
            await asyncio.sleep(GONE_S)

    async def _poll_orders(self) -> None:
        """Look for an operator's order for another layout, in a thread."""
        while not self._finished.is_set():
            await asyncio.sleep(min(STATUS_S, self._config.planner.interval_s))
            if self._nodes.pool is None or self._ending.recovery.reason:
                continue
            if await asyncio.to_thread(self._repartitioner.poll, self._blocked_by()):
                self._context.send(self._context.layout.train_leader, wire.StopTraining("repartition"))

    def _recover(self, rank: int, reason: str) -> None:
        """A leader is lost: all ranks restart, as often as that is allowed."""
        layout = self._context.layout
        stage = "training" if rank == layout.train_leader else "rollout"
        sentence = f"node {rank}, which leads {stage}, was lost ({reason})"
        if rank == layout.train_leader:
            self._ending.restart(sentence, time.time())
        elif self._ending.save_and_restart(sentence, time.time()):
            self._context.send(layout.train_leader, wire.StopTraining("recovery"))

    def _on_step(self, report: wire.StepReport) -> None:
        self._step = report.step
        if not self._stopping:
            self._ending.message = ""
        self._stepped_at = now = time.time()
        self._gen_tokens = report.metrics.batch.gen_tokens
        estimate = self._estimate(report.metrics.replicas)
        expected = None if estimate is None else estimate.batch_s
        self._observations.on_step(report, expected, now)
        speed = self._observations.rollout_speed(self._gen_tokens)[0]
        rollout = {"rollout_nodes": len(self._nodes.receivers), "rollout_tokens_per_s": speed}
        self._records.step(
            {"t": now, "step": report.step, **report.metrics.columns(), **rollout, "expected_s": expected}
        )

    def _estimate(self, trainers: int) -> StageEstimate | None:
        """The planner's estimate; None while it has none, or when it is of another split than the present one."""
        made = self._planner.estimate
        if made is None or made.split != (trainers, len(self._nodes.receivers)):
            return None
        return StageEstimate(made.times.train, made.times.rollout, made.times.batch)

    async def _close(self) -> None:
        for poll in self._polls:
            poll.cancel()
        newest = self._run_dir.latest_checkpoint()
        if newest is not None and self.state == "completed":
            try:
                await asyncio.to_thread(copy_policy, newest[1] / "policy", self._run_dir.policy)
            except OSError as error:
                why = f"the last step is saved in {newest[1]}, but the policy could not be exported: {error}"
                self._ending.state, self._ending.message = "failed", why
        self._decisions.close()
        if self.state == "restarting":
            await asyncio.to_thread(self._leave_for_restart)
        if self.state != "restarting":
            await asyncio.to_thread(
                self._repartitioner.give_up, f"the run is over: {self.state}, {self._ending.message}."
            )
            self._records.verdict(self.state, self._ending.message, self._step)
        self._write_status()
        for rank in self._nodes.facts:
            if rank != self._context.rank:
                self._context.send(rank, wire.StopAgent(self._ending.message))
        await self._records.close(f"the run is {self.state} at step {self._step}: {self._ending.message}")

    def _leave_for_restart(self) -> None:
        try:
            recovery = self._ending.recovery
            if recovery.reason:
                self._event("restart", reason=recovery.reason, restarts=recovery.used + 1, step=self._step)
                recovery.leave(self._run_dir, self._context.attempt)
            else:
                self._repartitioner.carry_out(self._step)
        except OSError as error:
            self._ending.state, self._ending.message = "failed", f"the restart could not be prepared: {error}"

    def _late(self, now: float, notices: list[str]) -> str:
        if self._nodes.pool is None or self._finished.is_set():
            return ""
        report, steps = self._observations.report, [wall for wall, _ in self._observations.walls]
        return late_step(now - self._stepped_at, steps, self._nodes.pool, report, notices)

    def _write_status(self) -> None:
        now = time.time()
        notices = self._records.notices(now)
        message = self._ending.message or self._repartitioner.message or self._late(now, notices)
        nodes = self._nodes
        status = compose_status(
            self._context,
            nodes.pool,
            nodes.facts,
            self._observations,
            job_id=self._job_id,
            state=self.state,
            message=message,
            started_at=self._started_at,
            step=self._step,
            gen_tokens=self._gen_tokens,
            decision=self._decisions.last,
            estimate=self._estimate(nodes.trainers),
            repartitioned=self._repartitioner.last,
            notices=notices,
            now=now,
        )
        self._records.status(status)


def _role(kind: str) -> Role:
    return "train" if kind == "train" else "rollout"
