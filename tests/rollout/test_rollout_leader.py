"""The rollout leader with scripted engines and environment: whatever is lost, every prompt is trained once, in time."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, Finished, Policy, TurnView
from libra_hpc.policies.scheduling.turn_migration import Running, TurnMigration
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.env import (
    CloseEpisode,
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    HostReady,
    OpenEpisode,
    Signal,
    StepEpisode,
)
from libra_hpc.protocol.mesh import Batch, EngineUp, Turns, TurnsDrained
from libra_hpc.protocol.rollout import Abort, EngineReady, EngineStats, Generate, Generated
from libra_hpc.rollout.recovery.recovered import SavedTrajectory, Start, TrainedPrompts, drop_reason, gather
from libra_hpc.rollout.rollout_leader import RolloutLeader
from libra_hpc.rollout.run_lines import TrajectoryEnd, decision_line, trace_line
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.train_leader.train_leader import DataOrder

STOP = 9
TRAIN_LEADER = 1


class Emptiest:
    """First come, first served, to the engine with the fewest tokens in flight."""

    name = "emptiest"

    def __init__(self) -> None:
        self.learned: list[Finished] = []
        self.given_up: list[str] = []

    def key(self, turn: TurnView, now: float) -> float:
        return turn.ready_at

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        free = [engine for bucket in board.classes if (engine := bucket.least())]
        if not free:
            return Decision(engine="", priority=0, level=0, template="all full", numbers={})
        best = min(free, key=lambda engine: engine.inflight_tokens)
        return Decision(
            engine=best.engine,
            priority=3,
            level=best.level,
            template="{tokens:.0f} tokens at {engine}",
            numbers={"tokens": best.inflight_tokens, "engine": best.engine},
        )

    def finished(self, record: Finished, now: float) -> None:
        self.learned.append(record)

    def forget(self, trajectory: str) -> None:
        self.given_up.append(trajectory)


class Probing(Emptiest):
    """The first sample of a prompt to ask goes ahead; its siblings wait until it has finished or is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: dict[str, str] = {}

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        if self.probes.setdefault(turn.prompt_id, turn.trajectory) not in ("", turn.trajectory):
            return Decision(engine="", priority=0, level=0, template="a sibling probes", numbers={}, wait="sibling")
        return super().route(turn, board, now)

    def finished(self, record: Finished, now: float) -> None:
        super().finished(record, now)
        self.probes[record.prompt_id] = ""

    def forget(self, trajectory: str) -> None:
        super().forget(trajectory)
        self.probes = {prompt: probe for prompt, probe in self.probes.items() if probe != trajectory}


class Moving(Emptiest):
    """Everything starts at ``e0``; the first turn that is seen to have generated ``after`` tokens there goes on at
    ``e1``."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.moved: list[TurnMigration] = []

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        there = any(move.trajectory == turn.trajectory for move in self.moved)
        return Decision(
            engine="e1" if there else "e0", priority=0, level=0, template="moved" if there else "first", numbers={}
        )

    def rebalance(self, running: Iterable[Running], board: Board, now: float) -> list[TurnMigration]:
        far = [run for run in running if run.generated >= self.after and not self.moved]
        numbers = dict.fromkeys(("remaining", "generated", "context", "left_s", "saves_s"), 1.0)
        self.moved += [
            TurnMigration(
                trajectory=run.turn.trajectory,
                turns=run.turn.turns,
                source=run.turn.engine,
                target="e1",
                numbers=numbers | {"source": "e0", "engine": "e1"},
            )
            for run in far[:1]
        ]
        return self.moved[-1:] if far else []


def configured(**sections: dict[str, Any]) -> RunConfig:
    """Not validated: some plants are smaller than a run file may ask for."""
    config = RunConfig()
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def generated(
    rid: str, tokens: list[int], logprobs: list[float], *, finish: str, versions: tuple[tuple[int, int], ...]
) -> Generated:
    """An engine's answer without times."""
    return Generated(
        rid=rid,
        tokens=pack_i32(tokens),
        logprobs=pack_f32(logprobs),
        finish=finish,
        versions=versions,
        cached_tokens=0,
        queue_s=0.0,
        run_s=0.0,
    )


def engine_stats(*, generated: int, prefilled: int, steps: int) -> EngineStats:
    """The counters of an engine with four running turns that fill a quarter of its KV cache."""
    return EngineStats(
        version=0,
        running=4,
        waiting=0,
        kv_use=0.25,
        generated_tokens=generated,
        prefill_tokens=prefilled,
        cached_tokens=0,
        preemptions=0,
        steps=steps,
        busy_s=0.1,
    )


