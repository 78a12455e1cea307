"""The planner's activation memory against the tensors that autograd stores for the real model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch._C._profiler import _EventType

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.memory import PADDING, activation_bytes_per_token
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.device import local_store
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.trainer.saved.checkpoint import load_policy
from libra_hpc.trainer.train_engine import TrainEngine, close_world, init_world

from .support import OPTIMIZER, make_model


def _pack(lengths: list[int]) -> Pack:
    samples = [
        Sample(str(n), pack_i32([3] * n), bytes([0, *[1] * (n - 1)]), pack_f32([0.0, *[-1.0] * (n - 1)]), 1.0)
        for n in lengths
    ]
    (one,) = pack([decode(s) for s in samples], 1 << 20, torch.device("cpu"))
    return one


def _stored(engine: TrainEngine, batch: Pack, dtype: torch.dtype) -> int:
    """Bytes of ``dtype`` tensors that a forward pass stores, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in engine.ddp.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # A CPU's norms keep float32 intermediates, a GPU's kernel keeps its input instead: those are counted by hand
        # below.
        if tensor.dtype is dtype and storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = engine.ddp(batch.tokens, batch.positions, None, packed_seq_params=engine.layout(batch))
    assert hidden.shape[1] == batch.tokens.shape[1]
    return sum(seen.values())


def _per_layer(folder: Path, lengths: list[int]) -> tuple[ModelShape, float]:
    """The shape, and bytes per layer and token: the difference between models of four layers and two."""
    batch, stored = _pack(lengths), []
    for layers in (2, 4):
        model_dir = folder / str(layers)
        make_model("qwen3", model_dir, layers=layers)
        split = init_world(torch.device("cpu"), 1, 1, 0, local_store(), 60.0)
        try:
            engine = TrainEngine(read_shape(model_dir), torch.device("cpu"), torch.bfloat16, split, OPTIMIZER)
            stored.append(_stored(engine, batch, torch.bfloat16))
        finally:
            close_world()
    shape = msgspec.structs.replace(model_shape(model_dir), dtype_bytes=2)
    norm_inputs = 2 * shape.hidden * 2
    return shape, (stored[1] - stored[0]) / 2 / sum(lengths) + norm_inputs


@pytest.mark.parametrize("lengths", [[200], [200, 180, 170, 165]])
def test_a_layer_stores_what_the_planner_counts(lengths: list[int], tmp_path: Path) -> None:
    shape, stored = _per_layer(tmp_path, lengths)
    counted = activation_bytes_per_token(shape, recompute="none") / 2
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    padding = len(lengths) * max(lengths) / sum(lengths)
    # Without padding values stay in the projection's output, and the attention's output is not copied.
    unpadded = counted - PADDING * (2 * q + 2 * kv) + q + kv
    # With padding, a GPU's norms of queries and keys store that output; a CPU's store float32 copies, not counted here.
    padded = counted - (PADDING - padding) * (2 * q + 2 * kv) - (q + 2 * kv)
    want = unpadded if padding == 1.0 else padded
    assert stored / 2 == pytest.approx(want, rel=0.01)


LENGTHS = [60, 50, 48]
RECOMPUTE: list[Recompute] = ["none", "selective", "full"]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "glm4", "olmo2", "granite", "gemma3_text", "qwen2_moe"])
def test_recomputation_changes_no_gradient_and_stores_less(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path / "m")
    batch = _pack(LENGTHS)
    gradients, held = [], []
    for recompute in RECOMPUTE:
        split = init_world(torch.device("cpu"), 1, 1, 0, local_store(), 60.0)
        try:
            engine = TrainEngine(
                read_shape(tmp_path / "m"), torch.device("cpu"), torch.float32, split, OPTIMIZER, recompute=recompute
            )
            load_policy(engine, tmp_path / "m")
            for _ in range(2):
                engine.forward_backward([batch], lambda head, one: -head.likelihood(one.targets, 1.0).logprobs.sum())
            gradients.append([buffer.grad_data.clone() for buffer in engine.ddp.buffers])
            held.append(_held(engine, batch))
        finally:
            close_world()
    for others in gradients[1:]:
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(gradients[0], others, strict=True))
    assert any(bool(g.any()) for g in gradients[0])
    none, selective, full = held
    shape = msgspec.structs.replace(model_shape(tmp_path / "m"), dtype_bytes=4)
    q = shape.heads * shape.head_dim
    # The planner assumes an average padding.
    padding = len(LENGTHS) * max(LENGTHS) / sum(LENGTHS) - PADDING
    less = activation_bytes_per_token(shape, "none") - activation_bytes_per_token(shape, "selective") + padding * q * 4
    assert none - selective == pytest.approx(less * shape.layers * sum(LENGTHS), rel=0.01)
    assert full < 0.5 * selective


def _held(engine: TrainEngine, batch: Pack) -> int:
    """Bytes of what a forward pass allocates and what exists after it, as long as its result does."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        hidden = engine.ddp(batch.tokens, batch.positions, None, packed_seq_params=engine.layout(batch))
        hidden = hidden.sum()
    assert hidden.requires_grad
    events, sizes = list(profile.profiler.kineto_results.experimental_event_tree()), dict[int, int]()  # type: ignore[union-attr]
    for event in events:
        events += event.children
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            # A negative size is a free, maybe of what was there before.
            sizes[event.extra_fields.ptr] = max(0, event.extra_fields.alloc_size)
    return sum(sizes.values())
