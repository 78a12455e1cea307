"""The rollout half of a node around processes of simulated engines: hung ones are ended, those that keep ending end
the run, a reset leaves nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_hpc.agent import rollout_node, supervised
from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.config.load import validate
from libra_hpc.mesh.agent_context import RankLayout
from libra_hpc.process.child import Child
from libra_hpc.process.entry import DUMP_SIGNAL
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Generate, WeightsRefused
from libra_hpc.protocol.engine_state import ObservedEngine
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.simulated import tokens
from tests.agent.weights_here import WrittenImage
from tests.stage.node_parts import Watched
from tests.stage.waiting import until

pytestmark = pytest.mark.slow

FLOOR_S = 4.0
"""Four times the longest planned silence of an engine."""
NODE = 2


class Scene(Watched):
    """A node, a training side that has nothing newer unless set, and everything that was sent."""

    def __init__(self, folder: Path, engines: int, **sections: dict[str, Any]) -> None:
        config = validate(
            {
                "run": {"engine": "simulated"},
                "components": {"rollout": {"nodes": 1, "gpus": 8, "gpu_type": "a800"}},
                "rollout": {"engines_per_node": engines, "max_model_len": 4096},
                "deadlines": {"floor_s": FLOOR_S, "first_s": 60.0, "factor": 1.1},
                "planner": {"model": "qwen3-8b"},
                "simulated": {"speedup": 1000.0, "start_s": 0.0},
                **sections,
            }
        )
        private = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
        self.folders = (private, folder / "shm")
        self.folders[1].mkdir()
        super().__init__()
        self.newest = 0
        places = dict(zip(("private", "shared_memory"), self.folders, strict=True))
        self.context = self.context_of(folder, NODE, config=config, changed=self.changed, **places)
        self.weights = WrittenImage(self.folders[1])
        self.node = RolloutNode(self.context, cast(NodeCarrier, self.weights))

    def write(self, version: int) -> None:
        """The image has another version."""
        self.weights.write(version, self.node.on_image)

    def send(self, rank: int, message: Any) -> None:
        super().send(rank, message)
        if isinstance(message, wire.WeightsWanted) and message.have >= self.newest:
            asyncio.get_running_loop().call_soon(self.node.on_current, wire.WeightsCurrent(message.have))

    def served(self) -> list[ObservedEngine]:
        return self.states("ready")

    def gone(self) -> list[tuple[str, str]]:
        return [(name, engine.state) for name, engine in self.seen if engine.state in ("standby", "ending", "lost")]

    async def up(self, count: int = 1) -> None:
        """Start the engines, and wait for the ``count``-th announcement."""
        await self.node.start()
        await until(lambda: len(self.served()) >= count)

    def pid(self) -> int:
        (pid,) = self.node.pids.values()
        return pid


@asynccontextmanager
async def scene(folder: Path, engines: int = 1, **sections: dict[str, Any]) -> AsyncIterator[Scene]:
    made = Scene(folder, engines, **sections)
    watching = asyncio.create_task(made.node.watch())
    try:
        yield made
        assert not watching.done()
    finally:
        watching.cancel()
        await made.node.stop()
        shutil.rmtree(made.folders[0])


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "WATCH_S", 0.1)


async def test_a_stopped_engine_is_reported_ended_and_the_next_one_serves(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        await made.up()
        await until(lambda: made.of(wire.EngineLoads))
        stopped = made.pid()
        os.kill(stopped, DUMP_SIGNAL)
        log = made.context.logs / "r2.0.log"
        await until(lambda: "most recent call first" in log.read_text())
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: made.states("lost"))
        (slow,), (hung,) = made.events("slow"), made.events("hung")
        assert (slow["part"], hung["part"], hung["rank"]) == ("r2.0", "r2.0", NODE)
        for reason in (hung["reason"], made.states("lost")[0].reason):
            assert "r2.0: has reported nothing for 4 s (limit 4 s)" in reason
        assert made.gone() == [("r2.0", "ending"), ("r2.0", "lost")]
        await made.up(2)
        assert made.pid() != stopped
        made.node.on_turns(wire.Turns((("r2.0", Generate("t", pack_i32(tokens.prompt(0, 0, 100, 20)), 50)),)))
        await until(lambda: made.of(wire.TurnsDone))
        ((_, answer),) = made.of(wire.TurnsDone)[0].items
        assert (answer.rid, answer.finish) == ("t", "stop")
        assert not made.of(wire.Fatal)


async def test_the_turns_of_an_engine_that_outlives_its_sigkill_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "KILL_S", 0.2)
    monkeypatch.setattr(supervised, "REPEAT_S", 0.2)
    kill = Child.kill
    async with scene(tmp_path) as made:
        await made.up()
        await until(lambda: made.of(wire.EngineLoads))
        (child,) = made.node._engines["r2.0"].children
        stuck = True
        monkeypatch.setattr(Child, "kill", lambda self: None if stuck else kill(self))
        try:
            os.kill(made.pid(), signal.SIGSTOP)
            await until(lambda: made.gone())
            await until(lambda: len(made.events("hung")) >= 4)
            await made.node.start()
            assert (made.node._engines["r2.0"].children, made.states("lost")) == ([child], []), "no other beside it"
            made.node.on_turns(wire.Turns((("r2.0", Generate("t", b"", 50)),)))
            await until(lambda: made.of(wire.TurnsDone))
            assert "after SIGKILL" in made.events("hung")[-1]["reason"]
        finally:
            stuck = False
            child.kill()
        await until(lambda: made.states("lost"))
        assert [state for _, state in made.gone()] == ["ending", "lost"]
        await made.up(2)


async def test_an_engine_with_weights_older_than_the_start_serves_only_once_it_has_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_node, "ASK_AGAIN_S", 0.01)
    async with scene(tmp_path) as made:
        made.context.resume_point = ResumePoint(4, "", 32, (), snapshot="step-4", saved_step=0)
        await made.node.start()
        await until(lambda: len(made.of(wire.WeightsWanted)) > 3)
        assert not made.served(), "the trainers have offered nothing yet"
        made.write(4)
        await until(lambda: made.served())
        assert made.served()[0].version == 4


@pytest.mark.parametrize(("patience_s", "serves"), [(60.0, 3), (0.0, 2)])
async def test_a_woken_engine_waits_for_the_weights_its_node_trained_with_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, serves: int
) -> None:
    monkeypatch.setattr(rollout_node, "NEWEST_S", patience_s)
    monkeypatch.setattr(rollout_node, "ASK_AGAIN_S", 0.01)
    async with scene(tmp_path) as made:
        await made.up()
        made.node.standby()
        made.node.beside = cast(Any, SimpleNamespace(trained=3, _frees=set()))
        made.write(2)
        await made.node.start()
        if patience_s:
            asked = len(made.of(wire.WeightsWanted))
            await until(lambda: len(made.of(wire.WeightsWanted)) > asked + 3)
            assert made.of(wire.WeightsWanted)[-1].have == 2
            made.write(3)
        await until(lambda: len(made.served()) == 2)
        assert made.served()[-1].version == serves


async def test_answers_to_several_engines_lead_to_one_round_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_node, "ASK_AGAIN_S", 0.2)
    async with scene(tmp_path, engines=2) as made:
        made.context.resume_point = ResumePoint(4, "", 32, (), snapshot="step-4", saved_step=0)
        await made.node.start()
        await until(lambda: [one.state for one in made.node.observed.values()] == ["loading"] * 2)
        before = len(made.of(wire.WeightsWanted))
        for _ in range(20):
            made.node.on_current(wire.WeightsCurrent(0))
        await until(lambda: len(made.of(wire.WeightsWanted)) > before)
        await asyncio.sleep(0.3)
        assert len(made.of(wire.WeightsWanted)) < before + 20, "two engines, in a few rounds"


async def test_an_engine_without_descriptors_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_node, "ASK_AGAIN_S", 0.1)
    async with scene(tmp_path) as made:
        await made.up()
        first, limits = made.pid(), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(first, resource.RLIMIT_NOFILE, (3, limits[1]))
        made.write(1)
        await until(lambda: made.events("engine_error"))
        assert made.events("engine_error")[0]["reason"].endswith("image.safetensors: Too many open files.")
        resource.prlimit(first, resource.RLIMIT_NOFILE, limits)
        await until(lambda: made.node.weights == 1)
        assert (made.pid(), made.gone()) == (first, [])


async def test_an_engine_that_cannot_take_new_weights_is_not_waited_for_and_the_next_begins_with_them(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as made:
        await made.up()
        made.write(1)
        await until(lambda: made.node.weights == 1)
        first = made.pid()
        for _ in range(rollout_node.REFUSALS):
            assert not made.gone()
            made.node.received(made.node._engines["r2.0"], 0, WeightsRefused(2, "no memory for them"))
        await asyncio.sleep(0)
        assert [state for _, state in made.gone()] == ["ending"], "its turns go elsewhere at once"
        await until(lambda: made.states("lost"))
        assert "it cannot take version 2 of the weights: no memory for them" in made.states("lost")[0].reason
        assert made.weights.told[-1] is None, "it needs no offer any more"
        await made.up(2)
        assert (made.served()[1].version, made.pid() == first) == (1, False)
        assert not made.events("hung")


async def test_an_engine_that_computes_wrongly_is_reloaded_and_at_the_second_time_closed(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        await made.up()
        made.write(1)
        await until(lambda: made.node.weights == 1)
        made.node.on_turns(wire.Turns((("r2.0", wire.WrongEngine("it is off", closed=False)),)))
        await until(lambda: made.states("lost"))
        assert "it is off" in made.states("lost")[0].reason
        await made.up(2)
        assert made.served()[1].version == 1, "it begins with the whole image"
        made.context.layout = RankLayout(("planner", "train", "hybrid", "rollout"))
        made.node.on_turns(wire.Turns((("r2.0", wire.WrongEngine("it is off again", closed=True)),)))
        await until(lambda: len(made.events("engine_lost")) == 2)
        await made.node.start()
        assert (made.node.pids, len(made.states("lost"))) == ({}, 1), "nobody starts it"
        assert len(made.states("closed")) == 1, "the run goes on without its node"
        assert "it is off again" in made.events("engine_lost")[1]["reason"]


async def test_an_engine_that_ends_more_often_than_the_run_file_allows_ends_the_run_with_count_window_and_log(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, deadlines={"restarts": 1}) as made:
        for count in (1, 2):
            await made.up(count)
            os.kill(made.pid(), signal.SIGKILL)
            await until(lambda count=count: len(made.gone()) == count)
        await until(lambda: made.of(wire.Fatal))
        log = made.context.logs / "r2.0.log"
        expected = (
            f"engine r2.0 ended 2 times in 300 s, the last time because process r2.0 was killed by signal 9; see {log}"
        )
        assert made.of(wire.Fatal)[0].reason == expected


async def test_a_reset_node_has_no_process_and_starts_again_with_its_image(tmp_path: Path) -> None:
    async with scene(tmp_path, engines=2) as made:
        await made.up(2)
        made.write(5)
        await until(lambda: made.node.weights == 5)
        before = set(made.node.pids.values())
        made.sent.clear()
        made.seen.clear()
        await made.node.reset()
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        assert (made.node.observed, made.node.pids, made.node.weights) == ({}, {}, -1)
        await made.up(2)
        assert {up.version for up in made.served()} == {5}, "the image is still there"
        assert not made.states("lost")
        assert not made.gone()
