"""Training: memory and FLOPs by hand, the bubble, communication that grows with its group, and MFU of at most 1."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.models.memory import TrainLayout, TrainMemory, activation_bytes_per_token, memory_limit, train_memory
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.policies.costs.factors import Factors
from libra_hpc.policies.costs.training_time import (
    LAYER_EFFICIENCY,
    BatchWork,
    HybridWorlds,
    TrainCost,
    forward_flops,
    packed,
)
from libra_hpc.policies.search.train_layout import TrainSearch
from tests.policies.control.plant_costs import A800, QWEN, agentic, batch_of

MOE = model_shape("qwen3-30b-a3b")


def cost(batch: BatchWork | None = None, factors: Factors = Factors()) -> TrainCost:  # noqa: B008
    return TrainCost(shape=QWEN, device=A800, devices_per_node=8, batch=batch or agentic(), factors=factors)


def layout(tp: int = 1, pp: int = 1, micro: int = 8192, **more: Any) -> TrainLayout:
    plain = {"tp": tp, "pp": pp, "cp": 1, "ep": 1, "dp": 1, "micro_tokens": micro, "recompute": "none"}
    return TrainLayout(**{**plain, **more})  # type: ignore[arg-type]


def memory(shape: ModelShape = QWEN, micro_batches: int = 1, pack_tokens: int = 4096, **options: Any) -> TrainMemory:
    return train_memory(shape, layout(**options), device=A800, micro_batches=micro_batches, pack_tokens=pack_tokens)


def test_14b_memory_by_hand() -> None:
    """Qwen3-14B, bf16, TP8, micro-batches of 8,192.

    - 14.77e9 parameters of 2 + 4 + 12.125 bytes, an eighth each; a bit of them marks what an update changed.
    - 40 layers of an eighth of 4 * 5120 elements per token, at 2 bytes.
    - An eighth of (5120 + 2 * 1024) + 1.25 * (2 * 5120 + 2 * 1024) + 5120 + 3 * 17408 = 79,872 elements, at 2 bytes.
    - Output layer: 2**25 logits at 6 bytes, 8,192 x 5120 states at 8, and the weight's gradient, 151,936 / 8 x 5120
      at 2; 3 GB of workspace.
    """
    found = memory(micro_batches=4, pack_tokens=8192, tp=8)
    wanted = {
        "weights": 14.77e9 * 2 / 8,
        "gradients": 14.77e9 * 4 / 8,
        "optimizer": 14.77e9 * 12.125 / 8,
        "activations": 40 * (20_480 + 79_872) / 8 * 2 * 8192,
        "logits": 2**25 * 6 + 8192 * 5120 * 8 + 151_936 / 8 * 5120 * 2,
    }
    assert {name: getattr(found, name) for name in wanted} == pytest.approx(wanted, rel=0.01)
    assert found.total == pytest.approx(45.1e9, rel=0.03)


def test_14b_does_not_fit_on_one_device_and_the_sentence_says_why() -> None:
    limit = memory_limit(memory(pack_tokens=8192), A800)
    assert limit.over > 266e9 - A800.memory_bytes
    assert limit.reason.endswith("of 80 GB, optimizer 179")


def test_pipeline_keeps_as_many_micro_batches_as_stages_and_recomputation_only_inputs() -> None:
    flat, deep = (memory(micro_batches=8, pp=pp) for pp in (1, 4))
    assert deep.weights == pytest.approx(flat.weights / 4, rel=0.2)
    assert memory(micro_batches=8, pp=4, recompute="full").activations < deep.activations / 10
    assert memory(micro_batches=2, pp=4).activations < deep.activations


def test_experts_are_divided_by_ep_and_the_rest_is_not() -> None:
    one, eight = (memory(MOE, ep=ep, dp=8) for ep in (1, 8))
    experts = MOE.layers * MOE.experts * MOE.expert_params * 2
    assert one.weights - eight.weights == pytest.approx(experts * 7 / 8)
    assert eight.optimizer == pytest.approx(one.optimizer), "as many devices share one state"


@pytest.mark.parametrize(("ep", "etp"), [(1, 0), (2, 0), (2, 1), (16, 1), (4, 4)])
def test_devices_of_a_stage_have_one_state_together(ep: int, etp: int) -> None:
    """However the experts are spread; 4 tensor ranks of 4 replicas."""
    found = memory(MOE, tp=4, ep=ep, dp=4, etp=etp)
    assert 16 * found.optimizer == pytest.approx(12.125 * MOE.params, rel=1e-3)


def test_tensor_ranks_of_an_expert_hold_every_routed_token() -> None:
    shared, own = (memory(MOE, tp=4, ep=4, dp=4, etp=etp) for etp in (4, 1))
    routed = MOE.experts_per_token * 2 * MOE.hidden * 2 * 4096 * MOE.layers
    assert shared.activations - own.activations == pytest.approx(routed * 3 / 4)


def test_float32_needs_no_second_copy_of_the_weights() -> None:
    found = memory(msgspec.structs.replace(QWEN, dtype_bytes=4), tp=8)
    assert found.optimizer == pytest.approx(2 * found.weights)


def test_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    """At 32K context attention adds 4 * layers * heads * head_dim FLOPs per pair, half of them causal."""
    lookup_free = QWEN.params - QWEN.head_params
    assert 3 * forward_flops(QWEN, 1000, 1000**2) == pytest.approx(6 * lookup_free * 1000, rel=0.05)
    extra = forward_flops(QWEN, 32768, 32768**2) - forward_flops(QWEN, 32768, 0)
    assert extra == pytest.approx(0.5 * 32768**2 * 4 * 40 * 40 * 128)


def test_equal_means_but_a_longer_tail_take_longer() -> None:
    even, uneven = batch_of(*[8000] * 16), batch_of(*[4000] * 15, 68_000)
    assert even.tokens == uneven.tokens
    assert cost(uneven).time(layout(tp=8)).compute > 1.05 * cost(even).time(layout(tp=8)).compute


def test_one_long_trajectory_bounds_every_replica_count() -> None:
    alone = cost(batch_of(60_000)).time(layout(tp=8)).compute
    assert cost(batch_of(*[1000] * 15, 60_000)).time(layout(tp=8, dp=64)).compute == pytest.approx(alone, rel=2e-3)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("dp", [1, 4, 64])
def test_no_pipeline_without_bubble(pp: int, dp: int) -> None:
    """1F1B takes n + pp - 1 slots for n micro-batches."""
    time = cost().time(layout(tp=2, pp=pp, dp=dp))
    assert time.bubble == pytest.approx((time.compute + time.tp) * (pp - 1) / time.micro_batches)
    assert time.bubble > 0


def test_every_update_drains_the_pipeline() -> None:
    one, four = agentic(), msgspec.structs.replace(agentic(), minibatches=4, forwards=0)
    assert cost(four).time(layout(pp=4)).bubble == pytest.approx(4 * cost(one).time(layout(pp=4)).bubble, rel=0.1)


def test_micro_batches_hold_whole_trajectories() -> None:
    batch = batch_of(*[3000] * 16, prompt=1000)
    assert packed(batch, 8192) == pytest.approx(8)
    assert packed(batch, 4096) == pytest.approx(16)
    assert packed(batch, 1000) == pytest.approx(16)
    assert cost(batch).pack_tokens(layout(micro=1000)) == 4000


def test_recomputation_is_one_forward_pass_of_the_layers_and_a_reference_one_of_everything() -> None:
    """The output layer has four passes of its own, over loss tokens alone."""
    batch = agentic()
    plain, again = (cost().time(layout(tp=8, recompute=how)).compute for how in ("none", "full"))
    whole = forward_flops(QWEN, batch.lengths.context, batch.lengths.context_square, batch.lengths.generated)
    head = batch.generated * QWEN.head_flops_per_token / batch.trajectories / whole
    assert again / plain == pytest.approx((4 * (1 - head) + 4 * head) / (3 * (1 - head) + 4 * head))
    reference = cost(msgspec.structs.replace(batch, forwards=1)).time(layout(tp=8)).compute
    assert reference / plain == pytest.approx(1 + 1 / (3 * (1 - head) + 4 * head))


def test_tokens_without_loss_cost_no_output_layer() -> None:
    asked, answered = (
        cost(batch_of(*[10_000 - prompt] * 16, prompt=prompt)).time(layout(tp=8)).compute for prompt in (9000, 1000)
    )
    assert answered - asked == pytest.approx(
        16 * 8000 * QWEN.head_flops_per_token * 4 / 8 / (A800.peak_flops * A800.flops_efficiency * LAYER_EFFICIENCY)
    )


def test_hybrid_nodes_share_the_work_and_exchange_one_gradient() -> None:
    """Over the core's links, however many hybrid nodes there are: 4 + 2 bytes a parameter, exposed."""
    core = layout(tp=8, dp=2)
    alone, one, four = (cost().time(core, HybridWorlds(nodes)) for nodes in (0, 1, 4))
    assert alone.exchange == 0.0
    assert one.compute == pytest.approx(alone.compute * 2 / 3)
    assert one.exchange == pytest.approx(6 * QWEN.params / 8 / (A800.inter_bytes_s * 0.8), rel=0.01)
    assert one.exchange < four.exchange < 2.5 * one.exchange


