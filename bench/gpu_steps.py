"""Step times of real vLLM engines on this GPU against the operator tables that planner and simulator use.

    python -m bench.gpu_steps --device h200 --models qwen3-4b,qwen3-8b

For each model, `libra-hpc calibrate` measures an engine with random weights.  Every measured step is compared with the
tables, which come from independent measurements (`libra_hpc/models/step_times/tables`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from bench.gpu_model import random_model
from bench.harness import median, report
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import StepPoint, fit_steps, load
from libra_hpc.rollout.group_state import quantile


def kind(point: StepPoint) -> str:
    """Class of a step: prefill or decode, and its size."""
    if point.prefill and point.decodes:
        return "both"
    if point.prefill:
        return "prefill, up to 1,024 tokens" if point.prefill <= 1024 else "prefill, more"
    size = "1 to 8" if point.decodes <= 8 else "16 to 128"
    return f"decode, {size} sequences, {'short' if point.kv_tokens / point.decodes < 3000 else 'long'}"


def measure(model: Path, *, device: str, name: str, out: Path, max_model_len: int, max_num_seqs: int) -> None:
    """Run the calibration in a separate process, which releases the GPU at its end."""
    config = EngineConfig(
        model=str(model),
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_mb=0,
        threads=1,
        device="cuda",
    )
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(config))
        file.flush()
        argv = [
            "-m",
            "libra_hpc.engine.measure_steps",
            "--config",
            file.name,
            "--device",
            device,
            "--model",
            name,
            "--out",
            str(out),
        ]
        subprocess.run([sys.executable, *argv], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="h200", help="name in the device table")
    parser.add_argument("--models", default="qwen3-4b,qwen3-8b", help="names in the model table")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the calibration files")
    arguments = parser.parse_args()
    rows, raw = [], []
    for name in arguments.models.split(","):
        out = arguments.out / f"{arguments.device}-{name}.json"
        with random_model(model_shape(name)) as folder:
            measure(
                folder,
                device=arguments.device,
                name=name,
                out=out,
                max_model_len=arguments.max_model_len,
                max_num_seqs=arguments.max_num_seqs,
            )
        found = load(out)
        tables, roofline = (lookup(arguments.device, name, 1, source=source) for source in ("tables", "roofline"))
        kinds: dict[str, list[StepPoint]] = {}
        for point in found.points:
            kinds.setdefault(kind(point), []).append(point)
        for label, points in sorted(kinds.items()):
            steps = [(p.decodes, p.kv_tokens, p.prefill, p.context) for p in points]
            by_table = [tables.step_s(*step) / p.seconds for step, p in zip(steps, points, strict=True)]
            by_roofline = [roofline.step_s(*step) / p.seconds for step, p in zip(steps, points, strict=True)]
            spread = f"{quantile(by_table, 0.1):.2f}..{quantile(by_table, 0.9):.2f}"
            rows.append(
                [
                    name,
                    label,
                    len(points),
                    1e3 * median([p.seconds for p in points]),
                    median(by_table),
                    spread,
                    median(by_roofline),
                ]
            )
            raw.append({"model": name, "kind": label, "tables": by_table, "roofline": by_roofline})
        capacity, fit = found.kv_capacity[1], fit_steps(found.points)
        rows.append(
            [
                name,
                "KV capacity, tokens",
                "",
                capacity,
                tables.kv_capacity / capacity,
                "",
                roofline.kv_capacity / capacity,
            ]
        )
        rows.append(
            [name, "own fit, median error", fit.points, "", f"{fit.median_error:.1%}", f"p90 {fit.p90_error:.1%}", ""]
        )
    columns = ["model", "steps", "number", "median, ms", "tables / real", "p10..p90", "roofline / real"]
    limits = f"contexts up to {arguments.max_model_len} tokens, up to {arguments.max_num_seqs} sequences"
    notes = [f"vLLM in bfloat16, TP 1, {limits}; long: 3,000 tokens and more."]
    title = f"Engine steps on {arguments.device} against the operator tables"
    report("gpu_steps", title=title, columns=columns, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
