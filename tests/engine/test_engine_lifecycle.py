"""How engines start and end: with FP8 caches, with a bad configuration, with parent or worker killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.protocol.engine import EngineFailed, Generated
from tests.stage.waiting import alive, wait_until

from .engine_harness import EngineUnderTest, Model, descendants, engine_config, logprobs_of, tokens_of, turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT = [5, 17, 99, 3, 64, 21, 8]


@pytest.mark.chaos
def test_a_dead_worker_fails_every_request_and_ends_the_engine(old: Model, folder: Path) -> None:
    engine = EngineUnderTest(folder, engine_config(old, tp=2))
    try:
        engine.ready()
        engine.start(turn("a", CONTEXT, 1000), turn("b", CONTEXT, 1000))
        below = descendants(engine.process.pid)
        worker = next(
            pid
            for pid in below
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
            or "VLLM" in Path(f"/proc/{pid}/comm").read_text()
        )
        os.kill(worker, signal.SIGKILL)
        answers = [engine.expect(Generated) for _ in range(2)]
        error = engine.expect(EngineFailed)
        assert {done.rid for done in answers} == {"a", "b"}
        for done in answers:
            assert done.finish == "error"
            assert done.error == error.what
            assert len(tokens_of(done)) == sum(count for _, count in done.versions) > 0
        assert error.fatal
        assert engine.process.wait(60) == 1
        wait_until(lambda: not any(map(alive, below)))
    finally:
        engine.close()


AGENT = """
import json, socket, subprocess, sys, time
from pathlib import Path
connection, theirs = socket.socketpair()
number = theirs.fileno()
command = [*json.loads(sys.argv[1]), "--socket", str(number)]
engine = subprocess.Popen(command, start_new_session=True, pass_fds=(number,))
theirs.close()
connection.recv(1)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_when_its_agent_is_killed(old: Model, folder: Path) -> None:
    config = folder / "engine.json"
    config.write_bytes(msgspec.json.encode(engine_config(old)))
    command = [sys.executable, "-m", "libra_hpc.engine", "--config", str(config)]
    started = [sys.executable, "-c", AGENT, json.dumps(command)]
    agent = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert agent.stdout is not None
    engine = 0
    try:
        engine = int(agent.stdout.readline())
        assert alive(engine)
        agent.kill()
        agent.wait()
        wait_until(lambda: not alive(engine))
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
        if engine and alive(engine):
            os.kill(engine, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 caches need AVX-512")
def test_caches_in_fp8_hold_more_and_their_gap_to_the_trainer_is_small_and_there(old: Model, folder: Path) -> None:
    config = engine_config(old, kv_dtype="fp8", kv_cache_mb=2)
    engine = EngineUnderTest(folder, config)
    try:
        # A byte per element instead of float32's four.
        assert engine.ready().capacity.kv_tokens == 2 * 2**20 // (2 * 2 * 64)
        (done,) = engine.generate(turn("check", CONTEXT, 200))
        exact = old.logprobs(CONTEXT + tokens_of(done), len(CONTEXT))
        off = [got - wanted for got, wanted in zip(logprobs_of(done), exact, strict=True)]
        # float32 caches differ by 1e-4; of the samples the recorded log-probability is still that of the sampler.
        assert 1e-3 < sum(map(abs, off)) / len(off) < 0.3
    finally:
        engine.close()


def test_a_bad_configuration_ends_with_two_and_one_sentence(old: Model, tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_bytes(msgspec.json.encode(EngineConfig(run=RunConfig().changed(model={"path": str(tmp_path)}))))
    command = [sys.executable, "-m", "libra_hpc.engine", "--socket", "0", "--config", str(config)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "no config.json" in run.stderr