class Plant:
    """Engines answer each turn with [7, 8, STOP]; an episode ends after ``turns`` turns with reward 1 for even
    samples."""

    def __init__(
        self,
        eta: int = 1,
        steps: int = 4,
        turns: int = 2,
        engines: int = 2,
        max_model_len: int = 1000,
        in_order: bool = False,
        policy: Policy | None = None,
        prompts: int = 2,
        group: int = 2,
    ) -> None:
        self.now, self.cut = 1000.0, max_model_len < 100
        self.broken: Callable[[Any], str | None] = lambda message: None
        """What an environment answers a message with instead: the error, if any."""
        self.engines: dict[str, int] = {}
        self.inbox: list[tuple[str, Generate]] = []
        self.aborts: list[tuple[str, Abort]] = []
        self.host: list[Any] = []
        self.batches: list[Batch] = []
        self.sent: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[dict[str, Any]] = []
        self.ended: list[Trajectory] = []
        self.decisions: list[dict[str, Any]] = []
        self.turns, self.version, self.tool = turns, 0, 5
        self.steps_of: dict[str, int] = {}
        self.finished: list[str] = []
        config = configured(
            run={"steps": steps},
            task={"name": "toy"},
            algorithm={
                "prompts_per_step": prompts,
                "group_size": group,
                "eta": eta,
                "batch_order": "data" if in_order else "finish",
            },
            rollout={"max_model_len": max_model_len, "max_inflight": 4},
        )
        self.leader = RolloutLeader(
            config=config,
            rank=5,
            policy=policy or Emptiest(),
            send=self.send,
            train_leader=TRAIN_LEADER,
            to_host=lambda _, m: self.host.append(m),
            ended=self.on_ended,
            routed=lambda routed: self.decisions.append(decision_line(routed)),
            log=lambda kind, **fields: self.events.append((kind, fields)),
            clock=lambda: self.now,
        )
        self.start_engines = engines

    def start(
        self,
        low: int = 0,
        extra: tuple[int, ...] = (),
        step: int = 0,
        recovered: Mapping[int, list[Trajectory]] | None = None,
    ) -> None:
        self.version = step
        self.leader.on_position(step, low, extra, recovered)
        self.leader.on_host(0, HostReady("toy"))
        for i in range(self.start_engines):
            self.up(f"e{i}", rank=3 + i)

    def on_ended(self, ended: TrajectoryEnd) -> None:
        self.lines.append(trace_line(ended))
        self.ended.append(ended.trajectory)

    def up(self, name: str, rank: int, tp: int = 1) -> None:
        self.engines[name] = self.version
        self.leader.on_engine_up(
            EngineUp(
                rank, name, EngineReady(version=self.version, tp=tp, max_model_len=1000, kv_tokens=10000, start_s=0.0)
            )
        )

    def down(self, name: str) -> None:
        del self.engines[name]
        self.inbox = [(engine, request) for engine, request in self.inbox if engine != name]
        self.leader.on_engine_down(name, "killed")

    def send(self, rank: int, message: Any) -> None:
        assert wire.mesh.decode(wire.mesh.encode(message)) == message, "it survives the way there"
        self.sent.append(message)
        if isinstance(message, Turns):
            self.inbox += [(engine, item) for engine, item in message.items if isinstance(item, Generate)]
            self.aborts += [(engine, item) for engine, item in message.items if isinstance(item, Abort)]
        elif isinstance(message, Batch):
            assert rank == TRAIN_LEADER
            self.batches.append(message)

    async def settle(self) -> None:
        for _ in range(5):
            self.environment()
            await asyncio.sleep(0)

    async def rebalance(self) -> None:
        """Let the dispatcher ask for moves now."""
        self.leader._turns._queue._rebalance_at = 0.0
        self.leader.report()
        await self.settle()

    def serve(self, count: int = 1000, pick: random.Random | None = None) -> None:
        for _ in range(min(count, len(self.inbox))):
            engine, request = self.inbox.pop(pick.randrange(len(self.inbox)) if pick else 0)
            tokens, logprobs = [7, 8, STOP][: request.max_tokens], [-1.0, -2.0, -3.0][: request.max_tokens]
            versions = ((self.engines[engine], len(tokens)),)
            finish = "stop" if STOP in tokens else "length"
            answer = generated(request.rid, tokens, logprobs, finish=finish, versions=versions)
            self.leader.on_turns_done(((engine, answer),))

    def environment(self) -> None:
        pending, self.host = self.host, []
        for message in pending:
            error = self.broken(message)
            if error is not None:
                self.leader.on_host(0, EpisodeFailed(message.episode, error))
                continue
            match message:
                case OpenEpisode(episode=episode, index=index):
                    self.steps_of[episode] = 0
                    self.leader.on_host(
                        0,
                        EpisodeOpened(
                            episode=episode,
                            prompt_id=f"p{index}",
                            tokens=pack_i32([1, 2, index]),
                            max_tokens=4,
                            stop_ids=(STOP,),
                        ),
                    )
                case StepEpisode(episode=episode, tokens=tokens):
                    assert unpack_i32(tokens)[-1] == STOP or self.cut
                    self.steps_of[episode] += 1
                    done = self.steps_of[episode] >= self.turns
                    reward = float(int(episode.split(".")[1]) % 2 == 0)
                    signal = Signal("tool", "ok", 1, 0.01, exit_code=1, passed=None if done else 3)
                    answer, info = (b"", {"solved": reward}) if done else (pack_i32([self.tool]), {})
                    self.leader.on_host(
                        0,
                        EpisodeStepped(
                            episode=episode, tokens=answer, signal=signal, done=done, reward=reward, info=info
                        ),
                    )
                    if done:
                        self.finished.append(episode)
                case CloseEpisode():
                    pass

    async def run(self, until: Callable[[], object], pick: random.Random | None = None) -> None:
        for _ in range(5000):
            self.environment()
            await asyncio.sleep(0)
            if until():
                return
            self.serve(2 if pick else 1000, pick)
        raise AssertionError("never happened")

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

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]

    def commit(self, batch: Batch) -> None:
        self.version = batch.step
        self.leader.on_committed(tuple(group.index for group in batch.groups))
        for engine in self.engines:
            self.engines[engine] = self.version
            self.leader.on_engine_version(engine, self.version)


def test_a_synchronous_run_trains_every_prompt_once_with_staleness_zero() -> None:
    async def main() -> None:
        plant = Plant(eta=0, steps=3)
        plant.start()
        for step in (1, 2, 3):
            await plant.run(lambda step=step: len(plant.batches) == step)
            assert plant.batches[-1].stats["staleness_max"] == 0.0
            plant.commit(plant.batches[-1])
        assert [sorted(g.index for g in b.groups) for b in plant.batches] == [[0, 1], [2, 3], [4, 5]]
        await asyncio.sleep(0)
        assert not plant.inbox, "nothing is sampled beyond the last step"

    asyncio.run(main())


def test_samples_carry_masks_logprobs_and_normalised_advantages() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        await plant.run(lambda: plant.batches)
        group = plant.batches[0].groups[0]
        good, bad = group.samples
        assert unpack_i32(good.tokens) == [1, 2, group.index, 7, 8, STOP, 5, 7, 8, STOP]
        assert list(good.loss_mask) == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
        assert good.logprobs == pack_f32([0, 0, 0, -1, -2, -3, 0, -1, -2, -3])
        assert good.advantage == -bad.advantage > 0.99
        line = next(line for line in plant.lines if line["index"] == group.index and line["sample"] == 0)
        assert line["prompt_tokens"] == 3
        assert [(t["new_tokens"], t["gen_tokens"], t["tool"], t["outcome"]) for t in line["turns"]] == [
            (0, 3, "tool", "ok"),
            (1, 3, "tool", "ok"),
        ]
        assert [(t["exit_code"], t.get("passed", "absent"), "failed" in t) for t in line["turns"]] == [
            (1, 3, False),
            (1, "absent", False),
        ]
        assert line["started_at"] <= line["finished_at"]

    asyncio.run(main())


def test_asynchronous_staleness_never_exceeds_eta_under_random_order() -> None:
    async def main() -> None:
        for seed in range(8):
            pick = random.Random(seed)
            eta, in_order = seed % 3, seed >= 4
            plant = Plant(eta=eta, steps=8, in_order=in_order)
            plant.start()
            trained: list[int] = []
            for position in range(8):
                batches = plant.batches
                await plant.run(lambda batches=batches, position=position: len(batches) > position, pick)
                batch = batches[position]
                assert batch.stats["staleness_max"] <= eta
                assert len(plant.leader._order.groups) <= (eta + 1) * 2
                trained += [group.index for group in batch.groups]
                plant.commit(batch)
            assert sorted(trained) == list(range(16))
            assert not in_order or [sorted(trained[i : i + 2]) for i in range(0, 16, 2)] == [
                [i, i + 1] for i in range(0, 16, 2)
            ]

    asyncio.run(main())


