"""Two tiny models per session, and one engine process of either kind for the modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine_harness import WAITS_OR_AHEAD, EngineUnderTest, Model, engine_config, make_model, versions


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("new"), seed=2)


@pytest.fixture(scope="package", params=[False, pytest.param(True, marks=pytest.mark.chaos)], ids=WAITS_OR_AHEAD)
def shared_engine(
    request: pytest.FixtureRequest, old: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    """An untied tp = 1 engine of 64 KV blocks with a step log, ended by SIGTERM.

    Where a step ahead of what is known makes a difference, tests of each change have it of both kinds (`both`).
    """
    folder = tmp_path_factory.mktemp("e")
    rollout: dict[str, object] = {"max_num_seqs": 4, "kv_cache_mb": 2, "async_steps": request.param}
    config = engine_config(old, version=1, step_log=str(folder / "steps.jsonl"), **rollout)
    under_test = EngineUnderTest(folder, config)
    try:
        ready = under_test.ready()
        assert (ready.version, ready.capacity.tp, ready.capacity.max_model_len) == (1, 1, 1024)
        # 2 MiB of float32 keys and values, 2 layers, hidden 64: one of its blocks is vLLM's own.
        assert ready.capacity.kv_tokens == 2 * 2**20 // (2 * 2 * 64 * 4) == 64 * 32
        under_test.loaded = under_test.greedy()
        yield under_test
        under_test.process.terminate()
        assert under_test.process.wait(60) == 0
        assert ("drained: True" in under_test.log()) is request.param
    finally:
        under_test.close()


@pytest.fixture
def engine(shared_engine: EngineUnderTest, old: Model) -> EngineUnderTest:
    """The shared engine with the weights of `old`, and no message of an earlier test to come."""
    shared_engine.begin(old.update(next(versions)))
    return shared_engine


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path short enough for a Unix-domain socket."""
    return tmp_path_factory.mktemp("e")
