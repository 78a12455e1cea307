"""A rollout leader between scripted engines and a scripted environment host."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import replace

from libra_hpc.config.job import Component, EnvComponent
from libra_hpc.config.learn import EvalPart
from libra_hpc.config.run import RunConfig
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.agents import Batch, Committed, Group, Turns
from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.engine import Abort, Generate, Generated
from libra_hpc.protocol.engine_state import EngineCapacity, EngineStats, LenderKind, ObservedEngine
from libra_hpc.protocol.env import (
    CloseEpisode,
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    HostLost,
    HostReady,
    OpenEpisode,
    Signal,
    StepEpisode,
    TruncateEpisode,
)
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.rollout.rollout_leader import RolloutLeader
from libra_hpc.rollout.trajectory import Trajectory, decision_line

from .emptiest import Emptiest

STOP = 9
TRAIN_LEADER = 1
Broken = Callable[[Any], str | None]
"""What an environment answers a message with instead: the error, if any."""


def generated(
    rid: str,
    tokens: list[int],
    *,
    finish: str,
    logprobs: list[float] | None = None,
    versions: Any = None,
    experts: bytes = b"",
) -> Generated:
    """An engine's answer without times; by default sampled at -1 under version 0."""
    return Generated(
        rid=rid,
        tokens=pack_i32(tokens),
        logprobs=pack_f32([-1.0] * len(tokens) if logprobs is None else logprobs),
        finish=finish,
        versions=(((0, len(tokens)),) if tokens else ()) if versions is None else versions,
        cached_tokens=0,
        queue_s=0.0,
        run_s=0.0,
        experts=experts,
    )


def engine_stats(*, generated: int, prefilled: int, steps: int) -> EngineStats:
    """The counters of an engine with four running turns that fill a quarter of its KV cache."""
    totals = {"generated_tokens": generated, "prefill_tokens": prefilled, "steps": steps}
    return EngineStats(running=4, kv_use=0.25, busy_s=0.1, **totals)


def plain_batch(batch: Batch) -> Batch:
    """The batch with loss masks of 0 and 1, whichever engines its tokens are from."""
    return msgspec.structs.replace(batch, groups=tuple(map(plain_group, batch.groups)))


def plain_group(group: Group) -> Group:
    samples = [msgspec.structs.replace(one, loss_mask=bytes(map(bool, one.loss_mask))) for one in group.samples]
    return Group(group.index, tuple(samples))


