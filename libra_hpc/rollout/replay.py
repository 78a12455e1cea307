"""An environment brought back: the turns of a trajectory are played again in a new episode, as long as it answers as it
did.

The policy's tokens are the expensive part of a trajectory, and the leader has them; what is gone with an environment
host, or with all ranks, is the state of the tools.  So an episode of the same prompt and sample is opened, and gets the
turns of the record one after the other.  When the prompt and every answer are token for token those of the record, the
environment is where it was, and the trajectory goes on from there.  At the first difference (tools that look at a
clock, a random number or the world) it is sampled anew from its prompt.

Only answers are compared: what an environment keeps to itself may differ, and counts as the same.
"""

from __future__ import annotations

from libra_hpc.protocol.env import EpisodeOpened, EpisodeStepped

from .trajectory import Trajectory


class TurnReplay:
    """Of one trajectory, which may go on to grow meanwhile: its turns that have been answered when this is made are
    played."""

    __slots__ = ("_at", "_past", "_turn", "_turns")

    def __init__(self, past: Trajectory) -> None:
        self._past = past
        self._turns = len(past.turns) - 1
        """Turns to play: after each of them the record has an answer."""
        self._turn = 0
        self._at = past.prompt_tokens
        """Where the next turn begins in the context."""

    def opened(self, message: EpisodeOpened) -> bool:
        """Whether the new episode begins as the record does."""
        past = self._past
        return message.prompt_id == past.prompt_id and message.tokens == past.context[: past.prompt_tokens].tobytes()

    def next(self) -> bytes | None:
        """Tokens (int32) of the next turn to play; None when the environment is where it was."""
        if self._turn == self._turns:
            return None
        return self._past.context[self._at : self._at + self._past.turns[self._turn].gen_tokens].tobytes()

    def answered(self, message: EpisodeStepped) -> bool:
        """Whether the turn that `next` gave was answered as in the record."""
        past = self._past
        start = self._at + past.turns[self._turn].gen_tokens
        self._turn += 1
        self._at = start + past.turns[self._turn].new_tokens
        return not message.done and message.tokens == past.context[start : self._at].tobytes()
