"""The rollout leader: admits prompts, runs every trajectory, and composes the batches.

It runs in the agent of one node that rolls out, touches no tensor, and owns all experience until it is trained. A
trajectory alternates between an environment host, the dispatcher's queue, and an engine.

- Engine lost -> its running turns are sent again elsewhere (`turn_router`).
- Environment host lost -> the next one replays the turns of its episodes (`environments`).
- Attempt failed -> it is tried again later, or given up (`attempts`).

Answers that arrive together are handled together, once per pass of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.policies.learning.advantages import LengthRules, Refill, advantage_named
from libra_hpc.policies.learning.engine_gaps import EngineGaps
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.staleness import StalenessGate
from libra_hpc.protocol.agents import (
    Batch,
    Committed,
    ExpertsWanted,
    Fatal,
    Group,
    GroupDone,
    RolloutReport,
    SampleExperts,
)
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.engine_state import EngineStats, LenderKind, ObservedEngine
from libra_hpc.protocol.env import EVALUATIONS, HostLost, HostReady, TurnUnwanted
from libra_hpc.protocol.plan import TrajectoryFact

from .attempts import ERROR_CHARS, Attempts
from .environments import Environments
from .evaluation import Evaluations
from .failures import FailureBook
from .group_state import GroupState, batch_stats, length_of, open_groups
from .prompt_order import PromptOrder
from .surroundings import Surroundings
from .trajectory import Trajectory
from .turn_router import TurnRouter


class RolloutLeader:
    """Inputs are the ``on_*`` methods; outputs go to its `Surroundings`."""

    def __init__(
        self, config: RunConfig, rank: int, train_leader: int, policy: Policy, surroundings: Surroundings
    ) -> None:
        self._config, self._train_leader, self._around = config, train_leader, surroundings
        self._clock, self._send, self._log = surroundings.clock, surroundings.send, surroundings.log
        self._order: PromptOrder | None = None
        self._environments = Environments(config, surroundings, self)
        self._turns = TurnRouter(config, policy, self._environments.episodes, surroundings=surroundings, leader=self)
        book = FailureBook(config.task.max_failed_share, config.task.failed_patience_s)
        self._attempts = Attempts(book, self._log, lambda why: self._send(0, Fatal(rank, why)))
        self._advantage = advantage_named(config.algorithm.advantage)
        rollout, algorithm = config.rollout, config.algorithm
        self._rules = LengthRules(algorithm.truncated, algorithm.overlong_soft, rollout.max_model_len)
        self._refill = Refill(algorithm.refill_batches * algorithm.prompts_per_step if algorithm.refill else 0)
        self._gaps = EngineGaps(algorithm.eta)
        self._parts = [one.name for one in config.task.train]
        self._task = "" if self._parts else config.task.name
        self.evaluations = Evaluations(config.task.eval, config.run.steps, surroundings.evaluated)
        self._scheduled = False
        self._lengths: list[TrajectoryFact] = []

    @property
    def resubmitted(self) -> int:
        return self._turns.resubmitted

    @property
    def composed(self) -> int:
        """Newest step whose batch was sent."""
        return self._order.composed if self._order else 0

    # --- data order

    def on_position(
        self, step: int, low: int, extra: tuple[int, ...], recovered: Mapping[int, Sequence[Trajectory]] | None = None
    ) -> None:
        """Begin at a position of the data order.

        Nothing below ``low``, nothing in ``extra``, and no trajectory in ``recovered`` (by prompt) is sampled again.
        """
        algorithm = self._config.algorithm
        gate = StalenessGate(
            eta=algorithm.eta,
            batch=algorithm.prompts_per_step,
            max_open=self._config.max_open_groups,
            version=step,
            in_order=algorithm.batch_order == "data",
        )
        self._order = PromptOrder(
            gate,
            step=step,
            low=low,
            extra=extra,
            steps=self._config.run.steps,
            group_size=algorithm.group_size,
            recovered=recovered or {},
            log=self._log,
            refill=self._refill,
            rules=self._rules,
            retain=self._config.retained_batches,
        )
        self.schedule_pass()

    def on_committed(self, committed: Committed) -> None:
        if self._order is not None:
            self._order.trained(committed.indices)
        off = self._gaps.observe(committed.step, *self._turns.engines.judged(committed.engine_gaps))
        if off is not None:
            self._turns.end(off)

    def on_experts_wanted(self, wanted: ExpertsWanted) -> None:
        for uid in wanted.samples:
            index, sample, part = map(int, uid.split("."))
            group = self._order.group(index) if self._order else None
            own = [trajectory for trajectory in group.done if trajectory.sample == sample] if group else []
            self._send(wanted.rank, SampleExperts(uid, own[0].experts_of(part) if own else b""))

    def _admit(self) -> None:
        now = self._clock()
        if self._order is None or not self._environments.up or not self._turns.engines.engines:
            self._attempts.book.unable(now)
            return
        most = self._attempts.evaluate(len(self._trained_episodes()), now)
        for group in self._order.admit(most):
            for sample in group.missing:
                trajectory = group.begun.get(sample) or Trajectory(index=group.index, sample=sample, task=self._task)
                trajectory.admitted = group.version
                if most is None:
                    self._begin(trajectory, now)
                else:
                    self._attempts.hold(trajectory, now)
        for trajectory in self._attempts.begin(now):
            self._begin(trajectory, now)
        engines = self._turns.engines
        if not self._turns.waiting and not self._attempts.book.paused:
            capacity = self._config.rollout.most_inflight * len(engines.engines)
            for trajectory in self.evaluations.begin(engines.inflight, capacity):
                self._begin(trajectory, now)

    def _begin(self, trajectory: Trajectory, now: float) -> None:
        trajectory.started_at, trajectory.ready_at = time.time(), now
        self._environments.open(trajectory)

    def progress(self, index: int) -> float:
        """Position of a prompt in the run, 0..1."""
        assert self._order is not None
        return self._order.progress(index) if index < EVALUATIONS else 0.0

    def schedule_pass(self) -> None:
        """Admit, compose and route once in this pass of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_pass)

    def _run_pass(self) -> None:
        self._scheduled = False
        # Recovered groups may be a batch as soon as they are admitted.
        self._admit()
        self._compose()
        self._turns.dispatch()

    # --- environment hosts

    def on_host(self, host: int, message: Any) -> None:
        if isinstance(message, TurnUnwanted):
            self._turns.shorten(message.episode, host)
        elif isinstance(message, HostLost):
            self._environments.on_down(host, message.reason)
        else:
            self._environments.on_message(host, message)
        if isinstance(message, HostReady):
            self.schedule_pass()

    def unfinished(self) -> list[Trajectory]:
        """Open trajectories with generated tokens: the next start of all ranks can go on with them."""
        return [one.copied() for one in self._trained_episodes() if any(part.generated for part in one.growing)]

    def _trained_episodes(self) -> list[Trajectory]:
        """Open trajectories but those of evaluations."""
        return [t for t in self._environments.whole() if t.index < EVALUATIONS]

    # --- trajectories

    def turn_wanted(self, trajectory: Trajectory) -> None:
        """Queue the next turn of a trajectory."""
        if trajectory.trunk is not None and len(trajectory.turns) == 1:
            self._turns.begun(trajectory)
        if not trajectory.evaluation:
            self._attempts.book.advanced((trajectory.index, trajectory.sample))
        self._turns.ready(trajectory)

    def turn_complete(self, trajectory: Trajectory) -> None:
        """Send the turn to its environment."""
        self._environments.answer(trajectory)

    def _drop(self, trajectory: Trajectory, now: float) -> None:
        """End an attempt; answers to it find nothing."""
        self._environments.drop(trajectory)
        for one in trajectory.growing:
            self._turns.drop(one, now)
        self.schedule_pass()

    def restart(self, trajectory: Trajectory, reason: str) -> None:
        """Sample a trajectory again from its prompt, through no fault of its own."""
        now = self._clock()
        self._drop(trajectory, now)
        self._turns.count_resubmitted(trajectory, reason)
        self._begin(trajectory.again(), now)

    def failed(self, trajectory: Trajectory, kind: str, error: str) -> None:
        """End a failed attempt: try again later, or leave the trajectory out, or give up the whole prompt."""
        now, order, trajectory = self._clock(), self._order, trajectory.whole
        assert order is not None
        trajectory.error = error
        self._environments.close(trajectory)
        self._drop(trajectory, now)
        trajectory.join()
        if trajectory.evaluation:
            self._log(
                "evaluation_failed", task=trajectory.evaluation, prompt=trajectory.prompt_id, error=error[:ERROR_CHARS]
            )
            self.evaluations.failed(trajectory, now)
            return
        self._around.failed(trajectory)
        if self._attempts.failed(trajectory, kind, now):
            order.groups[trajectory.index].retried += 1
        elif not order.close(trajectory.index, failed=True):
            self._log(
                "prompt_given_up",
                index=trajectory.index,
                prompt=trajectory.named,
                reason=f"All its trajectories failed, the last one with: {error}",
            )

    def finish(self, trajectory: Trajectory) -> None:
        """Take a trajectory whose episode is over into its group."""
        now = self._clock()
        # Other branches were there before a host was lost, and this episode did not come to them again.
        ended = [one for one in trajectory.growing if one.place == "done"]
        if not any(one.generated for one in ended):
            self.failed(trajectory, "engine", "No token was generated.")
            return
        self._environments.drop(trajectory)
        for one in trajectory.branches:
            self._turns.drop(one, now)
        trajectory.branches = tuple(ended[1:])
        trajectory.join()
        trajectory.finished_at = time.time()
        if trajectory.evaluation:
            self._turns.finished(trajectory, now)
            self.evaluations.finished(trajectory, now)
            self.schedule_pass()
            return
        self._attempts.book.succeeded((trajectory.index, trajectory.sample), trajectory.stepped_at)
        self._turns.finished(trajectory, now)
        self._lengths.append(length_of(trajectory))
        self._around.ended(trajectory)
        assert self._order is not None
        self._order.groups[trajectory.index].done.append(trajectory)
        self._order.close(trajectory.index)
        self.schedule_pass()

    def _to_group(self, group: GroupState) -> Group:
        return group.to_group(self._advantage, self._rules, self._refill, self._turns.engines.numbers)

    def _compose(self) -> None:
        engines = self._turns.engines
        while self._order is not None and (due := self._order.next_batch()):
            step, groups = due
            stats = batch_stats(
                groups,
                step - 1,
                engines.busy_per_token(),
                len(engines.own),
                self._parts,
                self._order.take_replaced(),
                engines.of_guests,
            )
            composed = tuple(self._to_group(group) for group in groups)
            self._around.composed(step, [trajectory for group in groups for trajectory in group.done], composed)
            self._send(self._train_leader, Batch(step, composed, stats, self._order.take_given_up()))
            self._order.take_ended()
        if self._order is not None and self._config.streamed:
            step, ended = self._order.take_ended()
            for index, group in ended:
                found = self._to_group(group) if group else Group(index, ())
                self._send(self._train_leader, GroupDone(step, found))

    # --- engines

    def on_turns_done(self, items: tuple[tuple[str, Generated], ...]) -> None:
        self._turns.on_turns_done(items)

    def on_engines(
        self, rank: int, observed: Mapping[str, ObservedEngine], lender: tuple[str, LenderKind] = ("", "idle")
    ) -> None:
        """Engines of a node: a ready one takes turns, the turns of any other are sent again."""
        changed = [self._turns.observe(rank, name, one, lender) for name, one in observed.items()]
        if any(changed):
            self._applied()
            self.schedule_pass()

    def on_rank_lost(self, rank: int) -> None:
        reason = f"node {rank} lost"
        self._turns.rank_lost(rank, reason)
        self._environments.on_rank_lost(rank, reason)
        self._applied()
        self.schedule_pass()

    @property
    def drained(self) -> dict[int, int]:
        """See `Heartbeat.drained`."""
        return self._turns.drained

    def on_drain(self, rank: int, starts: int, abort: bool = False) -> None:
        """Send no more turns to a node that leaves the rollout stage, or the job."""
        self._turns.drain(rank, starts, abort)

    def _applied(self) -> None:
        joint = self._turns.engines.joint_version
        if self._order is None:
            return
        if joint is not None:
            self._order.applied(joint)
            self.evaluations.on_version(joint, self._clock())
        self._turns.engines.admit(self._order.gate.version)
        self.schedule_pass()

    def on_engine_load(self, name: str, stats: EngineStats) -> None:
        self._turns.engine_load(name, stats)

    # --- deadlines and reports

    def watch(self) -> None:
        """Fail overdue environment steps, and send overdue turns elsewhere; about once a second."""
        self._environments.watch()
        self._turns.watch()

    def discount(self, seconds: float) -> None:
        """Extend all deadlines by a stall of this process."""
        self._attempts.book.discount(seconds)
        self._environments.discount(seconds)
        self._turns.engines.turns.discount(seconds)

    def report(self) -> RolloutReport:
        """What happened since the last report."""
        # Time alone may change a policy's decision about a waiting turn.
        self.schedule_pass()
        lengths, self._lengths = tuple(self._lengths), []
        engines, order, now = self._turns.engines, self._order, self._clock()
        episodes, book = self._environments.episodes.values(), self._attempts.book
        whole = self._environments.whole()
        paused = book.paused or self._environments.missing
        return RolloutReport(
            open_trajectories=len(whole) + len(self._attempts),
            waiting_turns=self._turns.waiting,
            inflight=engines.inflight,
            tools_running=sum(all(part.place == "tool" for part in one.growing) for one in whole),
            ready_groups=order.gate.ready if order else 0,
            outstanding_groups=order.gate.outstanding if order else 0,
            resubmitted=self.resubmitted,
            joint_version=order.gate.version if order else 0,
            generated_tokens=engines.generated,
            prefilled_tokens=engines.prefilled,
            busy_s=engines.busy_s,
            buckets=engines.buckets(episodes),
            lengths=lengths,
            open_groups=open_groups(self._trained_episodes(), now, engines.decode_s()),
            failures=book.counts,
            slow=engines.slow(),
            paused=paused or ("" if engines.engines else "No engine accepts turns."),
            waiting_for_room=self._turns.waiting_for_room,
            recomputed_tokens=self._turns.recomputed,
            evicted_tokens=self._turns.evicted,
            guest_tokens=sum(one.tokens for one in engines.lenders.values()),
            lenders=tuple(one.report() for one in engines.lenders.values()),
            lent_gpus=engines.lent_gpus,
            composed=self.composed,
            running=engines.running_on(),
            step_costs=engines.measured.costs(),
            environments=self._held_up(engines.inflight),
            evaluates=self.evaluations.unfinished,
        )

    def _held_up(self, inflight: int) -> str:
        """How environments hold up the engines, as a sentence; empty: no trajectory waits, or a turn does."""
        waits = "" if self._turns.waiting else self._environments.bottleneck
        turns = f"{inflight or 'no'} turn{'' if inflight == 1 else 's'} run{'s' if inflight == 1 else ''} at engines"
        return f"{waits}; {turns}, and none waits" if waits else ""
