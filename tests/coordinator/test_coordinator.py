"""The coordinator without nodes: what it orders, what it writes, how a run ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import load_resolved, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.coordinator import records as records_module
from libra_hpc.coordinator.coordinator import Coordinator
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import Status, decode_status
from libra_hpc.protocol.agents import Fatal, Heartbeat, Log, MemberJoined, RolloutReport, StopAgent, TrainReport
from libra_hpc.protocol.engine_state import ObservedEngine, StateName, WeightUpdate
from libra_hpc.protocol.layout import Layout, ResumePoint, StopTraining
from libra_hpc.protocol.plan import PlanDecision
from libra_hpc.protocol.ranks_stop import RanksStop
from tests.policies.pool.layout_orders import FormGeneration, StartEngine, all_orders
from tests.protocol.step_reports import step_report
from tests.stage.node_parts import Outbox
from tests.stage.waiting import until


def first_beat(rank: int, component: str, life: int = 0) -> Heartbeat:
    return Heartbeat(rank, component, {}, -1, host="h", pid=1, life=life)


def trains(**report: Any) -> Heartbeat:
    """A heartbeat of the train leader."""
    return Heartbeat(1, "train", {}, -1, training=TrainReport(**report))


class Scene(Outbox):
    def __init__(
        self,
        tmp_path: Path,
        step: int = 0,
        config: RunConfig | None = None,
        components: tuple[str, ...] = ("planner", "train", "hybrid", "rollout"),
        begun: bool = True,
    ) -> None:
        """``begun``: all nodes are there."""
        super().__init__()
        self.run = RunDir(tmp_path)
        self.run.logs(1).mkdir(parents=True, exist_ok=True)
        self.known = Layout()
        self.context = self.context_of(tmp_path, 0, *components, config=config, start=ResumePoint(step, "", 0, ()))
        self.coordinator = Coordinator(self.context)
        if begun:
            self.hello()

    def deliver(self, *messages: tuple[int, Any]) -> None:
        for source, message in messages:
            self.coordinator.on_message(source, message)

    def engines(self, rank: int, kind: str, state: StateName = "ready", **fields: Any) -> None:
        """A node's engines of a kind are so, since the start that its row asks for."""
        one = ObservedEngine(kind, state, starts=self.coordinator.nodes.layout.rows[rank].starts, **fields)
        self.deliver((rank, Heartbeat(rank, "", {f"{kind}{rank}": one}, -1)))

    def drained(self, rank: int) -> None:
        """No turn of a node is in flight, as the rollout leader has it."""
        starts = self.coordinator.nodes.layout.rows[rank].starts
        self.deliver((3, Heartbeat(3, "rollout", {}, -1, drained={rank: starts})))

    @property
    def end(self) -> RanksStop:
        """Why the ranks ended, as the run's owner reads it."""
        return msgspec.json.decode(self.run.ended(1).read_bytes(), type=RanksStop)

    def hello(self) -> None:
        self.deliver(*((rank, first_beat(rank, name)) for rank, name in enumerate(self.context.layout.components)))

    def orders(self, kind: type) -> list[tuple[int, Any]]:
        return [(rank, message) for rank, message in self.sent if isinstance(message, kind)]

    def status(self) -> Status:
        """It is written now."""
        self.coordinator._write_status()
        assert self.coordinator._records._facts.flush(30.0)
        return decode_status(self.run.status.read_bytes())

    @property
    def stop(self) -> StopTraining | None:
        return self.coordinator.nodes.layout.stop

    def asked(self, kind: type) -> list[Any]:
        """The orders of a kind in the Layouts that node 1 got."""
        layouts = [layout for rank, layout in self.orders(Layout) if rank == 1]
        return [order for order in all_orders(layouts, self.known) if isinstance(order, kind)]

    def clear(self) -> None:
        """Begin to note what is sent."""
        self.known = self.layouts.layout
        self.sent.clear()


def test_engines_start_once_all_nodes_are_there_and_the_core_forms_the_first_generation(tmp_path: Path) -> None:
    scene = Scene(tmp_path, begun=False)
    scene.deliver((1, first_beat(1, "train")))
    assert not scene.asked(StartEngine)
    scene.hello()
    assert [(m.rank, m.kind) for m in scene.asked(StartEngine)] == [(1, "train"), (2, "rollout"), (3, "rollout")]
    scene.engines(1, "train")
    assert [m.ranks for m in scene.asked(FormGeneration)] == [(1,)]
    scene.deliver((1, trains(joined=(MemberJoined(1, 1, 0, 0, 0.1),))))
    scene.engines(3, "rollout")
    newest = scene.orders(Layout)[-1][1]
    assert [row.state for row in newest.rows.values()] == ["train", "starting", "rollout"]
    assert newest.receivers == (3,)
    assert [rank for rank, layout in scene.orders(Layout) if layout.number == newest.number] == [0, 1, 2, 3]


def run_until_over(scene: Scene, done: int = -1) -> None:
    """``done``: the last step that was trained, if training ends it."""
    if done >= 0:
        scene.deliver((1, trains(done=done)))
    asyncio.run(asyncio.wait_for(scene.coordinator.run(), 30))


