"""Several engines measured at once: all while all are loaded, and one that fails is an error with its message."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from libra_hpc.annexes.calibrate.measure_engines import measure_engines
from libra_hpc.annexes.calibrate.measure_steps import plans
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.errors import OperationError, UserError
from libra_hpc.models.step_times.measured import measured_times

from .engine_harness import Model, engine_config

LENGTH, SEQUENCES = 256, 2


def config(model: Model) -> EngineConfig:
    return engine_config(model, max_num_seqs=SEQUENCES, max_model_len=LENGTH, kv_cache_mb=2)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2])
def test_engines_at_once(old: Model, count: int) -> None:
    reports: list[tuple[str, int, int]] = []
    found = measure_engines(
        config(old), count, device="this cpu", model="tiny", progress=lambda *what: reports.append(what)
    )
    expected = len(list(plans(LENGTH, SEQUENCES, found.kv_capacity[1])))
    assert reports[0] == ("starting", 0, count)
    assert ("starting", count, count) in reports
    measuring = [(done, total) for what, done, total in reports if what == "measuring"]
    assert measuring[-1] == (count * expected, count * expected)
    assert [done for done, _ in measuring] == sorted(done for done, _ in measuring)
    assert found.kv_capacity == {1: 2 * 2**20 // (2 * 2 * 64 * 4)}
    alone = [point for point in found.points if not point.decodes]
    # Each engine measures every plan; a plan that shared a step with nothing else gives one point.
    kinds = {(point.prefill, point.context) for point in alone}
    assert all(sum((point.prefill, point.context) == kind for point in alone) > 3 * (count - 1) for kind in kinds)
    assert measured_times(found, 1).step_s(2, 200) > 0.0


def test_a_folder_without_a_model_is_refused_before_an_engine_starts(old: Model, tmp_path: Path) -> None:
    empty = config(old).run.changed(model={"path": str(tmp_path)})
    with pytest.raises(UserError, match=r"no config\.json there"):
        measure_engines(msgspec.structs.replace(config(old), run=empty), 1, "cpu", "tiny")


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_error_of_an_engine_that_cannot_start_is_shown(old: Model, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    broken = config(old).run.changed(model={"path": str(tmp_path)})
    with pytest.raises(OperationError, match="before it was measured"):
        measure_engines(msgspec.structs.replace(config(old), run=broken), 1, "cpu", "tiny")
