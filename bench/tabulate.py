"""Make the library's operator tables: ``python -m bench.tabulate --system a100 --model qwen3-14b``.

Needs the extra ``libra-hpc[tables]``, no GPU: ``aiconfigurator-core`` has measured operator times of NVIDIA systems.
This module asks it for the operators of single steps and sorts them into the parts of `OperatorTable`.

Experts are sharded by tensor parallelism where the tool has measured that, else by whole experts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.models.step_times.tables import FOLDER, OperatorTable, Parts, Provenance

TOOL = "aiconfigurator-core"
BACKEND = "vllm"
SYSTEMS = {
    "a100": ("a100_sxm", "0.14.0", 300e9),
    "h100": ("h100_sxm", "0.24.0", 450e9),
    "h200": ("h200_sxm", "0.24.0", 450e9),
}
"""Our name -> the tool's system, the vLLM version of its measurements, link bandwidth in bytes/s (one direction)."""
DEGREES = (1, 2, 4, 8)
# Ratios of at most 1.5 at common sizes: linear interpolation of a quadratic is then within 4 %.
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
TOKENS = (*BATCHES, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NEWS = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
CACHED = (0, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
REDUCES = ("embedding_ar", "ar_1", "ar_2", "moe_pre_dispatch", "moe_post_dispatch")
"""Operators that communicate between a replica's devices."""
HEAD, ATTENTION = "logits_gemm", "attention"
MEASURED = "silicon"
HF_KINDS = {(False, False): "llama", (False, True): "qwen3", (True, True): "qwen3_moe", (True, False): "mixtral"}


def hf_config(shape: ModelShape) -> dict[str, object]:
    kind = "qwen2" if shape.qkv_bias else HF_KINDS[bool(shape.experts), shape.qk_norm]
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
    config: dict[str, object] = {
        "architectures": [f"{names[kind]}ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXTS[-1],
    }
    if shape.experts:
        count = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
        config |= {
            count: shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.moe_intermediate,
        }
    return config


def tabulate(system: str, shape: ModelShape, degrees: Iterable[int] = DEGREES) -> OperatorTable:
    """Tabulate one model on one system; degrees that do not shard the model are left out."""
    tool_system, backend_version, link = SYSTEMS[system]
    made = Provenance(
        tool=TOOL,
        version=version(TOOL),
        system=tool_system,
        backend=BACKEND,
        backend_version=backend_version,
        date=datetime.now(UTC).date().isoformat(),
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(shape)))
        chosen = [tp for tp in degrees if shape.divides(tp)]
        parts = {tp: _parts(folder, tool_system, backend_version, shape=shape, tp=tp) for tp in chosen}
    return OperatorTable(
        provenance=made,
        model=shape.name,
        intra_bytes_s=link,
        tokens=TOKENS,
        batches=BATCHES,
        contexts=CONTEXTS,
        news=NEWS,
        cached=CACHED,
        degrees=parts,
    )


def _parts(folder: str, system: str, backend_version: str, shape: ModelShape, tp: int) -> Parts:
    engine, experts = _engine(folder, system, backend_version, shape=shape, tp=tp)
    estimated: set[str] = set()

    def operators(raw: Iterable[tuple[str, float, float, str]]) -> dict[str, float]:
        out = {}
        for name, milliseconds, _, source in raw:
            short = name.partition("_")[2]
            out[short] = 1e3 * milliseconds
            if source != MEASURED and milliseconds > 0:
                estimated.add(short)
        return out

    def prefill(new: int, cached: int) -> dict[str, float]:
        return operators(engine.run_static_per_op(1, 1, cached + new, 2, cached, 1.0, 1.0)[0])

    def decode(batch: int, context: int) -> dict[str, float]:
        return operators(engine.decode_step_per_op(batch, context, 2))

    by_tokens = [prefill(count, 0) for count in TOKENS]
    decodes = [[decode(batch, context) for context in CONTEXTS] for batch in BATCHES]
    return Parts(
        experts=experts,
        layers=_compact(
            sum(us for name, us in step.items() if name not in (*REDUCES, HEAD, ATTENTION)) for step in by_tokens
        ),
        reduce=_compact(sum(us for name, us in step.items() if name in REDUCES) for step in by_tokens),
        head=_compact(row[0][HEAD] for row in decodes),
        decode_attention=tuple(_compact(step[ATTENTION] for step in row) for row in decodes),
        prefill_attention=tuple(_compact(prefill(new, cached)[ATTENTION] for cached in CACHED) for new in NEWS),
        estimated=tuple(sorted(estimated)),
    )


def _engine(folder: str, system: str, backend_version: str, shape: ModelShape, tp: int) -> tuple[Any, str]:
    from aiconfigurator_core import AicEngine
    from aiconfigurator_core.sdk.engine import compile_engine
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

    def build(**sharding: int) -> Any:
        return AicEngine.from_spec(compile_engine(folder, system, BACKEND, backend_version, tp_size=tp, **sharding))

    if not shape.experts:
        return build(), ""
    engine = build(moe_tp_size=tp)
    try:
        engine.decode_step_latency(1, CONTEXTS[0], 2)
    except PerfDataNotAvailableError:
        return build(moe_ep_size=tp), "expert"
    return engine, "tensor"


def _compact(microseconds: Iterable[float]) -> tuple[float, ...]:
    # A tenth of a microsecond is below the scatter of the measurements.
    return tuple(round(value, 1) for value in microseconds)


def write(table: OperatorTable, path: Path) -> None:
    """Write one table, a line per row of numbers, so that versions can be compared."""
    text = json.dumps(msgspec.to_builtins(table, str_keys=True), separators=(",", ":"))
    path.write_text(text.replace("],", "],\n").replace("},", "},\n") + "\n")


def run(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tabulate", description="Tabulate operator times for the step-time tables."
    )
    parser.add_argument("--system", nargs="+", required=True, choices=SYSTEMS)
    parser.add_argument("--model", nargs="+", required=True, help="short names or Hugging Face config files")
    parser.add_argument("--tp", nargs="+", type=int, default=list(DEGREES))
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for shape in [model_shape(model) for model in options.model]:
        for system in options.system:
            write(tabulate(system, shape, options.tp), options.out / f"{system}_{shape.name}.json")


if __name__ == "__main__":
    run()
