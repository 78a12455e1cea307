"""Making operator tables: each of the tool's operators ends in the right part of a readable file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import tabulate as module
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.tables import TableTimes, load_table
from tests.models.support import bare

Operators = list[tuple[str, float, float, str]]


class Missing(Exception):
    """The tool's error for operators without measurements."""


class Engine:
    """Operator times in milliseconds that are sums of known terms."""

    def __init__(self, sharding: dict[str, Any]) -> None:
        self.tp = sharding["tp_size"]
        self.missing = sharding.get("moe_tp_size") == 8

    def _operators(self, kind: str, tokens: int, rows: int, attention: float) -> Operators:
        times = {
            "qkv_gemm": 3 * tokens,
            "add_norm_1": 1.0,
            "attention": attention,
            "logits_gemm": 2 * rows,
            "ar_1": 5 * tokens,
            "ar_2": 7.0,
        }
        return [
            (f"{kind}_{name}", ms / self.tp, 0.0, "empirical" if name == "add_norm_1" else "silicon")
            for name, ms in times.items()
        ]

    def run_static_per_op(
        self, batch: int, beam: int, isl: int, osl: int, prefix: int, *_: float
    ) -> tuple[Operators, Operators]:
        return self._operators("context", isl - prefix, 1, 11.0 * (isl - prefix) + 0.001 * prefix), []

    def decode_step_per_op(self, batch: int, context: int, osl: int) -> Operators:
        return self._operators("generation", batch, batch, 13.0 * batch + 0.002 * batch * context)

    def decode_step_latency(self, batch: int, context: int, osl: int) -> float:
        if self.missing:
            raise Missing
        return sum(ms for _, ms, _, _ in self.decode_step_per_op(batch, context, osl))


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the real tool by one of known times; returns the model configs it got."""
    seen: list[dict[str, Any]] = []

    def compile_engine(folder: str, system: str, backend: str, version: str, **sharding: int) -> dict[str, int]:
        seen.append(json.loads(Path(folder, "config.json").read_text()))
        return sharding

    tool, sdk, engine, errors = (
        ModuleType(f"aiconfigurator_core{name}") for name in ("", ".sdk", ".sdk.engine", ".sdk.errors")
    )
    tool.AicEngine = type("AicEngine", (), {"from_spec": staticmethod(Engine)})  # type: ignore[attr-defined]
    engine.compile_engine = compile_engine  # type: ignore[attr-defined]
    errors.PerfDataNotAvailableError = Missing  # type: ignore[attr-defined]
    for each in (tool, sdk, engine, errors):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(module, "version", lambda name: "0.0")
    return seen


def test_operators_are_sorted_into_parts_and_read_back(configs: list[dict[str, Any]], tmp_path: Path) -> None:
    module.run(["--system", "a100", "--model", "qwen3-8b", "--tp", "1", "2", "--out", str(tmp_path)])
    table = load_table(tmp_path / "a100_qwen3-8b.json")
    assert (table.model, table.provenance.system, table.provenance.version, table.provenance.backend_version) == (
        "qwen3-8b",
        "a100_sxm",
        "0.0",
        "0.14.0",
    )
    assert configs[0]["hidden_size"] == 4096
    assert list(table.degrees) == [1, 2]
    for tp, parts in table.degrees.items():
        assert parts.estimated == ("add_norm_1",)
        assert parts.layers == pytest.approx([1e3 * (3 * n + 1) / tp for n in table.tokens])
        assert parts.reduce == pytest.approx([1e3 * (5 * n + 7) / tp for n in table.tokens])
        assert parts.head == pytest.approx([1e3 * 2 * n / tp for n in table.batches])
    # One step of 3 decodes at 1,000 tokens each and 100 prompt tokens after 500: every term once, in milliseconds.
    times = TableTimes(table, bare("a100"), model_shape("qwen3-8b"), 2)
    whole = (3 * 103 + 1) + (5 * 103 + 7) + 2 * 4 + (13 * 3 + 0.002 * 3000) + (11 * 100 + 0.001 * 500)
    assert times.step_s(3, 3000, 100, 500) == pytest.approx(1e-3 * whole / 2, rel=1e-4)


def test_experts_are_split_where_that_was_measured_and_whole_elsewhere(configs: list[dict[str, Any]]) -> None:
    table = module.tabulate("h200", model_shape("qwen3-30b-a3b"))
    assert {tp: parts.experts for tp, parts in table.degrees.items()} == {
        1: "tensor",
        2: "tensor",
        4: "tensor",
        8: "expert",
    }
    assert configs[0]["num_experts"] == 128
