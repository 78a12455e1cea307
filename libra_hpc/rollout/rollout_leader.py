"""The rollout leader: admits prompts under the staleness gate, runs the trajectory loops, and asks the scheduling
policy where every turn goes.

It runs in the agent of the lowest rollout rank, touches no tensor, and owns all experience until it is trained.  A
trajectory alternates between three places: an environment host (a tool runs; no engine slot is held), the dispatcher's
queue, and an engine.  Whatever dies, the token-level record here is complete up to the last answer, so a lost engine
costs the running turns only (they are sent again elsewhere), and the episodes of a lost environment host are brought
back by playing their turns again (`environments`).

Queue, board and policy are those the simulator drives.  Work is coalesced: answers that arrive together are routed
together, once per pass of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.env import HostReady, ToHost
from libra_hpc.protocol.mesh import Batch, EngineUp, Fatal, Length, MeshMessage, RolloutReport, Turns, TurnsDrained
from libra_hpc.protocol.rollout import Abort, EngineStats, Generate, Generated
from libra_hpc.sched.board import Board
from libra_hpc.sched.dispatch import Dispatcher
from libra_hpc.sched.protocol import Policy, TurnView
from libra_hpc.sched.staleness import StalenessGate

from .attempts import Attempts
from .engine_registry import EngineRegistry
from .environments import Environments
from .failures import Failure, FailureBook
from .group_state import batch_stats
from .open_groups import length_of, open_groups
from .prompt_order import PromptOrder
from .run_lines import Routed, TrajectoryEnd
from .trajectory import Trajectory, unusable

MAX_ERRORS = 3
"""Engines may fail a trajectory's turns this often before the attempt counts as failed."""
OVERDUE = "turn overdue"
MAX_OVERDUE = 3
"""So often may an engine have nothing of a trajectory's turn at the turn's deadline: each time costs the deadline."""


