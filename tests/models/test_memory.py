"""Memory of a training GPU: the sharded core, stateless replicas, minibatches, uneven stages."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from bench.tabulate import hf_config
from libra_hpc.errors import UserError
from libra_hpc.models.architecture import check_parallel, read_shape, stage_layers
from libra_hpc.models.devices import device
from libra_hpc.models.memory import TrainLayout, TrainMemory, stage_params, train_memory
from libra_hpc.models.shapes import model_shape, shapes
from libra_hpc.models.train_parallel import Degrees

from .support import config_of

SHAPE, A800 = model_shape("qwen3-14b"), device("a800")
CORE = TrainLayout(tp=8, pp=1, cp=1, ep=1, dp=4, micro_tokens=8192)
WHOLE = msgspec.structs.replace(CORE, dp=1)
ELASTIC = msgspec.structs.replace(WHOLE, elastic=True)
P = sum(stage_params(SHAPE, Degrees(8), 0))


def of(layout: TrainLayout, minibatches: int = 1, micro_batches: int = 4) -> TrainMemory:
    return train_memory(SHAPE, layout, A800, micro_batches=micro_batches, pack_tokens=4096, minibatches=minibatches)


@pytest.mark.parametrize(
    ("layout", "state", "copy"), [(WHOLE, 18.125, 12.0), (CORE, 9.03125, 3.0), (ELASTIC, 6.0, 0.0)]
)
def test_bytes_of_a_parameter(layout: TrainLayout, state: float, copy: float) -> None:
    one, two = of(layout), of(layout, minibatches=2)
    assert one.weights + one.gradients + one.optimizer == pytest.approx(state * P)
    assert two.minibatch_copy == pytest.approx(copy * P)
    assert two.total - one.total == pytest.approx(copy * P)


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