def test_a_killed_engine_loses_no_trajectory() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        await plant.run(lambda: plant.inbox)
        held = [request for engine, request in plant.inbox if engine == "e0"]
        assert held
        plant.down("e0")
        await plant.run(lambda: plant.batches)
        assert plant.leader.resubmitted == len(held) == sum(kind == "resubmitted" for kind, _ in plant.events)
        assert sorted(plant.finished) == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"], (
            "finished once each, from where they were"
        )

    asyncio.run(main())


def test_all_engines_gone_waits_and_goes_on() -> None:
    async def main() -> None:
        plant = Plant(eta=0, engines=1)
        plant.start()
        await plant.run(lambda: plant.inbox)
        plant.down("e0")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not plant.inbox
        assert plant.leader.report().paused == "No engine accepts turns."
        plant.up("e9", rank=3)
        plant.leader.on_host_down(0, "killed")
        assert plant.leader.report().paused == "Environment host 0 is not ready."
        plant.leader.on_host(0, HostReady("toy"))
        assert plant.leader.report().paused == ""
        await plant.run(lambda: plant.batches)

    asyncio.run(main())


def kill_host(plant: Plant) -> None:
    plant.host.clear()
    plant.leader.on_host_down(0, "killed")
    plant.leader.on_host(0, HostReady("toy"))


def test_episodes_of_a_lost_host_are_replayed_in_the_next_one() -> None:
    async def main() -> None:
        plain, plant = Plant(eta=0, turns=3), Plant(eta=0, turns=3)
        plain.start()
        await plain.run(lambda: plain.batches)
        plant.start()
        await plant.run(lambda: plant.inbox)
        plant.serve(3)
        await plant.settle()
        plant.serve(2)
        # One runs its first turn, one its second, and two are at their environment; one answer comes during a replay.
        kill_host(plant)
        plant.serve(1)
        await plant.run(lambda: plant.batches)
        assert sorted(plant.finished) == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"], "none is sampled again"
        assert plant.batches[0].groups == plain.batches[0].groups
        assert [(line["index"], line["sample"], len(line["turns"])) for line in sorted(plant.lines, key=str)] == [
            (line["index"], line["sample"], len(line["turns"])) for line in sorted(plain.lines, key=str)
        ]
        assert len(plant.decisions) == len(plain.decisions) == 12, "no turn is generated twice"
        assert not plant.events

    asyncio.run(main())


def test_an_environment_that_answers_differently_has_its_trajectory_sampled_again() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=3)
        plant.start()
        await plant.run(lambda: plant.inbox)
        plant.serve()
        await plant.settle()
        plant.tool = 6
        kill_host(plant)
        await plant.run(lambda: plant.batches)
        assert sorted(plant.finished) == ["0.0.1", "0.1.1", "1.0.1", "1.1.1"]
        contexts = [list(unpack_i32(sample.tokens)) for group in plant.batches[0].groups for sample in group.samples]
        assert all(5 not in context[3:] for context in contexts)
        assert [fields["reason"] for kind, fields in plant.events] == [
            "its environment did not answer as it had when its turns were replayed"
        ] * 4

    asyncio.run(main())


def test_a_turn_that_ends_its_host_is_sent_twice_and_no_more() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=3)
        plant.start()
        await plant.run(lambda: plant.inbox)
        deaths = 0
        for _ in range(200):
            if any(isinstance(message, StepEpisode) and message.episode == "1.1.0" for message in plant.host):
                deaths += 1
                kill_host(plant)
            plant.environment()
            plant.serve(1)
            await asyncio.sleep(0)
            if plant.batches:
                break
        assert deaths == 2
        assert "1.1.1" in plant.finished
        assert [len(g.samples) for g in plant.batches[0].groups] == [2, 2]

    asyncio.run(main())


def test_a_host_that_dies_before_it_opened_anything_costs_nothing() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        await asyncio.sleep(0)
        kill_host(plant)
        await plant.run(lambda: plant.batches)
        assert [len(g.samples) for g in plant.batches[0].groups] == [2, 2]
        assert len(plant.decisions) == 8

    asyncio.run(main())


def opening(index: int, *samples: int) -> Callable[[Any], str | None]:
    """Samples of a prompt that cannot be opened."""
    return lambda message: (
        "KeyError: 'x'"
        if isinstance(message, OpenEpisode) and message.index == index and message.sample in samples
        else None
    )


def test_a_trajectory_its_task_cannot_run_leaves_its_group_after_three_tries_with_time_between_them() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.broken = opening(0, 1)
        plant.start()
        began = plant.now
        await plant.pass_time(20, lambda: plant.batches)
        assert [len(g.samples) for g in plant.batches[0].groups] == [1, 2]
        assert [(e["trajectory"], e["given_up"], e["failure"]) for e in plant.kinds("trajectory_failed")] == [
            ("0.1.0", False, "raised"),
            ("0.1.1", False, "raised"),
            ("0.1.2", True, "raised"),
        ]
        assert plant.now - began >= 3.0, "1 s, then 2 s"
        stats = plant.batches[0].stats
        assert tuple(stats[name] for name in ("failed", "retried", "trajectories")) == (1, 2, 3)
        assert plant.leader.report().failures == (("raised", 3, "KeyError: 'x'"),)
        assert not plant.kinds("admission_paused"), "one prompt is no outage"

    asyncio.run(main())


def test_a_prompt_that_fails_as_a_whole_gives_its_place_to_the_next_and_is_not_sampled_again() -> None:
    async def main() -> None:
        for eta, in_order in ((0, True), (1, False), (1, True)):
            plant = Plant(eta=eta, steps=4, in_order=in_order)
            plant.broken = opening(3, 0, 1)
            plant.start()
            for step in range(1, 5):
                await plant.pass_time(60, lambda plant=plant, step=step: len(plant.batches) >= step)
                batch = plant.batches[step - 1]
                assert len(batch.groups) == 2
                assert all(group.samples for group in batch.groups)
                plant.commit(batch)
            assert sorted(g.index for b in plant.batches for g in b.groups) == [0, 1, 2, 4, 5, 6, 7, 8]
            assert [index for b in plant.batches for index in b.given_up] == [3]
            assert max(b.stats["staleness_max"] for b in plant.batches) <= eta
            assert [e["index"] for e in plant.kinds("prompt_given_up")] == [3]
            order = DataOrder()
            for batch in plant.batches[:2]:
                order.trained([*(g.index for g in batch.groups), *batch.given_up])
            resumed = Plant(eta=eta, steps=4, in_order=in_order)
            resumed.broken = plant.broken
            resumed.start(order.low, tuple(order.extra), 2)
            for step in (3, 4):
                await resumed.pass_time(60, lambda resumed=resumed, step=step: len(resumed.batches) >= step - 2)
                resumed.commit(resumed.batches[step - 3])
            await resumed.pass_time(5)
            trained = [g.index for b in (*plant.batches[:2], *resumed.batches) for g in b.groups]
            assert len(set(trained)) == len(trained) == 8
            assert (3 in order.extra or order.low > 3) == (not resumed.kinds("trajectory_failed"))

    asyncio.run(main())


