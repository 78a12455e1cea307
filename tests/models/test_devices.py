"""The device table, a user's own file, the errors of a wrong one, and which source `lookup` uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.tabulate import hf_config
from libra_hpc.errors import UserError
from libra_hpc.models import devices as module
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup

from .support import config_of, device_file


def test_the_a800_is_an_a100_with_two_thirds_of_its_links() -> None:
    a100, a800 = device("a100"), device("A800-SXM")
    for figure in ("memory_bytes", "peak_flops", "hbm_bytes_s"):
        assert getattr(a800, figure) == getattr(a100, figure)
    assert a800.intra_bytes_s / a100.intra_bytes_s == pytest.approx(400 / 600)


def test_a_user_file_adds_and_replaces(tmp_path: Path) -> None:
    path = device_file(tmp_path / "mine.toml")
    path.write_text(path.read_text() + device_file(tmp_path / "other.toml", "a100").read_text())
    assert device("MI250X", path).hbm_bytes_s == 1.6e12
    assert device("a100", path).memory_bytes == 68.7e9
    assert device("h100", path) == device("h100")


def test_the_example_of_the_docstring_is_valid(tmp_path: Path) -> None:
    example = module.__doc__[module.__doc__.index('["mi250x"]') :]
    (tmp_path / "mine.toml").write_text("\n".join(line.strip() for line in example.splitlines()))
    assert device("mi250x", tmp_path / "mine.toml").peak_flops == 191.5e12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["mi250x"]', "[mi250x", "device file"),
        ('["mi250x"]', "mi250x = 3", "'mi250x' is not a table"),
        ("hbm_bytes_s = 1600000000000.0", "", "missing required field `hbm_bytes_s`"),
        ("68700000000.0", "-1", "memory_bytes"),
        ("68700000000.0", "nan", "memory_bytes"),
        ("devices_per_node", "hbm = 3\ndevices_per_node", "unknown field `hbm`"),
        ("devices_per_node", "hbm_efficiency = 1.2\ndevices_per_node", r"a number in \(0, 1\]"),
        ("devices_per_node", "kernel_s = -1e-6\ndevices_per_node", "a number >= 0"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = device_file(tmp_path / "mine.toml")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        device("mi250x", path)


def test_a_missing_file_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        device("a100", tmp_path / "none.toml")


def test_tables_are_taken_where_they_exist_and_the_roofline_elsewhere(tmp_path: Path) -> None:
    tables = "operator tables (aiconfigurator-core 0.12.0, a100_sxm, vllm 0.14.0) for qwen3-14b on 2 x a800"
    assert lookup("a800", "qwen3-14b", 2).source == f"{tables}, all-reduces rescaled to links of 200 GB/s"
    assert "rescaled" not in lookup("h200", "qwen3-14b", 2).source
    # 40 heads: a degree without a table that still shards the model.
    assert lookup("a800", "llama-3.1-70b", 16).source.startswith("roofline")
    small = {**hf_config(model_shape("qwen3-8b")), "num_hidden_layers": 4}
    assert lookup("a800", config_of(tmp_path / "small", small), 1).source == "roofline of small on 1 x a800"


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "mixtral-8x7b"])
def test_a_config_of_a_known_shape_uses_its_table(tmp_path: Path, name: str) -> None:
    config_of(tmp_path, hf_config(model_shape(name)))
    own, known = lookup("h200", tmp_path, 2), lookup("h200", name, 2)
    assert own.source == known.source.replace(name, tmp_path.name)
    assert own.step_s(8, 8000, 100, 50) == known.step_s(8, 8000, 100, 50)


@pytest.mark.parametrize(
    ("device", "model", "tp", "message"),
    [
        ("a80", "qwen3-14b", 1, r"'a80': unknown device; valid: a100, .*, h800 \(did you mean 'a800'\?\)"),
        ("a800", "qwen3-14", 1, "did you mean 'qwen3-14b'"),
        ("a800", "qwen3-14b", 3, "tp = 3"),
    ],
)
def test_wrong_names_and_degrees_are_one_sentence(device: str, model: str, tp: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lookup(device, model, tp)