def test_fewer_key_value_heads_than_tensor_ranks_are_held_whole() -> None:
    one, four, eight = (activation_bytes_per_token(MOE, "none", tp, 1) / 2 for tp in (1, 4, 8))
    q, kv = 32 * 128, 4 * 128
    assert four == pytest.approx(one / 4)
    assert eight == pytest.approx(one / 8 + (q + 2 * kv + 1.25 * 2 * kv) / 8)


def test_gathered_keys_and_values_are_whole_on_every_context_rank() -> None:
    one, four = (memory(pack_tokens=8192, tp=2, cp=cp).activations for cp in (1, 4))
    assert four - one / 4 == pytest.approx(40 * 2 * 4 * 128 * 2 * 8192)


def test_a_group_across_nodes_is_slower_than_one_inside() -> None:
    assert cost().time(layout(tp=8, pp=2)).pp > 2 * cost().time(layout(tp=4, pp=2)).pp


def test_fewer_key_value_heads_than_devices_cost_a_gather() -> None:
    few = TrainCost(msgspec.structs.replace(QWEN, kv_heads=4), A800, 8, agentic())
    eight, four = (few.time(layout(tp=tp)).tp / cost().time(layout(tp=tp)).tp for tp in (8, 4))
    assert eight == pytest.approx(1 + (40 + 8) * 128 / 4 / 5120, rel=0.01)
    assert four == 1.0


