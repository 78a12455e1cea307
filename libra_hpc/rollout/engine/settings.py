"""What one engine is: its configuration file, and the environment and vLLM arguments that follow from it.

This is the one place where the device decides anything: which environment variables vLLM finds when it is imported, and
which arguments differ. Everything after it takes the same path on CPU and on GPU.

Choices that hold on every device, and why:

- ``VLLM_ENABLE_V1_MULTIPROCESSING=0``: vLLM's core runs in this process (start in 2 s instead of 9, no child to
  orphan); with tp > 1 only the workers are children.
- ``logprobs_mode = processed_logprobs``: log-probabilities of the distribution sampled from (after temperature); vLLM's
  default is before it.
- ``enable_chunked_prefill = True``: long prompts do not stall running turns.  It forbids per-request seeds on CPU (vLLM
  dies), so requests carry none and ``seed`` seeds the engine.
- ``async_scheduling = False``: every batch's output is known before the next is formed, so a weight swap or an abort
  falls exactly between two batches.
- ``skip_tokenizer_init``: token ids in, token ids out.
- ``VLLM_CPU_OMP_THREADS_BIND=nobind``: thread placement is Slurm's; vLLM's own binding puts every engine of a node on
  the same first cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from libra_hpc.errors import UserError, invalid

TRANSFER_BACKEND = "libra_file"
"""Name under which our weight-transfer engine is registered in every vLLM worker."""
SCHEDULER = "libra_hpc.rollout.engine.pinning.PinningScheduler"
WORKER_EXTENSION = "libra_hpc.rollout.engine.transfer.WorkerExtension"
MIB = 1 << 20
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
"""Tokens per step for which CUDA graphs are captured.

vLLM stops at twice ``max_num_seqs``, at 512 at most.  In agentic rollout every turn brings some hundred tokens of tool
output, so that a large share of the steps is above that, and without a graph the host takes longer to launch a step
than the device to compute it: on an H200 steps with 384 prompt tokens took 25 to 38 ms without a graph, those with 96
and a graph 10 to 16, those with 1,536 (no graph, but the device is busy) 38 to 47 (docs/lab/0.1-h200.md).  Up to 2,048
tokens, where computing takes over, in strides that waste an eighth at most.
"""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, as its agent writes it to a JSON file."""

    model: str
    """Hugging Face folder: ``config.json`` and ``*.safetensors``, whose tensor names and shapes every later weight
    file must have."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tp: Positive = 1
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] = 4096
    """Most tokens of a prompt and its continuation together."""
    max_num_seqs: Positive = 64
    kv_cache_mb: Natural = 0
    """KV cache per device in MiB; 0: vLLM's default share of the device."""
    block_size: Positive = 32
    """KV block in tokens."""
    threads: Positive = 1
    """CPU threads of each worker."""
    seed: Natural = 0
    device: Literal["cpu", "cuda"] = "cpu"
    version: Natural = 0
    """Weight version of the weights the engine starts with."""
    step_log: str = ""
    """Note every step with its duration in this file (`libra_hpc.rollout.engine.steplog`); empty: nowhere."""
    weights: str = ""
    """Start from this HF-named safetensors file instead of the folder's weights."""


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
    """Check what the types do not say; raises `UserError`."""
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise invalid("model", config.model, "no config.json there", "a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise invalid(
            "model", config.model, "no *.safetensors there", "a Hugging Face model folder with safetensors weights"
        )
    if config.weights and not Path(config.weights).is_file():
        raise invalid("weights", config.weights, "no such file", "an HF-named safetensors file, or an empty string")


def environment(config: EngineConfig) -> dict[str, str]:
    """The environment variables vLLM and torch must find when they are imported."""
    out = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(config.threads),
        # The workers of one engine share a node: nothing of theirs listens beyond it.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
    }
    if config.device == "cpu":
        # Without a compiler, or on the first request with one, dynamo costs more than it gives to eager CPU execution.
        out |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}
    return out


def prepare_process(config: EngineConfig) -> None:
    """Put `environment` into this process; call it before torch or vLLM is imported, later it has no effect on them."""
    os.environ.update(environment(config))


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Keyword arguments of ``vllm.engine.arg_utils.EngineArgs``."""
    return {
        "model": config.model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_mb * MIB or None,
        "block_size": config.block_size,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "scheduler_cls": SCHEDULER,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if config.weights else "safetensors",
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
        # CUDA graphs and sleeping memory pools exist on GPUs only.
        "enforce_eager": config.device == "cpu",
        "cudagraph_capture_sizes": list(CAPTURED) if config.device == "cuda" else None,
        "enable_sleep_mode": config.device == "cuda",
    }
