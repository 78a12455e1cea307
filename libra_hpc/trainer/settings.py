"""What a Megatron worker process is started with: one JSON file, decoded into `WorkerConfig`.

Needs no torch: a dry run starts many workers on one machine.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from libra_hpc.config.node_groups import TrainWorld, core_world, elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.shapes import model_shape

from .shards import PLAIN, SampleWork


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process of a run, and its place in a torch world (`libra_hpc.config.node_groups`)."""

    run: RunConfig
    world_rendezvous: str
    """Path of a fresh FileStore that only the processes of this world share."""
    start_dir: str = ""
    """Checkpoint or snapshot to start from; empty: the weights in ``model.path`` at step 0."""
    device_index: int = 0
    elastic: bool = False
    """A replica without optimizer, outside the core."""
    rank: int
    step_timeout_s: float = 900.0
    """Longest wait for a slower peer in one gradient sum.  A dead peer needs none: its socket closes at once."""
    random_weights: bool = False
    """Start from random weights of the model's shape, for a measurement of speed; ``model.path`` then needs none."""
    join_timeout_s: float = 60.0
    """Longest wait for all members of a generation to appear; a newer order ends it at once."""

    @property
    def world(self) -> TrainWorld:
        return elastic_world(self.run) if self.elastic else core_world(self.run)


_decoder = msgspec.json.Decoder(WorkerConfig)


def sample_work(config: RunConfig) -> SampleWork:
    """Work of the model's samples, by its own sizes; where they are not known, as in a dry run, tokens alone count."""
    try:
        shape = model_shape(config.model.path)
        reference = model_shape(config.algorithm.reference_folder(config.model.path) or config.model.path)
    except UserError:
        return PLAIN
    # Causal: half of all pairs. A delta net has a state at the end of a beginning, and no kernel that goes on from it.
    attention = 0.5 * shape.attention_flops_per_pair / (shape.layer_flops_per_token + shape.head_flops_per_token)
    return SampleWork(attention, shares=not (shape.delta_net or reference.delta_net))


def write_config(config: WorkerConfig, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def read_config(path: Path) -> WorkerConfig:
    """Raises `msgspec.ValidationError` when the file does not fit the schema."""
    return _decoder.decode(path.read_bytes())
