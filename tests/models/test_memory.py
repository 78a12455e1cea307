"""Memory of a training GPU: the sharded core, stateless replicas, minibatches, uneven stages."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.tabulate import hf_config
from libra_hpc.config.node_groups import Degrees
from libra_hpc.errors import UserError
from libra_hpc.models.architecture import check_parallel, read_shape, stage_layers
from libra_hpc.models.devices import device
from libra_hpc.models.memory import TrainLayout, TrainMemory, memory_limit, stage_params, train_memory
from libra_hpc.models.shapes import ModelShape, model_shape, shapes

from .support import config_of

SHAPE, MOE, A800 = model_shape("qwen3-14b"), model_shape("qwen3-30b-a3b"), device("a800")
CORE = TrainLayout(tp=8, pp=1, cp=1, ep=1, dp=4, micro_tokens=8192)
WHOLE = msgspec.structs.replace(CORE, dp=1)
ELASTIC = msgspec.structs.replace(WHOLE, elastic=True)
P = sum(stage_params(SHAPE, Degrees(8), 0))


def of(layout: TrainLayout, copies: bool = False, micro_batches: int = 4) -> TrainMemory:
    return train_memory(SHAPE, layout, A800, micro_batches=micro_batches, pack_tokens=4096, copies=copies)


@pytest.mark.parametrize(
    ("layout", "state", "copy"), [(WHOLE, 18.125, 12.0), (CORE, 9.03125, 3.0), (ELASTIC, 6.0, 0.0)]
)
def test_bytes_of_a_parameter(layout: TrainLayout, state: float, copy: float) -> None:
    one, two = of(layout), of(layout, copies=True)
    assert one.weights + one.gradients + one.optimizer == pytest.approx(state * P)
    assert two.minibatch_copy == pytest.approx(copy * P)
    assert two.total - one.total == pytest.approx(copy * P)


def test_a_state_in_host_memory_leaves_pieces_and_marks() -> None:
    hosted, plain = of(msgspec.structs.replace(CORE, host=True), copies=True), of(CORE, copies=True)
    assert hosted.optimizer == pytest.approx(2 * (1 << 24) * 12 + P / 4 / 8)
    assert hosted.minibatch_copy == 0.0
    assert plain.total - hosted.total == pytest.approx(24.125 * P / 4 - hosted.optimizer)


def test_a_reference_is_where_activations_are_before_and_after() -> None:
    def frozen(name: str, micro_batches: int) -> TrainMemory:
        pipeline, other = msgspec.structs.replace(CORE, pp=2), model_shape(name)
        sizes = {"micro_batches": micro_batches, "pack_tokens": 4096}
        return train_memory(SHAPE, pipeline, A800, **sizes, reference=other)

    least, weights = frozen("qwen3-32b", 1), 2 * sum(stage_params(model_shape("qwen3-32b"), Degrees(8, 2), 0))
    room = least.activations + least.logits
    assert weights < least.reference_policy + room < 1.2 * weights
    assert frozen("qwen3-4b", 4).reference_policy == 0.0


def test_context_ranks_share_the_cores_state() -> None:
    assert of(msgspec.structs.replace(CORE, cp=2)).optimizer == pytest.approx(of(CORE).optimizer / 2)


def test_sequence_parallelism_divides_all_activations() -> None:
    single = msgspec.structs.replace(WHOLE, tp=1)
    assert of(CORE, micro_batches=1).activations == pytest.approx(of(single, micro_batches=1).activations / 8)


def test_the_fullest_of_uneven_stages_counts() -> None:
    shape = msgspec.structs.replace(SHAPE, layers=10, vocab=8)
    assert stage_layers(10, 4) == (2, 3, 3, 2)
    stages, whole = (
        train_memory(shape, msgspec.structs.replace(WHOLE, tp=1, pp=pp), A800, micro_batches=n, pack_tokens=1024)
        for pp, n in ((4, 8), (1, 1))
    )
    assert stages.weights == pytest.approx(2 * sum(stage_params(shape, Degrees(1, 4), 1)))
    assert stages.activations == pytest.approx(whole.activations / 10 * max(2 * 4, 3 * 3))


@pytest.mark.parametrize("name", [name for name, shape in shapes().items() if not shape.experts])
def test_search_and_trainer_allow_the_same_degrees(name: str, tmp_path: Path) -> None:
    shape = shapes()[name]
    trained = read_shape(config_of(tmp_path, hf_config(shape)))
    for tp in (1, 2, 3, 4, 5, 8, 16):
        for pp in (1, 3, 7, 8, 16, 65, 100):
            with nullcontext() if shape.trains(tp, pp) else pytest.raises(UserError):
                check_parallel(trained, tp, pp)


def memory(shape: ModelShape = SHAPE, micro_batches: int = 1, pack_tokens: int = 4096, **options: Any) -> TrainMemory:
    plain = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 1, "micro_tokens": 8192}
    layout = TrainLayout(**{**plain, **options})
    return train_memory(shape, layout, device=A800, micro_batches=micro_batches, pack_tokens=pack_tokens)


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
