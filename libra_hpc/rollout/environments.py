"""The episodes of all open trajectories, at their environment hosts.

- Host lost, or unfinished trajectory recovered -> replay its turns in a new episode (`replay`); a turn that runs at an
  engine goes on meanwhile.
- Answer longer than the rest of the context (``max_model_len``) -> clip it to the rest.
- No room for a token behind the answer -> the trajectory ends as ``truncated``, with the reward that its task gives.
- Host restarts, or its node is lost -> episodes are opened at the other hosts.
- No host has a free seat (`env_seats`) -> the trajectory waits for one.

Hosts of the rollout leader's node are numbered from 0, those of the environment node of rank ``r`` from ``r * hosts``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from libra_hpc.config.node_groups import env_ranks
from libra_hpc.config.run import RunConfig
from libra_hpc.policies.scheduling.env_seats import HostSeats, seat
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.env import (
    BRANCH,
    CloseEpisode,
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    HostReady,
    OpenEpisode,
    StepEpisode,
    TruncateEpisode,
)

from .group_state import TRUNCATED
from .replay import TurnReplay
from .surroundings import Surroundings, TrajectoryListener
from .trajectory import TOKEN_BYTES, Trajectory, unusable_reward

MOST_NUMBERS, NAME_CHARS = 64, 100
"""Names in ``info`` that become columns of every step, and their characters."""
GRACE_S = 10.0
"""Added to the limit of a step, at which the host itself reports the step unless it hangs."""


class Environments:
    def __init__(self, config: RunConfig, surroundings: Surroundings, leader: TrajectoryListener) -> None:
        self.episodes: dict[str, Trajectory] = {}
        """Every open trajectory, by episode."""
        self._replays: dict[str, TurnReplay] = {}
        """Replays in progress, by episode."""
        each, room = config.task.hosts, config.components.env.room
        self._each = each
        """Hosts of a node."""
        self._seats = {rank * each + host: -(-room // each) for rank in env_ranks(config) for host in range(each)}
        """Seats of each host of an environment node."""
        self._taken: Counter[int] = Counter()
        self._waiting: dict[str, float] = {}
        """Episodes that wait for a seat, and since when."""
        self._up = dict.fromkeys([*range(each), *self._seats], False)
        """Whether each host is ready; those of lost nodes are not there."""
        self._started = False
        """Whether all hosts were ready at once: before, the first one would get the work of all."""
        self._max_model_len = config.rollout.max_model_len
        self._send, self._clock, self._leader = surroundings.to_host, surroundings.clock, leader
        self._log = surroundings.log
        self._names: set[str] = set()
        self._cut = False
        self._limits = dict.fromkeys(self._up, config.deadlines.first_s)
        self._pending: dict[str, tuple[float, float]] = {}
        """(asked at, limit in seconds) of every episode whose host owes an answer."""

    @property
    def up(self) -> bool:
        """Whether an episode can be opened."""
        return self._started and any(self._up.values())

    @property
    def missing(self) -> str:
        """Names a host that is not ready, as a sentence; empty when an episode can be opened."""
        rank, host = divmod(next((host for host, up in self._up.items() if not up), 0), self._each)
        return "" if self.up else f"Environment host {host}{f' of node {rank}' if rank else ''} is not ready."

    @property
    def bottleneck(self) -> str:
        """Why trajectories wait for a seat, as the beginning of a sentence; empty: none does."""
        if not self._waiting:
            return ""
        longest_s = self._clock() - min(self._waiting.values())
        count = f"{len(self._waiting)} of {len(self.whole())} trajectories wait for a seat"
        return f"{count}, the first for {longest_s:.0f} s, because {seat(self._hosts()).reason}"

    def whole(self) -> list[Trajectory]:
        """Every open trajectory."""
        return [one for one in self.episodes.values() if one.trunk is None]

    def open(self, trajectory: Trajectory) -> None:
        """Open its episode; a trajectory beyond its prompt gets a replay, as each of its branches."""
        for one in trajectory.growing:
            self.episodes[one.episode] = one
            if one.prompt_tokens:
                self._replays[one.episode] = TurnReplay(one, self._max_model_len)
                one.place = "tool" if one.place == "done" else one.place
        self._waiting[trajectory.episode] = self._clock()
        self._seat()

    def _seat(self) -> None:
        """Open the episodes that wait, first come, first served, as far as there are seats."""
        while self._waiting and (host := seat(self._hosts()).host) is not None:
            episode = next(iter(self._waiting))
            del self._waiting[episode]
            trajectory = self.episodes[episode]
            for one in trajectory.growing:
                one.host = host
            self._taken[host] += 1
            self._ask(
                trajectory,
                OpenEpisode(
                    episode=episode,
                    index=trajectory.index,
                    sample=trajectory.sample,
                    progress=self._leader.progress(trajectory.index),
                ),
            )

    def _hosts(self) -> list[HostSeats]:
        return [HostSeats(host, self._seats.get(host, 0), self._taken[host], up) for host, up in self._up.items()]

    def answer(self, trajectory: Trajectory) -> None:
        """Send its complete turn to the environment, once a replay in progress has ended."""
        trajectory.place, trajectory.stepped_at = "tool", self._clock()
        if trajectory.episode in self._replays:
            return
        if trajectory.truncated:
            self._ask(trajectory, TruncateEpisode(trajectory.episode))
            return
        room = self._max_model_len - trajectory.context_tokens
        turn = StepEpisode(trajectory.episode, trajectory.turn, room, trajectory.turns[-1].versions)
        self._ask(trajectory, turn)

    def _ask(self, trajectory: Trajectory, message: OpenEpisode | StepEpisode | TruncateEpisode) -> None:
        self._pending[trajectory.episode] = (self._clock(), self._limits[trajectory.host] + GRACE_S)
        self._send(trajectory.host, message)

    def watch(self) -> None:
        """Fail the attempts whose environment has not answered in time; about once a second."""
        now = self._clock()
        late = [
            (self.episodes[episode], now - since, limit)
            for episode, (since, limit) in self._pending.items()
            if now - since > limit
        ]
        for trajectory, waited_s, limit in late:
            # The start of a host has a deadline of its own.
            if not self._up.get(trajectory.host):
                continue
            self._leader.failed(
                trajectory, "timeout", f"The environment has not answered for {waited_s:.0f} s (limit {limit:.0f} s)."
            )

    def discount(self, seconds: float) -> None:
        """Extend all limits by a time in which nobody could read answers."""
        self._pending = {episode: (since + seconds, limit) for episode, (since, limit) in self._pending.items()}

    def close(self, trajectory: Trajectory) -> None:
        if trajectory.host in self._up and trajectory.episode not in self._waiting:
            self._send(trajectory.host, CloseEpisode(trajectory.episode))

    def drop(self, trajectory: Trajectory) -> None:
        """Remove a trajectory that is no longer open."""
        for one in trajectory.growing:
            self.episodes.pop(one.episode, None)
            self._replays.pop(one.episode, None)
            self._pending.pop(one.episode, None)
        self._leave(trajectory)
        self._seat()

    def _leave(self, trajectory: Trajectory) -> None:
        """Free its seat, or its place among those that wait for one."""
        if self._waiting.pop(trajectory.episode, None) is None:
            self._taken[trajectory.host] -= 1

    def on_message(self, host: int, message: Any) -> None:
        if isinstance(message, HostReady):
            self._ready(host, message)
        if isinstance(message, HostReady | Doing):
            return
        trajectory = self.episodes.get(message.episode) or self._new_branch(host, message)
        if trajectory is None or trajectory.host != host:
            return
        self._pending.pop(message.episode, None)
        replay = self._replays.get(message.episode)
        match message:
            case EpisodeOpened():
                trajectory.max_tokens, trajectory.stop_ids = message.max_tokens, message.stop_ids
                if replay is not None:
                    self._continue_replay(trajectory, replay, replay.opened(message))
                    return
                trajectory.open(message.prompt_id, message.tokens)
                if trajectory.room(self._max_model_len) > 0 and trajectory.prompt_tokens > 0:
                    self._leader.turn_wanted(trajectory)
                else:
                    self._leader.failed(trajectory, "answer", self._no_room(trajectory))
            case EpisodeStepped():
                trajectory.max_tokens = message.max_tokens or trajectory.max_tokens
                if replay is not None:
                    self._continue_replay(trajectory, replay, replay.answered(message))
                else:
                    self._stepped(trajectory, message)
            case EpisodeFailed(error=error, kind=kind):
                self._leader.failed(trajectory, kind, error)

    def _new_branch(self, host: int, message: Any) -> Trajectory | None:
        """The branch that an environment has opened, unless its trajectory is no longer here."""
        name, _, branch = message.episode.partition(BRANCH)
        trunk = self.episodes.get(name)
        if trunk is None or trunk.host != host or not isinstance(message, EpisodeOpened):
            return None
        found = self.episodes[message.episode] = trunk.sprout(branch)
        return found

    def _ready(self, host: int, message: HostReady) -> None:
        self._up[host] = True
        self._started |= all(self._up.values())
        self._limits[host] = message.step_limit_s or self._limits[host]
        self._pending |= {
            episode: (self._clock(), self._limits[host] + GRACE_S)
            for episode in self._pending
            if self.episodes[episode].host == host
        }
        self._seat()

    def on_down(self, host: int, reason: str) -> None:
        """Replay the episodes of a lost host in another, or in the one that follows it.

        Any turn that waited for an answer may have ended the host. Such an episode, or one in a replay, is replayed
        once; at the second loss its trajectory is sampled again.
        """
        if host in self._up:
            self._up[host] = False
        for trajectory in [t for t in self.whole() if t.host == host and t.episode not in self._waiting]:
            suspect = any(one.place == "tool" or one.episode in self._replays for one in trajectory.growing)
            if not trajectory.prompt_tokens or (suspect and trajectory.replays):
                self._leader.restart(trajectory, reason)
            else:
                trajectory.replays += suspect
                for one in trajectory.growing:
                    self._pending.pop(one.episode, None)
                self._leave(trajectory)
                self.open(trajectory)

    def on_rank_lost(self, rank: int, reason: str) -> None:
        """Replay the episodes of a lost environment node elsewhere."""
        lost = [host for host in self._seats if host // self._each == rank and self._up.pop(host, None) is not None]
        self._started |= all(self._up.values())
        for host in lost:
            self.on_down(host, reason)
        self._seat()

    def _continue_replay(self, trajectory: Trajectory, replay: TurnReplay, same: bool) -> None:
        """Send the next turn of a replay, if the environment answered as before (``same``)."""
        if not same:
            self.close(trajectory.whole)
            self._leader.restart(
                trajectory.whole, "its environment did not answer as it had when its turns were replayed"
            )
        elif (turn := replay.next()) is not None:
            self._ask(trajectory, turn)
        else:
            del self._replays[trajectory.episode]
            if trajectory.place == "tool":
                self.answer(trajectory)
            elif trajectory.place == "before":
                self._leader.turn_wanted(trajectory)

    def _stepped(self, trajectory: Trajectory, message: EpisodeStepped) -> None:
        if error := unusable_reward(message.reward, message.info):
            self._leader.failed(trajectory, "reward", error)
            return
        if message.dropped > trajectory.turns[-1].gen_tokens:
            self._leader.failed(trajectory, "answer", f"dropped is {message.dropped}; its turn has fewer tokens.")
            return
        trajectory.drop(message.dropped)
        if not trajectory.truncated:
            trajectory.add_signals(message.signals, 0.0 if message.done else message.reward)
        info = message.info | {TRUNCATED: 1.0} if trajectory.truncated else message.info
        trajectory.whole.info = trajectory.whole.info | self._numbers(info)
        if message.done:
            trajectory.reward, trajectory.place = message.reward, "done"
            if trajectory.trunk is None:
                self._leader.finish(trajectory)
            return
        before = 0 if message.new_sample else trajectory.context_tokens
        room = TOKEN_BYTES * (self._max_model_len - before)
        trajectory.add_environment(message.tokens[:room], message.new_sample)
        if len(message.tokens) >= room:
            trajectory.clipped, trajectory.truncated = (len(message.tokens) - room) // TOKEN_BYTES, True
            self.answer(trajectory)
            return
        self._leader.turn_wanted(trajectory)

    def _numbers(self, info: dict[str, float]) -> dict[str, float]:
        """The numbers of a task that become columns: the first `MOST_NUMBERS` names that it ever used."""
        for name in info:
            if len(self._names) < MOST_NUMBERS and len(name) <= NAME_CHARS:
                self._names.add(name)
        kept = {name: value for name, value in info.items() if name in self._names}
        if len(kept) < len(info) and not self._cut:
            self._cut = True
            reason = f"info has {len(info):,} names; {MOST_NUMBERS} of at most {NAME_CHARS} characters are kept"
            self._log("numbers_cut", reason=f"{reason}, the first that came")
        return kept

    def _no_room(self, trajectory: Trajectory) -> str:
        return (
            f"The prompt has {trajectory.prompt_tokens} tokens and a turn at most {trajectory.max_tokens}; valid: at"
            f" least 1 of each, with room for a token below rollout.max_model_len = {self._max_model_len}."
        )
