"""Mixture of experts: the fields of Megatron-Core's configuration, and its dispatcher without a GPU.

Every layer is a router and ``experts`` gated MLPs; a token goes to ``experts_per_token`` of them by two all-to-alls over
the expert-parallel ranks. There is no auxiliary loss: the objective is the policy's.

Without CUDA, Megatron-Core's token dispatcher has two calls that raise; with CUDA nothing is replaced:

- ``torch.cuda.Stream()`` for copies to the host -> no stream
- those copies -> the host's tensors as they are
"""

from __future__ import annotations

from typing import Any

import torch

from libra_hpc.hardware.architecture import Architecture
from libra_hpc.weights.names import ReplicaPlace

from .mcore import MoEAlltoAllTokenDispatcher, moe_utils


def expert_config(shape: Architecture, place: ReplicaPlace) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` for ``shape``; none for a dense model."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_router_pre_softmax": not shape.norm_topk,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": place.ep,
        "expert_tensor_parallel_size": place.etp,
    }


def install() -> None:
    """Make Megatron-Core's layers of experts work without Transformer Engine and without CUDA; may be repeated."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron-Core reads the name, but does not define it without Transformer Engine.
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
        MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _on_host


def _on_host(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(dispatcher, name)
            if splits is not None:
                setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert
