"""Analytic step times: the slowest of bandwidth, arithmetic, link and latency bounds each part of a step.

With ``tokens = decodes + prefill`` positions on ``tp`` devices:

- Linear layers: ``max(bytes / (tp * hbm), flops / (tp * peak))``. Experts read only those that the tokens use: ``E *
  (1 - (1 - k/E)**tokens)`` with k of E per token and even routing.
- Decode attention: reads the keys and values of each device's heads (replicated beyond the KV heads).
- Prefill attention: multiplies new positions with the context and earlier new ones, reads the context once.
- All-reduces: two per layer, latency plus ``2 (tp-1)/tp`` times the message over the link (ring).
- Launches: `KERNELS_PER_LAYER` kernels of fixed time, at any degree.

Peaks are scaled by the device's efficiencies; the host's work comes on top (`Device.host_s`).
"""

from __future__ import annotations

from libra_hpc.models.devices import Device, kv_capacity
from libra_hpc.models.shapes import ModelShape

EXPERT_EFFICIENCY = 0.6
"""Arithmetic speed of the experts' grouped products, as a share of a large product's: near the operator tables' median.
"""
KERNELS_PER_LAYER = 8
"""Kernels of a fused decoder layer: two norms, four matrix products, attention, activation."""
ALLREDUCES_PER_LAYER = 2
"""After attention and after the MLP."""


class Roofline:
    """`StepTimes` of ``shape`` on ``tp`` devices from `Device`.

    Raises `UserError` for a ``tp`` that does not shard the model.
    """

    def __init__(self, device: Device, shape: ModelShape, tp: int) -> None:
        self.tp = tp
        self.kv_capacity = kv_capacity(device, shape, tp)
        self.source = f"roofline of {shape.name} on {tp} x {device.name}"
        hbm = device.hbm_bytes_s * device.hbm_efficiency
        flops = tp * device.peak_flops * device.flops_efficiency
        link = (
            device.intra_bytes_s if tp <= device.devices_per_node else device.inter_bytes_s
        ) * device.link_efficiency
        self._host, self._host_sequence = device.host_s, device.host_sequence_s
        self._launch = shape.layers * KERNELS_PER_LAYER * device.kernel_s
        common, experts = shape.layer_params(0, shape.layers)
        self._shared = (common + shape.head_params) * shape.dtype_bytes / (tp * hbm)
        self._experts = experts * shape.dtype_bytes / (tp * hbm)
        self._untouched = 1 - shape.experts_per_token / shape.experts if shape.experts else 1.0
        self._expert_token = 2 * experts * (1 - self._untouched) / (flops * EXPERT_EFFICIENCY)
        self._token = 2 * common / flops
        self._row = shape.head_flops_per_token / flops
        self._pair = shape.attention_flops_per_pair / flops
        self._kv = shape.kv_bytes_per_device(tp) / hbm
        reduces = ALLREDUCES_PER_LAYER * shape.layers if tp > 1 else 0
        self._reduce = reduces * device.allreduce_s
        self._reduce_token = reduces * 2 * (tp - 1) / tp * shape.hidden * shape.dtype_bytes / link

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        tokens = decodes + prefill
        # Each decode and the end of the prompt chunk needs one row of logits.
        compute = tokens * self._token + (decodes + 1 if prefill else decodes) * self._row
        base = (
            (compute if compute > self._shared else self._shared)
            + self._launch
            + self._reduce
            + tokens * self._reduce_token
        )
        if self._experts:
            read, compute = self._experts * (1 - self._untouched**tokens), tokens * self._expert_token
            base += compute if compute > read else read
        if prefill:
            pairs = prefill * (context + 0.5 * (prefill + 1)) * self._pair
            read = (context + prefill) * self._kv
            base += pairs if pairs > read else read
        return base + self._host + decodes * self._host_sequence + kv_tokens * self._kv