def test_a_judge_that_is_down_for_15_s_costs_no_trajectory() -> None:
    async def main() -> None:
        plant = Plant(eta=1, steps=20, prompts=4, group=4)
        plant.start()
        await plant.pass_time(60, lambda: plant.batches)
        down = plant.now
        plant.broken = lambda m: (
            "ConnectionError" if isinstance(m, StepEpisode) and down <= plant.now < down + 15.0 else None
        )
        for step in range(1, 21):
            await plant.pass_time(120, lambda step=step: len(plant.batches) >= step)
            plant.commit(plant.batches[step - 1])
        assert all(len(group.samples) == 4 for batch in plant.batches for group in batch.groups)
        assert plant.now - down < 60.0
        paused, resumed = plant.kinds("admission_paused"), plant.kinds("admission_resumed")
        assert len(paused) == len(resumed) == 1
        assert "the most frequent error (raised" in paused[0]["reason"]
        assert paused[0]["reason"].count("ConnectionError") == 1
        assert plant.leader.report().paused == ""

    asyncio.run(main())


def test_an_environment_that_always_raises_ends_the_run_with_its_error_and_trains_nothing() -> None:
    async def main() -> None:
        plant = Plant(eta=1, steps=20, prompts=4, group=4)
        plant.broken = lambda m: "KeyError: 'x'" if isinstance(m, StepEpisode) else None
        plant.start()
        began = plant.now
        await plant.pass_time(2000, lambda: any(isinstance(m, wire.Fatal) for m in plant.sent))
        (fatal,) = [m for m in plant.sent if isinstance(m, wire.Fatal)]
        assert fatal.rank == 5
        assert "KeyError: 'x'" in fatal.reason
        assert "max_failed_share = 0.2" in fatal.reason
        assert 600.0 <= plant.now - began < 700.0
        assert plant.batches == []
        assert plant.leader.report().paused
        tried = [message for _, message in plant.events if _ == "trajectory_failed"]
        assert len(tried) < 60, "a probe a minute, and no flood of events"
        await plant.pass_time(300)
        assert len([m for m in plant.sent if isinstance(m, wire.Fatal)]) == 1
        assert not plant.inbox, "nothing is sampled any more"

    asyncio.run(main())


def test_without_an_engine_the_patience_of_a_pause_does_not_run_out() -> None:
    async def main() -> None:
        plant = Plant(eta=1, steps=20, prompts=4, group=4)
        plant.broken = lambda m: "KeyError: 'x'" if isinstance(m, StepEpisode) else None
        plant.start()
        await plant.pass_time(30, lambda: plant.kinds("admission_paused"))
        for name in ("e0", "e1"):
            plant.down(name)
        await plant.pass_time(2000)
        assert not [m for m in plant.sent if isinstance(m, wire.Fatal)]
        plant.up("e0", rank=3)
        await plant.pass_time(500)
        assert not [m for m in plant.sent if isinstance(m, wire.Fatal)]
        await plant.pass_time(300)
        assert [m for m in plant.sent if isinstance(m, wire.Fatal)]

    asyncio.run(main())


def test_two_prompts_that_fail_at_once_end_no_run_whose_other_trajectories_take_long() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=50, prompts=64, group=4)
        plant.broken = lambda m: "KeyError: 'x'" if isinstance(m, OpenEpisode) and m.index in (62, 63) else None
        plant.start()
        for _ in range(70):
            plant.leader.report()
            await plant.settle()
            plant.serve()
            plant.now += 60.0
            if plant.batches:
                break
        assert not [m for m in plant.sent if isinstance(m, wire.Fatal)]
        assert len(plant.kinds("admission_paused")) == len(plant.kinds("admission_resumed")) <= 2
        assert len(plant.kinds("prompt_given_up")) == 2

    asyncio.run(main())


def test_an_aborted_turn_goes_on_from_its_partial_output() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=1, engines=1)
        plant.start()
        await plant.run(lambda: plant.inbox and not plant.host)
        engine, request = plant.inbox.pop(0)
        plant.leader.on_turns_done(((engine, generated(request.rid, [7], [-1.0], finish="abort", versions=((0, 1),))),))
        await asyncio.sleep(0)
        again = next(r for _, r in plant.inbox if r.rid.split(":")[0] == request.rid.split(":")[0])
        assert unpack_i32(again.prompt) == [*unpack_i32(request.prompt), 7]
        assert again.max_tokens == request.max_tokens - 1

    asyncio.run(main())


def test_a_running_turn_is_moved_and_its_record_is_complete() -> None:
    async def main() -> None:
        policy = Moving(after=2)
        plant = Plant(eta=0, turns=1, policy=policy)
        plant.start()
        await plant.run(lambda: len(plant.inbox) == 4)
        await plant.settle()
        assert not plant.aborts, "nothing is known of its progress yet"
        plant.leader.on_engine_load("e0", engine_stats(generated=8, prefilled=12, steps=2))
        await plant.rebalance()
        ((engine, abort),) = plant.aborts
        request = next(r for _, r in plant.inbox if r.rid == abort.rid)
        assert engine == "e0"
        episode = policy.moved[0].trajectory
        assert request.rid.startswith(f"{episode}:")
        assert [(kind, fields["engine"], fields["to"]) for kind, fields in plant.events] == [
            ("turn_interrupted", "e0", "e1")
        ]
        plant.inbox.remove(("e0", request))
        plant.leader.on_turns_done((("e0", generated(request.rid, [7], [-1.0], finish="abort", versions=((0, 1),))),))
        await plant.settle()
        ((_, again),) = [(e, r) for e, r in plant.inbox if e == "e1"]
        assert unpack_i32(again.prompt) == [*unpack_i32(request.prompt), 7]
        assert again.max_tokens == request.max_tokens - 1
        plant.inbox = [item for item in plant.inbox if item[1] is not again]
        rest = generated(again.rid, [8, STOP], [-2.0, -3.0], finish="stop", versions=((0, 1), (1, 1)))
        plant.leader.on_turns_done((("e1", rest),))
        await plant.run(lambda: plant.batches)
        index, sample = (int(part) for part in episode.split(".")[:2])
        group = next(g for g in plant.batches[0].groups if g.index == index)
        assert unpack_i32(group.samples[sample].tokens) == [1, 2, index, 7, 8, STOP]
        assert group.samples[sample].logprobs == pack_f32([0, 0, 0, -1, -2, -3])
        assert list(group.samples[sample].loss_mask) == [0, 0, 0, 1, 1, 1]
        line = next(line for line in plant.lines if (line["index"], line["sample"]) == (index, sample))
        assert (line["versions"], line["turns"][0]["gen_tokens"]) == ([(0, 2), (1, 1)], 3)
        first, second = [d for d in plant.decisions if d["trajectory"] == episode]
        assert (first["engine"], second["engine"], second["from"], second["turn"], second["reason"]) == (
            "e0",
            "e1",
            "e0",
            0,
            "moved",
        )
        assert plant.leader.resubmitted == 0, "nothing went wrong"

    asyncio.run(main())