class Plant:
    """Engines answer each turn with [7, 8, STOP]; an episode ends after ``turns`` turns with reward 1 for even
    samples, keeps ``kept`` tokens of each, and begins a new sample of four tokens after each ``fresh`` ones. Of prompts
    in ``equal`` all have 1; others replace them in up to ``refill_batches`` batches a step."""

    def __init__(
        self,
        *,
        eta: int = 0,
        steps: int = 4,
        turns: int = 2,
        engines: int = 2,
        max_model_len: int = 1000,
        in_order: bool = False,
        policy: Policy | None = None,
        prompts: int = 2,
        group: int = 2,
        broken: Broken = lambda message: None,
        fresh: int = 0,
        kept: int = 99,
        evals: Sequence[EvalPart] = (),
        equal: Collection[int] = (),
        refill_batches: int = 0,
        env: EnvComponent | None = None,
        routing: str = "rollout",
    ) -> None:
        self.now, self.cut = 1000.0, max_model_len < 100
        self.broken, self.fresh, self.equal = broken, fresh, equal
        self.truncated_reward, self.truncated_info = 0.0, dict[str, float]()
        self.engines: dict[str, tuple[int, ObservedEngine, tuple[str, LenderKind]]] = {}
        """Node, state and lender of each."""
        self.inbox: list[tuple[str, Generate]] = []
        self.aborts: list[tuple[str, Abort]] = []
        self.host: list[Any] = []
        self.at: dict[str, int] = {}
        """Host of each episode."""
        self.batches: list[Batch] = []
        self.sent: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[TrajectoryRecord] = []
        self.evaluated: list[dict[str, Any]] = []
        self.failed: list[Trajectory] = []
        self.of_evaluations: list[Trajectory] = []
        self.composed: list[tuple[int, list[Trajectory], tuple[Group, ...]]] = []
        self.ended: list[Trajectory] = []
        self.decisions: list[dict[str, Any]] = []
        self.turns, self.version, self.tool, self.kept = turns, 0, 5, kept
        self.steps_of: dict[str, int] = {}
        self.finished: list[str] = []
        algorithm = {
            "prompts_per_step": prompts,
            "group_size": group,
            "eta": eta,
            "batch_order": "data" if in_order else "finish",
            "refill": refill_batches > 0,
            "refill_batches": refill_batches,
            "routing": routing,
        }
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": steps},
            "task": {"name": "toy", "eval": list(evals)},
            "algorithm": algorithm,
            "rollout": {"max_model_len": max_model_len, "max_inflight": 4},
            "components": {"rollout": Component(nodes=8), "env": env or EnvComponent()},
        }
        # Not validated: some plants are smaller than a run file may ask for.
        config = RunConfig().changed(**sections)
        self.leader = RolloutLeader(
            config=config,
            rank=5,
            train_leader=TRAIN_LEADER,
            policy=policy or Emptiest(),
            surroundings=SimpleNamespace(
                clock=lambda: self.now,
                send=self.send,
                to_host=self.to_host,
                ended=self.on_ended,
                failed=self.failed.append,
                evaluated=self.on_evaluated,
                composed=lambda *batch: self.composed.append(batch),
                routed=lambda routed: self.decisions.append(decision_line(routed)),
                log=lambda kind, **fields: self.events.append((kind, fields)),
                changed=lambda: None,
            ),
        )
        self.start_engines = engines

    def start(
        self,
        low: int = 0,
        extra: tuple[int, ...] = (),
        step: int = 0,
        recovered: Mapping[int, list[Trajectory]] | None = None,
    ) -> Plant:
        self.version = step
        self.leader.on_position(step, low, extra, recovered)
        self.host_up()
        for i in range(self.start_engines):
            self.up(f"e{i}", rank=3 + i)
        return self

    def on_evaluated(self, line: dict[str, Any], trajectories: list[Trajectory]) -> None:
        self.evaluated.append(line)
        self.of_evaluations += trajectories

    def on_ended(self, trajectory: Trajectory) -> None:
        self.lines.append(msgspec.json.decode(msgspec.json.encode(trajectory.numbers), type=TrajectoryRecord))
        self.ended.append(trajectory)

    def send(self, rank: int, message: Any) -> None:
        assert wire.mesh.decode(wire.mesh.encode(message)) == message, "it survives the way there"
        self.sent.append(message)
        if isinstance(message, Turns):
            self.inbox += [(engine, item) for engine, item in message.items if isinstance(item, Generate)]
            self.aborts += [(engine, item) for engine, item in message.items if isinstance(item, Abort)]
        elif isinstance(message, Batch):
            assert rank == TRAIN_LEADER
            self.batches.append(plain_batch(message))

    def to_host(self, host: int, message: Any) -> None:
        self.host.append(message)
        self.at[message.episode] = host

    def from_host(self, message: Any) -> None:
        self.leader.on_host(self.at.get(message.episode, 0), message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]

    def sizes(self) -> list[int]:
        """Samples of each group of the first batch."""
        return [len(group.samples) for group in self.batches[0].groups]

    def samples(self) -> list[Any]:
        """Those of the first batch."""
        return [sample for group in self.batches[0].groups for sample in group.samples]

    # --- engines

    def up(self, name: str, rank: int, tp: int = 1, lender: tuple[str, LenderKind] = ("", "idle")) -> None:
        """Its process, after that of before ended."""
        capacity = EngineCapacity(tp=tp, max_model_len=1000, kv_tokens=10000)
        _, before, _ = self.engines.get(name, (rank, ObservedEngine("rollout", "lost"), lender))
        now = ObservedEngine("rollout", "ready", self.version, before.ends + 1, "killed", capacity)
        self.engines[name] = rank, now, lender
        self.leader.on_engines(rank, {name: now}, lender)

    def down(self, name: str) -> None:
        self.inbox = [(engine, request) for engine, request in self.inbox if engine != name]
        self.observed(name, state="lost", ends=self.engines[name][1].ends + 1)

    def observed(self, name: str, **changes: Any) -> None:
        """An engine as its node has it now."""
        rank, before, lender = self.engines[name]
        self.engines[name] = rank, replace(before, **changes), lender
        self.leader.on_engines(rank, {name: self.engines[name][1]}, lender)

    def answer(self, engine: str, request: Generate, tokens: list[int], finish: str = "stop", **fields: Any) -> None:
        """Whatever else is in the engine, this turn leaves it."""
        self.inbox = [item for item in self.inbox if item[1] is not request]
        self.leader.on_turns_done(((engine, generated(request.rid, tokens, finish=finish, **fields)),))

    def serve(self, count: int = 1000, pick: random.Random | None = None) -> None:
        for _ in range(min(count, len(self.inbox))):
            engine, request = self.inbox[pick.randrange(len(self.inbox)) if pick else 0]
            tokens = [7, 8, STOP][: request.max_tokens]
            self.answer(
                engine,
                request,
                tokens,
                "stop" if STOP in tokens else "length",
                logprobs=[-1.0, -2.0, -3.0][: request.max_tokens],
                versions=((self.engines[engine][1].version, len(tokens)),),
            )

    # --- the environment host

    def host_up(self, step_timeout_s: float | None = None, host: int = 0) -> None:
        self.leader.on_host(host, HostReady("toy") if step_timeout_s is None else HostReady("toy", step_timeout_s))

    def kill_host(self) -> None:
        """The next one is there at once."""
        self.host.clear()
        self.leader.on_host(0, HostLost("killed"))
        self.host_up()

    def open_episode(self, message: OpenEpisode, tokens: list[int], max_tokens: int = 4) -> None:
        self.from_host(
            EpisodeOpened(
                episode=message.episode,
                prompt_id=f"p{message.index}",
                tokens=pack_i32(tokens),
                max_tokens=max_tokens,
                stop_ids=(STOP,),
            )
        )

    def end_step(
        self,
        message: StepEpisode | TruncateEpisode,
        tokens: list[int] | None = None,
        *,
        done: bool = True,
        reward: float = 1.0,
        info: dict[str, float] | None = None,
        signals: tuple[Signal, ...] = (),
        new_sample: bool = False,
    ) -> None:
        stepped = EpisodeStepped(
            episode=message.episode,
            tokens=pack_i32(tokens or []),
            signals=signals,
            done=done,
            reward=reward,
            info=info or {},
            new_sample=new_sample,
            dropped=max(0, len(getattr(message, "tokens", b"")) // 4 - self.kept),
        )
        self.from_host(stepped)

    def take_step(self) -> StepEpisode:
        """The one step that the host is asked for; the host will not answer it by itself."""
        (step,) = [m for m in self.host if isinstance(m, StepEpisode)]
        self.host.remove(step)
        return step

    def environment(self) -> None:
        pending, self.host = self.host, []
        for message in pending:
            error = self.broken(message)
            if error is not None:
                self.from_host(EpisodeFailed(message.episode, error))
                continue
            match message:
                case OpenEpisode(episode=episode, index=index):
                    self.steps_of[episode] = 0
                    self.open_episode(message, [1, 2, index % 1000])
                case StepEpisode(episode=episode, tokens=tokens) if self._begins_sample(episode):
                    self.steps_of[episode] += 1
                    self.end_step(message, [1, 2, int(episode.split(".")[0]) % 1000, 6], done=False, new_sample=True)
                case StepEpisode(episode=episode, tokens=tokens):
                    assert unpack_i32(tokens)[-1] == STOP or self.cut or self.kept == len(unpack_i32(tokens))
                    self.steps_of[episode] += 1
                    done = self.steps_of[episode] >= self.turns
                    prompt, sample, *_ = map(int, episode.split("."))
                    reward = float(prompt in self.equal or sample % 2 == 0)
                    signal = Signal("tool", "ok", 1, 0.01, exit_code=1, passed=None if done else 3)
                    answer, info = ([], {"solved": reward}) if done else ([self.tool], {})
                    self.end_step(message, answer, done=done, reward=reward, info=info, signals=(signal,))
                    if done:
                        self.finished.append(episode)
                case TruncateEpisode():
                    self.end_step(message, reward=self.truncated_reward, info=self.truncated_info)
                case CloseEpisode():
                    pass

    def _begins_sample(self, episode: str) -> bool:
        done = self.steps_of[episode] + 1
        return self.fresh > 0 and done < self.turns and not done % self.fresh

    # --- time

    async def settle(self) -> None:
        for _ in range(5):
            self.environment()
            await asyncio.sleep(0)

    async def run(self, until: Callable[[], object], pick: random.Random | None = None) -> None:
        for _ in range(5000):
            self.environment()
            await asyncio.sleep(0)
            if until():
                return
            self.serve(2 if pick else 1000, pick)
        raise AssertionError("never happened")

    async def batch(self, count: int = 1, pick: random.Random | None = None) -> Batch:
        """That of this number in this start, from 1 on."""
        await self.run(lambda: len(self.batches) >= count, pick)
        return self.batches[count - 1]

    async def pass_time(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """A second a round, in which everything that can go on goes on."""
        end = self.now + seconds
        while self.now < end and not until():
            self.leader.report()
            for _ in range(6):
                self.environment()
                await asyncio.sleep(0)
                self.serve()
            self.now += 1.0

    async def batch_within(self, seconds: float, count: int = 1) -> Batch:
        await self.pass_time(seconds, lambda: len(self.batches) >= count)
        return self.batches[count - 1]

    def watch_after(self, seconds: float) -> None:
        self.now += seconds
        self.leader.watch()

    def commit(self, batch: Batch) -> None:
        self.version = batch.step
        self.leader.on_committed(Committed(batch.step, (*(group.index for group in batch.groups), *batch.given_up)))
        for engine in self.engines:
            self.observed(engine, version=self.version)


async def sampling(turns_at_engines: int = 1, **options: Any) -> Plant:
    """A plant whose first turns wait at their engines."""
    plant = Plant(**options).start()
    await plant.run(lambda: len(plant.inbox) >= turns_at_engines)
    return plant