class RolloutLeader:
    """See the module docstring.  Inputs are the ``on_*`` methods; outputs go through ``send`` (mesh), ``to_host``,
    ``ended`` and ``routed``."""

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        policy: Policy,
        send: Callable[[int, MeshMessage], None],
        train_leader: int,
        to_host: Callable[[int, ToHost], None],
        ended: Callable[[TrajectoryEnd], None],
        routed: Callable[[Routed], None],
        log: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self._send, self._train_leader, self._log = send, train_leader, log
        self._ended, self._routed = ended, routed
        self._board = Board(config.rollout.max_inflight)
        self._engines = EngineRegistry(self._board, config.deadlines, clock)
        self._queue = Dispatcher(policy, self._board)
        self._order: PromptOrder | None = None
        self._environments = Environments(
            config.task.hosts,
            config.algorithm.group_size,
            config.rollout.max_model_len,
            to_host,
            self._progress,
            self._answered,
            self._finish,
            self._restart,
            self._failed,
            clock,
            step_limit_s=config.deadlines.first_s,
        )
        book = FailureBook(config.task.max_failed_share, config.task.failed_patience_s)
        self._attempts = Attempts(book, log, lambda why: send(0, Fatal(rank, why)))
        self._draining: set[int] = set()
        self._scheduled = False
        self._rid = self.resubmitted = 0
        self._lengths: list[Length] = []

    # --- data order
    # ----------------------------------------------------------------------------------------------

    def on_position(
        self, step: int, low: int, extra: tuple[int, ...], kept: Mapping[int, Sequence[Trajectory]] | None = None
    ) -> None:
        """Where the data order stands: nothing below ``low``, nothing in ``extra``, and no trajectory in ``kept``
        (by prompt) is sampled again."""
        algorithm, in_order = self._config.algorithm, self._config.algorithm.batch_order == "data"
        gate = StalenessGate(algorithm.eta, algorithm.prompts_per_step, self._config.max_open_groups, step, in_order)
        self._order = PromptOrder(
            gate, step, low, extra, self._config.run.steps, algorithm.group_size, kept or {}, self._log
        )
        self._kick()

    def on_committed(self, indices: tuple[int, ...]) -> None:
        """A step is trained: its groups are forgotten."""
        if self._order is not None:
            self._order.trained(indices)

    def _admit(self) -> None:
        now = self._clock()
        if self._order is None or not self._environments.up or not self._engines.engines:
            self._attempts.book.unable(now)
            return
        most = self._attempts.evaluate(len(self._environments.episodes), now)
        for group in self._order.admit(now, most):
            for sample in group.missing:
                trajectory = group.begun.get(sample) or Trajectory(group.index, sample, 0)
                if most is None:
                    self._begin(trajectory, now)
                else:
                    self._attempts.hold(trajectory, now)
        for trajectory in self._attempts.begin(now):
            self._begin(trajectory, now)

    def _begin(self, trajectory: Trajectory, now: float) -> None:
        trajectory.started_at = trajectory.ready_at = now
        self._environments.open(trajectory)

    def _progress(self, index: int) -> float:
        assert self._order is not None
        return self._order.progress(index)

    # --- environment hosts
    # ------------------------------------------------------------------------------------------------------------------

    def on_host(self, host: int, message: Any) -> None:
        """A message of an environment host."""
        self._environments.on_message(host, message)
        if isinstance(message, HostReady):
            self._kick()

    def on_host_down(self, host: int, reason: str) -> None:
        """An environment host died, and another was started."""
        self._environments.on_down(host, reason)

    def unfinished(self) -> list[Trajectory]:
        """Trajectories in mid-course that have generated something: what a new start of all ranks can go on with."""
        return [trajectory for trajectory in self._environments.episodes.values() if trajectory.attained]

    # --- turns
    # ----------------------------------------------------------------------------------------------

    def _answered(self, trajectory: Trajectory) -> None:
        self._attempts.book.advanced((trajectory.index, trajectory.sample))
        self._ready(trajectory)

    def _ready(self, trajectory: Trajectory) -> None:
        trajectory.ready_at, trajectory.place = self._clock(), "waiting"
        self._queue.ready(self._view(trajectory), trajectory.ready_at)
        self._kick()

    def _view(self, trajectory: Trajectory) -> TurnView:
        return trajectory.view(self._config.task.name, self._config.rollout.max_model_len)

    def _kick(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._scheduled = False
        # What is kept from before may be a batch as soon as it is admitted.
        self._admit()
        self._compose()
        self._dispatch()
        self._rebalance()

    def _dispatch(self) -> None:
        now, at = self._clock(), time.time()
        outbox: dict[int, list[tuple[str, Generate]]] = {}
        for turn, decision in self._queue.dispatch(now):
            trajectory, name = self._environments.episodes[turn.trajectory], decision.engine
            self._rid += 1
            rid = f"{trajectory.episode}:{self._rid}"
            room = trajectory.room(self._config.rollout.max_model_len)
            request = Generate(
                rid,
                trajectory.context.tobytes(),
                room,
                self._config.rollout.temperature,
                trajectory.stop_ids,
                decision.priority,
                decision.keep_s,
            )
            outbox.setdefault(self._engines.engines[name].rank, []).append((name, request))
            self._engines.send(name, rid, trajectory)
            trajectory.engine, trajectory.place, trajectory.sent_at = name, "engine", now
            self._routed(Routed(turn, decision, at, now - turn.ready_at))
        for rank, items in outbox.items():
            self._send(rank, Turns(tuple(items)))

    def _rebalance(self) -> None:
        """Interrupt turns that should go on elsewhere; each comes back as aborted, and is routed again with its
        partial output."""
        for move in self._queue.rebalance(self._engines.running(self._view), self._clock()):
            rid = self._engines.request(move.source, move.trajectory)
            self._abort(move.source, rid)
            self._log(
                "turn_interrupted", trajectory=move.trajectory, engine=move.source, to=move.target, reason=move.reason
            )

    def _abort(self, engine: str, rid: str) -> None:
        self._send(self._engines.engines[engine].rank, Turns(((engine, Abort(rid)),)))

    def on_turns_done(self, items: tuple[tuple[str, Generated], ...]) -> None:
        """Answers of engines."""
        for name, generated in items:
            overdue, nothing = (
                self._engines.turns.overdue((name, generated.rid)),
                generated.finish == "abort" and not generated.tokens,
            )
            trajectory = self._engines.take(name, generated.rid, counts=not nothing)
            if trajectory is None:
                continue
            if overdue and nothing:
                self._overdue(trajectory, f"Engine {name} generated nothing of a turn until its deadline.")
            elif generated.finish == "error":
                trajectory.errors += 1
                if trajectory.errors >= MAX_ERRORS:
                    self._failed(trajectory, "engine", generated.error)
                else:
                    self._resubmit(trajectory, generated.error)
            else:
                self._take(trajectory, generated, name, overdue)
            self._maybe_drained(self._engines.engines[name].rank)
        self._kick()

    def _take(self, trajectory: Trajectory, generated: Generated, engine: str, overdue: bool) -> None:
        if error := unusable(generated):
            self._failed(trajectory, "logprobs", error)
            return
        trajectory.add_generated(generated, engine)
        if generated.finish == "abort" and trajectory.room(self._config.rollout.max_model_len) > 0:
            if overdue:
                self._resubmit(trajectory, OVERDUE)
            else:
                self._ready(trajectory)
            return
        self._environments.answer(trajectory)

    def _overdue(self, trajectory: Trajectory, error: str) -> None:
        trajectory.overdue += 1
        if trajectory.overdue >= MAX_OVERDUE:
            self._failed(trajectory, "timeout", error)
        else:
            self._resubmit(trajectory, OVERDUE)

    def _resubmit(self, trajectory: Trajectory, reason: str) -> None:
        self.resubmitted += 1
        self._log("resubmitted", trajectory=trajectory.episode, reason=reason)
        if reason == OVERDUE:
            trajectory.engine = ""  # what its engine has cached is no reason to go back there
        self._ready(trajectory)

    def _drop(self, trajectory: Trajectory, now: float) -> None:
        """This attempt is over; answers to it will find nothing."""
        self._environments.forget(trajectory)
        for name, rid in self._engines.drop(trajectory):
            self._abort(name, rid)
            self._maybe_drained(self._engines.engines[name].rank)
        # Siblings that wait for this one to finish would wait for ever.
        self._queue.forget(trajectory.episode, trajectory.prompt_id, now)
        self._kick()

    def _restart(self, trajectory: Trajectory, reason: str) -> None:
        """Sample the trajectory anew from its prompt, through no fault of its own."""
        now = self._clock()
        self._drop(trajectory, now)
        self.resubmitted += 1
        self._log("resubmitted", trajectory=trajectory.episode, reason=reason)
        self._begin(Trajectory(trajectory.index, trajectory.sample, trajectory.attempt + 1), now)

    def _failed(self, trajectory: Trajectory, kind: str, error: str) -> None:
        """This attempt failed: try again later, or let the group go on without the trajectory, or give the group up
        with its last one."""
        now, order, index = self._clock(), self._order, trajectory.index
        assert order is not None
        self._environments.close(trajectory)
        self._drop(trajectory, now)
        prompt = trajectory.prompt_id or f"number {index} of the data order"
        if self._attempts.failed(trajectory, Failure(kind, self._config.task.name, prompt, error), now):
            order.groups[index].retried += 1
        elif not order.close(index, failed=True):
            self._attempts.book.settled(index)
            self._log(
                "prompt_given_up",
                index=index,
                prompt=prompt,
                reason=f"All its trajectories failed, the last one with: {error}",
            )

    # --- the end of a trajectory
    # ------------------------------------------------------------------------------------------------------------

    def _finish(self, trajectory: Trajectory) -> None:
        if not trajectory.attained:
            self._failed(trajectory, "engine", "No token was generated.")
            return
        self._environments.forget(trajectory)
        trajectory.place = "done"
        now = self._clock()
        self._attempts.book.succeeded((trajectory.index, trajectory.sample), trajectory.stepped_at)
        self._queue.finished(trajectory.finished(self._config.task.name), now)
        self._lengths.append(length_of(trajectory))
        self._ended(TrajectoryEnd(trajectory, time.time(), now - trajectory.started_at))
        assert self._order is not None
        self._order.groups[trajectory.index].done.append(trajectory)
        self._order.close(trajectory.index)
        self._kick()

    def _compose(self) -> None:
        while self._order is not None and (due := self._order.next_batch()):
            step, groups = due
            stats = batch_stats(groups, step - 1, self._engines.busy_per_token(), len(self._engines.engines))
            composed = tuple(group.to_group() for group in groups)
            self._send(self._train_leader, Batch(step, composed, stats, self._order.take_given_up()))

    # --- engines
    # ----------------------------------------------------------------------------------------------

    def on_engine_up(self, up: EngineUp) -> None:
        """An engine accepts turns."""
        self._lose(up.engine, "replaced")
        self._draining.discard(up.rank)
        self._engines.up(up)
        self._applied()
        self._kick()

    def on_engine_down(self, engine: str, reason: str) -> None:
        """An engine is gone: its turns are sent again elsewhere."""
        rank = self._lose(engine, reason)
        if rank is not None:
            self._maybe_drained(rank)
            self._applied()
            self._kick()

    def _lose(self, name: str, reason: str) -> int | None:
        gone = self._engines.down(name)
        if gone is None:
            return None
        for held in gone.inflight.values():
            self._resubmit(held.trajectory, reason)
        return gone.rank

    def on_rank_lost(self, rank: int) -> None:
        """A node is gone with all its engines."""
        for name in self._engines.of(rank):
            self.on_engine_down(name, f"node {rank} lost")

    def on_drain(self, rank: int) -> None:
        """A node is about to leave the rollout stage: it gets no more turns."""
        self._draining.add(rank)
        self._engines.drain(rank)
        self._maybe_drained(rank)

    def _maybe_drained(self, rank: int) -> None:
        if rank in self._draining and self._engines.empty(rank):
            self._draining.discard(rank)
            self._send(0, TurnsDrained(rank))

    def on_engine_version(self, engine: str, version: int) -> None:
        """An engine applied new weights."""
        if engine in self._engines.engines:
            self._engines.applied(engine, version)
            self._applied()

    def _applied(self) -> None:
        oldest = self._engines.oldest
        if self._order is not None and oldest is not None:
            self._order.applied(oldest)
            self._engines.admit(self._order.gate.version)
            self._kick()

    def on_engine_load(self, name: str, stats: EngineStats) -> None:
        """Counters of an engine."""
        self._engines.load(name, stats)

    # --- deadlines
    # ----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Fail steps of environments that have not ended in time, and send overdue turns elsewhere; about once a
        second."""
        self._environments.watch()
        for action, engine, rid, sentence in self._engines.turns.evaluate(self._clock()):
            if action == "slow":
                self._log("slow", part=f"engine {engine}", reason=f"The {sentence}.")
            elif action == "abort":
                self._abort(engine, rid)
            elif trajectory := self._engines.take(engine, rid, counts=False):
                self._overdue(trajectory, f"At engine {engine} the {sentence}, and is not aborted either.")
                self._maybe_drained(self._engines.engines[engine].rank)

    def discount(self, seconds: float) -> None:
        """This process stood still for so long."""
        self._attempts.book.discount(seconds)
        self._environments.discount(seconds)
        self._engines.turns.discount(seconds)

    # --- reports
    # ----------------------------------------------------------------------------------------------

    def report(self) -> RolloutReport:
        """What happened since the last report."""
        # Time alone may change a policy's mind about a turn it has let wait.
        self._kick()
        lengths, self._lengths = tuple(self._lengths), []
        engines, order, episodes, now = self._engines, self._order, self._environments.episodes.values(), self._clock()
        ready, outstanding = (order.gate.ready, order.gate.outstanding) if order else (0, 0)
        return RolloutReport(
            len(episodes) + len(self._attempts),
            len(self._queue),
            engines.inflight,
            sum(1 for t in episodes if t.place == "tool"),
            ready,
            outstanding,
            self.resubmitted,
            order.blocked_share(now) if order else 0.0,
            engines.generated,
            engines.prefilled,
            engines.busy_s,
            engines.decode_s(),
            engines.buckets(episodes),
            lengths,
            open_groups(episodes, now, engines.decode_s()),
            self._attempts.book.counts,
            self._attempts.book.paused
            or self._environments.missing
            or ("" if engines.engines else "No engine accepts turns."),
        )
