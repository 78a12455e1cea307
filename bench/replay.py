"""Real engines that replay workloads: production leader, agent half, engines and environment host without MPI.

The engines live as long as `Replayer`; every `play` has its own leader, policy and environment host.  Two things are
not production code:

* Messages pass through `LocalMesh`.
* A turn's ``max_tokens`` is set to the length in the workload; turns have no stop ids, so they end there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.harness import ROOT
from bench.rollout_side import NODE, RolloutSide
from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.steplog import StepLogHeader, read_steps
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.process.child_environment import VARIABLE
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import EngineState, EngineStats
from libra_hpc.protocol.trace import TrajectoryRecord, recorded

PATIENCE_S = 600.0
"""Longest play, about ten times the longest one of an idle machine."""
POLL_S = 0.02
SETTLE_S = 0.3
"""Wait after the last answer for the engines' last reports."""


class TurnTimes(msgspec.Struct, frozen=True):
    """One turn of a real run; seconds, the first three of `time.time`."""

    ready: float
    sent: float
    answered: float
    queue_s: float
    """In the engine, before its first step."""
    run_s: float
    """In the engine, from there to the last token."""
    cached: int
    """Tokens found in the prefix cache."""
    engine: str
    env_s: float = 0.0
    """From the answer to the next ready turn, without the tool's seconds; 0 for the last turn."""

    @property
    def latency_s(self) -> float:
        """The simulator's definition of turn latency."""
        return self.answered - self.ready


class Played(msgspec.Struct, frozen=True):
    """A real run in the terms of the simulator."""

    makespan_s: float
    turns: list[TurnTimes]
    steps: list[StepPoint]
    """Of all engines."""
    header: StepLogHeader
    stats: dict[str, tuple[EngineStats, EngineStats]]
    """Each engine's counters before and after."""
    load: float
    """Load average of the machine at the start; above 0.5 another job uses it."""
    recomputed: int = 0
    """Context tokens computed again in later turns; next, those of them that a KV cache had lost."""
    evicted: int = 0

    def total(self, counter: str) -> float:
        """Growth of a counter of `EngineStats`, all engines."""
        return float(sum(getattr(after, counter) - getattr(before, counter) for before, after in self.stats.values()))


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    model: Path
    engines: int = 2
    max_model_len: int = 4096
    max_num_seqs: int = 32
    max_inflight: int = 48
    kv_cache_mb: int = 64
    device: Literal["cpu", "cuda"] = "cpu"
    """All engines share the first GPU."""

    def config(
        self, work: Path, *, groups: int, group_size: int, open_groups: int, policy: str, seed: int = 0
    ) -> RunConfig:
        task = f"{ROOT}/bench/replay_task.py:Replay"
        return validate(
            {
                "run": {"steps": 1, "seed": seed},
                "model": {"path": str(self.model), "dtype": "float32" if self.device == "cpu" else "bfloat16"},
                "slurm": {"device": self.device},
                "task": {"name": task, "options": {"work": str(work), "group_size": group_size}},
                "algorithm": {"eta": 0, "prompts_per_step": groups, "group_size": group_size},
                "rollout": {
                    "engines_per_node": self.engines,
                    "policy": policy,
                    "max_model_len": self.max_model_len,
                    "max_num_seqs": self.max_num_seqs,
                    "max_inflight": self.max_inflight,
                    "kv_cache_mb": self.kv_cache_mb,
                    "max_trajectories": open_groups * group_size,
                    "record_steps": True,
                },
            }
        )