def test_a_finished_run_leaves_its_end_and_stops_everyone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, config=validate({"run": {"steps": 1}}))
    scene.deliver(
        (1, step_report(1, reward=0.5, trained_tokens=10, loss_tokens=5, train_nodes=1, train_s=0.1)),
        (1, trains(done=1)),
    )
    run_until_over(scene)
    assert scene.end == RanksStop("completed", "step 1 is saved", 1)
    assert [rank for rank, _ in scene.orders(StopAgent)] == [1, 2, 3]
    assert [line["step"] for line in read_lines(scene.run.metrics)] == [1]
    assert decode_status(scene.run.status.read_bytes()).numbers["reward"] == 0.5


def test_a_report_behind_a_lost_one_is_taken_once_that_came(tmp_path: Path) -> None:
    scene = Scene(tmp_path, config=validate({"run": {"steps": 3}}))
    scene.deliver(*((1, step_report(step, step_s=1.0, train_nodes=1)) for step in (1, 3, 1, 2, 3)))
    run_until_over(scene, 3)
    steps = [line["step"] for line in read_lines(scene.run.metrics)]
    assert steps == [1, 2, 3], "what is recorded has no gap: the train leader drops all before it"


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[None]:
    """A run that ends with what is within."""
    async with asyncio.timeout(30.0):
        run = asyncio.create_task(scene.coordinator.run())
        yield
        await run


async def test_a_request_to_stop_saves_first_and_has_time_for_it(scene: Scene) -> None:
    async with running(scene):
        scene.run.stop.write_text("{}")
        await until(lambda: scene.stop)
        scene.deliver((1, trains(done=7)))
    assert scene.end == RanksStop("cancelled", "step 7 is saved", 7)


@pytest.mark.parametrize("how", ["evaluated", "cancelled", "hangs"])
async def test_a_run_ends_once_its_last_step_is_evaluated(tmp_path: Path, how: str) -> None:
    sections = {"run": {"steps": 1}, "task": {"eval": [{"name": "held"}]}}
    limits = {"floor_s": 0.1, "first_s": 0.1} if how == "hangs" else {}
    scene = Scene(tmp_path, config=validate(sections | {"deadlines": limits}))
    scene.deliver((3, RolloutReport(evaluates=True)), (1, trains(done=1)))
    assert scene.coordinator._ending.message == "step 1 is saved; it is evaluated now"
    async with running(scene):
        await asyncio.sleep(0.1)
        if how == "cancelled":
            scene.coordinator.on_signal("SIGTERM")
        if how == "evaluated":
            scene.deliver((3, RolloutReport()))
    sentence, _, given_up = scene.end.sentence.partition("; its evaluation was given up: nothing progressed for ")
    assert (scene.end.why, scene.end.step, sentence, bool(given_up)) == (
        "completed",
        1,
        "step 1 is saved",
        how == "hangs",
    )


def test_a_notice_saves_first_and_the_run_counts_as_cancelled(scene: Scene) -> None:
    ignored = {"rank": 2, "signal": "SIGTERM", "reason": "SIGTERM is for rank 0"}
    scene.deliver((2, Log("signal_ignored", 1.0, ignored)))
    for _ in range(2):  # the owner passes on what its group got as well
        scene.coordinator.on_signal("SIGTERM")
    scene.deliver((3, Log("signal_ignored", 2.0, {**ignored, "rank": 3})))
    assert scene.stop is not None
    run_until_over(scene, 7)
    assert scene.end == RanksStop("cancelled", "step 7 is saved", 7)
    said = [(event["kind"], event.get("rank")) for event in read_lines(scene.run.events) if "signal" in event]
    assert said == [("signal_ignored", 2), ("stop_requested", None)]


async def test_a_run_near_its_time_limit_finishes_its_step_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_HPC_JOB_END", str(int(time.time()) + 60))
    scene = Scene(tmp_path)
    scene.deliver((1, step_report(1, train_nodes=1, step_s=25.0)))
    async with running(scene):
        await until(lambda: scene.stop)
        scene.coordinator.on_signal("SIGUSR1")
        scene.deliver((1, trains(done=2)))
    assert scene.stop is not None
    assert scene.stop.after == 2
    assert scene.end.why == "time_limit"
    assert "a step takes 25 s and a save 6 s; step 2 is saved" in scene.end.sentence


DRY_RUN = validate(
    {
        "run": {"engine": "simulated"},
        "planner": {"model": "qwen3-8b", "device": "a800"},
        "simulated": {"presets": ["math"]},
        "components": {name: {"nodes": 1, "gpus": 8} for name in ("train", "hybrid", "rollout")},
    }
)
CHANGES = {"components.train.nodes": 2, "components.hybrid.nodes": 0, "components.rollout.nodes": 1, "rollout.tp": 2}


class Proposes:
    """A planner that has a better layout of the core nodes."""

    def close(self) -> None:
        """Nothing."""

    def decide(self, snapshot: Any, now: float) -> PlanDecision:
        return PlanDecision("repartition", -1, "repartition: better", {}, layout="better", changes=dict(CHANGES))


