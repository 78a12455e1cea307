"""How engines start and end: from a weight file, with a tied head, with parent or worker killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from libra_hpc.engine.warm_up import DECODES, PROMPT
from libra_hpc.protocol.engine import EngineFailed, Generated, StopEngine

from .engine_harness import (
    EngineUnderTest,
    Model,
    alive,
    bring,
    descendants,
    engine_config,
    logprobs_of,
    make_model,
    tokens_of,
    turn,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT = [5, 17, 99, 3, 64, 21, 8]


def assert_serves(engine: EngineUnderTest, model: Model, version: int) -> None:
    (done,) = engine.generate(turn("check", CONTEXT, 12, temperature=0.7))
    tokens = tokens_of(done)
    assert done.versions == ((version, 12),)
    assert logprobs_of(done) == pytest.approx(model.logprobs(CONTEXT + tokens, len(CONTEXT), 0.7), abs=1e-3)
    (greedy,) = engine.generate(turn("greedy", CONTEXT, 12, temperature=0.0))
    assert tokens_of(greedy) == model.greedy(CONTEXT, 12)


def test_tied_head_follows_every_update_and_shutdown_ends_with_zero(tmp_path: Path, folder: Path) -> None:
    first, second = (make_model(tmp_path / name, seed, tied=True) for name, seed in (("first", 3), ("second", 4)))
    # The folder's own weights are never loaded: it starts from the second model's.
    image = second.image(tmp_path)
    bring(image, 7, load_file(second.weights))
    engine = EngineUnderTest(folder, engine_config(first, version=7, weights=str(image.path)))
    try:
        ready = engine.ready()
        assert ready.version == 7
        warm, decoded, read = ready.capacity.warm_up
        assert decoded.steps - warm.steps == decoded.generated_tokens - warm.generated_tokens == DECODES
        assert (read.steps - decoded.steps, read.prefill_tokens - decoded.prefill_tokens) == (1, PROMPT)
        assert warm.busy_s < decoded.busy_s < read.busy_s
        # The counters start from 0 afterwards, and the cache is empty.
        begun = engine.idle()
        assert (begun.steps, begun.generated_tokens, begun.cached_tokens) == (1, 1, 0)
        assert_serves(engine, second, 7)
        before = engine.idle()
        applied = engine.apply(first.update(8))
        assert engine.idle().update_s - before.update_s == pytest.approx(applied.seconds)
        assert_serves(engine, first, 8)
        engine.apply(second.update(9))
        assert_serves(engine, second, 9)
        engine.send(StopEngine())
        assert engine.process.wait(60) == 0
    finally:
        engine.close()


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
        wait_until(lambda: not any(map(alive, below)), "the other workers end")
    finally:
        engine.close()


AGENT = """
import json, socket, subprocess, sys, time
from pathlib import Path
command, where = json.loads(sys.argv[1]), sys.argv[2]
listener = socket.socket(socket.AF_UNIX)
listener.bind(where)
listener.listen(1)
engine = subprocess.Popen(command, start_new_session=True)
connection, _ = listener.accept()
connection.recv(1)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_when_its_agent_is_killed(old: Model, folder: Path) -> None:
    config, where = folder / "engine.json", str(folder / "s")
    config.write_bytes(msgspec.json.encode(engine_config(old)))
    command = [sys.executable, "-m", "libra_hpc.engine", "--socket", where, "--config", str(config)]
    started = [sys.executable, "-c", AGENT, json.dumps(command), where]
    agent = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert agent.stdout is not None
    engine = 0
    try:
        engine = int(agent.stdout.readline())
        assert alive(engine)
        agent.kill()
        agent.wait()
        wait_until(lambda: not alive(engine), "the engine of a killed agent ends")
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
        if engine and alive(engine):
            os.kill(engine, signal.SIGKILL)


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 caches need AVX-512")
def test_caches_in_fp8_hold_more_and_their_gap_to_the_trainer_is_small_and_there(old: Model, folder: Path) -> None:
    config = msgspec.structs.replace(engine_config(old, kv_dtype="fp8"), kv_cache_mb=2)
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


OFFLINE = """
import json, sys, time
import msgspec
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine import Generate, UpdateWeights
from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import EngineConfig

job = json.loads(sys.argv[1])
with OfflineEngine(msgspec.convert(job["config"], EngineConfig)) as engine:
    prefixes = [(str(n), pack_i32(job["context"][:n])) for n in job["lengths"]]
    batch = engine.generate([Generate(name, tokens, 6, temperature=0.0) for name, tokens in prefixes])
    # Two turns of three tokens each: the second continues the first.
    context, turns = list(job["context"]), 0
    engine.submit(Generate("0", pack_i32(context), 3, temperature=0.0))
    while engine.pending:
        for done in engine.poll():
            context += unpack_i32(done.tokens)
            turns += 1
            if turns < 2:
                engine.submit(Generate(str(turns), pack_i32(context), 3, temperature=0.0))
    update = msgspec.convert(job["update"], UpdateWeights)
    engine.engine.check(update)
    while not engine.engine.staged():
        time.sleep(0.01)
    engine.engine.apply(update)
    (swapped,) = engine.generate([Generate("s", pack_i32(job["context"]), 6, temperature=0.0)])
print(json.dumps({
    "finish": [done.finish for done in batch],
    "batch": [unpack_i32(done.tokens) for done in batch],
    "turns": context[len(job["context"]):],
    "swapped": unpack_i32(swapped.tokens),
}))
"""


def test_offline_engine_generates_batches_and_turns(old: Model, new: Model) -> None:
    lengths = [7, 0, 3]
    update = {"type": "UpdateWeights", **msgspec.to_builtins(new.update(1))}
    job = {"config": msgspec.to_builtins(engine_config(old)), "context": CONTEXT, "lengths": lengths, "update": update}
    run = subprocess.run([sys.executable, "-c", OFFLINE, json.dumps(job)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    out = json.loads(run.stdout.splitlines()[-1])
    assert out["finish"] == ["length", "error", "length"]
    assert out["batch"] == [old.greedy(CONTEXT[:n], 6) if n else [] for n in lengths]
    assert out["turns"] == old.greedy(CONTEXT, 6)
    assert out["swapped"] == new.greedy(CONTEXT, 6)


def test_a_bad_configuration_ends_with_two_and_one_sentence(old: Model, tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_bytes(msgspec.json.encode(msgspec.structs.replace(engine_config(old), model=str(tmp_path))))
    command = [sys.executable, "-m", "libra_hpc.engine", "--socket", str(tmp_path / "s"), "--config", str(config)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "no config.json" in run.stderr
