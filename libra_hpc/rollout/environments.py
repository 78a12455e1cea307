"""The episodes of all trajectories in play, at their environment hosts.

An episode is opened, gets the policy's turns, and answers each.  When a host dies its episodes are brought back in the one that follows it, and so are
those of trajectories that a new start of all ranks took over in mid-course: their turns are played again (`replay`), and a turn that runs at an engine
goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.env import CloseEpisode, EpisodeFailed, EpisodeOpened, EpisodeStepped, HostAlive, HostReady, OpenEpisode, StepEpisode, ToHost

from .replay import Replay
from .trajectory import Trajectory


class Environments:
    """Messages go out through ``send(host, message)``.

    ``ready(trajectory)``: it needs a turn.  ``finish(trajectory)``: it is over.  ``restart(trajectory, reason, counts)``: its episode is lost and it is to be
    sampled anew; ``counts`` when that is its own fault.  ``progress(index)``: where its prompt stands in the run.
    """

    def __init__(
        self,
        hosts: int,
        group_size: int,
        max_model_len: int,
        send: Callable[[int, ToHost], None],
        progress: Callable[[int], float],
        ready: Callable[[Trajectory], None],
        finish: Callable[[Trajectory], None],
        restart: Callable[[Trajectory, str, bool], None],
    ) -> None:
        self.episodes: dict[str, Trajectory] = {}
        """Of every trajectory in play."""
        self._replays: dict[str, Replay] = {}
        """Episodes that are being brought back."""
        self._up = [False] * hosts
        self._group_size, self._max_model_len = group_size, max_model_len
        self._send, self._progress, self._ready, self._finish, self._restart = send, progress, ready, finish, restart

    @property
    def up(self) -> bool:
        """Whether every host is."""
        return all(self._up)

    def open(self, trajectory: Trajectory) -> None:
        """Start its episode; one that has come further is brought back."""
        self.episodes[trajectory.episode] = trajectory
        trajectory.host = (trajectory.index * self._group_size + trajectory.sample) % len(self._up)
        if trajectory.prompt_tokens:
            self._replays[trajectory.episode] = Replay(trajectory)
        self._send(trajectory.host, OpenEpisode(trajectory.episode, trajectory.index, trajectory.sample, self._progress(trajectory.index)))

    def answer(self, trajectory: Trajectory) -> None:
        """Its turn is complete: the environment's move, as soon as it is where the trajectory is."""
        trajectory.place = "tool"
        if trajectory.episode not in self._replays:
            self._send(trajectory.host, StepEpisode(trajectory.episode, pack_i32(trajectory.turn)))

    def forget(self, trajectory: Trajectory) -> None:
        """It is not in play any more."""
        self.episodes.pop(trajectory.episode, None)
        self._replays.pop(trajectory.episode, None)

    def on_message(self, host: int, message: Any) -> None:
        """What a host says."""
        if isinstance(message, HostReady):
            self._up[host] = True
            return
        if isinstance(message, HostAlive):
            return
        trajectory = self.episodes.get(message.episode)
        if trajectory is None:
            return
        replay = self._replays.get(message.episode)
        match message:
            case EpisodeOpened():
                trajectory.max_tokens, trajectory.stop_ids = message.max_tokens, message.stop_ids
                if replay is not None:
                    self._play(trajectory, replay, replay.opened(message))
                    return
                trajectory.prompt_id = message.prompt_id
                trajectory.add_environment(message.tokens)
                trajectory.prompt_tokens = len(trajectory.context)
                self._ready(trajectory)
            case EpisodeStepped():
                if replay is not None:
                    self._play(trajectory, replay, replay.answered(message))
                else:
                    self._stepped(trajectory, message)
            case EpisodeFailed(error=error):
                self._restart(trajectory, error, True)

    def on_down(self, host: int, reason: str) -> None:
        """A host died, and another follows it.

        One of its episodes may have broken it, with a turn that it would be told again: of those it was working on, each is brought back once, then sampled
        anew.
        """
        self._up[host] = False
        for trajectory in [t for t in self.episodes.values() if t.host == host]:
            suspect = trajectory.place == "tool" or trajectory.episode in self._replays
            if not trajectory.prompt_tokens or (suspect and trajectory.replays):
                self._restart(trajectory, reason, False)
            else:
                trajectory.replays += suspect
                self.open(trajectory)

    def _play(self, trajectory: Trajectory, replay: Replay, same: bool) -> None:
        """The next turn of a replay, if the environment answered as before."""
        if not same:
            self._send(trajectory.host, CloseEpisode(trajectory.episode))
            self._restart(trajectory, "its environment did not answer as it had when its turns were played again", False)
        elif (tokens := replay.next()) is not None:
            self._send(trajectory.host, StepEpisode(trajectory.episode, tokens))
        else:
            del self._replays[trajectory.episode]
            if trajectory.place == "tool":
                self.answer(trajectory)
            elif trajectory.place == "before":
                self._ready(trajectory)

    def _stepped(self, trajectory: Trajectory, message: EpisodeStepped) -> None:
        if message.signal is not None:
            trajectory.add_signal(message.signal)
        if message.done:
            trajectory.reward, trajectory.info = message.reward, message.info
            self._finish(trajectory)
            return
        trajectory.add_environment(message.tokens)
        if len(trajectory.context) + trajectory.max_tokens > self._max_model_len:
            self._send(trajectory.host, CloseEpisode(trajectory.episode))
            trajectory.info = {"truncated": 1.0}
            self._finish(trajectory)
            return
        self._ready(trajectory)