def test_a_turn_that_ends_before_its_interruption_arrives_is_taken_as_it_is() -> None:
    async def main() -> None:
        plant = Plant(eta=0, policy=Moving(after=0))
        plant.start()
        await plant.run(lambda: len(plant.inbox) == 4)
        await plant.rebalance()
        await plant.run(lambda: plant.batches)
        assert len(plant.aborts) == 1
        assert sorted(plant.finished) == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"]
        assert all(len(s.tokens) == 10 * 4 for g in plant.batches[0].groups for s in g.samples)

    asyncio.run(main())


def test_draining_answers_once_the_last_turn_is_back() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        await plant.run(lambda: plant.inbox)
        before = len(plant.sent)
        plant.leader.on_drain(3)
        assert not any(isinstance(m, TurnsDrained) for m in plant.sent)
        plant.serve()
        assert [m.rank for m in plant.sent if isinstance(m, TurnsDrained)] == [3]
        await plant.run(lambda: plant.batches)
        assert {engine for m in plant.sent[before:] if isinstance(m, Turns) for engine, _ in m.items} == {"e1"}

    asyncio.run(main())


def test_a_drained_node_whose_last_turns_are_dropped_is_reported_and_generates_for_nobody() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=3, engines=1)
        plant.start()
        await plant.run(lambda: len(plant.inbox) == 4)
        plant.serve()
        await plant.settle()
        assert len(plant.inbox) == 4
        plant.leader.on_drain(3)
        plant.tool = 6
        kill_host(plant)
        await plant.settle()
        assert [m.rank for m in plant.sent if isinstance(m, TurnsDrained)] == [3], (
            "replays failed, and nothing of the node counts"
        )
        assert {(engine, abort.rid) for engine, abort in plant.aborts} == {
            (engine, request.rid) for engine, request in plant.inbox
        }
        plant.serve()
        assert len([m for m in plant.sent if isinstance(m, TurnsDrained)]) == 1

    asyncio.run(main())


def test_a_context_that_would_outgrow_the_engines_ends_by_length() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=50, max_model_len=20)
        plant.start()
        await plant.run(lambda: plant.batches)
        assert plant.batches[0].stats["truncated"] == 1.0
        assert plant.batches[0].stats["reward"] == 0.0
        assert all(len(unpack_i32(s.tokens)) <= 20 for g in plant.batches[0].groups for s in g.samples)
        assert [line["clipped"] for line in plant.lines] == [1] * 4

    asyncio.run(main())


def test_an_answer_too_long_for_the_context_is_clipped_and_its_tokens_counted() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=3, max_model_len=40)
        plant.start()
        await plant.run(lambda: plant.inbox)
        plant.serve(1)
        (step,) = [m for m in plant.host if isinstance(m, StepEpisode)]
        plant.host.remove(step)
        plant.leader.on_host(
            0,
            EpisodeStepped(
                episode=step.episode, tokens=pack_i32([5] * 1_600_000), signal=None, done=False, reward=0.0, info={}
            ),
        )
        await plant.run(lambda: plant.batches)
        (line,) = [line for line in plant.lines if line["clipped"]]
        assert (line["clipped"], line["info"], line["reward"], line["turns"][-1]["new_tokens"]) == (
            1_600_000 - 34,
            {"truncated": 1.0},
            0.0,
            34,
        )
        assert plant.batches[0].stats["truncated"] == 0.25
        assert max(len(s.tokens) for g in plant.batches[0].groups for s in g.samples) == 4 * 40

    asyncio.run(main())


def test_no_context_ever_exceeds_the_longest_one_whatever_the_environment_answers() -> None:
    async def main() -> None:
        clipped = 0
        for seed in range(20):
            pick = random.Random(seed)
            longest = pick.randrange(5, 60)
            plant = Plant(eta=0, steps=2, max_model_len=longest)
            plant.start()
            for _ in range(120):
                pending, plant.host = plant.host, []
                for message in pending:
                    if isinstance(message, OpenEpisode):
                        prompt = [1] * pick.choice(
                            (1, 2, longest - 1, longest, longest + 9) if message.sample else (1, 2)
                        )
                        plant.leader.on_host(
                            0,
                            EpisodeOpened(
                                episode=message.episode,
                                prompt_id=f"p{message.index}",
                                tokens=pack_i32(prompt),
                                max_tokens=pick.randrange(1, 9),
                                stop_ids=(STOP,),
                            ),
                        )
                    elif isinstance(message, StepEpisode):
                        answer, done = [5] * pick.choice((0, 1, 3, longest, 1000)), pick.random() < 0.2
                        plant.leader.on_host(
                            0,
                            EpisodeStepped(
                                episode=message.episode,
                                tokens=pack_i32(answer),
                                signal=None,
                                done=done,
                                reward=1.0,
                                info={},
                            ),
                        )
                await asyncio.sleep(0)
                inbox, plant.inbox = plant.inbox, []
                for engine, request in inbox:
                    context = len(unpack_i32(request.prompt))
                    assert 0 < request.max_tokens <= longest - context
                    tokens = pick.randrange(1, request.max_tokens + 1)
                    finish = pick.choice(("stop", "length", "abort"))
                    answered = generated(
                        request.rid, [7] * tokens, [-1.0] * tokens, finish=finish, versions=((0, tokens),)
                    )
                    plant.leader.on_turns_done(((engine, answered),))
                plant.now += 1.0
                plant.leader.report()
                assert all(
                    len(t.context) <= longest for t in (*plant.leader._environments.episodes.values(), *plant.ended)
                )
            assert plant.batches
            clipped += sum(line["clipped"] > 0 for line in plant.lines)
            assert {e["failure"] for e in plant.kinds("trajectory_failed")} <= {"answer"}
            assert all("rollout.max_model_len = " in e["error"] for e in plant.kinds("trajectory_failed"))
        assert clipped > 10

    asyncio.run(main())


def test_a_resumed_run_skips_what_is_trained() -> None:
    async def main() -> None:
        plant = Plant(eta=0, steps=4)
        plant.start(low=2, extra=(3, 4), step=2)
        await plant.run(lambda: plant.batches)
        assert plant.batches[0].step == 3
        assert sorted(g.index for g in plant.batches[0].groups) == [2, 5]

    asyncio.run(main())


