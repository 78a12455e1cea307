"""The rollout leader: admits prompts under the staleness gate, runs the trajectory loops, and asks the scheduling policy where every turn goes.

It runs in the agent of the lowest rollout rank, touches no tensor, and owns all experience until it is trained.  A trajectory alternates between three
places: an environment host (a tool runs; no engine slot is held), the list of waiting turns, and an engine.  Whatever dies, the token-level record here
is complete up to the last answer, so a lost engine costs the running turns only (they are sent again elsewhere), and a lost environment host costs its
episodes, which start anew under the same prompt.

Work is coalesced: answers that arrive together are routed together, once per pass of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.env import (
    CloseEpisode,
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    HostReady,
    OpenEpisode,
    StepEpisode,
    ToHost,
)
from libra_hpc.protocol.mesh import Batch, EngineUp, MeshMessage, RolloutReport, Turns, TurnsDrained
from libra_hpc.protocol.rollout import EngineStats, Generate, Generated
from libra_hpc.sched.protocol import Finished, Policy, TurnView

from .batch import batch_stats
from .fleet import Engine, Fleet
from .staleness import StalenessGate
from .supply import PromptSupply
from .trajectory import Trajectory

MAX_ERRORS = 3
"""An engine or a task may fail a trajectory this often before its group goes on without it: once is an accident, thrice is the trajectory's own fault."""

class RolloutSettings(msgspec.Struct, frozen=True):
    """What the leader needs of the run file."""

    task: str
    prompts_per_step: int
    group_size: int
    eta: int
    steps: int
    temperature: float
    max_model_len: int
    max_inflight: int
    max_open_groups: int
    in_order: bool


