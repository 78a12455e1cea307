"""Step times of real vLLM engines on this GPU against the operator tables that planner and simulator use.

    python -m bench.gpu_steps --device h200 --models qwen3-4b,qwen3-8b

For each model, the calibration of `libra-hpc calibrate` measures an engine with random weights.  Every measured step is
compared with the tables, which come from independent measurements (`libra_hpc/models/step_times/tables`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bench.gpu_model import random_model
from bench.harness import Options, median, options, report
from libra_hpc.annexes.calibrate.measure_engines import measure_engines
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import Calibration, StepPoint, fit_steps
from libra_hpc.rollout.group_state import quantile

COLUMNS = ["model", "steps", "number", "median, ms", "tables / real", "p10..p90", "roofline / real"]


def kind(point: StepPoint) -> str:
    """Class of a step: prefill or decode, and its size."""
    if point.prefill and point.decodes:
        return "both"
    if point.prefill:
        return "prefill, up to 1,024 tokens" if point.prefill <= 1024 else "prefill, more"
    size = "1 to 8" if point.decodes <= 8 else "16 to 128"
    return f"decode, {size} sequences, {'short' if point.kv_tokens / point.decodes < 3000 else 'long'}"


def measure(name: str, given: Options) -> Calibration:
    """The calibration of an engine in a process of its own, which releases the GPU at its end."""
    limits = {"max_model_len": given.max_model_len, "max_num_seqs": given.max_num_seqs, "kv_cache_mb": 0, "threads": 1}
    with random_model(model_shape(name)) as folder:
        config = EngineConfig(model=str(folder), dtype="bfloat16", device="cuda", **limits)
        return measure_engines(config, 1, given.device, name)


def lines(name: str, device: str, found: Calibration) -> list[list[Any]]:
    """A line for each kind of step, one for the KV cache, and one for the fit of the steps alone."""
    tables, roofline = (lookup(device, name, 1, source=source) for source in ("tables", "roofline"))
    kinds: dict[str, list[StepPoint]] = defaultdict(list)
    for point in found.points:
        kinds[kind(point)].append(point)
    rows: list[list[Any]] = []
    for label, points in sorted(kinds.items()):
        by_table, by_roofline = (
            [times.step_s(p.decodes, p.kv_tokens, p.prefill, p.context) / p.seconds for p in points]
            for times in (tables, roofline)
        )
        spread = f"{quantile(by_table, 0.1):.2f}..{quantile(by_table, 0.9):.2f}"
        took = 1e3 * median([p.seconds for p in points])
        rows.append([name, label, len(points), took, median(by_table), spread, median(by_roofline)])
    capacity, fit = found.kv_capacity[1], fit_steps(found.points)
    ratios = (tables.kv_capacity / capacity, "", roofline.kv_capacity / capacity)
    errors = (f"{fit.median_error:.1%}", f"p90 {fit.p90_error:.1%}", "")
    rows.append([name, "KV capacity, tokens", "", capacity, *ratios])
    rows.append([name, "own fit, median error", fit.points, "", *errors])
    return rows


def main() -> None:
    limits: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 128}
    given = options("gpu_steps", __doc__, device="h200", models=["qwen3-4b", "qwen3-8b"], **limits)
    rows = [line for name in given.models for line in lines(name, given.device, measure(name, given))]
    words = f"contexts up to {given.max_model_len} tokens, up to {given.max_num_seqs} sequences"
    notes = [f"vLLM in bfloat16, TP 1, {words}; long: 3,000 tokens and more."]
    title = f"Engine steps on {given.device} against the operator tables"
    report(given, title, columns=COLUMNS, rows=rows, notes=notes, raw=rows)


if __name__ == "__main__":
    main()
