"""Compiled scheduler and simulator do what their sources do, and are never used for other sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from libra_hpc_envs import compile as building

from libra_hpc import compiled

DECIDE = """
import hashlib, json, msgspec
import libra_hpc.simulator.engine.simulated_engine
import libra_hpc.policies.scheduling.causal_mlfq
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.causal_mlfq import CausalMlfq
from bench.decisions import views
from tests.policies.scheduling.boards import ended
import random

rng, policy, board, seen = random.Random(7), CausalMlfq(), Board(24), hashlib.sha256()
for i, tp in enumerate((1, 1, 1, 2, 2, 4)):
    board.up(f"e{i}", tp, 300_000 * tp, 0)
for round in range(6):
    at, now = {}, 100.0 * round
    for i in range(6):
        waiting, share = rng.randrange(9), rng.random()
        tokens = (5000 * round + i, 20_000 * round + 7 * i)
        board.report(f"e{i}", EngineStats(0, waiting, 0, share, *tokens, 0, 0, 50 * round, 0.5 * round + 0.1))
    made = views(rng, 100, at)
    for turn in made:
        key = policy.key(turn, now)
        decision = policy.route(turn, board, now)
        words = [decision.engine, decision.priority, decision.wait, decision.reason]
        seen.update(json.dumps([key, *words, dict(decision.numbers)]).encode())
        if decision.engine:
            board.sent(decision.engine, turn.context_tokens)
            at[turn.trajectory] = decision.engine
    for turn in made:
        if turn.trajectory in at:
            board.answered(at[turn.trajectory], turn.context_tokens)
        policy.finished(ended(turn.trajectory, turn.prompt_id, 100), now)
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.traces.generate import Dials, generate
work = generate("r2e", Dials(trajectories=64))
rules = SimulationSettings(batch_groups=2, eta=1, train_s=9.0, sync_s=2.0)
engines = build_engines("2xTP1,1xTP2", 0, "a800", "qwen3-14b").engines
seen.update(msgspec.json.encode(simulate(work, engines, CausalMlfq(), rules)))
modules = libra_hpc.policies.scheduling.causal_mlfq, libra_hpc.simulator.engine.simulated_engine
compiled = all(module.__file__.endswith(".so") for module in modules)
print(json.dumps([compiled, len(board.engines), seen.hexdigest()]))
"""


def decide(**environment: str) -> list[object]:
    """Whether machine code ran, and a digest of 600 decisions and of a simulation."""
    env = {name: value for name, value in os.environ.items() if name != compiled.INTERPRETED} | environment
    done = subprocess.run(
        [sys.executable, "-c", DECIDE],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=Path(__file__).parents[3],
    )
    return json.loads(done.stdout)


def test_machine_code_decides_to_the_last_bit_what_the_sources_decide() -> None:
    if not compiled.build_folder().is_dir():
        pytest.skip("the scheduler is not compiled here")
    fast, plain = decide(), decide(**{compiled.INTERPRETED: "1"})
    assert (fast[0], plain[0]) == (True, False)
    assert fast[1:] == plain[1:]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, and nothing built."""
    folder = tmp_path / "libra_hpc"
    shutil.copytree(compiled.SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__", "tables"))
    monkeypatch.setattr(compiled, "SOURCES", folder)
    monkeypatch.setattr(compiled, "BUILDS", tmp_path / "builds")
    monkeypatch.delenv(compiled.INTERPRETED, raising=False)
    return folder


def test_a_build_is_used_for_its_own_sources_only(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ["own"]
    compiled.use(path, "simulator/engine")
    assert path == ["own"], "nothing is built"
    build = compiled.build_folder()
    build.mkdir(parents=True)
    compiled.use(path, "simulator/engine")
    assert path == [str(build / "simulator/engine"), "own"]
    monkeypatch.setenv(compiled.INTERPRETED, "1")
    compiled.use(path, "simulator/engine")
    assert len(path) == 2
    monkeypatch.delenv(compiled.INTERPRETED)
    with (sources / "policies/scheduling/causal_mlfq.py").open("a") as edited:
        edited.write("\n")
    assert not compiled.in_use(), "a build of other sources"


@pytest.mark.parametrize(("compiler", "missing"), [("no-such-compiler", "'no-such-compiler'"), ("sh", "Python.h")])
def test_without_a_compiler_the_sources_stay_in_use(
    compiler: str, missing: str, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(building.sysconfig, "get_path", lambda name: "/nowhere")
    assert building.main() == 1
    message = capsys.readouterr().err
    assert missing in message
    assert message.count("\n") == 1
    assert not compiled.BUILDS.exists()


def test_a_build_that_is_there_is_not_made_again(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled.build_folder().mkdir(parents=True)
    assert building.main() == 0
    assert capsys.readouterr().out == "the compiled scheduler is up to date\n"
