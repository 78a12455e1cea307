"""Run Megatron-Core without a GPU; does nothing where CUDA exists.

Megatron-Core names the device in literals. Without CUDA exactly these calls, which would raise, are replaced:

- ``torch.cuda.current_device()`` (device of gradient and pipeline buffers) -> the CPU
- ``torch.cuda.synchronize()`` (before pipeline sends) -> nothing
- ``device="cuda"`` and ``tensor.cuda()`` inside `mcore_device` (counters, norms, shared embeddings) -> the CPU
- ``tensor.type()`` inside `mcore_device` (optimizers compare it with ``'torch.cuda.FloatTensor'``) -> the CUDA name

Code that asks ``torch.cuda.is_available()`` first is not affected: vLLM or transformers in the same process work.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaLiteralsToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if isinstance(device, str) and device.startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _FloatsToHost(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].cpu().float() if func is torch.Tensor.float else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def eager_import() -> Iterator[None]:
    """Context for importing Megatron-Core: ``torch.compile`` does nothing, warnings of missing packages are dropped.

    The model is built without compiled fusions. Setting up the compiler would double a worker's start-up time.
    """
    real = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = real


def install() -> None:
    """Replace the two ``torch.cuda`` functions where there is no CUDA; may be repeated."""
    # Of deprecated names that Megatron-Core calls, and of settings for GPUs.
    for module in ("torch.distributed", "megatron"):
        warnings.filterwarnings("ignore", module=module)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_args, **_kwargs: None


def masters_in_host_memory(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Context for Megatron-Core's optimizer, whose float32 copies of weights the device may have no room for."""
    return _FloatsToHost() if wanted else contextlib.nullcontext()


def no_random_state() -> None:
    """Have Megatron-Core's random state, which its embedding forks, do nothing: nothing here is random."""
    with eager_import():
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def mcore_device() -> contextlib.AbstractContextManager[Any]:
    """Context for Megatron-Core calls with ``"cuda"`` literals: construction of model and optimizer, schedules,
    updates.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaLiteralsToCpu()


def without_shim() -> contextlib.AbstractContextManager[Any]:
    """Context for our own code inside `mcore_device`, which has no literals: torch calls cost less without the mode."""
    return contextlib.nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()
