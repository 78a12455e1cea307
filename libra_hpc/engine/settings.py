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
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.files import read_named
from libra_hpc.gate.gated_steps import GateConfig
from libra_hpc.models.devices import STEP_TOKENS
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.models.shapes import read_config as read_model
from libra_hpc.process.addresses import loopback

WORKER_EXTENSION = "libra_hpc.engine.worker_extension.WorkerExtension"
TEXT_MODEL = "text_model"
"""Name of `libra_hpc.engine.text_model_loader` in vLLM."""
MODEL = "model"
"""Name of the link to its model in the folder where an engine works."""
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
of a step takes longer than its computation up to about 2,048 tokens (docs/log).
"""

CPU_STEP_TOKENS = 512
"""Most tokens of a step on CPUs, where a prompt's token takes as long as a decoded one: messages wait for a step. After
an update the longest step took 11.1 s with 2,048; 3.1 s with 512, and all of it 9 % longer; 2.3 s with
128, and 60 % longer."""
SHARED_GPU = 0.01
"""Share of a GPU that must be free for a start where ``kv_cache_mb`` sets the size of the cache: vLLM's 0.92 never is
beside a server or a trainer."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine of a run, or of a measurement (`alone`)."""

    run: RunConfig
    """``model.path`` is the folder that the engine serves; every image must have the same tensor names and shapes."""
    component: str = "rollout"
    """Component of its node."""
    tp: Annotated[int, msgspec.Meta(ge=1)] = 1
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """Empty: ``model.dtype``."""
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Weight version of the weights the engine starts with."""
    step_log: str = ""
    """Log every step with its duration in this file (`libra_hpc.engine.steplog`); empty: no log."""
    weights: str = ""
    """Start from this image (`libra_hpc.weights.image`) instead of the folder's weights."""
    gate: GateConfig | None = None
    """Gate of an engine on a device whose server has users; None: the device is ours."""


engine_settings = msgspec.json.Decoder(EngineConfig)


def alone(
    model: str, device: str, *, dtype: str, rollout: Mapping[str, Any] = MappingProxyType({}), **place: Any
) -> EngineConfig:
    """An engine without a run; ``place``: fields of `EngineConfig`."""
    run = RunConfig().changed(model={"path": model}, slurm={"device": device}, rollout=rollout)
    return EngineConfig(run=run, dtype=cast(Any, dtype), **place)


def read_config(path: str | Path) -> EngineConfig:
    """Read an engine configuration from a JSON file.

    Raises `UserError` naming the file and the field when it is missing, not JSON, or not an `EngineConfig`.
    """
    fields = ", ".join(EngineConfig.__struct_fields__)
    config = read_named("--config", Path(path), engine_settings, f"a JSON file with the fields {fields}")
    check_config(config)
    return config


def check_config(config: EngineConfig) -> None:
    """Check that the model folder and the image exist; raises `UserError`."""
    model = config.run.model.path
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise invalid("model", model, "no config.json there", "a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise invalid("model", model, "no *.safetensors there", "a Hugging Face model folder with safetensors weights")
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
        "OMP_NUM_THREADS": str(config.run.rollout.threads),
        # The workers of one engine share a node: they listen on no other address.
        "VLLM_HOST_IP": loopback(),
        "VLLM_LOOPBACK_IP": loopback(),
    }
    if config.run.slurm.device == "cpu":
        # Execution on the CPU is eager: dynamo would only cost time.
        out |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}
    return out


def under_one_name(config: EngineConfig, place: Path) -> EngineConfig:
    """The same engine, with its model at `MODEL` in the working directory, which becomes ``place``.

    The path of a model is a part of the key of its compiled graphs: an engine could use those of no other checkpoint.
    Of a wrapper the folder has the weights and the text model's configuration: vLLM builds nothing else.
    """
    place.mkdir(exist_ok=True)
    own, folder = place / MODEL, Path(config.run.model.path).absolute()
    if own.is_symlink():
        own.unlink()
    shutil.rmtree(own, ignore_errors=True)
    model = read_model(folder / "config.json", "model", str(folder))
    if "wrapper" in model:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        own.mkdir()
        model["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model["model_type"]]]
        (own / "config.json").write_bytes(msgspec.json.encode(model))
        for file in chain(folder.glob("*.safetensors"), folder.glob("*.index.json")):
            (own / file.name).symlink_to(file)
    else:
        own.symlink_to(folder)
    os.chdir(place)
    return msgspec.structs.replace(config, run=config.run.changed(model={"path": MODEL}))


def prepare_process(config: EngineConfig) -> None:
    """Put `environment` into this process; call it before torch or vLLM is imported."""
    os.environ.update(environment(config))


def schedules_ahead(config: EngineConfig) -> bool:
    """Whether vLLM forms a batch before the one before it has ended.

    Beside a server's users no step may be in flight that the gate has not let through.
    """
    return config.run.steps_ahead and config.gate is None


def replays(run: RunConfig, shape: ModelShape) -> bool:
    """Whether engines report the experts of tokens."""
    return shape.experts > 0 and run.algorithm.routing == "rollout"


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Keyword arguments of ``vllm.engine.arg_utils.EngineArgs``."""
    run, rollout = config.run, config.run.rollout
    on_gpus = run.slurm.device == "cuda"
    return {
        "model": run.model.path,
        "skip_tokenizer_init": True,
        # Mistral's folders have a second configuration and a second copy of the weights, under other names.
        "config_format": "hf",
        "generation_config": "vllm",
        "dtype": config.dtype or run.model.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.slots,
        "kv_cache_memory_bytes": rollout.kv_cache_mb * MIB or None,
        "kv_cache_dtype": rollout.kv_dtype,
        "max_num_batched_tokens": max(STEP_TOKENS if on_gpus else CPU_STEP_TOKENS, rollout.slots),
        "block_size": rollout.block_size,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": schedules_ahead(config),
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        # Of vLLM's second model runner; a CPU engine has a table of its own.
        "enable_return_routed_experts": on_gpus and replays(run, model_shape(run.model.path)),
        "load_format": "dummy" if config.weights else TEXT_MODEL,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        # CUDA graphs and sleeping memory pools exist on GPUs only.
        "enforce_eager": not on_gpus,
        "cudagraph_capture_sizes": list(CAPTURED) if on_gpus else None,
        "enable_sleep_mode": on_gpus,
        **({"gpu_memory_utilization": SHARED_GPU} if rollout.kv_cache_mb and on_gpus else {}),
    }
