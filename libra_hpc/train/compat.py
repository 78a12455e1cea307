"""Run Megatron-Core where there is no GPU: the whole shim, a no-op where CUDA exists.

Megatron-Core names the device in literals.  On a host without CUDA exactly these calls are replaced, each of which can
only raise there:

=====================================================
================================================================================== call
why Megatron-Core makes it =====================================================
================================================================================== ``torch.cuda.current_device()``
device of gradient buffers, pipeline receive buffers ``torch.cuda.synchronize()``                           before
pipeline sends ``f(..., device="cuda")`` inside `mcore_device`        token counters, overflow flags and norms of
schedules and optimizers ``tensor.cuda()`` inside `mcore_device`                embedding weights shared by the first
and last pipeline stage (at construction) ``tensor.type()`` inside `mcore_device`                optimizers compare it
with ``'torch.cuda.FloatTensor'`` =====================================================
==================================================================================

Besides, on every device, `eager_import` keeps Megatron-Core's import from decorating its fused functions with
``torch.compile``: the model is built with those fusions off, and setting up the compiler doubles the start of a worker,
which is part of the time a node needs to change sides.

Code that asks ``torch.cuda.is_available()`` first is not affected, so vLLM or transformers in the same process keep
working.
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


@contextlib.contextmanager
def eager_import() -> Iterator[None]:
    """Context for importing Megatron-Core: ``torch.compile`` returns functions as they are, and warnings that
    optional packages are missing are dropped."""
    real = torch.compile
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = real


def install() -> None:
    """Replace the two ``torch.cuda`` calls above, where there is no CUDA; repeating it does no harm."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_args, **_kwargs: None


def mcore_device() -> contextlib.AbstractContextManager[Any]:
    """Context for Megatron-Core calls that carry ``"cuda"`` literals: construction of its model and optimizer, its
    schedules, its optimizer step."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaLiteralsToCpu()


def without_shim() -> contextlib.AbstractContextManager[Any]:
    """Context for our own code inside `mcore_device`: the model's forward has no literals, and every torch call is
    cheaper without the mode."""
    return contextlib.nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()
