"""The `Player` in a process of its own, so that its plays do not stop the coordinator's loop.

- The first frame is a `PlaySetup`, each further one a `Question`; a decision follows each.
- A question is asked at one evaluation, and its answer taken at a later one; until then the last hold stays.
- No answer within `LIMIT_S` -> a hold that says so; the process is ended, and another begins with the next question.
- Its agent ends -> the process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text
from libra_hpc.policies.control.plays import hold
from libra_hpc.process.child import Child, spawn
from libra_hpc.protocol.codec import Codec, EngineSocket
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot

from .live import live_player, without_tables

LIMIT_S = 60.0
"""Half: plays of a thousand GPUs on a busy node are dropped; double: a move comes two minutes late."""
NICE = 5
"""The coordinator goes first."""


class PlaySetup(msgspec.Struct, tag=True, frozen=True):
    config: dict[str, Any]
    """`RunConfig` of the run."""
    repartition_after: float


class Question(msgspec.Struct, tag=True, frozen=True):
    snapshot: PlanSnapshot
    now: float


QUESTIONS: Codec[PlaySetup | Question] = Codec(PlaySetup | Question)
PLAYS = hold("the coming work is being played")
ANSWERS: Codec[PlanDecision] = Codec(PlanDecision)


class PlayerProcess:
    """The player of a run, which answers late; `close` ends its process.  It is asked in an event loop."""

    def __init__(self, config: RunConfig, repartition_after: float = -inf, log: Path = Path(os.devnull)) -> None:
        self._setup, self._log = PlaySetup(config.as_data(), repartition_after), log
        self._idle = _nothing_to_decide(config)
        self._child: Child | None = None
        self._asked: float | None = None
        """When the question was asked that has no answer yet, or whose answer was not taken."""
        self._answer: PlanDecision | None = None
        self._roles: list[str] = []
        self._held = PLAYS

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """The answer to an earlier question, if it is there and its nodes are where they were; else the last hold."""
        if self._idle:
            return hold(self._idle)
        roles = [node.role for node in snapshot.nodes]
        if self._asked is None:
            self._asked, self._roles = now, roles
            self._playing().send(Question(snapshot, now))
            return self._held
        if self._answer is None:
            if now - self._asked > LIMIT_S:
                self.close(f"the coming work was not played within {LIMIT_S:.0f} s")
            return self._held
        decision, self._asked, self._answer = self._answer, None, None
        self._held = decision if decision.action == "hold" else PLAYS
        return decision if roles == self._roles else self._held

    def close(self, reason: str = "the run ends") -> None:
        """End the process: the next question is for another."""
        child, self._child, self._asked, self._held = self._child, None, None, hold(reason)
        if child is not None:
            child.kill()

    def _playing(self) -> Child:
        if self._child is None:
            self._child = Child("player", QUESTIONS, ANSWERS, self._answered, self._exited)
            self._child.send(self._setup)
            spawn(self._start(self._child))
        return self._child

    async def _start(self, child: Child) -> None:
        try:
            await child.start([sys.executable, "-m", __name__], dict(os.environ), self._log)
        except OSError as error:
            self._lost(child, error_text(error))

    def _answered(self, child: Child, decision: PlanDecision) -> None:
        if child is self._child:
            self._answer = decision

    def _exited(self, child: Child, code: int) -> None:
        self._lost(child, child.fault or f"exit code {code}")

    def _lost(self, child: Child, why: str) -> None:
        if child is self._child:
            self.close(f"the process that plays the coming work ended: {why}")


def _nothing_to_decide(config: RunConfig) -> str:
    """Why no process is needed; empty: one is."""
    if not config.planner.enabled:
        return "the planner is disabled"
    parts = config.components
    movable = parts.hybrid.nodes or parts.train.roll_out or config.borrow.spot.nodes or config.borrow.lenders
    return "there is no hybrid node to move" if without_tables(config) and not movable else ""


def main() -> None:
    """Answer until the other end of the socket closes."""
    os.nice(NICE)
    agent = EngineSocket(int(sys.argv[-1]), QUESTIONS, ANSWERS)
    with contextlib.suppress(EOFError):
        setup = agent.receive()
        player = live_player(validate(setup.config), setup.repartition_after)
        while True:
            question = agent.receive()
            agent.send(player.decide(question.snapshot, question.now))


if __name__ == "__main__":
    main()
