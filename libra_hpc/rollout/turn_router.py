"""Sends waiting turns to engines and takes their answers.

- Turns wait -> the scheduling policy picks the engine of each (`dispatch`).
- Engine lost, or turn answered with an error -> send the turn again; `MAX_ERRORS` errors -> the attempt fails.
- Turn overdue -> abort it; `MAX_OVERDUE` times with nothing generated -> the attempt fails.
- An engine stands still beside the users of its device -> no more turns for it, and those it has are aborted.
- Node drains -> no more turns for it; it is in `drained` after its last one, which may be aborted for that.

Dispatcher, board and policy are those that the simulator drives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from libra_hpc.config.run import RunConfig
from libra_hpc.policies.learning.engine_gaps import EngineOff
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.protocol import Finished, Policy
from libra_hpc.process.progress import TURN
from libra_hpc.protocol.agents import Turns, WrongEngine
from libra_hpc.protocol.engine import Abort, Generate, Generated
from libra_hpc.protocol.engine_state import EngineStats, LenderKind, ObservedEngine

from .engine_registry import EngineRegistry
from .surroundings import Surroundings, TrajectoryListener
from .trajectory import Routed, Trajectory, unusable

MAX_ERRORS = 3
"""Errors of engines at one attempt until it fails: a few may be the engines' fault."""
OVERDUE = "turn overdue"
"""Reason of a `resubmitted` event."""
MAX_OVERDUE = 3
"""Deadlines of one attempt that may pass with nothing generated; each costs its whole length."""