class Replayer(RolloutSide):
    """A context in which the engines are up; `play` any number of times, one after the other."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self._folder = folder
        config = setup.config(folder / "none", groups=1, group_size=2, open_groups=1, policy="least_loaded")
        if setup.device == "cuda":
            os.environ[VARIABLE] = ",".join("0" * setup.engines)
        super().__init__(config, RunDir.create(folder, "engines"))
        self._up: dict[str, EngineState] = {}
        self._stats: dict[str, EngineStats] = {}
        self._work: list[TrajectoryRecord] = []
        self._group_size = 1
        self._asked: dict[str, int] = {}
        self._answers: dict[str, list[tuple[float, float, float, int]]] = {}
        self._plays = 0

    async def __aenter__(self) -> Replayer:
        await self.node.start()
        await self._until(lambda: len(self._up) == self.setup.engines, "the engines did not start", self.context.logs)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.node.stop()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    async def _until(self, condition: Callable[[], bool], problem: str, where: Path) -> None:
        """Wait; raises `OperationError` after `PATIENCE_S`."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > PATIENCE_S:
                raise OperationError(f"{problem} in {PATIENCE_S:.0f} s; see {where}")
            await asyncio.sleep(POLL_S)

    async def play(self, work: list[TrajectoryRecord], policy: str, open_groups: int) -> Played:
        """Run a workload of equally large, contiguous groups, at most ``open_groups`` at once."""
        self._plays += 1
        groups = len({spec.prompt_id for spec in work})
        self._work, self._group_size = work, len(work) // groups
        run = RunDir.create(self._folder, "play")
        path = run.path / "work.json"
        path.write_bytes(msgspec.json.encode(work))
        # A new seed, so that the prefix caches have nothing of an earlier play.
        config = self.setup.config(
            path, groups=groups, group_size=self._group_size, open_groups=open_groups, policy=policy, seed=self._plays
        )
        self._asked, self._answers, self.batches = {}, {}, []
        before, load = dict(self._stats), os.getloadavg()[0]
        seen = {name: len(read_steps(self._log(name))[1]) for name in self._up}
        self.service = RolloutService(self.mesh.context(NODE, config, run, self.folders))
        for up in self._up.values():
            self.service.on_message(up)
        reports = asyncio.create_task(self.service.run())
        try:
            problem = f"a play of {len(work)} trajectories did not end"
            await self._until(lambda: bool(self.batches), problem, run.path)
            await asyncio.sleep(SETTLE_S)
        finally:
            reports.cancel()
            await self.service.stop()
            self.service = None
        found = [read_steps(self._log(name), first) for name, first in seen.items()]
        turns, makespan_s = self._match(run)
        served = [turn for one in recorded(run.trajectories) for turn in one.turns]
        idle = EngineStats()
        stats = {name: (before.get(name, idle), after) for name, after in self._stats.items()}
        return Played(
            makespan_s=makespan_s,
            turns=turns,
            steps=[point for _, points in found for point in points],
            header=found[0][0],
            stats=stats,
            load=load,
            recomputed=sum(turn.recomputed for turn in served),
            evicted=sum(turn.evicted for turn in served),
        )

    # --- messages

    def on_turns(self, message: wire.Turns) -> None:
        self.node.on_turns(wire.Turns(tuple((name, self._imposed(request)) for name, request in message.items)))

    def on_message(self, message: Any) -> None:
        match message:
            case wire.TurnsDone(items=items):
                now = time.time()
                for _, answer in items:
                    times = (now, answer.queue_s, answer.run_s, answer.cached_tokens)
                    self._answers.setdefault(answer.rid.partition(":")[0], []).append(times)
            case wire.EngineLoad(engine=engine, stats=stats):
                self._stats[engine] = stats
            case EngineState(state="ready", engine=engine):
                self._up[engine] = message
        super().on_message(message)

    def _imposed(self, request: Any) -> Any:
        episode = request.rid.partition(":")[0]
        number = self._asked[episode] = self._asked.get(episode, -1) + 1
        return msgspec.structs.replace(request, max_tokens=self._spec(episode).turns[number].gen_tokens)

    def _spec(self, episode: str) -> TrajectoryRecord:
        index, sample, attempt = map(int, episode.split("."))
        if attempt:
            raise OperationError(f"trajectory {episode} was restarted: what was replayed is not the workload any more")
        return self._work[index * self._group_size + sample]

    # --- results

    def _match(self, run: RunDir) -> tuple[list[TurnTimes], float]:
        """Times of all turns, from the alternating decisions and answers of each trajectory; and the makespan."""
        decisions: dict[str, list[dict[str, Any]]] = {}
        for line in read_lines(run.decisions):
            decisions.setdefault(line["trajectory"], []).append(line)
        turns = []
        for episode, routed in decisions.items():
            spec, answers = self._spec(episode), self._answers[episode]
            if not len(routed) == len(answers) == len(spec.turns):
                counts = f"{len(routed)} decisions and {len(answers)} answers for {len(spec.turns)} turns"
                raise OperationError(f"trajectory {episode}: {counts}")
            for number, (line, (at, queue_s, run_s, cached)) in enumerate(zip(routed, answers, strict=True)):
                last = number + 1 == len(routed)
                env_s = 0.0 if last else _ready(routed[number + 1]) - at - spec.turns[number].tool_s
                times = (_ready(line), line["t"], at, queue_s, run_s)
                turns.append(TurnTimes(*times, cached=cached, engine=line["engine"], env_s=env_s))
        ends = [one.finished_at for one in recorded(run.trajectories)]
        if len(ends) != len(self._work):
            raise OperationError(f"{len(ends)} trajectories ended, {len(self._work)} were to be played")
        return turns, max(ends) - min(turn.ready for turn in turns)

    def _log(self, engine: str) -> Path:
        return self.context.logs / f"{engine}.steps.jsonl"


def _ready(decision: dict[str, Any]) -> float:
    return float(decision["t"] - decision["waited_s"])