def test_a_new_start_goes_on_with_what_is_there_and_samples_only_the_rest() -> None:
    """All ranks restart many times, from the last step or the one before.

    Recovered trajectories go through their records, as in the recovery log.
    """

    async def main() -> None:
        total = Counter[str]()
        for seed in range(12):
            pick = random.Random(seed)
            eta, in_order, steps = seed % 3, seed % 2 == 1, 9
            starts, found, batches = [Start(0, "same")], list[tuple[int, SavedTrajectory]](), dict[int, Batch]()
            step = 0
            while step < steps:
                trained = DataOrder()
                for at in range(1, step + 1):
                    trained.trained(group.index for group in batches[at].groups)
                position = TrainedPrompts(step, trained.low, frozenset(trained.extra))
                number = len(starts) - 1
                recovered = gather(
                    (record, drop_reason(record, start, starts, position=position, eta=eta)) for start, record in found
                )
                begun_before = {
                    t: t.context.tobytes()
                    for members in recovered.groups.values()
                    for t in members
                    if t.place != "done"
                }
                plant = Plant(eta=eta, steps=steps, in_order=in_order)
                plant.start(trained.low, tuple(trained.extra), step, recovered.groups)
                begun, last = step, min(steps, step + pick.randrange(1, 4))
                while step < last:
                    await plant.run(lambda plant=plant, count=step - begun: len(plant.batches) > count, pick)
                    batch = plant.batches[step - begun]
                    assert batch.step == step + 1
                    assert batch.stats["staleness_max"] <= eta
                    assert batch.stats["trajectories"] == 4
                    batches[batch.step] = batch
                    plant.commit(batch)
                    step += 1
                    await plant.settle()
                    plant.serve(pick.randrange(20), pick)
                    await plant.settle()
                groups = {g.index: {s.uid: s for s in g.samples} for batch in plant.batches for g in batch.groups}
                for index, members in recovered.groups.items():
                    for member in members:
                        if member in begun_before:
                            total["gone on with"] += index in groups
                            if index in groups:
                                assert groups[index][f"{index}.{member.sample}"].tokens.startswith(begun_before[member])
                            continue
                        assert f"{index}.{member.sample}.0" not in plant.steps_of, "it is not sampled again"
                        if index in groups:
                            assert groups[index][f"{index}.{member.sample}"].tokens == member.context.tobytes()
                        total["recovered"] += 1
                assert not [kind for kind, _ in plant.events if kind == "experience_refused"]
                assert len({(line["index"], line["sample"]) for line in plant.lines}) == len(plant.lines)
                # A start may end with or without notice.
                unfinished = plant.leader.unfinished() if pick.random() < 0.7 else []
                found += [(number, SavedTrajectory.of(trajectory)) for trajectory in (*plant.ended, *unfinished)]
                total["sampled"] += len(plant.ended)
                step = max(begun, step - pick.randrange(2)) if step < steps else step
                starts.append(Start(step, "same"))
            assert sorted(group.index for batch in batches.values() for group in batch.groups) == list(range(2 * steps))
        assert total["recovered"] > 100
        assert total["gone on with"] > 20

    asyncio.run(main())


def test_a_batch_recovered_whole_needs_no_turn_and_waits_for_the_engines() -> None:
    async def main() -> None:
        first = Plant(eta=1)
        first.start()
        await first.run(lambda: len(first.ended) == 8)
        recovered: dict[int, list[Trajectory]] = {}
        for trajectory in first.ended:
            recovered.setdefault(trajectory.index, []).append(trajectory)
        plant = Plant(eta=1, engines=0)
        plant.start(recovered=recovered)
        await plant.settle()
        assert not plant.batches, "the trainers may not be there yet"
        plant.up("e0", rank=3)
        await plant.settle()
        assert [batch.step for batch in plant.batches] == [1, 2]
        assert [[g.index for g in batch.groups] for batch in plant.batches] == [[0, 1], [2, 3]]
        assert not plant.inbox
        assert plant.lines == [], "an earlier start has written them"
        plant.commit(plant.batches[0])
        await plant.run(lambda: plant.inbox)
        assert {unpack_i32(request.prompt)[2] for _, request in plant.inbox} == {4, 5}

    asyncio.run(main())


def test_what_comes_too_late_for_the_bound_is_sampled_again() -> None:
    async def main() -> None:
        first = Plant(eta=0)
        first.start()
        await first.run(lambda: len(first.ended) == 4)
        plant = Plant(eta=0)
        plant.start(step=1, recovered={0: first.ended[:2]})
        await plant.run(lambda: plant.batches)
        assert plant.batches[0].stats["staleness_max"] == 0.0
        assert plant.events == [("experience_refused", {"index": 0, "trajectories": 2})]

    asyncio.run(main())


def test_every_turn_sent_is_a_decision_with_reason_and_numbers() -> None:
    async def main() -> None:
        plant = Plant(eta=0, engines=1)
        plant.start()
        await plant.run(lambda: plant.inbox)
        first = plant.inbox[0][1]
        assert first.priority == 3
        await plant.run(lambda: plant.batches)
        assert [(d["trajectory"], d["turn"]) for d in plant.decisions[:4]] == [
            ("0.0.0", 0),
            ("0.1.0", 0),
            ("1.0.0", 0),
            ("1.1.0", 0),
        ]
        second = plant.decisions[1]
        assert (second["engine"], second["level"], second["priority"], second["from"]) == ("e0", 0, 3, "")
        assert (second["reason"], second["numbers"]) == ("3 tokens at e0", {"tokens": 3, "engine": "e0"})
        assert sorted((d["trajectory"], d["turn"]) for d in plant.decisions) == [
            (f"{i}.{s}.0", t) for i in (0, 1) for s in (0, 1) for t in (0, 1)
        ]
        assert all(d["from"] == "e0" and d["context_tokens"] == 7 for d in plant.decisions if d["turn"] == 1)

    asyncio.run(main())


def test_the_board_counts_what_is_in_flight_and_only_that() -> None:
    async def main() -> None:
        plant = Plant(eta=1, engines=0)
        plant.start()
        plant.up("low", rank=3, tp=1)
        plant.up("high", rank=4, tp=2)
        await plant.run(lambda: len(plant.inbox) == 8)
        assert plant.leader.report().buckets == ((1, 1, 4, 4, 0.0), (2, 1, 4, 4, 0.0))
        plant.leader.on_engine_load("high", engine_stats(generated=0, prefilled=0, steps=1))
        plant.leader.on_host_down(0, "killed")
        assert plant.leader.report().buckets == ((1, 1, 4, 4, 0.0), (2, 1, 4, 4, 0.25)), (
            "turns go on while environments are replayed"
        )
        plant.serve()
        plant.leader.on_host(0, HostReady("toy"))
        await plant.run(lambda: len(plant.inbox) == 8)
        plant.down("high")
        assert plant.leader.report().buckets == ((1, 1, 4, 4, 0.0),)
        assert (plant.leader.report().waiting_turns, plant.leader.report().inflight) == (4, 4)
        await plant.run(lambda: len(plant.batches) == 2)
        assert plant.leader.report().buckets == ((1, 1, 0, 0, 0.0),)

    asyncio.run(main())


