"""Build Megatron-Core's `GPTModel` from an `Architecture`, with attention over packed sequences.

`PackedAttention` replaces the local spec's ``core_attention``, which refuses packed sequences and needs a CUDA
generator. It applies rotary positions too (`trainer.model.rotary`), so the model has no position embedding. All
else is Megatron-Core's.

Fusions are off or run uncompiled (`trainer.model.compat.eager_import`): compilation takes longer than a short run.
Only the gated activation is fused: it stores its input alone, two MLP widths per token and layer less. CUDA has own
forms of what is left (`libra_hpc.trainer.model.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import Architecture, stage_layers
from libra_hpc.models.supported import in_float32
from libra_hpc.weights.names import ReplicaPlace, own_entries

from . import compat, context, moe
from .attention import Kernel, choose_kernel, rectangles
from .delta_net import GatedDeltaNet
from .head import return_hidden_states
from .kernels import install_gate, sum_in_products
from .mcore import (
    GPTModel,
    IdentityOp,
    MegatronModule,
    ModuleSpec,
    SelfAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    get_gpt_layer_local_spec,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
)
from .packing import PackedLayout
from .recompute import recompute_all, recompute_selected
from .rotary import rotated


class Norm(torch.nn.RMSNorm):
    """RMSNorm as Megatron-Core builds it; torch's own refuses sequence parallelism.

    There each tensor rank norms its part of the tokens, and `finalize_model_grads` sums the gradients of flagged
    weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(MegatronModule):
    """Causal self-attention over packed sequences."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        windows: tuple[int, ...] = (),
        turned: tuple[bool, ...] = (),
        sinks: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.sinks = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self.scale = softmax_scale
        self.window = windows[layer_number - 1] if windows else 0
        self.turned = not turned or turned[layer_number - 1]
        self.kernel: Kernel = rectangles

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Query [t, heads, d], key and value [t, groups, d] (this rank's heads) -> [t, heads * d].
        """
        assert packed_seq_params is not None, "the trainer always packs"
        assert packed_seq_params.rotary is not None, "the engine sets it before every pass"
        if self.turned:
            table = packed_seq_params.rotary[-1 if self.window else 0]
            query, key = rotated(query, table), rotated(key, table)
        columns = context.Columns(key, value, None)
        if packed_seq_params.gathered:
            columns = context.gather(key, value)
        return self.kernel(query, columns, packed_seq_params, scale=self.scale, window=self.window, sinks=self.sinks)


class OutputGated(SelfAttention):
    """Self-attention with a gate for each channel of its output; in the files a head has its query, then its gate."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values and gates, [t, 1, heads, d]."""
        mixed, _bias = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.unflatten(-1, (groups, -1))
        both, key, value = torch.split(mixed, [mixed.shape[-1] - 2 * size, size, size], dim=-1)
        query, gate = both.reshape(*both.shape[:2], -1, 2, size).unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate


class OffsetNorm(Norm):
    """RMSNorm that multiplies by 1 + weight, rounds once, and stores its input alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self._rounded, x, use_reentrant=False, preserve_rng_state=False)
        return out

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class WholeNorm(Norm):
    """RMSNorm over all heads of q or k, also those of other tensor ranks; every rank has the whole weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__(config, heads * hidden_size, eps)
        self._heads, self._eps = heads, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., heads of this rank, head_dim]."""
        mean, ranks = (
            x.float().pow(2).mean((-2, -1), keepdim=True),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        if ranks > 1:
            # Both passes sum over the ranks. Each has as many heads, of which several may have the same.
            mean = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(mean)) / ranks
        first = parallel_state.get_tensor_model_parallel_rank() * self._heads // ranks
        weight = self.weight.view(self._heads, -1)[first : first + x.shape[-2]]
        return (x.float() * torch.rsqrt(mean + self._eps) * weight).to(x.dtype)


class Add(torch.nn.Module):
    """Megatron-Core's bias, dropout and residual addition, with a norm and a factor, and without bias and dropout."""

    def __init__(self, config: TransformerConfig, norm: type[Norm] | None, scale: float) -> None:
        super().__init__()
        if norm is not None:
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self._scale = scale

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(self, output: tuple[torch.Tensor, Any], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        added = self.norm(output[0]) if hasattr(self, "norm") else output[0]
        return residual + (added if self._scale == 1.0 else added * self._scale)


def stages_of(layers: int, pp: int) -> list[list[str]] | None:
    """Megatron-Core's description of `stage_layers`: what each stage holds; None for one stage."""
    if pp == 1:
        return None
    stages = [["decoder"] * count for count in stage_layers(layers, pp)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def transformer_config(shape: Architecture, dtype: torch.dtype, place: ReplicaPlace) -> TransformerConfig:
    """Megatron-Core's configuration for ``shape``."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        # Megatron-Core's fused form of the second is that of tanh.
        activation_func=F.silu if shape.kind.activation == "silu" else F.gelu,
        add_bias_linear=shape.sinks,
        add_qkv_bias=shape.qkv_bias,
        attention_output_gate=shape.output_gate,
        qk_layernorm=shape.qk_norm,
        softmax_scale=shape.attention_scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=place.tp,
        sequence_parallel=place.tp > 1,
        context_parallel_size=place.cp,
        pipeline_model_parallel_size=place.pp,
        pipeline_model_parallel_layout=stages_of(shape.layers, place.pp),
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        # Packs differ in length; Megatron-Core then wants this dispatcher even for dense models.
        variable_seq_lengths=place.pp > 1,
        moe_token_dispatcher_type="alltoall",
        **moe.expert_config(shape, place),
    )


def attend_with(model: torch.nn.Module, kernel: Kernel) -> None:
    """Let every layer of ``model`` attend with ``kernel``."""
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.kernel = kernel


def _layer_spec(shape: Architecture, config: TransformerConfig, norm: type[Norm], layer_index: int) -> ModuleSpec:
    experts = shape.experts > 0 and layer_index >= shape.dense_layers
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        num_experts=shape.experts if experts else None,
        moe_grouped_gemm=False,
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm if shape.pre_norm else IdentityOp
    attention.core_attention = partial(PackedAttention, windows=shape.windows, turned=shape.rotated, sinks=shape.sinks)
    if shape.output_gate:
        layer.self_attention.module = OutputGated
    if shape.delta_net and shape.delta_net.layers[layer_index]:
        layer.self_attention = ModuleSpec(GatedDeltaNet, params={"net": shape.delta_net})
    if experts and shape.stacked_experts:
        layer.mlp.submodules.experts = moe.StackedExperts
    elif experts:
        layer.mlp.submodules.experts.module = moe.GroupedExperts
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.whole_qk_norm:
        attention.q_layernorm = ModuleSpec(WholeNorm, params={"heads": shape.heads})
        attention.k_layernorm = ModuleSpec(WholeNorm, params={"heads": shape.kv_heads})
    behind = {"norm": norm if "mlp_bda.norm" in shape.kind.norms else None, "scale": shape.residual_scale}
    if behind != {"norm": None, "scale": 1.0}:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(Add, params={"config": config, **behind})
    return spec


def build_model(
    shape: Architecture, device: torch.device, dtype: torch.dtype, place: ReplicaPlace, recompute: Recompute = "none"
) -> GPTModel:
    """Build this rank's part of the model, uninitialised; needs Megatron-Core's parallel state.

    The last stage returns the final hidden states; `libra_hpc.trainer.model.head` applies the output layer.

    ``recompute``: see `libra_hpc.trainer.model.recompute`; with "full" a layer stores its input alone.
    """
    config = transformer_config(shape, dtype, place)
    config.gradient_accumulation_fusion = sum_in_products(device, dtype)
    moe.install()
    install_gate(device, dtype)
    norm = OffsetNorm if shape.kind.norm_offset else Norm
    stages = stage_layers(shape.layers, place.pp)
    # Megatron-Core builds as many layers of the stage as there are specifications.
    first = sum(stages[: place.pp_rank])
    layers = range(first, first + stages[place.pp_rank])
    specs = [_layer_spec(shape, config, norm, layer) for layer in layers]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)
    with compat.mcore_device():
        model = GPTModel(
            config,
            block,
            vocab_size=shape.vocab,
            max_sequence_length=shape.max_positions,
            position_embedding_type="none",
            share_embeddings_and_output_weights=shape.tied_embeddings,
            parallel_output=True,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    attend_with(model, choose_kernel(shape, device, dtype, place))
    if shape.kind.sigmoid_router:
        moe.add_biases(model)
    # Inside of recomputation, which then has the same experts.
    moe.replay_routing(model, place)
    if parallel_state.is_pipeline_last_stage():
        return_hidden_states(model, shape.logits_scale)
    if shape.embedding_scale != 1.0 and parallel_state.is_pipeline_first_stage():
        model.embedding.register_forward_hook(lambda _, arguments, out: out * shape.embedding_scale)
    if recompute != "none":
        for layer in model.decoder.layers:
            (recompute_selected if recompute == "selective" else recompute_all)(layer)
    # torch.nn.RMSNorm ignores the spec's params_dtype.
    model.to(device=device, dtype=dtype)
    for name, entry in own_entries(shape, place).items():
        if in_float32(entry.hf[0]):
            parameter = model.get_parameter(name).requires_grad_(False)
            parameter.data = parameter.float()
    return model