def test_gradient_reduction_hides_behind_the_last_backward_only() -> None:
    tiny = batch_of(*[100] * 16)
    time = cost(tiny).time(layout(tp=8, dp=2))
    by_hand = (4 + 2) * QWEN.params / 8 / 2 / (A800.inter_bytes_s * 0.8)
    assert by_hand - time.compute < time.dp < by_hand
    assert cost(agentic(8192)).time(layout(tp=8, dp=2, micro=65536)).dp < time.dp


degrees = st.sampled_from([1, 2, 4, 8])


@given(
    st.builds(layout, degrees, degrees, st.sampled_from([2048, 65536]), cp=degrees, dp=st.sampled_from([1, 3, 16])),
    st.floats(1e-6, 10.0),
)
def test_mfu_never_exceeds_one(spread: TrainLayout, measured: float) -> None:
    time = cost(factors=Factors(compute=measured, comm=1e-9, optimizer=1e-9)).time(spread)
    assert 0 < time.mfu <= 1.0


def test_plain_mfu_is_what_large_models_reach() -> None:
    assert 0.3 < TrainSearch(cost(), 8).best(32).time.mfu < 0.55


def test_each_factor_scales_its_own_term() -> None:
    shape = layout(tp=4, pp=2, dp=2)
    plain = cost().time(shape)
    assert cost(factors=Factors(compute=1.5)).time(shape).compute == pytest.approx(1.5 * plain.compute)
    assert cost(factors=Factors(comm=2.0)).time(shape).tp == pytest.approx(2 * plain.tp)
    assert cost(factors=Factors(optimizer=3.0)).time(shape).optimizer == pytest.approx(3 * plain.optimizer)


@given(st.sampled_from([8, 16, 24, 40]), st.sampled_from([32, 512]), st.sampled_from(["qwen3-14b", "qwen3-30b-a3b"]))
def test_the_training_search_equals_enumeration(devices: int, trajectories: int, model: str) -> None:
    """Bounds and order must not cost the optimum."""
    batch = agentic(trajectories, longest=8192, generated=1000)
    tried = TrainCost(model_shape(model), A800, 8, batch)
    search = TrainSearch(tried, 8)
    able = [tried.time(one).total for one in search.candidates(devices) if tried.limit(one) is None]
    best = search.best(devices)
    assert (math.inf if best is None else best.time.total) == pytest.approx(min(able, default=math.inf))


def test_excluded_layouts_do_not_fit_and_the_best_one_does() -> None:
    search = TrainSearch(cost(), 8)
    best = search.best(16)
    assert memory_limit(best.memory, A800) is None
    assert best.layout.devices == 16
    excluded = search.excluded(16)
    assert [e.limit.over for e in excluded] == sorted(e.limit.over for e in excluded)
    assert any(e.what.startswith("training TP1·PP1·DP16") and "GB over" in e.limit.reason for e in excluded)