def test_an_engine_that_comes_up_again_unannounced_loses_no_turn() -> None:
    async def main() -> None:
        plant = Plant(eta=0, engines=1)
        plant.start()
        await plant.run(lambda: plant.inbox)
        held = len(plant.inbox)
        plant.inbox.clear()
        plant.up("e0", rank=3)
        await plant.run(lambda: plant.batches)
        assert plant.leader.resubmitted == held

    asyncio.run(main())


def test_an_engine_behind_in_weights_gets_no_turns_until_it_caught_up() -> None:
    async def main() -> None:
        plant = Plant(eta=0, steps=2)
        plant.start()
        await plant.run(lambda: plant.batches)
        plant.commit(plant.batches[0])
        plant.version = 0
        plant.up("late", rank=9)
        await plant.run(lambda: plant.inbox)
        await plant.settle()
        assert "late" not in {engine for engine, _ in plant.inbox}
        plant.serve(1)
        plant.leader.on_engine_version("late", 1)
        plant.engines["late"] = 1
        await plant.settle()
        assert "late" in {engine for engine, _ in plant.inbox}

    asyncio.run(main())


def test_siblings_wait_for_their_probe_and_no_longer_when_it_is_given_up() -> None:
    async def main() -> None:
        policy = Probing()
        plant = Plant(eta=0, policy=policy)
        plant.start()
        await plant.run(lambda: plant.inbox)
        await plant.settle()
        assert [request.rid.split(":")[0] for _, request in plant.inbox] == ["0.0.0", "1.0.0"]
        assert plant.leader.report().waiting_turns == 2
        for attempt in range(3):
            plant.leader.on_host(0, EpisodeFailed(f"0.0.{attempt}", "KeyError"))
            plant.now += 4.0
            plant.leader.report()
            await plant.settle()
        assert "0.1.0" in {request.rid.split(":")[0] for _, request in plant.inbox}
        await plant.run(lambda: plant.batches)
        assert policy.given_up == ["0.0.0", "0.0.1", "0.0.2"]
        assert sorted(record.trajectory for record in policy.learned) == ["0.1.0", "1.0.0", "1.1.0"]
        learned = next(record for record in policy.learned if record.trajectory == "1.1.0")
        assert (learned.generated_tokens, learned.turns, learned.at_signal, learned.context_tokens) == (
            6,
            2,
            (3, 6),
            10,
        )

    asyncio.run(main())


def test_what_is_not_finite_is_a_failed_attempt_and_never_in_a_batch() -> None:
    async def main() -> None:
        nan, inf = float("nan"), float("inf")
        ends: list[tuple[float, dict[str, float], str]] = [
            (nan, {}, "The reward is nan."),
            (-inf, {}, "The reward is -inf."),
            (0.0, {"a": inf}, "info['a'] is inf."),
            (1e300, {}, ""),
        ]
        for reward, info, error in ends:
            plant = Plant(eta=0, turns=1)
            plant.start()
            await plant.run(lambda plant=plant: plant.inbox)
            plant.serve(1)
            (step,) = [m for m in plant.host if isinstance(m, StepEpisode)]
            plant.host.remove(step)
            plant.leader.on_host(
                0, EpisodeStepped(episode=step.episode, tokens=b"", signal=None, done=True, reward=reward, info=info)
            )
            assert any(isinstance(m, CloseEpisode) for m in plant.host)
            await plant.pass_time(10, lambda plant=plant: plant.batches)
            (failed,) = plant.kinds("trajectory_failed")
            assert (failed["failure"], failed["task"], failed["prompt"]) == ("reward", "toy", "p0")
            assert not error or failed["error"] == error
            assert plant.batches[0].stats["reward"] == 0.5
            assert "a" not in plant.batches[0].stats
            assert [len(group.samples) for group in plant.batches[0].groups] == [2, 2]

    asyncio.run(main())


def test_log_probabilities_that_are_not_finite_or_missing_and_empty_trajectories_are_failed_attempts() -> None:
    async def main() -> None:
        for tokens, logprobs, kind in (
            ([7, STOP], [-1.0, float("nan")], "logprobs"),
            ([7, STOP], [-1.0], "logprobs"),
            ([STOP], [float("-inf")], "logprobs"),
        ):
            plant = Plant(eta=0)
            plant.start()
            await plant.run(lambda plant=plant: plant.inbox)
            engine, request = plant.inbox.pop(0)
            answer = generated(request.rid, tokens, logprobs, finish="stop", versions=((0, len(tokens)),))
            plant.leader.on_turns_done(((engine, answer),))
            await plant.pass_time(10, lambda plant=plant: plant.batches)
            assert [(e["failure"], e["prompt"]) for e in plant.kinds("trajectory_failed")] == [(kind, "p0")]
            assert all(
                -9.0 < value <= 0.0
                for group in plant.batches[0].groups
                for s in group.samples
                for value in array("f", s.logprobs)
            )
        plant = Plant(eta=0, turns=1)
        plant.start()
        await plant.run(lambda: plant.inbox)
        engine, request = plant.inbox.pop(0)
        plant.leader.on_turns_done(((engine, generated(request.rid, [], [], finish="stop", versions=())),))
        (step,) = [m for m in plant.host if isinstance(m, StepEpisode)]
        plant.host.remove(step)
        plant.leader.on_host(
            0, EpisodeStepped(episode=step.episode, tokens=b"", signal=None, done=True, reward=1.0, info={})
        )
        await plant.pass_time(10, lambda: plant.batches)
        assert [e["error"] for e in plant.kinds("trajectory_failed")] == ["No token was generated."]
        assert all(any(s.loss_mask) for group in plant.batches[0].groups for s in group.samples)

    asyncio.run(main())


def test_a_step_that_never_ends_is_a_failed_attempt_and_its_episode_is_closed() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        plant.leader.on_host(0, HostReady("toy", 30.0))
        await plant.run(lambda: plant.inbox)
        plant.serve(1)
        (step,) = [m for m in plant.host if isinstance(m, StepEpisode)]
        plant.host.remove(step)
        plant.now += 39.0
        plant.leader.watch()
        assert not plant.kinds("trajectory_failed")
        plant.leader.discount(5.0)
        plant.now += 5.0
        plant.leader.watch()
        assert not plant.kinds("trajectory_failed"), "nobody could have read its answer"
        plant.now += 2.0
        plant.leader.watch()
        (failed,) = plant.kinds("trajectory_failed")
        assert (failed["failure"], failed["error"]) == (
            "timeout",
            "The environment has not answered for 41 s (limit 40 s).",
        )
        assert [m.episode for m in plant.host if isinstance(m, CloseEpisode)] == [step.episode]
        plant.leader.on_host(
            0, EpisodeStepped(episode=step.episode, tokens=b"", signal=None, done=True, reward=1.0, info={})
        )
        await plant.pass_time(10, lambda: plant.batches)
        assert plant.batches[0].stats["retried"] == 1.0
        assert [len(group.samples) for group in plant.batches[0].groups] == [2, 2]

    asyncio.run(main())


