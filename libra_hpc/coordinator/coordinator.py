"""The coordinator, in the agent of rank 0: it carries out what pure policies decide, and writes what people read.

- A message about an engine or a node -> an event of the pool (`nodes`); the Layout that follows is published.
- Every `PlannerSection.interval_s` -> the planner's decision becomes moves (`live_planning`) or a repartition.
- A node is lost (`liveness`) -> the others go on; without a leader or a part of the core, all ranks restart from the
  newest checkpoint.
- A lost node sends again -> it ends its engines and starts as a new one, or is quarantined.

It alone writes the event log, the metrics and the status snapshot, and it decides how the run ends (`ending`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.node_groups import het_groups
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.planning.live_child import PlayerProcess
from libra_hpc.policies.learning.guards import GuardDecision
from libra_hpc.policies.pool import states
from libra_hpc.process.retry import patiently
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.ranks_stop import RanksStop, Why, start_of
from libra_hpc.state.attempt import Event, copy_policy, saved_point, source_of

from .ending import RunEnding
from .guard_watch import ENDS, GuardWatch
from .live_planning import LivePlanning, StepSharing
from .liveness import Ladder, LostNode, Movement, NodeContact, discount, waits_for
from .nodes import NodePool
from .observations import Observations, slowest
from .records import Records
from .repartitioner import Repartitioner
from .run_status import compose_status
from .time_limit import TimeLimit

GONE_JOIN_S = 10.0
"""Before that, the noted end of a rank without a heartbeat may be of the start before."""
JOIN_S = 120.0
"""All agents of one `srun` send heartbeats within seconds of each other."""
STATUS_S = 1.0
"""Between two status snapshots."""
LAYOUT_S = 2.0
"""The Layout is repeated this often; agents see by it that the coordinator lives."""
REQUESTS_S = 1.0
"""Between two readings of the lease and of a request to stop."""
ORPHAN_S = 60.0
"""How long a save may take once the run has no owner; Slurm ends the job of a dead one sooner."""
SAVE_S = 600.0
"""How long a checkpoint may take when nobody else waits for it."""

log = logging.getLogger("libra_hpc.agent")


class Coordinator:
    def __init__(self, context: AgentContext, events: Sequence[Event] = (), guards: GuardWatch | None = None) -> None:
        """``events`` of the choice of the start; ``guards`` have read the steps before it."""
        self._context, self._config, self._run_dir = context, context.config, context.run
        self._records = Records(context)
        self._event, self.log_layout = self._records.event, self._records.layout
        for kind, fields in events:
            self._event(kind, **fields)
        now = time.time()
        self._observations = Observations()
        self._nodes = NodePool(context, self._event, self._observations.on_switch, lambda: self._records.recorded)
        self._guards = guards or GuardWatch(self._config.algorithm.guard, self._config.rollout.kv_dtype)
        self._nodes.good_step = self._guards.good_step
        self._repartitioner = Repartitioner(context, self._event)
        self._sharing = StepSharing(context, self._nodes, self._observations)
        self._planning = LivePlanning(
            self._config,
            self._nodes,
            self._observations,
            self._sharing,
            PlayerProcess(self._config, self._repartitioner.not_before, context.logs / "player.log"),
            event=self._event,
        )
        self._started_at = now
        self._step = context.resume_point.step
        self._finished = asyncio.Event()
        self._limit = TimeLimit(self._config.slurm, now)
        self._ladder = Ladder(self._config.deadlines, now)
        self._ending = RunEnding(self._config.run.steps)
        self._given = start_of()
        self._replaceable = len(het_groups(self._config)[0].ranks)
        """Ranks whose nodes a spare one can replace: the first so many."""
        self._stepped_at = now
        self._late = ""
        """What a late step waits for, as a sentence."""
        self._job_id = ""
        self._asked_to_stop = False
        self._joined: tuple[wire.MemberJoined, ...] = ()
        """See `TrainReport.joined`, in the last report."""
        self._trained = False
        """Training has ended, and its step is saved."""
        self._last_step = 0
        """The step after which training stops for the time limit; 0: none."""

    # --- messages

    def on_message(self, source: int, message: Any) -> None:
        if isinstance(message, wire.Heartbeat):
            self._note_updates(message)
        if is_guest(source):
            self._nodes.on_guest(source, message)
            if isinstance(message, wire.Log):
                self._records.record(message.kind, message.t, message.fields)
        else:
            self._on_own(self._nodes.contacts[source], message)
        self._settle()

    def _on_own(self, node: NodeContact, message: Any) -> None:
        """A message of a node of the run."""
        node.seen = time.time()
        match message:
            case wire.Heartbeat(rank=rank, training=training):
                self._nodes.on_beat(rank, message)
                self._maybe_start()
                if training is not None:
                    self._on_training(training, node.seen)
            case wire.Log(kind="signal_ignored") if self._ending.saving_for is not None:
                pass  # rank 0 got it as well
            case wire.Log(kind=kind, t=t, fields=fields):
                self._records.record(kind, t, fields)
                if fields.get("waits") and fields["rank"] in self._context.layout.core:
                    # One of them may not answer; trainers of the core would end at twice this time, and cost more.
                    self._lose(self._nodes.replicas, str(fields["reason"]), node.seen)
            case wire.StepReport():
                self._on_step(message)
            case wire.RolloutReport():
                self._observations.on_rollout(message, self._nodes.receivers, time.time())
                self._share()
            case wire.Fatal():
                self._on_fatal(message)

    def _note_updates(self, beat: wire.Heartbeat) -> None:
        """Engines of a node that serve have new weights."""
        nodes, now = self._nodes, time.time()
        contact = nodes.contacts.get(beat.rank) or nodes.guests.contacts.get(beat.rank)
        known = contact.engines if contact is not None else {}
        self._observations.updates += [
            (beat.rank, one.update, now)
            for name, one in beat.engines.items()
            if one.update is not None and (name not in known or known[name].update != one.update)
        ]

    def _on_training(self, report: wire.TrainReport, now: float) -> None:
        joined = report.joined if report.joined != self._joined else ()
        self._joined = report.joined
        for member in joined:
            self._event("member_joined", **msgspec.structs.asdict(member))
            self._nodes.apply(states.StateArrived(member.rank))
            self._nodes.apply(states.MemberOf(member.rank, member.generation))
        self._limit.on_saves(report.saving, report.save_s, now)
        if report.core_wanted:
            self._sharing.core_to_train(now, at_once=self._stopping)
        if report.done is not None:
            self._step, self._trained = report.done, True
            self._end_training()

    def _end_training(self) -> None:
        """End the run, once the last step is evaluated where the run file asks for that."""
        if self._config.task.eval and self._step >= self._config.run.steps and not self._stopping:
            report = self._observations.report
            if report is None or report.evaluates:
                self._ending.message = f"step {self._step} is saved; it is evaluated now"
                return
        self._ending.finished(self._step, self._repartitioner.ordered)

    def _on_fatal(self, fatal: wire.Fatal) -> None:
        lost = fatal.restart or self._repartitioner.ordered
        why: Why = "defect" if fatal.defect else "lost" if lost else "fatal"
        self._ending.fatal(f"node {fatal.rank}: {fatal.reason}", why)

    def on_signal(self, name: str) -> None:
        now, cancelled = time.time(), name == "SIGTERM"
        if self._ending.over or not (cancelled or self._limit.heeds_notice(now)):
            return
        orphaned = self._context.fence.orphaned()
        if cancelled and not orphaned and self._ending.saving_for == "cancelled":
            return  # the owner passes on what its group got as well
        reason = orphaned or f"Slurm sent {name}"
        self._event("stop_requested", signal=name, reason=reason)
        if orphaned:
            self._stop(reason, ORPHAN_S if self._limit.end_at is None else self._limit.grace_s, "orphaned")
        elif cancelled:
            self._stop(reason, self._limit.grace_s)
        else:
            self._stop(reason, self._limit.left_s(now), "time_limit")

    def _on_stop_request(self) -> None:
        """Somebody asked for a checkpoint and the end, and waits for both."""
        self._asked_to_stop = True
        self._event("stop_requested", signal="", reason="a request to stop")
        if self._nodes.pool is None:
            self._ending.end("cancelled", "stopped before the first step")
            self._settle()
        else:
            self._stop("a request to stop", SAVE_S)

    def _stop(self, reason: str, patience_s: float, why: Why = "cancelled", after: int = 0) -> None:
        self._ending.stop(reason, patience_s, time.time(), why)
        self._nodes.stop_training(reason, after)

    def _settle(self) -> None:
        """Order nothing any more once the run is over."""
        if self._ending.over:
            self._nodes.frozen = True
            self._nodes.guests.closed = "it ends"
            self._finished.set()

    @property
    def state(self) -> str:
        """The state that `status` shows; see `RunEnding`."""
        return self._ending.state

    @property
    def nodes(self) -> NodePool:
        return self._nodes

    def _maybe_start(self) -> None:
        if self._nodes.pool is not None or not self._nodes.complete:
            return
        self._event("job_started", ranks=len(self._nodes.contacts), step=self._step, attempt=self._context.attempt)
        if self._given.reason:
            self._event(
                "recovered",
                restarts=self._given.restarts,
                reason=self._given.reason,
                step=self._step,
                source=source_of(self._context.resume_point),
            )
        if self._given.fewer.sentence:
            self._event("fewer_nodes", reason=self._given.fewer.sentence)
        self._ending.state, self._ending.message = "running", "starting engines"
        if self._step:
            self._ending.message += f", going on {source_of(self._context.resume_point)}"
        self._nodes.start(self._config.planner.hybrid_start)

    # --- planning

    def _plan(self) -> None:
        decision = self._planning.decide(self._config.run.steps - self._step, time.time())
        carried_out = (
            decision.action == "repartition" and decision.changes and self._config.planner.repartition == "carry_out"
        )
        if carried_out and self._repartitioner.propose(decision):
            self._nodes.stop_training("repartition")

    def _share(self) -> None:
        """Move nodes within the step; a run that stops moves none."""
        if self._stopping:
            self._sharing.end()
        self._sharing.evaluate(self._step, time.time())

    # --- the loop

    async def run(self) -> None:
        if (decision := self._guards.decided) is not None:
            self._ending.end(ENDS[decision.action], decision.reason)
            self._settle()
        try:
            async with asyncio.TaskGroup() as group:
                polls = [group.create_task(self._poll_requests()), group.create_task(self._poll_offers())]
                await self._serve()
                for poll in polls:
                    poll.cancel()
        except* Exception as failed:
            error = failed.exceptions[0]
            log.error("the coordinator failed", exc_info=error)
            self._ending.fatal(f"node 0: {type(error).__name__}: {error}", "defect")
            self._settle()
        await self._close()

    async def _serve(self) -> None:
        next_status = next_layout = next_plan = 0.0
        slept_s = period = min(STATUS_S, self._config.planner.interval_s)
        while not self._finished.is_set():
            now = time.time()
            if stall := discount({**self._nodes.contacts, **self._nodes.guests.contacts}, slept_s, period, now):
                self._ladder.discount(stall, now)
                self._event("own_stall", reason=f"rank 0 was stopped for {stall:.1f} s", seconds=stall)
            self._check(now)
            if now >= next_layout:
                next_layout = now + LAYOUT_S
                self._nodes.publish(again=True)
            settled = self._nodes.pool is not None and not (self._nodes.moves or self._stopping)
            if self._config.planner.enabled and now >= next_plan and settled:
                next_plan = now + self._config.planner.interval_s
                self._plan()
            if now >= next_status:
                next_status = now + STATUS_S
                self._write_status()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), period)
            # By the clock that silences are measured with: a clock that was set forward is no silence either.
            slept_s = time.time() - now

    @property
    def _stopping(self) -> bool:
        return self._repartitioner.ordered or self._ending.saving_for is not None

    def _check(self, now: float) -> None:
        waited_s = now - self._started_at
        if self._nodes.pool is None and waited_s > GONE_JOIN_S:
            missing = [rank for rank, node in self._nodes.contacts.items() if not node.host]
            if waited_s > JOIN_S or any(rank in self._context.ended for rank in missing):
                self._ending.fatal(f"no sign of life from rank(s) {missing} after {waited_s:.0f} s", "lost")
        if self._nodes.pool is not None:
            self._check_lost(now)
            self._nodes.check_guests(now)
        if self._ending.saving_for == "cancelled" and (orphaned := self._context.fence.orphaned()):
            self._ending.stop(orphaned, ORPHAN_S, now, "orphaned")
        self._ending.check(now)
        if (fault := self._records.check_storage()) and self._ending.saving_for is None:
            self._stop(fault, SAVE_S, "storage")
        self._check_time_limit(now)
        self._check_progress(now)
        if self._trained and not self._ending.over:
            self._end_training()
        self._settle()

    def _check_lost(self, now: float) -> None:
        for lost in self._nodes.find_lost(self._context.ended, now):
            spare = self._given.spare if lost.rank < self._replaceable else 0
            if (lost.down and spare > 0 and self._ending.saving_for is None) or lost.rank in self._context.layout.vital:
                self._recover(lost.rank, lost.reason)

    def _lose(self, ranks: Iterable[int], reason: str, now: float) -> None:
        seen = self._nodes.contacts
        self._nodes.lose([LostNode(rank, reason, now - seen[rank].seen) for rank in ranks], now)

    def _check_progress(self, now: float) -> None:
        seen, nodes, notices = self._observations, self._nodes, self._records.notices(now)
        was_late, self._late = self._late, ""
        if nodes.pool is None or self._ending.over:
            return
        run = Movement(
            (self._step, seen.tokens()),
            tuple(node.state for node in nodes.pool.nodes.values()),
            self._stopping or bool(self._records.fault),
            self._step,
            seen.lines[-1]["step_s"] if len(seen.lines) > 1 else 0.0,
            nodes.droppable,
            nodes.silent_s(now),
            nodes.replicas,
            starting=nodes.starting,
            least_s=self._least_s(),
            waits_for=waits_for(nodes.pool, seen.report, notices),
        )
        self._late = "" if self._trained else self._ladder.late(run, now - self._stepped_at)
        if self._late and not was_late:
            self._event("step_late", step=self._step, reason=self._late)
        rung = self._ladder.evaluate(run, now)
        if rung is None:
            return
        if self._trained:
            # An evaluation that hangs costs no saved run.
            self._ending.finished(self._step, self._repartitioner.ordered)
            self._ending.message += f"; its evaluation was given up: {rung.reason}"
            return
        self._lose(rung.ranks, rung.reason, now)
        if rung.action == "restart":
            self._ending.fatal(rung.reason, "lost")

    def _least_s(self) -> float:
        """No limit of progress is shorter at the moment."""
        limits, least_s = self._config.deadlines, 0.0
        if self._observations.patient and self._nodes.receivers:  # without an engine nothing else has a limit
            least_s = max(limits.first_s, self._config.task.failed_patience_s)
        # Behind the last step only its checkpoint is missing; one that failed is tried again, as when the disk is full.
        if self._limit.saving_since is not None or (self._step >= self._config.run.steps and not self._trained):
            least_s = max(least_s, limits.storage_s)
        return least_s

    def _check_time_limit(self, now: float) -> None:
        stop = self._limit.stop(self._step, self._stepped_at, now)
        # A last step that takes too long is given up.
        if stop is None or (stop.after if self._last_step else self._stopping):
            return
        self._last_step = stop.after
        self._event("stop_requested", signal="", reason=stop.reason)
        self._stop(stop.reason, self._limit.left_s(now), "time_limit", stop.after)

    async def _poll_requests(self) -> None:
        """Read who owns the run and whether somebody wants the run to stop, in threads: a file system may hang."""
        while not self._finished.is_set():
            if taken := await asyncio.to_thread(self._context.fence.check):
                log.error("leaving: %s", taken)
                self._ending.end("taken", taken)
                self._settle()
            if not self._asked_to_stop and await asyncio.to_thread(os.path.exists, self._run_dir.stop):
                self._on_stop_request()
            if not self._job_id:
                # The launcher writes it once it has the id, which may be after this start.
                self._job_id = str(
                    (await asyncio.to_thread(self._run_dir.read_json, self._run_dir.job)).get("job_id", "")
                )
            await asyncio.sleep(REQUESTS_S)

    async def _poll_offers(self) -> None:
        """Read offers of lenders, in a thread."""
        while not self._finished.is_set():
            await asyncio.sleep(min(STATUS_S, self._config.planner.interval_s))
            if self._config.borrow.lenders and self._nodes.pool is not None and self._ending.saving_for != "lost":
                await asyncio.to_thread(self._nodes.guests.offers.read)

    def _recover(self, rank: int, reason: str) -> None:
        """A leader or a part of the core is lost: the ranks end, as soon as training has saved if it can."""
        layout = self._context.layout
        roles = dict.fromkeys(layout.core, "has a part of the trainers")
        roles |= {layout.train_leader: "leads training", layout.rollout_leader: "leads rollout"}
        sentence = f"node {rank}, which {roles.get(rank, 'a spare node replaces')}, was lost ({reason})"
        if rank in layout.core:
            self._ending.fatal(sentence, "lost")
        elif self._ending.save_and_restart(sentence, time.time()):
            self._nodes.stop_training("recovery")

    def _on_step(self, report: wire.StepReport) -> None:
        if report.step != self._step + 1:
            # A report before it was lost with a connection. The train leader keeps both, for the next start.
            return
        self._step = report.step
        if not self._stopping:
            self._ending.message = ""
        self._stepped_at = now = time.time()
        metrics = report.metrics
        self._limit.on_step(metrics["step_s"])
        estimate = self._planning.estimate(int(metrics["train_nodes"]))
        own = {
            "rollout_nodes": len({*self._nodes.receivers, *self._sharing.ranks}),
            "rollout_tokens_per_s": self._observations.step_speed(metrics, now),
            "expected_s": None if estimate is None else estimate.batch_s,
            **self._log_updates(),
        }
        line = {"t": now, "step": report.step, **metrics, **own}
        self._observations.on_step(line, now)
        self._records.step(line)
        self._share()
        self._on_guards(self._guards.observe(line))

    def _log_updates(self) -> dict[str, float]:
        """Log weights that engines got since the last step, a line a version; returns what they cost."""
        seen, contacts = self._observations, self._nodes.contacts
        updates, seen.updates = sorted(seen.updates, key=lambda one: one[1].version), []
        for version, group in groupby(updates, lambda one: one[1].version):
            ranks, applied, _ = zip(*group, strict=True)
            late = [rank for rank in self._nodes.receivers if (beat := contacts[rank].beat) and beat.version < version]
            guests = sum(map(is_guest, ranks))
            self._event(
                "weights_applied", version=version, engines=len(ranks), guests=guests, late=late, **slowest(applied)
            )
        return seen.update_costs(updates)

    def _on_guards(self, decision: GuardDecision | None) -> None:
        """What the guards of learning decided at this step."""
        if self._guards.good_step != self._nodes.good_step:
            self._nodes.good_step = self._guards.good_step
            self._nodes.publish()
        if decision is not None and decision.action in ENDS:
            self._event("stop_requested", signal="", reason=decision.reason)
            self._stop(decision.reason, SAVE_S, ENDS[decision.action])
        elif decision is not None:
            fields = {"step": self._step, "good_step": decision.good_step, "reason": decision.reason}
            self._event("learning_notice", **fields)

    async def _close(self) -> None:
        self._planning.close()
        self._log_updates()
        if self._ending.why != "taken":
            await asyncio.to_thread(self._leave)
            self._write_status()
            self._records.end(RanksStop(self._ending.why or "fatal", self._ending.message, self._step))
        for rank in (*self._nodes.contacts, *self._nodes.guests.contacts):
            if rank != self._context.rank:
                self._context.send(rank, wire.StopAgent(self._ending.message, self.state == "restarting"))
        await self._records.close(f"the run is {self.state} at step {self._step}: {self._ending.message}")

    def _leave(self) -> None:
        """Leave what the next start needs, or what the run has made, and why the ranks end."""
        ending = self._ending
        what = "the end could not be prepared"
        try:
            if ending.why == "completed":
                what = "the last step is saved, but the policy could not be exported"
                if newest := patiently(lambda: saved_point(self._run_dir), SAVE_S).checkpoint:
                    copy_policy(Path(newest) / "policy", self._run_dir.policy)
            elif ending.why == "repartition":
                what = "the restart could not be prepared"
                self._repartitioner.carry_out(self._step)
            elif ending.why in ENDS.values():
                ending.message += f"; {self._guards.advice(self._run_dir)}"
        except OSError as error:
            ending.why, ending.state, ending.message = "fatal", "failed", f"{what}: {error}"

    def _write_status(self) -> None:
        now = time.time()
        fewer = self._given.fewer.sentence, self._nodes.going_on(now)
        notices = [*filter(None, fewer), *self._nodes.quarantined, *self._records.notices(now)]
        restarts = "saving, to start again in another layout" if self._repartitioner.ordered else ""
        message = self._ending.message or restarts or self._late
        nodes = self._nodes
        status = compose_status(
            self._context,
            nodes.pool,
            nodes.contacts,
            nodes.guests,
            self._observations,
            job_id=self._job_id,
            state=self.state,
            message=message,
            started_at=self._started_at,
            step=self._step,
            decision=self._planning.last,
            estimate=self._planning.estimate(nodes.trainers),
            repartitioned=self._repartitioner.last,
            notices=self._guards.shown(notices),
            spot_nodes=self._planning.spot_nodes,
            takes=self._planning.takes(),
            now=now,
        )
        self._records.status(status)
