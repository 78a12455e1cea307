"""The configuration file of one engine, and the environment and vLLM arguments that follow from it.

Only here does the device (CPU or GPU) decide anything. Choices for every device, and why:

- ``VLLM_ENABLE_V1_MULTIPROCESSING=0``: vLLM's core runs in this process, starts in 2 s instead of 9, leaves no orphan.
- ``processed_logprobs``: of the distribution sampled from, after temperature; vLLM's default is before it.
- ``enable_chunked_prefill``: long prompts do not stall running turns. Per-request seeds end vLLM on CPU with it, so
  ``seed`` seeds the engine.
- ``VLLM_USE_FLASHINFER_SAMPLER=0``: it hides the log-probabilities under top-p and top-k, and compiles itself.
- ``VLLM_CPU_OMP_THREADS_BIND=nobind``: Slurm places threads; vLLM would put all engines of a node on the same cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.process.node_topology import loopback

if TYPE_CHECKING:
    from libra_hpc.config.run import RunConfig

WORKER_EXTENSION = "libra_hpc.engine.worker_extension.WorkerExtension"
MIB = 1 << 20
"""Bytes."""
CAPTURED = (
    1,
    2,
    4,
    *range(8, 64, 8),
    *range(64, 256, 16),
    *range(256, 512, 32),
    *range(512, 1024, 64),
    *range(1024, 2049, 256),
)
"""Tokens per step for which CUDA graphs are captured, in strides that waste at most an eighth.

vLLM stops at twice ``max_num_seqs``, at most 512; answers of tools make many steps larger. Without a graph the launch
of a step takes longer than its computation up to about 2,048 tokens (docs/LOG.md).
"""

CPU_STEP_TOKENS = 512
"""Most tokens of a step on CPUs, where a prompt's token takes as long as a decoded one: messages wait for a step. After
an update the longest step took 11.1 s with 2,048, vLLM's default; 3.1 s with 512, and all of it 9 % longer; 2.3 s with
128, and 60 % longer."""
SHARED_GPU = 0.01
"""Share of a GPU that must be free for a start where ``kv_cache_mb`` sets the size of the cache: vLLM's 0.92 never is
beside a server or a trainer."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, as its agent writes it to a JSON file; `config_for_run` takes the values from a run."""

    model: str
    """Hugging Face folder with ``config.json`` and ``*.safetensors``; every image must have the same tensor names
    and shapes."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    tp: Positive = 1
    max_model_len: Annotated[int, msgspec.Meta(ge=2)]
    """Most tokens of a prompt and its continuation."""
    max_num_seqs: Positive
    kv_cache_mb: Natural
    """KV cache per device in MiB; 0: vLLM's default share of the device."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """See `rollout.kv_dtype`."""
    async_steps: bool = False
    """See `rollout.async_steps`."""
    kv_host_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Host memory per device in GiB for KV caches that the device has no room for; 0: none.  GPUs only."""
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """See `rollout.kv_after_update`."""
    block_size: Positive = 32
    """KV block in tokens."""
    threads: Positive
    """CPU threads of each worker."""
    seed: Natural = 0
    device: Literal["cpu", "cuda"]
    version: Natural = 0
    """Weight version of the weights the engine starts with."""
    step_log: str = ""
    """Log every step with its duration in this file (`libra_hpc.engine.steplog`); empty: no log."""
    weights: str = ""
    """Start from this image (`libra_hpc.weights.image`) instead of the folder's weights."""
    gate: GateConfig | None = None
    """Gate of an engine on a device whose server has users; None: the device is ours."""


def config_for_run(
    run: RunConfig, *, model: str, seed: int, tp: int = 1, version: int = 0, step_log: str = "", weights: str = ""
) -> EngineConfig:
    """The engine of a run that serves the folder ``model``; the other arguments as in `EngineConfig`."""
    rollout = run.rollout
    return EngineConfig(
        model=model,
        dtype=run.model.dtype,
        tp=tp,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_mb=rollout.kv_cache_mb,
        kv_dtype=rollout.kv_dtype,
        async_steps=rollout.async_steps,
        kv_host_gb=rollout.kv_host_gb_per_gpu,
        kv_after_update=rollout.kv_after_update,
        block_size=rollout.block_size,
        threads=rollout.threads,
        seed=seed,
        device=run.slurm.device,
        version=version,
        step_log=step_log,
        weights=weights,
    )


def read_config(path: str | Path) -> EngineConfig:
    """Read an engine configuration from a JSON file.

    Raises `UserError` naming the file and the field when it is missing, not JSON, or not an `EngineConfig`.
    """
    try:
        config = msgspec.json.decode(Path(path).read_bytes(), type=EngineConfig)
    except OSError as error:
        raise invalid("--config", str(path), error.strerror or "cannot be read", "a readable JSON file") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}; fields: {', '.join(EngineConfig.__struct_fields__)}.") from error
    check_config(config)
    return config


def check_config(config: EngineConfig) -> None:
    """Check that the model folder and the image exist; raises `UserError`."""
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise invalid("model", config.model, "no config.json there", "a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise invalid(
            "model", config.model, "no *.safetensors there", "a Hugging Face model folder with safetensors weights"
        )
    if config.weights and not Path(config.weights).is_file():
        raise invalid("weights", config.weights, "no such file", "an image, or an empty string")


def environment(config: EngineConfig) -> dict[str, str]:
    """The environment variables vLLM and torch must find when they are imported."""
    out = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(config.threads),
        # The workers of one engine share a node: they listen on no other address.
        "VLLM_HOST_IP": loopback(),
        "VLLM_LOOPBACK_IP": loopback(),
    }
    if config.device == "cpu":
        # Execution on the CPU is eager: dynamo would only cost time.
        out |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}
    return out


def prepare_process(config: EngineConfig) -> None:
    """Put `environment` into this process; call it before torch or vLLM is imported."""
    os.environ.update(environment(config))


def schedules_ahead(config: EngineConfig) -> bool:
    """Whether vLLM forms a batch before the one before it has ended.

    vLLM's CPU platform cannot: its steps run in the thread that forms them, and it has no events to wait for.  Beside a
    server's users no step may be in flight that the gate has not let through.
    """
    return config.async_steps and config.device == "cuda" and config.gate is None


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Keyword arguments of ``vllm.engine.arg_utils.EngineArgs``."""
    return {
        "model": config.model,
        "skip_tokenizer_init": True,
        # Mistral's folders have a second configuration and a second copy of the weights, under other names.
        "config_format": "hf",
        "generation_config": "vllm",
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_mb * MIB or None,
        "kv_cache_dtype": config.kv_dtype,
        # vLLM counts all devices of the engine.
        "kv_offloading_size": config.kv_host_gb * config.tp or None,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, config.max_num_seqs) if config.device == "cpu" else None,
        "block_size": config.block_size,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": schedules_ahead(config),
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if config.weights else "safetensors",
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        # CUDA graphs and sleeping memory pools exist on GPUs only.
        "enforce_eager": config.device == "cpu",
        "cudagraph_capture_sizes": list(CAPTURED) if config.device == "cuda" else None,
        "enable_sleep_mode": config.device == "cuda",
        **({"gpu_memory_utilization": SHARED_GPU} if config.kv_cache_mb and config.device == "cuda" else {}),
    }
