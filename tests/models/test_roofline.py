"""Physics that analytic step times must obey."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.models.devices import device, kv_capacity
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.roofline import Roofline

from .support import bare

DEGREES = (1, 2, 4, 8)
MODELS = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b")
steps = st.tuples(st.integers(1, 1024), st.integers(0, 4_000_000), st.integers(0, 16384), st.integers(0, 131072))


def times(model: str, tp: int, name: str = "a100") -> Roofline:
    return Roofline(device(name), model_shape(model), tp)


@given(step=steps, model=st.sampled_from(MODELS), tp=st.sampled_from(DEGREES[1:]))
def test_tp_devices_are_at_most_tp_times_as_fast(step: tuple[int, int, int, int], model: str, tp: int) -> None:
    one, many = times(model, 1).step_s(*step), times(model, tp).step_s(*step)
    assert one <= tp * many * (1 + 1e-12)


@given(step=steps, more=steps, model=st.sampled_from(MODELS), tp=st.sampled_from(DEGREES))
def test_more_work_never_takes_less_time(
    step: tuple[int, int, int, int], more: tuple[int, int, int, int], model: str, tp: int
) -> None:
    step_s = times(model, tp).step_s
    larger = tuple(a + b for a, b in zip(step, more, strict=True))
    assert step_s(*larger) >= step_s(*step) * (1 - 1e-12)


@given(batch=st.integers(1, 512), kv=st.integers(0, 2_000_000), k=st.integers(1, 200))
def test_k_steps_of_a_batch_take_k_times_the_step_at_its_mean(batch: int, kv: int, k: int) -> None:
    step_s = times("qwen3-14b", 2).step_s
    each = [step_s(batch, kv + i * batch) for i in range(k)]
    mean = (step_s(batch, kv) + step_s(batch, kv + (k - 1) * batch)) / 2
    assert sum(each) == pytest.approx(k * mean)


def test_no_step_beats_the_peaks() -> None:
    a100, shape = device("a100"), model_shape("qwen3-8b")
    streamed = (shape.params - shape.head_params) * shape.dtype_bytes
    assert times("qwen3-8b", 1).step_s(1, 1000) > (streamed + 1000 * shape.kv_bytes_per_device(1)) / a100.hbm_bytes_s
    pairs = 8192 * 8192 + 8192 * 8193 // 2
    flops = 8192 * shape.layer_flops_per_token + pairs * shape.attention_flops_per_pair + shape.head_flops_per_token
    assert times("qwen3-8b", 1).step_s(0, 0, 8192, 8192) > flops / a100.peak_flops


def test_a_mixture_reads_more_experts_with_more_tokens_until_all_are_touched() -> None:
    shape = model_shape("qwen3-30b-a3b")
    small, middle, large = (Roofline(bare("a100"), shape, 1).step_s(n, 0) for n in (1, 32, 256))
    assert middle - small > 5 * (large - middle)
    assert small < (shape.weight_bytes / 3) / device("a100").hbm_bytes_s


def test_slower_links_cost_prefill_more_than_single_decodes() -> None:
    fast, slow = times("qwen3-14b", 8, "a100").step_s, times("qwen3-14b", 8, "a800").step_s
    assert slow(0, 0, 2048) / fast(0, 0, 2048) > 1.1
    assert 1 < slow(1, 1024) / fast(1, 1024) < 1.01
    assert times("qwen3-14b", 1, "a800").step_s(8, 8192, 512) == times("qwen3-14b", 1, "a100").step_s(8, 8192, 512)


def test_a_replica_across_nodes_pays_the_link_between_them() -> None:
    across = msgspec.structs.replace(device("a100"), devices_per_node=4)
    inside = times("qwen3-14b", 8).step_s(0, 0, 2048)
    assert Roofline(across, model_shape("qwen3-14b"), 8).step_s(0, 0, 2048) > 2 * inside


@pytest.mark.parametrize("tables", ["a100", ""])
def test_asynchronous_steps_take_as_long_as_device_or_host_whichever_is_slower(tables: str) -> None:
    shape, usual = model_shape("qwen3-14b"), msgspec.structs.replace(device("a800"), host_s=0.015, tables=tables)
    hidden, alone = (lookup(one, shape, 8).step_s for one in (usual.asynchronous(), bare("a800", tables=tables)))
    waits = lookup(usual, shape, 8).step_s
    for step, shorter in (((256, 0), False), ((16, 2_000_000), True), ((16, 5000, 4096, 0), True)):
        host = usual.host_s + step[0] * usual.host_sequence_s
        assert waits(*step) == pytest.approx(alone(*step) + host)
        assert hidden(*step) == (alone(*step) if shorter else pytest.approx(host))


def test_capacity_is_what_weights_and_workspace_leave() -> None:
    a100, shape = device("a100"), model_shape("qwen3-14b")
    free = 4 * (0.9 * a100.memory_bytes - a100.workspace_bytes) - shape.weight_bytes
    assert kv_capacity(a100, shape, 4) == pytest.approx(free / shape.kv_bytes_per_device(1), rel=1e-3)
    assert kv_capacity(a100, model_shape("llama-3.1-70b"), 1) == 0
    replicated = model_shape("qwen3-30b-a3b")
    assert 1 < kv_capacity(a100, replicated, 8) / kv_capacity(a100, replicated, 4) < 1.3, "KV heads on two devices each"


@pytest.mark.parametrize("tables", ["a100", ""])
def test_caches_in_fp8_hold_twice_the_tokens_and_a_decode_reads_half(tables: str) -> None:
    shape, machine = model_shape("qwen3-14b"), msgspec.structs.replace(device("a800"), tables=tables)
    usual, fp8 = (lookup(machine, one, 2) for one in (shape, shape.with_kv("fp8")))
    assert fp8.kv_capacity == pytest.approx(2 * usual.kv_capacity, abs=2)
    assert fp8.step_s(64, 0) == usual.step_s(64, 0)
    reads, halved = (times.step_s(64, 2_000_000) - times.step_s(64, 0) for times in (usual, fp8))
    assert halved == pytest.approx(reads / 2)
