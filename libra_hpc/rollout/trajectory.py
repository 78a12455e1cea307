"""One trajectory: the token-level record that rollout fills and training reads, and its line in `trajectories.jsonl`."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trainer import Sample


class TurnRecord(msgspec.Struct):
    """One turn in the trace schema: tokens the environment added before this generation, tokens generated, the tool called at its end and what it said."""

    new_tokens: int
    gen_tokens: int
    tool: str | None = None
    outcome: str | None = None
    tool_s: float = 0.0
    engine: str = ""
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Trajectory:
    """Mutable state of one sample of a group.  `context` is int32, `mask` uint8 (1: the policy generated it), `logprobs` float32, all of one length."""

    __slots__ = (
        "at_signal", "attempt", "attained", "context", "engine", "episode", "errors", "first_version", "host", "index", "info", "logprobs", "mask",
        "max_tokens", "place", "prompt_id", "prompt_tokens", "ready_at", "reward", "sample", "signals", "started_at", "stop_ids", "turn", "turns", "versions",
    )  # fmt: skip

    def __init__(self, index: int, sample: int, attempt: int, host: int, now: float) -> None:
        self.index, self.sample, self.attempt, self.host = index, sample, attempt, host
        self.episode = f"{index}.{sample}.{attempt}"
        self.prompt_id = ""
        self.context, self.mask, self.logprobs = array("i"), bytearray(), array("f")
        self.prompt_tokens = self.attained = self.max_tokens = self.errors = 0
        self.stop_ids: tuple[int, ...] = ()
        self.turn: list[int] = []
        self.turns: list[TurnRecord] = []
        self.signals: list[Signal] = []
        self.at_signal: list[int] = []
        self.versions: list[tuple[int, int]] = []
        self.first_version = -1
        self.engine = ""
        self.place = "tool"
        self.started_at = self.ready_at = now
        self.reward = 0.0
        self.info: dict[str, float] = {}

    def add_environment(self, tokens: array[int]) -> None:
        """Append tokens the policy did not generate, and open the next turn."""
        self.context.extend(tokens)
        self.mask.extend(bytes(len(tokens)))
        self.logprobs.extend([0.0] * len(tokens))
        self.turn = []
        self.turns.append(TurnRecord(len(tokens), 0))

    def add_generated(self, tokens: array[int], logprobs: array[float], versions: tuple[tuple[int, int], ...], engine: str) -> None:
        """Append (part of) a turn's generated tokens."""
        self.context.extend(tokens)
        self.mask.extend(b"\x01" * len(tokens))
        self.logprobs.extend(logprobs)
        self.turn.extend(tokens)
        self.attained += len(tokens)
        record = self.turns[-1]
        record.gen_tokens += len(tokens)
        record.engine = engine
        record.versions.extend(versions)
        for version, count in versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + count)
            else:
                self.versions.append((version, count))
            self.first_version = version if self.first_version < 0 else min(self.first_version, version)

    def sample_for_training(self, advantage: float) -> Sample:
        """The trainer's view."""
        return Sample(f"{self.index}.{self.sample}", self.context.tobytes(), bytes(self.mask), self.logprobs.tobytes(), advantage)

    def trace_line(self, now: float) -> dict[str, Any]:
        """Record of the trace schema, plus what a replay does not need but a user wants: versions, info, times."""
        return {
            "prompt_id": self.prompt_id, "sample": self.sample, "prompt_tokens": self.prompt_tokens,
            "turns": [
                {"new_tokens": t.new_tokens if i else 0, "gen_tokens": t.gen_tokens, "tool": t.tool, "outcome": t.outcome, "tool_s": round(t.tool_s, 6),
                 "engine": t.engine, "versions": t.versions}
                for i, t in enumerate(self.turns)
            ],
            "reward": self.reward, "index": self.index, "attempt": self.attempt, "info": self.info, "versions": self.versions,
            "started_at": self.started_at, "finished_at": now,
        }  # fmt: skip
