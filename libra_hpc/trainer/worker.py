"""The Megatron worker process: obeys `libra_hpc.protocol.trainer` messages until its agent's socket closes.

    python -m libra_hpc.trainer.worker --socket FD --config JSON

One process per device. The ``tp * pp * dp`` processes of a world get every message and all answer; rank 0 writes the
files that are not sharded.

- A step, join or file failed -> as `libra_hpc.trainer.link.WorkerLoop`; the process stays usable.
- A checkpoint is asked for -> a thread writes it while the next orders are obeyed (`StateWriter`).
- Any other error -> ``WorkerFailed(fatal=True)`` and exit code 1; every peer notices the closed sockets.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.models.adapters import with_adapters
from libra_hpc.models.architecture import read_shape
from libra_hpc.process.entry import leave, run
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.engine_state import LOAD, EngineReady
from libra_hpc.protocol.trainer import Join, PortionDone, StepDone, Tier, TrainPortion, TrainStep, WorkerFailed
from libra_hpc.trainer.saved.state_writer import StateWriter
from libra_hpc.weights.image import reading
from libra_hpc.weights.pieces import Offer
from libra_hpc.weights.weightfile import WeightFileError

from .device import choose_device, file_store
from .elastic import ElasticReplicas
from .grpo_trainer import GrpoTrainer
from .link import Arrived, WorkerLoop, WorkerSocket
from .saved import checkpoint
from .saved.checkpoint import ReferencePolicy
from .saved.shard_files import holds_snapshot, load_snapshot
from .saved.weight_offers import WeightOffers
from .settings import WorkerConfig, read_config, sample_work
from .train_engine import NO_STEP, TrainEngine, init_world


class Worker(WorkerLoop):
    def __init__(self, config: WorkerConfig, socket: WorkerSocket, pulse: Pulse) -> None:
        super().__init__(socket, pulse)
        run, world, model_dir = config.run, config.world, Path(config.run.model.path)
        torch.manual_seed(run.run.seed)
        shape = with_adapters(read_shape(model_dir), *run.lora.arguments)
        device = choose_device(run.slurm.device, config.device_index, run.train.threads)
        split = init_world(
            device,
            tp=world.degrees.tp,
            pp=world.degrees.pp,
            rank=config.rank,
            store=file_store(config.world_rendezvous, world.ranks),
            timeout_s=config.step_timeout_s,
            dp=world.dp,
            cp=world.degrees.cp,
            ep=world.degrees.ep,
            etp=world.degrees.etp,
        )
        self._engine = TrainEngine(
            shape,
            device,
            getattr(torch, run.model.dtype),
            split,
            settings=run.optimizer,
            updates=run.updates,
            recompute=run.train.recompute,
            elastic=config.elastic,
        )
        if config.random_weights:
            checkpoint.randomize(self._engine)
        else:
            with pulse.phase(LOAD):
                self._load(model_dir, "" if config.elastic else config.start_dir, config.rank)
        self._replicas = ElasticReplicas(
            self._engine,
            config.step_timeout_s,
            config.join_timeout_s,
            pulse.waiting,
            socket.interrupted,
            core_dp=core_world(run).dp,
            elastic_dp=elastic_world(run).dp,
        )
        self._trainer = GrpoTrainer(
            self._engine,
            self._replicas,
            run,
            sample_work(run),
            self._reference(run.algorithm.reference_folder(run.model.path), run.model.path, pulse),
        )
        self._offers = WeightOffers(self._engine, config.rank)
        self._writer = StateWriter(self._engine, model_dir, self.written)
        pulse.end()
        socket.send(EngineReady(version=self._engine.state.step))

    def _load(self, model_dir: Path, start_dir: str, rank: int) -> None:
        engine = self._engine
        # Weights of the model, to which adapters are added in any state.
        if engine.shape.lora or not (start_dir or engine.elastic):
            checkpoint.load_policy(engine, model_dir)
        else:
            checkpoint.load_untrained(engine, model_dir)
        if engine.elastic:
            engine.state.commit(NO_STEP, 0)
        elif start_dir and holds_snapshot(Path(start_dir), rank):
            load_snapshot(engine.state, Path(start_dir), rank)
        elif start_dir:
            checkpoint.load_state(engine, Path(start_dir))

    def _reference(self, folder: str, initial: str, pulse: Pulse) -> ReferencePolicy | None:
        if not folder:
            return None
        with pulse.phase(LOAD):
            # A teacher's routers have learned something else.
            return ReferencePolicy(self._engine, Path(folder), replays=folder == initial)

    @property
    def step(self) -> int:
        return self._engine.state.step

    def join(self, message: Join) -> Arrived:
        began = time.monotonic()
        self._engine.reclaim()
        ready = time.monotonic()
        # With adapters those of the node are merged, and cannot be taken.
        if message.weights and self._engine.elastic and self.step < message.version and not self._engine.shape.lora:
            self._load_weights(message)
        loaded = time.monotonic()
        return Arrived(self._replicas.join(message), ready - began, loaded - ready)

    def _load_weights(self, message: Join) -> None:
        """Take the weights that this node has for rollout; without them they come from the core."""
        image = Path(message.weights)
        try:
            with reading(image) as version:
                checkpoint.load_policy(self._engine, image)
        except (OSError, ValueError, SafetensorError, WeightFileError) as error:
            self._engine.state.commit(NO_STEP, 0)
            print(f"the weights in {message.weights} cannot be read: {error}", file=sys.stderr)
        else:
            self._engine.state.commit(version, 0)

    def portion(self, message: TrainPortion) -> PortionDone:
        return self._trainer.portion(message)

    def train(self, message: TrainStep) -> StepDone:
        return self._trainer.step(message)

    def offer(self, folder: Path, version: int, base: int) -> tuple[Offer, int]:
        return self._offers.write(folder, version, base), self._offers.total

    def copy(self, folder: Path, tier: Tier) -> Callable[[], None]:
        return self._writer.copy(folder, tier)

    def standby(self) -> None:
        self._replicas.park()
        if self._engine.frees:
            self._engine.release()


def work(link: int, config: Path) -> int:
    socket = WorkerSocket(link)
    pulse = Pulse(socket.send)
    try:
        Worker(read_config(config), socket, pulse).run()
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        try:
            socket.send(WorkerFailed(f"{type(error).__name__}: {error}", fatal=True))
        except OSError:
            print("the agent is gone as well", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(run("libra_hpc.trainer.worker", work))
