"""Which source `lookup` uses, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from libra_hpc.errors import UserError
from libra_hpc.models.devices import device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.tabulate import hf_config


def test_tables_are_taken_where_they_exist_and_the_roofline_elsewhere(tmp_path: Path) -> None:
    assert (
        lookup("a800", "qwen3-14b", 2).source
        == "operator tables (aiconfigurator-core 0.12.0, a100_sxm, vllm 0.14.0) for qwen3-14b on 2 x a800, all-reduces"
        " rescaled to links of 200 GB/s"
    )
    assert "rescaled" not in lookup("h200", "qwen3-14b", 2).source
    assert lookup("a800", "qwen3-14b", 2, source="roofline").source == "roofline of qwen3-14b on 2 x a800"
    # 40 heads: a degree without a table that still shards the model.
    assert lookup("a800", "llama-3.1-70b", 16).source.startswith("roofline")
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({**hf_config(model_shape("qwen3-8b")), "num_hidden_layers": 4}))
    assert lookup("a800", small, 1).source == "roofline of small on 1 x a800"


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "mixtral-8x7b"])
def test_a_config_of_a_known_shape_uses_its_table(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model_shape(name))))
    own, known = lookup("h200", tmp_path, 2), lookup("h200", name, 2)
    assert own.source == known.source.replace(name, tmp_path.name)
    assert own.step_s(8, 8000, 100, 50) == known.step_s(8, 8000, 100, 50)


def test_objects_serve_as_well_as_names() -> None:
    roomy = msgspec.structs.replace(device("a100"), memory_bytes=2 * device("a100").memory_bytes)
    assert lookup(roomy, model_shape("qwen3-32b"), 1).kv_capacity > 10 * lookup("a100", "qwen3-32b", 1).kv_capacity


def test_memory_that_does_not_hold_the_weights_is_no_capacity() -> None:
    assert lookup("a100", "llama-3.1-70b", 1).kv_capacity == 0
    assert lookup("a100", "qwen3-8b", 1, memory_util=0.5).kv_capacity < lookup("a100", "qwen3-8b", 1).kv_capacity


def test_a_users_device_falls_to_the_roofline(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[mine]\nmemory_bytes = 64e9\npeak_flops = 190e12\nhbm_bytes_s = 1.6e12\nintra_bytes_s = 1e11\ninter_bytes_s ="
        " 1e10\ndevices_per_node = 8\n"
    )
    assert lookup("mine", "qwen3-8b", 2, devices_file=path).source == "roofline of qwen3-8b on 2 x mine"
    with pytest.raises(
        UserError,
        match=r"source = 'tables': there are no operator tables for qwen3-8b on mine; valid: .*qwen3-8b on a100",
    ):
        lookup("mine", "qwen3-8b", 2, devices_file=path, source="tables")


def test_wrong_names_and_degrees_are_one_sentence() -> None:
    with pytest.raises(UserError, match=r"did you mean 'a800'"):
        lookup("a8000", "qwen3-14b", 1)
    with pytest.raises(UserError, match=r"did you mean 'qwen3-14b'"):
        lookup("a800", "qwen3-14", 1)
    with pytest.raises(UserError, match=r"source = 'table': .*did you mean 'tables'"):
        lookup("a800", "qwen3-14b", 1, source="table")
    for source in ("auto", "tables", "roofline"):
        with pytest.raises(UserError, match="tp = 3"):
            lookup("a800", "qwen3-14b", 3, source=source)
    with pytest.raises(
        UserError, match=r"tp = 16: the operator table of llama-3.1-70b on a100_sxm lacks it; valid: 1, 2, 4, 8"
    ):
        lookup("a800", "llama-3.1-70b", 16, source="tables")


def test_a_login_node_needs_no_numeric_package() -> None:
    code = (
        "import sys, libra_hpc.models.step_times.lookup as room; room.lookup('a800', 'qwen3-14b', 4)\n"
        "print(*{'numpy', 'pandas', 'torch', 'vllm'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
