"""The host's work per step, measured and written into a device file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from libra_hpc.annexes.calibrate.measure_steps import with_host_cost, write_host_cost
from libra_hpc.errors import UserError
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import StepPoint, load
from tests.models.support import bare, device_file

SHAPE = model_shape("qwen3-8b")


def points(host_s: float, sequence_s: float, tp: int = 2) -> list[StepPoint]:
    machine = msgspec.structs.replace(device("a800"), host_s=host_s, host_sequence_s=sequence_s)
    times = lookup(machine, SHAPE, tp)
    return [StepPoint(tp=tp, decodes=n, kv_tokens=n * 500, seconds=times.step_s(n, n * 500)) for n in range(1, 64, 4)]


def test_the_hosts_work_is_what_steps_take_beyond_the_device() -> None:
    found = with_host_cost(device("a800"), SHAPE, points(3e-3, 4e-5))
    assert (found.host_s, found.host_sequence_s) == pytest.approx((3e-3, 4e-5), rel=0.01)


def test_real_steps_give_the_figures_of_the_device_table() -> None:
    measured = load(Path(__file__).parents[2] / "models" / "h200_qwen3-8b.json")
    found = with_host_cost(device("h200"), SHAPE, measured.points)
    assert found.host_s == pytest.approx(device("h200").host_s, rel=0.1)
    assert found.host_sequence_s == pytest.approx(device("h200").host_sequence_s, rel=0.15)


def test_a_device_is_written_whole_and_other_lines_of_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    a800 = msgspec.structs.replace(device("a800"), host_s=1e-3)
    write_host_cost(a800, path)
    mine = device_file(tmp_path / "mine.toml", "mine", memory_bytes=9e9, host_s=5e-3).read_text()
    path.write_text(f"{path.read_text()}# ours\n{mine}")
    write_host_cost(msgspec.structs.replace(device("mine", path), host_s=7e-3, host_sequence_s=1e-5), path)
    assert "# ours" in path.read_text()
    assert (device("mine", path).host_s, device("mine", path).host_sequence_s) == (7e-3, 1e-5)
    assert device("mine", path).memory_bytes == 9e9
    assert device("a800", path) == device("a800-sxm", path) == a800


def test_steps_shorter_than_the_device_allows_are_refused() -> None:
    fast = [msgspec.structs.replace(p, seconds=p.seconds / 3) for p in points(0.0, 0.0)]
    with pytest.raises(UserError, match="shorter than this device's own time"):
        with_host_cost(bare("a800"), SHAPE, fast)
    with pytest.raises(UserError, match="decode steps = 3"):
        with_host_cost(bare("a800"), SHAPE, fast[:3])