class Borrows(Proposes):
    """A planner that wants two nodes of a queue, then none; ``seen``: what it knew of them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def decide(self, snapshot: Any, now: float) -> PlanDecision:
        self.seen.append(snapshot.borrow)
        wanted = 2 if len(self.seen) == 1 else 0
        return PlanDecision("borrow" if wanted else "give_back", -1, "because", {}, spot_nodes=wanted)


def test_the_nodes_that_the_planner_wants_are_in_the_status_for_the_owner_who_queues_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Borrows()
    monkeypatch.setattr("libra_hpc.coordinator.coordinator.PlayerProcess", lambda *run: planner)
    scene = Scene(tmp_path, config=validate({"borrow": {"spot": {"nodes": 3}}}))
    wanted = []
    for _ in range(3):
        wanted.append(scene.status().spot_nodes)
        scene.coordinator._plan()
    assert wanted == [-1, 2, 0]
    assert [(one.most, one.wanted) for one in planner.seen] == [(3, 0), (3, 2), (3, 0)]
    assert planner.seen[2].since > planner.seen[1].since > planner.seen[0].since == float("-inf")


async def after_a_repartition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig, reached: int
) -> Scene:
    """A run whose planner proposes at its first evaluation, and whose training then ends at step ``reached``."""
    monkeypatch.setattr("libra_hpc.coordinator.coordinator.PlayerProcess", lambda *run: Proposes())
    tmp_path.joinpath("config.json").write_text(json.dumps(config.as_data()))
    scene = Scene(tmp_path, config=config)
    async with running(scene):
        await until(lambda: any(e["kind"] == "decision" for e in read_lines(scene.run.events)))
        scene.deliver((1, trains(done=reached)))
    return scene


async def test_a_better_layout_of_the_core_ends_the_ranks_and_asks_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await after_a_repartition(tmp_path, monkeypatch, DRY_RUN, 3)
    assert scene.stop == StopTraining("repartition")
    assert scene.end.why == "repartition"
    config = load_resolved(scene.run.config)
    assert (config.components.train.nodes, config.components.rollout.nodes, config.rollout.tp) == (2, 1, 2)
    assert [rank for rank, _ in scene.orders(StopAgent)] == [1, 2, 3]
    events = list(read_lines(scene.run.events))
    assert (events[-1]["kind"], events[-1]["changes"], events[-1]["step"]) == ("repartitioned", CHANGES, 3)
    status = decode_status(scene.run.status.read_bytes())
    assert (status.state, status.repartitioned) == ("restarting", "after step 3: better")


async def test_advice_is_only_written_down_where_the_run_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await after_a_repartition(
        tmp_path, monkeypatch, validate({"run": {"steps": 3}, "planner": {"repartition": "advise"}}), 3
    )
    assert not scene.stop
    assert [e["layout"] for e in read_lines(scene.run.events) if e["kind"] == "decision"] == ["better"]
    assert scene.end.why == "completed"


def test_a_fatal_report_fails_the_run_with_its_reason(scene: Scene) -> None:
    scene.deliver((3, Fatal(3, "engine r3.0 ended with 1")))
    run_until_over(scene)
    assert scene.end == RanksStop("fatal", "node 3: engine r3.0 ended with 1", 0)


async def test_nothing_is_written_to_a_descriptor_that_the_launcher_did_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(records_module.os, "write", lambda number, data: written.append(number))
    monkeypatch.delenv("LIBRA_HPC_OUTPUT_FD", raising=False)
    await Scene(tmp_path / "local", begun=False).coordinator._records.close("over")
    assert not written
    monkeypatch.setenv("LIBRA_HPC_OUTPUT_FD", "3")
    await Scene(tmp_path / "slurm", begun=False).coordinator._records.close("over")
    assert written == [3]


def test_new_weights_are_an_event_a_version_with_the_nodes_that_lack_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, components=("planner", "train", *["rollout"] * 30))
    for rank in range(2, 32):
        scene.engines(rank, "rollout")
    for step, rest in ((1, ()), (2, (7, 9)), (3, ())):
        update = WeightUpdate(step, wire_s=0.5, recomputed=3)
        engine = ObservedEngine("rollout", "ready", step, update=update)
        for rank in {*range(2, 32)}.difference(rest):
            beat = msgspec.structs.replace(first_beat(rank, "rollout"), version=step)
            known = msgspec.structs.replace(beat, engines={f"r{rank}.{number}": engine for number in range(8)})
            scene.deliver((rank, known), (rank, known))
        scene.deliver((1, step_report(step, step_s=1.0, train_nodes=1)))
    scene.coordinator._records._facts.flush(30.0)
    found = [one for one in read_lines(scene.run.events) if one["kind"] == "weights_applied"]
    assert [(one["version"], one["engines"], one["late"]) for one in found] == [
        (1, 240, []),
        (2, 224, [7, 9]),
        (3, 240, []),
    ]
    assert (found[1]["wire_s"], found[1]["recomputed"], found[1]["guests"]) == (0.5, 672, 0)
