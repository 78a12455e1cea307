"""The Megatron worker process: obeys `libra_hpc.protocol.trainer` messages until its agent's socket closes.

    python -m libra_hpc.trainer.worker --socket PATH --config JSON

One process per device. The ``tp * pp * dp`` processes of a world get every message and all answer; rank 0 writes the
files that are not sharded.

- A step, join or file failed -> `StepFailed`, `SaveFailed`, `ExportFailed`, `SnapshotFailed` or
  ``WorkerFailed(fatal=False)``; the process stays usable.
- A checkpoint is asked for -> a thread writes it while the next orders are obeyed (`StateWriter`).
- Any other error -> ``WorkerFailed(fatal=True)`` and exit code 1; every peer notices the closed sockets.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError

from libra_hpc.models.architecture import read_shape
from libra_hpc.process.dump import dump_on_request
from libra_hpc.process.leave import leave
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import (
    Export,
    Exported,
    ExportFailed,
    Join,
    Joined,
    SaveCheckpoint,
    SaveFailed,
    SaveStarted,
    SnapshotFailed,
    Standby,
    StepFailed,
    StopWorker,
    TakeSnapshot,
    TrainStep,
    WorkerFailed,
)
from libra_hpc.trainer.saved.state_writer import StateWriter

from .device import choose_device, file_store
from .elastic import ElasticReplicas, PeerLost
from .grpo_trainer import BatchRejected, GrpoTrainer
from .link import CHECKPOINT, COMPUTE, LOAD, SNAPSHOT, WAITING, Pulse, WorkerSocket
from .saved import checkpoint, snapshot
from .settings import WorkerConfig, read_config
from .train_engine import NO_STEP, TrainEngine, init_world


class Worker:
    def __init__(self, config: WorkerConfig, socket: WorkerSocket, pulse: Pulse) -> None:
        self._config, self._socket, self._pulse = config, socket, pulse
        self._model_dir = Path(config.model_dir)
        torch.manual_seed(config.seed)
        shape = read_shape(self._model_dir)
        device = choose_device(config.device, config.device_index, config.threads)
        store = file_store(config.world_rendezvous, config.tp * config.pp * config.cp * config.dp)
        split = init_world(
            device,
            tp=config.tp,
            pp=config.pp,
            rank=config.rank,
            store=store,
            timeout_s=config.step_timeout_s,
            dp=config.dp,
            cp=config.cp,
            ep=config.ep,
            etp=config.etp,
        )
        self._engine = TrainEngine(
            shape,
            device,
            getattr(torch, config.dtype),
            split,
            settings=config.optimizer,
            recompute=config.recompute,
            elastic=config.elastic,
        )
        if config.random_weights:
            checkpoint.randomize(self._engine)
        elif config.elastic:
            self._engine.state.commit(NO_STEP, 0)
        else:
            with pulse.phase(LOAD):
                if config.start_dir and snapshot.holds(Path(config.start_dir), config.rank):
                    snapshot.load(self._engine.state, Path(config.start_dir), config.rank)
                else:
                    checkpoint.start(self._engine, self._model_dir, config.start_dir)
        self._replicas = ElasticReplicas(
            self._engine,
            config.step_timeout_s,
            config.join_timeout_s,
            lambda: pulse.phase(WAITING),
            socket.interrupted,
            core_dp=config.core_dp,
            elastic_dp=config.elastic_dp,
        )
        self._trainer = GrpoTrainer(
            self._engine, self._replicas, config.algorithm, config.micro_tokens, config.attention
        )
        self._writer = StateWriter(self._engine, self._model_dir, socket.send)
        self._socket.send(EngineState(-1, "train", "ready", version=self._engine.state.step))

    def run(self) -> None:
        """Obey messages until `StopWorker`; raises `EOFError` when the agent is gone."""
        while True:
            message = self._socket.receive()
            if isinstance(message, StopWorker):
                return
            with self._pulse.phase(COMPUTE):
                self._obey(message)

    def _obey(self, message: object) -> None:
        if isinstance(message, TrainStep):
            self._train(message)
        elif isinstance(message, Join):
            self._join(message)
        elif isinstance(message, Export):
            self._export(message)
        elif isinstance(message, SaveCheckpoint):
            self._save(message)
        elif isinstance(message, TakeSnapshot):
            self._snapshot(message)
        elif isinstance(message, Standby):
            self._replicas.leave()
            self._engine.release()

    def _join(self, message: Join) -> None:
        begin = time.monotonic()
        self._engine.reclaim()
        if message.weights and self._engine.elastic and self._engine.state.step < message.version:
            self._load_weights(message)
        try:
            received = self._replicas.join(message)
        except PeerLost as lost:
            what = f"generation {message.generation} did not form: {lost}"
            error = WorkerFailed(what, fatal=False, generation=message.generation, attempt=message.attempt)
            self._socket.send(error)
            return
        seconds = time.monotonic() - begin
        self._socket.send(
            Joined(message.generation, self._engine.state.step, received, seconds, attempt=message.attempt)
        )

    def _load_weights(self, message: Join) -> None:
        """Take the weights that this node has for rollout; without them they come from their owners."""
        try:
            checkpoint.load_policy(self._engine, Path(message.weights))
        except (OSError, ValueError, SafetensorError) as error:
            self._engine.state.commit(NO_STEP, 0)
            print(f"the weights in {message.weights} cannot be read: {error}", file=sys.stderr)
        else:
            self._engine.state.commit(message.version, 0)

    def _train(self, message: TrainStep) -> None:
        try:
            done = self._trainer.step(message)
        except (PeerLost, BatchRejected) as error:
            self._socket.send(StepFailed(message.step, message.generation, str(error)))
            return
        self._socket.send(done)

    def _export(self, message: Export) -> None:
        begin = time.monotonic()
        if message.version != self._engine.state.step:
            reason = f"this replica is at step {self._engine.state.step}, it cannot export step {message.version}"
            self._socket.send(ExportFailed(message.version, reason))
            return
        try:
            crc, size = checkpoint.export(self._engine, Path(message.path))
        except OSError as error:
            self._socket.send(ExportFailed(message.version, str(error)))
            return
        self._writer.exported(message.version, Path(message.path))
        self._socket.send(Exported(message.version, crc, size, time.monotonic() - begin))

    def _snapshot(self, message: TakeSnapshot) -> None:
        step = self._engine.state.step
        if message.step != step:
            reason = f"this replica is at step {step}, it has no snapshot of step {message.step}"
            self._socket.send(SnapshotFailed(message.step, reason))
            return
        with self._pulse.phase(SNAPSHOT):
            self._writer.snapshot(Path(message.folder))

    def _save(self, message: SaveCheckpoint) -> None:
        begin = time.monotonic()
        write, failure = None, ""
        if message.step != self._engine.state.step:
            failure = f"this replica is at step {self._engine.state.step}, it cannot save step {message.step}"
        else:
            try:
                with self._pulse.phase(CHECKPOINT):
                    write = self._writer.copy(Path(message.folder))
            except OSError as error:
                failure = str(error)
        self._socket.send(SaveStarted(message.step, time.monotonic() - begin))
        if write is not None:
            write()
        else:
            self._socket.send(SaveFailed(message.folder, message.step, failure))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="libra_hpc.trainer.worker", description="One process of a Megatron-Core replica."
    )
    parser.add_argument("--socket", required=True, help="the agent's Unix-domain socket")
    parser.add_argument("--config", required=True, type=Path, help="JSON file of WorkerConfig")
    options = parser.parse_args(arguments)
    dump_on_request()
    socket = WorkerSocket(options.socket)
    pulse = Pulse(socket)
    try:
        with pulse.phase(COMPUTE):
            worker = Worker(read_config(options.config), socket, pulse)
        worker.run()
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
    leave(main())
