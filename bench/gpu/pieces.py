"""Where the seconds of a training step go on one device, beside what `libra_hpc.models.train_seconds` counts.

- Layer: difference of two depths of the trainer's model, over a pack of one trajectory, of equal ones, of mixed ones.
  Kernels of a profile are products, attention, or the rest: elementwise operations and sums of gradients.
- Levers, each beside its plain form: attention, head and experts, alone, over a grid of lengths and sizes; their plain
  form comes first. So it is with what adds the gradient of a weight.
- Norm and gated activation: beside the least bytes that a kernel of one pass would move.
- Copies between host and device, and on the device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from bench.gpu.model import write_config
from bench.gpu.setting import Figures, Setting, core_layout
from bench.gpu.training import GB, TIMED, timed
from libra_hpc.config.run import RunConfig
from libra_hpc.models.architecture import Architecture, read_shape
from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.models.train_seconds import TrainCost, work_of
from libra_hpc.trainer.device import choose_device, local_store
from libra_hpc.trainer.model import head as trainer_head
from libra_hpc.trainer.model.attention import choose_kernel, rectangles
from libra_hpc.trainer.model.context import Columns
from libra_hpc.trainer.model.head import choose_passes, likelihood
from libra_hpc.trainer.model.kernels import (
    add_afterwards,
    add_product,
    choose_product,
    install_gate,
    one_by_one,
    sum_in_products,
)
from libra_hpc.trainer.model.mcore import fused_bias_swiglu
from libra_hpc.trainer.model.packing import ALONE, Pack, example, pack
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.train_engine import TrainEngine, close_world, init_world

DEPTHS = 2, 4
"""Layers; four of the largest have 15 GB of weights and gradients."""
VOCAB = 1024
"""Of the models whose layers are measured: one token carries loss, and the head is in no difference."""
KERNELS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention|attn"),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|splitK|::(add|b)?mm$"),
    "elementwise": re.compile(""),
}
"""Names of kernels; the first that matches. On a CPU: of operations."""
LAYER = "products", "attention", "elementwise", "gradients"
"""Parts of `TrainTime` that a layer has."""
BIG = model_shape("qwen3-8b"), model_shape("qwen3-32b"), model_shape("qwen3-30b-a3b")
EP8 = replace(BIG[2], name="qwen3-30b-a3b, 16 of 128 experts", experts=16)
"""The experts of one device."""
TINY = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 192, "vocab": VOCAB}
GRIDS = {
    "cuda": ((*BIG[:2], EP8, BIG[2]), 8192, (1024, 4096, 8192, 32768), (1365, 4096, 8192), 1 << 30),
    "cpu": (
        (replace(BIG[0], **TINY), replace(BIG[2], **TINY, experts=8, moe_intermediate=32)),
        256,
        (64, 256),
        (128,),
        1 << 20,
    ),
}
"""Models, tokens of a pack, of trajectories for attention, of loss for the head, and bytes of a copy."""


MIXED = (0.4, 0.25, 0.15, 0.1, 0.06, 0.03)
"""Lengths of mixed trajectories as shares of a pack: like those of agents, few are long."""


class Bench(NamedTuple):
    """A device and where its figures go."""

    device: torch.device
    hardware: Device
    figures: Figures

    def seconds(self, work: Callable[[], object]) -> float:
        """Median of `TIMED` runs after one that warms up."""
        return median([timed(self.device, work) for _ in range(1 + TIMED)][1:])

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=torch.bfloat16, requires_grad=True)

    def both(
        self, what: str, forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], counted: Sequence[float]
    ) -> None:
        """Add the seconds of a forward pass, and of it with its backward pass."""
        with torch.no_grad():
            gradient = torch.randn_like(forward())
            self.figures.add(f"{what}: forward, s", self.seconds(forward), counted[0])
        seconds = self.seconds(lambda: torch.autograd.grad(forward(), inputs, gradient))
        self.figures.add(f"{what}: forward and backward, s", seconds, counted[1])

    def counted(self, shape: ModelShape, lengths: Sequence[int], loss: int, *names: str) -> tuple[float, float]:
        """Seconds of parts of one pack: of a forward pass, and of it with its backward pass."""
        work, one_pack = replace(work_of([(n, 0) for n in lengths]), loss=loss), len(lengths) * max(lengths)
        once, twice = (
            sum(
                TrainCost(shape, self.hardware, 1, asked).time(core_layout(one_pack)).parts.get(name, 0.0)
                for name in names
            )
            for asked in (work, replace(work, reference=shape))
        )
        return twice - once, once


def packed(lengths: Sequence[int], device: torch.device) -> Pack:
    """One pack of random trajectories whose last tokens carry loss."""
    examples = [
        example(str(i), torch.randint(0, VOCAB, (n,)), torch.arange(n) == n - 1, torch.zeros(n), 1.0)
        for i, n in enumerate(lengths)
    ]
    return pack(examples, sum(lengths), device)[0]


def architecture(shape: ModelShape) -> Architecture:
    with TemporaryDirectory() as name:
        return read_shape(write_config(shape, Path(name) / "model"))


def pieces(setting: Setting, figures: Figures) -> None:
    """Measure all; the largest model comes last."""
    where = choose_device(setting.device, 0, setting.sizes.threads)
    bench, (models, tokens, lengths, losses, size) = Bench(where, setting.hardware(), figures), GRIDS[setting.device]
    copies(bench, size)
    for length in lengths:
        attention(bench, replace(models[0], layers=1, vocab=VOCAB), [length] * max(1, tokens // length))
    for shape in {shape.hidden: shape for shape in models}.values():
        for loss in losses:
            head(bench, replace(shape, layers=1), loss)
    for shape in models:
        if shape.experts:
            experts(bench, shape, tokens)
    elementwise(bench, models[0], tokens)
    for shape in models:
        layer(bench, replace(shape, vocab=VOCAB), tokens)


def copies(bench: Bench, size: int) -> None:
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    for kind in ("pageable", "pinned")[: 1 + (bench.device.type == "cuda")]:
        here = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for way, to, source in (("to the device", there, here), ("to the host", here, there)):
            rate = size / bench.seconds(partial(to.copy_, source))
            bench.figures.add(f"copy {way}, {kind}, GB/s", rate / GB, bench.hardware.host_bytes_s / GB)
    rate = 2 * size / bench.seconds(there.clone)
    bench.figures.add("copy on the device, read and written, GB/s", rate / GB, bench.hardware.hbm_bytes_s / GB)


def attention(bench: Bench, shape: ModelShape, lengths: Sequence[int]) -> None:
    """The trainer's kernels over trajectories of one length."""
    layout = packed(lengths, bench.device).layout
    chosen = choose_kernel(architecture(shape), bench.device, torch.bfloat16, ALONE)
    query, key, value = (
        bench.random(sum(lengths), heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    for name, kernel in {"padded blocks": rectangles, "the trainer's choice": chosen}.items():
        forward = partial(kernel, query, Columns(key, value, None), layout, scale=None)
        counted = bench.counted(shape, lengths, 1, "attention")
        bench.both(f"attention, {len(lengths)} x {lengths[0]:,}, {name}", forward, (query, key, value), counted)


def head(bench: Bench, shape: ModelShape, loss: int) -> None:
    hidden, weight = bench.random(loss, shape.hidden), bench.random(shape.vocab, shape.hidden)
    targets = torch.randint(0, shape.vocab, (loss,), device=bench.device)
    counted = bench.counted(shape, [loss], loss, "head")
    forms = {"plain": trainer_head.PLAIN, "the trainer's choice": choose_passes(bench.device, torch.bfloat16)}
    for name, passes in forms.items():
        what = f"head, {loss:,} tokens x {shape.hidden:,} x {shape.vocab:,}, {name}"
        with patch.object(trainer_head, "choose_passes", lambda *_, passes=passes: passes):
            bench.both(what, lambda: likelihood(hidden, weight, targets, temperature=1.0)[0], (hidden, weight), counted)


def experts(bench: Bench, shape: ModelShape, tokens: int) -> None:
    """The first product of a layer's experts, every one with as many tokens, and the two products of its gradients."""
    inner, outer, rows = shape.hidden, 2 * shape.moe_intermediate, tokens * shape.experts_per_token
    counted = 2 * rows * inner * outer / (bench.hardware.peak_flops * bench.hardware.product_efficiency)
    ends = torch.arange(1, shape.experts + 1, device=bench.device, dtype=torch.int32) * (rows // shape.experts)
    with torch.no_grad():
        x, gradient = bench.random(rows, inner), bench.random(rows, outer)
        weights = bench.random(shape.experts, outer, inner)
        chosen = choose_product(inner, outer, bench.device, x.dtype)
        for name, product in {"one by one": one_by_one, "the trainer's choice": chosen}.items():
            work = {
                "forward": partial(product, x, weights.mT, ends),
                "gradient of tokens": partial(product, gradient, weights, ends),
                "gradient of weights": partial(product, gradient.t(), x, ends),
            }
            for part, one in work.items():
                bench.figures.add(f"{shape.name}, experts, {name}: {part}, s", bench.seconds(one), counted)


def elementwise(bench: Bench, shape: ModelShape, tokens: int) -> None:
    """Norm, gated activation, and what adds the gradient of a weight, as the trainer has them."""
    element_s = tokens * 2 / (bench.hardware.hbm_bytes_s * bench.hardware.stream_efficiency)
    x, both = bench.random(tokens, shape.hidden), bench.random(tokens, 2 * shape.intermediate)
    install_gate(bench.device, x.dtype)
    scale = bench.random(shape.hidden)
    norm = partial(torch.nn.functional.rms_norm, x, (shape.hidden,), scale, 1e-6)
    bench.both("norm", norm, (x, scale), [passes * shape.hidden * element_s for passes in (2, 5)])
    gate = partial(fused_bias_swiglu.bias_swiglu_impl, both, None)
    bench.both("gated activation", gate, (both,), [passes * shape.intermediate * element_s for passes in (3, 8)])
    total = torch.zeros(shape.hidden, 2 * shape.intermediate, device=bench.device)
    chosen = add_product if sum_in_products(bench.device, x.dtype) else add_afterwards
    counted = 2 * tokens * total.numel() / (bench.hardware.peak_flops * bench.hardware.product_efficiency)
    with torch.no_grad():
        for name, add in {"added afterwards": add_afterwards, "the trainer's choice": chosen}.items():
            bench.figures.add(
                f"gradient of a weight, {name}: and sum, s", bench.seconds(partial(add, both, x, total)), counted
            )


def layer(bench: Bench, shape: ModelShape, tokens: int) -> None:
    """One layer over packs of three kinds."""
    kinds = {"one": [tokens], "eight": [tokens // 8] * 8, "mixed": [int(share * tokens) for share in MIXED]}
    found = {depth: measured(bench, replace(shape, layers=depth), kinds) for depth in DEPTHS}
    one = replace(shape, layers=1)
    for kind, lengths in kinds.items():
        names = {part: (part,) for part in KERNELS} | {"elementwise": ("elementwise", "gradients")}
        counted = {part: bench.counted(one, lengths, 1, *parts)[1] for part, parts in names.items()}
        counted["forward"] = bench.counted(one, lengths, 1, *KERNELS)[0]
        counted["forward and backward"] = bench.counted(one, lengths, 1, *LAYER)[1]
        for what, predicted in counted.items():
            shallow, deep = (found[depth][kind][what] for depth in DEPTHS)
            seconds = (deep - shallow) / (DEPTHS[1] - DEPTHS[0])
            bench.figures.add(f"{shape.name}, layer, {kind}: {what}, s", seconds, predicted)


def measured(bench: Bench, shape: ModelShape, kinds: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Seconds of a whole model over each pack: forward, with backward, and kernels by kind."""
    place = init_world(bench.device, 1, 1, 0, local_store(), 600.0)
    engine = TrainEngine(architecture(shape), bench.device, torch.bfloat16, place, RunConfig().optimizer, elastic=True)
    checkpoint.randomize(engine)
    found = {}
    for kind, lengths in kinds.items():
        work = [packed(lengths, bench.device)], lambda head, one: head.likelihood(one.targets, 1.0).logprobs.sum()
        whole = partial(engine.forward_backward, *work)
        found[kind] = {
            "forward": bench.seconds(partial(engine.forward, *work)),
            "forward and backward": bench.seconds(whole),
            **kernels(bench.device, whole),
        }
    close_world()
    return found


def kernels(device: torch.device, work: Callable[[], object]) -> Counter[str]:
    """Seconds of the device by `KERNELS`."""
    cuda, found = device.type == "cuda", Counter[str]()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        timed(device, work)
    for event in seen.key_averages():
        kind = next(kind for kind, name in KERNELS.items() if name.search(event.key))
        found[kind] += (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6
    return found
