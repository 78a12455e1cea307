"""The `Player` in a process of its own, so that its plays do not stop the coordinator's loop.

- The first frame is a `PlaySetup`, each further one a `Question`; a decision follows each.
- A question is asked at one evaluation, and its answer taken at a later one; until then the last hold stays.
- No answer within `LIMIT_S` -> a hold that says so; the process is ended, and another begins with the next question.
- Its standard input ends -> the process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

import msgspec

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.policies.control.plays import hold
from libra_hpc.protocol.codec import Codec, FrameError, read_frame
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
    """The player of a run, which answers late; `close` ends its process."""

    def __init__(self, config: RunConfig, repartition_after: float = -inf, limit_s: float = LIMIT_S) -> None:
        self._setup, self._limit_s = PlaySetup(config.as_data(), repartition_after), limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._idle = _nothing_to_decide(config)
        self._thread = ThreadPoolExecutor(1, "player")
        self._answer: Future[PlanDecision] | None = None
        self._asked = 0.0
        self._roles: list[str] = []
        self._held = PLAYS

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """The answer to an earlier question, if it is there and its nodes are where they were; else the last hold."""
        if self._idle:
            return hold(self._idle)
        roles = [node.role for node in snapshot.nodes]
        answer, self._answer = self._answer, None
        if answer is None:
            self._asked, self._roles = now, roles
            self._answer = self._thread.submit(self._ask, Question(snapshot, now))
            return self._held
        if not answer.done():
            if now - self._asked <= self._limit_s:
                self._answer = answer
                return self._held
            self._end()
            self._held = hold(f"the coming work was not played within {self._limit_s:.0f} s")
            return self._held
        try:
            decision = answer.result()
        except (OSError, EOFError, FrameError) as error:
            self._end()
            self._held = hold(f"the process that plays the coming work ended: {error}")
            return self._held
        self._held = decision if decision.action == "hold" else PLAYS
        return decision if roles == self._roles else self._held

    def close(self) -> None:
        self._end()
        self._thread.shutdown(wait=False)

    def _ask(self, question: Question) -> PlanDecision:
        """In the thread: start the process if there is none, and wait for its answer."""
        process = self._process
        if process is None:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            _write(process.stdin, QUESTIONS.frame(self._setup))
        _write(process.stdin, QUESTIONS.frame(question))
        assert process.stdout is not None
        return ANSWERS.decode(read_frame(process.stdout.read))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _nothing_to_decide(config: RunConfig) -> str:
    """Why no process is needed; empty: one is."""
    if not config.planner.enabled:
        return "the planner is disabled"
    parts = config.components
    movable = parts.hybrid.nodes or parts.train.roll_out or config.borrow.spot.nodes or config.borrow.lenders
    return "there is no hybrid node to move" if without_tables(config) and not movable else ""


def main() -> None:
    """Answer until standard input ends; signals to the job are for its agents."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with os.fdopen(os.dup(0), "rb", 0) as questions, os.fdopen(os.dup(1), "wb", 0) as answers:
        os.dup2(2, 1)  # Nothing that a policy prints may stand between the frames.
        try:
            setup = QUESTIONS.decode(read_frame(questions.read))
            assert isinstance(setup, PlaySetup)
            player = live_player(validate(setup.config), setup.repartition_after)
            while True:
                question = QUESTIONS.decode(read_frame(questions.read))
                assert isinstance(question, Question)
                _write(answers, ANSWERS.frame(player.decide(question.snapshot, question.now)))
        except EOFError:
            return


def _write(stream: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


if __name__ == "__main__":
    main()