def test_a_host_that_starts_slowly_has_its_episodes_time_counted_from_when_it_is_up() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        plant.leader.on_host(0, HostReady("toy", 30.0))
        await plant.run(lambda: plant.inbox)
        plant.host.clear()
        plant.leader.on_host_down(0, "killed")
        plant.now += 500.0
        plant.leader.watch()
        plant.leader.on_host(0, HostReady("toy", 30.0))
        plant.now += 39.0
        plant.leader.watch()
        assert not plant.kinds("trajectory_failed")
        plant.now += 2.0
        plant.leader.watch()
        assert len(plant.kinds("trajectory_failed")) == 4

    asyncio.run(main())


def test_a_turn_past_half_of_its_deadline_is_logged_as_slow_once() -> None:
    async def main() -> None:
        plant = Plant(eta=0)
        plant.start()
        await plant.run(lambda: len(plant.inbox) == 4)
        plant.now += 10.0
        plant.serve(3)
        await plant.settle()
        plant.leader.watch()
        assert not plant.kinds("slow")
        plant.now += 45.0
        plant.leader.watch()
        plant.leader.watch()
        (slow,) = plant.kinds("slow")
        engine, _ = plant.inbox[0]
        assert slow == {"part": f"engine {engine}", "reason": "The turn has not ended after 55 s (limit 100 s)."}
        assert not plant.aborts
        plant.down(engine)
        plant.leader.watch()
        assert len(plant.kinds("slow")) == 1

    asyncio.run(main())


def test_a_turn_that_its_engine_never_ends_is_sent_again_with_what_it_has() -> None:
    async def main() -> None:
        for partial in (None, [], [7]):
            plant = Plant(eta=0, turns=1)
            plant.start()
            await plant.run(lambda plant=plant: len(plant.inbox) == 4)
            stuck = [item for item in plant.inbox if item[0] == "e0"]
            plant.inbox = [item for item in plant.inbox if item[0] == "e1"]
            plant.serve()
            await plant.settle()
            plant.now += 59.0
            plant.leader.watch()
            assert not plant.aborts
            plant.now += 842.0
            plant.leader.watch()
            assert [(engine, abort.rid) for engine, abort in plant.aborts] == [
                (engine, request.rid) for engine, request in stuck
            ]
            for engine, request in stuck if partial is not None else ():
                versions = ((0, 1),) if partial else ()
                answer = generated(
                    request.rid, partial or [], [-1.0 for _ in partial or []], finish="abort", versions=versions
                )
                plant.leader.on_turns_done(((engine, answer),))
            plant.leader.on_engine_load("e0", engine_stats(generated=8, prefilled=12, steps=2))
            plant.now += 61.0
            plant.leader.watch()
            await plant.settle()
            assert {tuple(unpack_i32(request.prompt)[3:]) for _, request in plant.inbox} == {tuple(partial or ())}
            assert [event["reason"] for event in plant.kinds("resubmitted")] == ["turn overdue"] * 2
            assert plant.leader.resubmitted == 2
            await plant.run(lambda plant=plant: plant.batches)
            assert [len(group.samples) for group in plant.batches[0].groups] == [2, 2]
            assert not plant.kinds("trajectory_failed")

    asyncio.run(main())


def test_a_turn_that_is_overdue_three_times_with_nothing_generated_is_a_failed_attempt() -> None:
    async def main() -> None:
        plant = Plant(eta=0, turns=1, engines=1, prompts=1, group=1)
        plant.start()
        for count in range(3):
            await plant.settle()
            assert len(plant.inbox) == count + 1
            plant.now += 901.0
            plant.leader.watch()
            plant.leader.watch()
            assert (len(plant.aborts), len(plant.kinds("resubmitted"))) == (count + 1, count)
            plant.leader.discount(30.0)
            plant.now += 89.0
            plant.leader.watch()
            assert len(plant.kinds("resubmitted")) == count
            plant.now += 2.0
            plant.leader.watch()
        (failed,) = plant.kinds("trajectory_failed")
        assert (failed["failure"], failed["given_up"]) == ("timeout", False)
        plant.serve()
        assert not plant.finished, "late answers find nothing"
        await plant.pass_time(20, lambda: plant.batches)
        assert [len(group.samples) for group in plant.batches[0].groups] == [1]

    asyncio.run(main())


def faults(plant: Plant, pick: random.Random) -> Callable[[Any], str | None]:
    """A share of all steps, one prompt always, and everything for some seconds."""
    share, bad, since, seconds = (
        pick.choice((0.0, 0.05, 0.1)),
        pick.randrange(20),
        plant.now + pick.randrange(30),
        pick.randrange(20),
    )

    def broken(message: Any) -> str | None:
        if isinstance(message, CloseEpisode):
            return None
        fails = int(message.episode.split(".")[0]) == bad or pick.random() < share or 0.0 <= plant.now - since < seconds
        return "Error" if fails else None

    return broken


def test_whatever_fails_every_step_has_its_groups_and_no_prompt_is_trained_and_given_up() -> None:
    async def main() -> None:
        given_up = dropped = 0
        for seed in range(24):
            pick = random.Random(seed)
            eta, in_order, steps, prompts = seed % 3, seed % 2 == 0, 6, pick.choice((1, 2, 4))
            plant = Plant(eta=eta, steps=steps, in_order=in_order, prompts=prompts, group=pick.choice((2, 4)))
            plant.broken = faults(plant, pick)
            plant.start()
            trained: list[int] = []
            for step in range(1, steps + 1):
                await plant.pass_time(590, lambda plant=plant, step=step: len(plant.batches) >= step)
                batch = plant.batches[step - 1]
                assert batch.step == step
                assert len(batch.groups) == prompts
                assert all(any(any(s.loss_mask) for s in group.samples) for group in batch.groups)
                assert batch.stats["staleness_max"] <= eta
                assert plant.leader._order.gate.outstanding <= (eta + 1) * prompts
                trained += [group.index for group in batch.groups]
                dropped += int(batch.stats["failed"])
                if pick.random() < 0.2:
                    plant.down("e0")
                    plant.up("e0", rank=3)
                if pick.random() < 0.2:
                    kill_host(plant)
                plant.commit(batch)
            gone = [index for batch in plant.batches for index in batch.given_up]
            assert len(set(trained) | set(gone)) == len(trained) + len(gone)
            assert not [m for m in plant.sent if isinstance(m, wire.Fatal)]
            given_up += len(gone)
            await plant.pass_time(80)
            assert plant.leader._order.gate.outstanding == 0
            assert not plant.leader._environments.episodes, "nothing is sampled for steps that do not come"
        assert given_up > 5
        assert dropped > 0

    asyncio.run(main())