class TurnRouter:
    """Turns of the trajectories in ``episodes``."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        episodes: Mapping[str, Trajectory],
        *,
        surroundings: Surroundings,
        leader: TrajectoryListener,
    ) -> None:
        self._rollout, self._episodes = config.rollout, episodes
        self._replays = config.algorithm.routing == "rollout"
        self._around, self._leader, self._clock = surroundings, leader, surroundings.clock
        board = Board(config.rollout.most_inflight)
        self.engines = EngineRegistry(board, config.deadlines, self._clock)
        self._queue = Dispatcher(policy, board)
        self._draining: dict[int, int] = {}
        self.drained: dict[int, int] = {}
        """Nodes with and without turns -> `Row.starts` with which they were to drain."""
        self._off: set[str] = set()
        """Engines that compute wrongly, until their nodes end them."""
        self._serial = 0
        self.resubmitted = 0
        """Turns and trajectories that had to be sent or sampled again since the start."""
        self.recomputed = self.evicted = 0
        """Totals of `TurnRecord.recomputed` and `TurnRecord.evicted` since the start."""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_for_room(self) -> int:
        """Turns out of ``waiting`` that wait for room in a KV cache."""
        return self._queue.waiting_for_room

    # --- turns out

    def ready(self, trajectory: Trajectory) -> None:
        """Queue the next (part of a) turn."""
        trajectory.ready_at, trajectory.place = self._clock(), "waiting"
        self._queue.ready(trajectory.view(self._rollout.max_model_len), trajectory.ready_at)
        self._leader.schedule_pass()

    def dispatch(self) -> None:
        """Send the turns that the policy gives an engine, in one message per node."""
        now, at = self._clock(), time.time()
        outbox: dict[int, list[tuple[str, Generate]]] = {}
        for turn, decision in self._queue.dispatch(now):
            trajectory, name = self._episodes[turn.trajectory], decision.engine
            self._serial += 1
            rid = f"{trajectory.episode}:{self._serial}"
            request = Generate(
                rid=rid,
                prompt=trajectory.context_ids,
                max_tokens=trajectory.room(self._rollout.max_model_len),
                temperature=self._rollout.temperature,
                stop_ids=trajectory.stop_ids,
                priority=decision.priority,
                admitted=trajectory.whole.admitted,
                routed=trajectory.known_experts if self._replays and not trajectory.evaluation else -1,
            )
            outbox.setdefault(self.engines.engines[name].rank, []).append((name, request))
            self.engines.send(name, rid, trajectory)
            trajectory.engine, trajectory.place, trajectory.sent_at = name, "engine", now
            self._around.routed(Routed(turn, decision, at, now - turn.ready_at))
        for rank, items in outbox.items():
            self._around.send(rank, Turns(tuple(items)))

    def engine_load(self, name: str, stats: EngineStats) -> None:
        """A report of an engine."""
        if self.engines.load(name, stats):
            for rid in self.engines.engines[name].inflight if stats.stands_still else ():
                self._abort(name, rid)
            self._leader.schedule_pass()

    def _abort(self, engine: str, rid: str) -> None:
        self._around.send(self.engines.engines[engine].rank, Turns(((engine, Abort(rid)),)))

    def shorten(self, episode: str, host: int) -> None:
        """End a turn that nobody waits for with the tokens that it has, or its first one."""
        trajectory = self._episodes.get(episode)
        if trajectory is not None and trajectory.host == host and trajectory.place in ("waiting", "engine"):
            trajectory.max_tokens = trajectory.turns[-1].gen_tokens + 1
            if trajectory.place == "engine":
                self._abort(trajectory.engine, self.engines.request(trajectory.engine, episode))

    def begun(self, branch: Trajectory) -> None:
        """A branch begins: while no other sample has a turn, engines need not keep the contexts of these."""
        others = [one for one in branch.whole.growing if one is not branch]
        for one in others if all(one.place == "tool" for one in others) else ():
            self._queue.policy.forget(one.episode)

    def drop(self, trajectory: Trajectory, now: float) -> None:
        """Abort the turns of an attempt that is over; answers to them find nothing."""
        for name, rid in self.engines.drop(trajectory):
            self._abort(name, rid)
            self._maybe_drained(self.engines.engines[name].rank)
        # Siblings that wait for this one to finish would wait for ever.
        self._queue.drop(trajectory.episode, trajectory.prompt_id, now)

    def finished(self, trajectory: Trajectory, now: float) -> None:
        self._queue.finished(Finished.of(trajectory, trajectory.episode), now)

    # --- answers in

    def on_turns_done(self, items: tuple[tuple[str, Generated], ...]) -> None:
        for name, generated in items:
            overdue = self.engines.turns.over((name, generated.rid))
            nothing = generated.finish == "abort" and not generated.tokens
            trajectory = self.engines.take(name, generated.rid, counts=not nothing)
            if trajectory is None:
                continue
            if overdue and nothing:
                self._overdue(trajectory, f"Engine {name} generated nothing of a turn until its deadline.")
            elif generated.finish == "error":
                trajectory.errors += 1
                if trajectory.errors >= MAX_ERRORS:
                    self._leader.failed(trajectory, "engine", generated.error)
                else:
                    self._resubmit(trajectory, generated.error)
            else:
                self._take(trajectory, generated, name, overdue)
            self._maybe_drained(self.engines.engines[name].rank)
        self._leader.schedule_pass()

    def _take(self, trajectory: Trajectory, generated: Generated, engine: str, overdue: bool) -> None:
        if error := unusable(generated):
            self._leader.failed(trajectory, "logprobs", error)
            return
        before = trajectory.turns[-1]
        trajectory.add_generated(generated, engine, self._rollout.block_size)
        self.recomputed += trajectory.turns[-1].recomputed - before.recomputed
        self.evicted += trajectory.turns[-1].evicted - before.evicted
        if generated.finish == "abort" and trajectory.room(self._rollout.max_model_len) > 0:
            if overdue:
                self._resubmit(trajectory, OVERDUE)
            else:
                self.ready(trajectory)
            return
        self._leader.turn_complete(trajectory)

    def _overdue(self, trajectory: Trajectory, error: str) -> None:
        trajectory.overdue += 1
        if trajectory.overdue >= MAX_OVERDUE:
            self._leader.failed(trajectory, "timeout", error)
        else:
            self._resubmit(trajectory, OVERDUE)

    def _resubmit(self, trajectory: Trajectory, reason: str) -> None:
        self.count_resubmitted(trajectory, reason)
        if reason == OVERDUE:
            trajectory.engine = ""  # what its engine has cached is no reason to go back there
        self.ready(trajectory)

    def count_resubmitted(self, trajectory: Trajectory, reason: str) -> None:
        self.resubmitted += 1
        self._around.log("resubmitted", trajectory=trajectory.episode, reason=reason)

    def watch(self) -> None:
        """Log slow turns, abort overdue ones, and send those elsewhere that are not aborted; about once a second."""
        now = self._clock()
        for late in self.engines.turns.late(now):
            self._around.log("slow", part=f"engine {late.key[0]}", reason=f"The {late.what}.")
        for stall in self.engines.turns.stalled(now):
            engine, rid = stall.key
            if stall.phase == TURN:
                self._abort(engine, rid)
            elif trajectory := self.engines.take(engine, rid, counts=False):
                self._overdue(trajectory, f"At engine {engine} the {stall.what}.")
                self._maybe_drained(self.engines.engines[engine].rank)

    # --- engines

    def end(self, off: EngineOff) -> None:
        """End an engine that computes wrongly; its turns go on elsewhere, without what they have of it."""
        rank = self.engines.engines[off.engine].rank
        self._around.log("engine_off", rank=rank, engine=off.engine, action=off.action, reason=off.reason)
        wrong = WrongEngine(off.reason, closed=off.action == "close")
        self._around.send(rank, Turns(((off.engine, wrong),)))
        self._off.add(off.engine)
        self.engine_lost(off.engine, off.reason)

    def observe(self, rank: int, name: str, engine: ObservedEngine, lender: tuple[str, LenderKind]) -> bool:
        """An engine as its node has it now; returns whether something has changed."""
        if engine.state != "ready":
            self._off.discard(name)
        known, serves = self.engines.engines.get(name), engine.state == "ready" and engine.kind == "rollout"
        serves &= name not in self._off
        lost = known is not None and not (serves and known.ends == engine.ends)
        if lost:
            self.engine_lost(name, engine.reason)
        if known is not None and not lost:
            return self.engines.applied(name, engine.version)
        if serves and engine.capacity is not None:
            self._draining.pop(rank, None)
            self.drained.pop(rank, None)
            self.engines.ready(rank, name, engine, engine.capacity, lender)
            return True
        return lost

    def engine_lost(self, name: str, reason: str) -> None:
        """Send the turns of a lost engine again."""
        lost = self.engines.lost(name)
        if lost is not None:
            for sent in lost.inflight.values():
                self._resubmit(sent.trajectory, reason)
            self._maybe_drained(lost.rank)

    def rank_lost(self, rank: int, reason: str) -> None:
        for name in self.engines.of(rank):
            self.engine_lost(name, reason)
        self._draining.pop(rank, None)
        self.drained.pop(rank, None)

    def drain(self, rank: int, starts: int, abort: bool) -> None:
        """Send no more turns to a node, and report when its last one is back."""
        self._draining[rank] = starts
        self.engines.drain(rank)
        for name in self.engines.of(rank) if abort else ():
            for rid in self.engines.engines[name].inflight:
                self._abort(name, rid)
        self._maybe_drained(rank)

    def _maybe_drained(self, rank: int) -> None:
        if rank in self._draining and self.engines.empty(rank):
            self.drained[rank] = self._draining.pop(rank)
            self._around.changed()