class RolloutLeader:
    """See the module docstring.  Inputs are the ``on_*`` methods; outputs go through ``send`` (mesh), ``to_host`` and ``trace``."""

    def __init__(
        self,
        settings: RolloutSettings,
        policy: Policy,
        send: Callable[[int, MeshMessage], None],
        train_leader: int,
        hosts: int,
        to_host: Callable[[int, ToHost], None],
        trace: Callable[[dict[str, Any]], None],
        log: Callable[..., None],
    ) -> None:
        self.settings, self.policy = settings, policy
        self._send, self._train_leader, self._to_host, self._trace, self._log = send, train_leader, to_host, trace, log
        self._hosts_ready = [False] * hosts
        self._fleet = Fleet(settings.max_inflight)
        self._supply: PromptSupply | None = None
        self._episodes: dict[str, Trajectory] = {}
        self._waiting: list[Trajectory] = []
        self._draining: set[int] = set()
        self._scheduled = False
        self._rid = 0
        self.resubmitted = 0
        self._lengths: list[tuple[int, int, int]] = []

    # --- data order -------------------------------------------------------------------------------------------------------------------------

    def on_position(self, step: int, low: int, extra: tuple[int, ...]) -> None:
        """Where the data order stands: nothing below ``low`` and nothing in ``extra`` is sampled again."""
        settings = self.settings
        gate = StalenessGate(settings.eta, settings.prompts_per_step, settings.max_open_groups, step, settings.in_order)
        self._supply = PromptSupply(gate, step, low, extra, settings.steps * settings.prompts_per_step, settings.group_size)
        self._kick()

    def on_committed(self, indices: tuple[int, ...]) -> None:
        """A step is trained: its groups are forgotten."""
        if self._supply is not None:
            self._supply.trained(indices)

    def _admit(self) -> None:
        if self._supply is None or not all(self._hosts_ready) or not self._fleet.engines:
            return
        now = time.monotonic()
        for index in self._supply.admit(now):
            for sample in range(self.settings.group_size):
                self._open(index, sample, 0, now)

    def _open(self, index: int, sample: int, attempt: int, now: float) -> None:
        host = (index * self.settings.group_size + sample) % len(self._hosts_ready)
        trajectory = Trajectory(index, sample, attempt, host, now)
        self._episodes[trajectory.episode] = trajectory
        assert self._supply is not None
        self._to_host(host, OpenEpisode(trajectory.episode, index, sample, self._supply.progress(index)))

    # --- environment hosts ------------------------------------------------------------------------------------------------------------------

    def on_host(self, host: int, message: Any) -> None:
        """A message of an environment host."""
        match message:
            case EpisodeStepped():
                self._stepped(message)
            case EpisodeOpened(episode=episode):
                trajectory = self._episodes.get(episode)
                if trajectory is not None:
                    trajectory.prompt_id = message.prompt_id
                    trajectory.max_tokens, trajectory.stop_ids = message.max_tokens, message.stop_ids
                    tokens = _ids(message.tokens)
                    trajectory.prompt_tokens = len(tokens)
                    trajectory.add_environment(tokens)
                    self._ready(trajectory)
            case EpisodeFailed(episode=episode, error=error):
                trajectory = self._episodes.get(episode)
                if trajectory is not None:
                    self._restart(trajectory, error)
            case HostReady():
                self._hosts_ready[host] = True
                self._kick()

    def on_host_down(self, host: int, reason: str) -> None:
        """An environment host died: its episodes start anew once it is back."""
        self._hosts_ready[host] = False
        for trajectory in [t for t in self._episodes.values() if t.host == host]:
            self._restart(trajectory, reason, counts=False)

    def _stepped(self, message: EpisodeStepped) -> None:
        trajectory = self._episodes.get(message.episode)
        if trajectory is None:
            return
        if message.signal is not None:
            record = trajectory.turns[-1]
            record.tool, record.outcome, record.tool_s = message.signal.tool, message.signal.outcome, message.signal.seconds
            trajectory.signals.append(message.signal)
            trajectory.at_signal.append(trajectory.attained)
        if message.done:
            trajectory.reward, trajectory.info = message.reward, message.info
            self._finish(trajectory)
            return
        trajectory.add_environment(_ids(message.tokens))
        if len(trajectory.context) + trajectory.max_tokens > self.settings.max_model_len:
            self._to_host(trajectory.host, CloseEpisode(trajectory.episode))
            trajectory.info = {"truncated": 1.0}
            self._finish(trajectory)
            return
        self._ready(trajectory)

    # --- turns ------------------------------------------------------------------------------------------------------------------------------

    def _ready(self, trajectory: Trajectory) -> None:
        trajectory.ready_at = time.monotonic()
        trajectory.place = "waiting"
        self._waiting.append(trajectory)
        self._kick()

    def _kick(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._scheduled = False
        self._compose()
        self._admit()
        self._dispatch()

    def _dispatch(self) -> None:
        if not self._waiting:
            return
        views = self._fleet.open(self._supply.gate.version if self._supply else 0)
        free = sum(max(0, view.max_inflight - view.inflight) for view in views.values())
        if free == 0:
            return
        now = time.monotonic()
        turns = [
            TurnView(
                t.episode, t.prompt_id, t.sample, self.settings.task, len(t.context), t.attained, len(t.turns) - 1, now - t.ready_at, t.engine, tuple(t.signals)
            )
            for t in self._waiting
        ]
        sent: set[int] = set()
        outbox: dict[int, list[tuple[str, Generate]]] = {}
        for position in self.policy.order(turns, now):
            if free == 0:
                break
            decision = self.policy.route(turns[position], list(views.values()), now)
            if not decision.engine:
                continue
            trajectory, engine = self._waiting[position], self._fleet.engines[decision.engine]
            self._rid += 1
            rid = f"{trajectory.episode}:{self._rid}"
            room = trajectory.max_tokens - len(trajectory.turn)
            request = Generate(rid, trajectory.context.tobytes(), room, self.settings.temperature, trajectory.stop_ids, decision.priority)
            outbox.setdefault(engine.rank, []).append((decision.engine, request))
            engine.send(rid, trajectory)
            trajectory.engine, trajectory.place = decision.engine, "engine"
            views[decision.engine] = self._fleet.view(decision.engine)
            sent.add(position)
            free -= 1
        for rank, items in outbox.items():
            self._send(rank, Turns(tuple(items)))
        if sent:
            self._waiting = [t for position, t in enumerate(self._waiting) if position not in sent]

    def on_turns_done(self, items: tuple[tuple[str, Generated], ...]) -> None:
        """Answers of engines."""
        for name, generated in items:
            engine = self._fleet.engines.get(name)
            trajectory = engine.take(generated.rid) if engine else None
            if engine is None or trajectory is None:
                continue
            if generated.finish == "error":
                trajectory.errors += 1
                if trajectory.errors >= MAX_ERRORS:
                    self._restart(trajectory, generated.error)
                else:
                    self._resubmit(trajectory, generated.error)
            else:
                self._take(trajectory, generated, name)
            if engine.rank in self._draining:
                self._maybe_drained(engine.rank)
        self._kick()

    def _take(self, trajectory: Trajectory, generated: Generated, engine: str) -> None:
        trajectory.add_generated(_ids(generated.tokens), _floats(generated.logprobs), generated.versions, engine)
        if generated.finish == "abort" and len(trajectory.turn) < trajectory.max_tokens:
            self._ready(trajectory)
            return
        trajectory.place = "tool"
        self._to_host(trajectory.host, StepEpisode(trajectory.episode, pack_i32(trajectory.turn)))

    def _resubmit(self, trajectory: Trajectory, reason: str) -> None:
        self.resubmitted += 1
        self._log("resubmitted", trajectory=trajectory.episode, reason=reason)
        self._ready(trajectory)

    def _restart(self, trajectory: Trajectory, reason: str, counts: bool = True) -> None:
        """Sample the trajectory anew from its prompt; after `MAX_ERRORS` faults of its own its group goes on without it."""
        self._episodes.pop(trajectory.episode, None)
        self._waiting = [t for t in self._waiting if t is not trajectory]
        for engine in self._fleet.engines.values():
            for rid in [rid for rid, t in engine.inflight.items() if t is trajectory]:
                engine.take(rid)
        attempt = trajectory.attempt + 1
        if counts and attempt >= MAX_ERRORS:
            self._log("trajectory_dropped", trajectory=trajectory.episode, reason=reason)
            self._close(trajectory.index)
            return
        self.resubmitted += 1
        self._log("resubmitted", trajectory=trajectory.episode, reason=reason)
        self._open(trajectory.index, trajectory.sample, attempt, time.monotonic())

    # --- the end of a trajectory ------------------------------------------------------------------------------------------------------------

    def _finish(self, trajectory: Trajectory) -> None:
        del self._episodes[trajectory.episode]
        now = time.monotonic()
        self.policy.finished(
            Finished(
                trajectory.episode, trajectory.prompt_id, trajectory.sample, self.settings.task, trajectory.attained, len(trajectory.turns),
                tuple(trajectory.at_signal), tuple(trajectory.signals), trajectory.versions[-1][0] if trajectory.versions else 0,
            ),
            now,
        )  # fmt: skip
        self._lengths.append((trajectory.attained, len(trajectory.context), len(trajectory.turns)))
        self._trace(trajectory.trace_line(time.time()))
        assert self._supply is not None
        self._supply.groups[trajectory.index].done.append(trajectory)
        self._close(trajectory.index)

    def _close(self, index: int) -> None:
        assert self._supply is not None
        if self._supply.close(index):
            self._kick()

    def _compose(self) -> None:
        while self._supply is not None and (batch := self._supply.next_batch()):
            step, groups = batch
            stats = batch_stats(groups, step - 1)
            stats["rollout_s"] = stats.get("gen_tokens", 0.0) * self._fleet.busy_per_token() / max(1, self._fleet.nodes)
            self._send(self._train_leader, Batch(step, tuple(group.to_group() for group in groups), stats))

    # --- engines ----------------------------------------------------------------------------------------------------------------------------

    def on_engine_up(self, up: EngineUp) -> None:
        """An engine accepts turns."""
        self._fleet.engines[up.engine] = Engine(up)
        self._draining.discard(up.rank)
        self._applied()
        self._kick()

    def on_engine_down(self, engine: str, reason: str) -> None:
        """An engine is gone: its turns are sent again elsewhere."""
        gone = self._fleet.engines.pop(engine, None)
        if gone is None:
            return
        for trajectory in gone.inflight.values():
            self._resubmit(trajectory, reason)
        self._maybe_drained(gone.rank)
        self._applied()
        self._kick()

    def on_rank_lost(self, rank: int) -> None:
        """A node is gone with all its engines."""
        for name in self._fleet.of(rank):
            self.on_engine_down(name, f"node {rank} lost")

    def on_drain(self, rank: int) -> None:
        """A node is about to leave the rollout stage: it gets no more turns."""
        self._draining.add(rank)
        self._fleet.drain(rank)
        self._maybe_drained(rank)

    def _maybe_drained(self, rank: int) -> None:
        if rank in self._draining and self._fleet.empty(rank):
            self._draining.discard(rank)
            self._send(0, TurnsDrained(rank))

    def on_engine_version(self, engine: str, version: int) -> None:
        """An engine applied new weights."""
        if engine in self._fleet.engines:
            self._fleet.engines[engine].version = version
            self._applied()

    def _applied(self) -> None:
        applied = self._fleet.applied
        if self._supply is not None and applied is not None and self._supply.applied(applied):
            self._kick()

    def on_engine_load(self, name: str, stats: EngineStats) -> None:
        """Counters of an engine."""
        self._fleet.load(name, stats)

    # --- reports ----------------------------------------------------------------------------------------------------------------------------

    def report(self) -> RolloutReport:
        """What happened since the last report."""
        lengths, self._lengths = tuple(self._lengths), []
        fleet, supply, episodes = self._fleet, self._supply, self._episodes.values()
        ready, outstanding = (supply.gate.ready, supply.gate.outstanding) if supply else (0, 0)
        return RolloutReport(
            len(episodes), len(self._waiting), fleet.inflight, sum(1 for t in episodes if t.place == "tool"), ready, outstanding, self.resubmitted,
            supply.blocked_share(time.monotonic()) if supply else 0.0, fleet.generated, fleet.prefilled, fleet.busy_s, fleet.decode_s(),
            fleet.buckets(episodes), lengths,
        )  # fmt: skip


def _ids(data: bytes) -> array[int]:
    out = array("i")
    out.frombytes(data)
    return out


def _floats(data: bytes) -> array[float]:
    out = array("f")
    out.frombytes(data)
    return out
