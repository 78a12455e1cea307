"""Replay of turns: brings an environment back to where a trajectory is.

With an environment host, or all ranks, the state of the tools is lost; the leader has the tokens. A new episode
of the same prompt and sample gets the recorded turns one after the other.

- Prompt and every answer equal the record, token for token -> the trajectory goes on from there.
- First difference (a tool that reads a clock, a random number or the world) -> it is sampled again from its prompt.
"""

from __future__ import annotations

from libra_hpc.protocol.env import EpisodeOpened, EpisodeStepped, StepEpisode

from .trajectory import TOKEN_BYTES, Trajectory


class TurnReplay:
    """The replay of one trajectory's turns that have an answer now; the trajectory may grow meanwhile."""

    def __init__(self, past: Trajectory, max_model_len: int) -> None:
        self._past, self._max_model_len = past, max_model_len
        self._turns = len(past.turns) - 1
        """Turns to replay: each has an answer in the record."""
        self._turn = 0
        self._begin, self._at = 0, TOKEN_BYTES * past.prompt_tokens
        """Positions of the next turn's sample, and of the turn, in the trajectory's tokens; bytes."""

    def opened(self, message: EpisodeOpened) -> bool:
        """Whether the new episode begins as the record does."""
        past = self._past
        return message.prompt_id == past.prompt_id and message.tokens == past.tokens[: self._at]

    def next(self) -> StepEpisode | None:
        """The next turn; None when the replay is complete."""
        if self._turn == self._turns:
            return None
        turn = self._past.turns[self._turn]
        end = self._at + TOKEN_BYTES * turn.gen_tokens
        room = self._max_model_len - (end - self._begin) // TOKEN_BYTES
        return StepEpisode(self._past.episode, self._past.tokens[self._at : end], room, turn.versions)

    def answered(self, message: EpisodeStepped) -> bool:
        """Whether the turn that `next` gave was answered as in the record."""
        past = self._past
        start = self._at + TOKEN_BYTES * past.turns[self._turn].gen_tokens
        self._turn += 1
        following = past.turns[self._turn]
        self._at = start + TOKEN_BYTES * following.new_tokens
        if following.new_sample:
            self._begin = start
        clipped = past.truncated and self._turn == len(past.turns) - 1
        tokens = message.tokens[: self._at - start] if clipped else message.tokens
        same = tokens == past.tokens[start : self._at] and message.new_sample == following.new_sample
        return same and not message.done and not message.dropped
