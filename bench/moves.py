"""What moving a node between training and rollout costs, and what it costs those that stay in training.

    python -m bench.moves [--parameters 220e6] [--rounds 3] [--tokens 128]

Two training processes, one thread each, random bfloat16 weights, a tiny vocabulary. One stays; the other goes to
standby and comes back, after a step without it. Two ways:

- ``local``: who stays owns the optimizer state; who joins reads the weights that its node has for rollout.
- ``owners``: as ``local``, but who joins has no weights and takes them from their owner.

Memory is what a process has of its own, less that of a process with a tiny model.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.gpu_check_steps import TINY
from bench.gpu_check_switch import own_memory, to_standby
from bench.gpu_model import write_config
from bench.harness import median, options, progress, report
from libra_hpc.config.run import RunConfig
from libra_hpc.models.architecture import read_shape
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.protocol.trainer import Export, Exported, Join, Joined, StepDone, TrainStep
from libra_hpc.trainer.measure import MeasurementReplica, random_samples
from libra_hpc.weights.names import hf_shapes

LAYERS, HEAD, VOCAB = 16, 64, 64
PAUSE_S = 0.5
"""Before every order, so that both processes are idle."""
SHARED = Path("/dev/shm")
"""Where a node keeps the weights of its rollout engines."""


Round = dict[str, float]
"""One move to rollout and back; seconds from the orders to the answers, by the names of the table.

- ``to training``: both have the order to join -> both are in the new generation.
- ``the other waits``: of that, until the one that stayed can begin its next step.
- ``to rollout``: the one that stays has the order for a generation without the other -> the other has given its memory
  back. In this order, as in a run: the leaving process gets its order when the generation without it exists.
- ``memory given back``: of that, from the order to the leaving process to its next answer.
- ``processor s``: of both processes meanwhile.
- ``in training``, ``in standby``: memory of the leaving process, bytes.
"""
FIRST, SECOND, WAIT = "  the first, with the wait, x", "a later step of both, s", "  the other waits, s"
MEMORY = ("in training, bytes/parameter", "in standby, bytes/parameter")


class Pair:
    """The process that stays and the one that moves, by turns alone and together."""

    def __init__(self, stays: MeasurementReplica, moves: MeasurementReplica, folder: Path, tokens: int) -> None:
        self._stays, self._moves, self._folder, self._tokens = stays, moves, folder, tokens
        self._generation = self._step = 0
        for replica in (stays, moves):
            replica.answer(EngineState)
        self.round(local=False)

    def round(self, local: bool) -> Round:
        """To rollout, a step without the node, to training, two steps with it."""
        training, cpu, begin = own_memory(self._moves), self._cpu(), self._idle()
        self._form(self._stays)
        self._stays.answer(Joined)
        ordered = time.monotonic()
        to_standby(self._moves)
        freed = time.monotonic()
        to_rollout_cpu, standby = self._cpu() - cpu, own_memory(self._moves)
        # The joining node's state is always one of before.
        self._run(self._stays)
        path = self._folder / "weights.safetensors"
        if local:
            # The engines of the node need it for rollout: no part of the move.
            self._stays.ask(Export(str(path), self._step), Exported)
        cpu, joining = self._cpu(), self._idle()
        self._form(self._stays, self._moves, weights=str(path) if local else "")
        self._stays.answer(Joined)
        waited = time.monotonic()
        received = self._moves.answer(Joined).received_bytes
        joined, to_training_cpu = time.monotonic(), self._cpu() - cpu
        first, second = self._run(self._stays, self._moves), self._run(self._stays, self._moves)
        return {
            "to training, s": joined - joining,
            "to training, processor s": to_training_cpu,
            "  received, MB": received / 1e6,
            WAIT: waited - joining,
            SECOND: second,
            FIRST: first,
            "to rollout, s": freed - begin,
            "to rollout, processor s": to_rollout_cpu,
            "  of it memory given back, s": freed - ordered,
            MEMORY[0]: training,
            MEMORY[1]: standby,
        }

    def _form(self, *members: MeasurementReplica, weights: str = "") -> None:
        """Order a generation of ``members``; they answer."""
        self._generation += 1
        path = str(self._folder / f"generation-{self._generation}")
        for rank, member in enumerate(members):
            size = len(members)
            member.send(Join(self._generation, rank, size, path, weights=weights if rank else "", version=self._step))

    def _run(self, *members: MeasurementReplica) -> float:
        """Seconds of one step of one trajectory a member."""
        begin = self._idle()
        self._step += 1
        samples = random_samples(1, self._tokens, VOCAB)
        for member in members:
            total = (self._tokens - 1) * len(members)
            member.send(TrainStep(self._step, self._generation, (samples,), (total,)))
        for member in members:
            member.answer(StepDone)
        return time.monotonic() - begin

    def _idle(self) -> float:
        time.sleep(PAUSE_S)
        return time.monotonic()

    def _cpu(self) -> float:
        return sum(processor_s(replica) for replica in (self._stays, self._moves))


def processor_s(replica: MeasurementReplica) -> float:
    """Seconds of processor time of the first process; unlike seconds of the clock, hardly longer on a busy machine."""
    fields = Path(f"/proc/{replica.pids[0]}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_model(folder: Path, parameters: float) -> int:
    """Write the configuration of a model of about ``parameters`` weights; returns their number."""
    # A layer has 4 h^2 weights of attention and 9 h^2 of the MLP.
    heads = max(1, round(math.sqrt(parameters / (13 * LAYERS)) / HEAD))
    sizes = {"hidden": heads * HEAD, "heads": heads, "kv_heads": heads, "intermediate": 3 * heads * HEAD}
    write_config(replace(TINY, layers=LAYERS, head_dim=HEAD, vocab=VOCAB, **sizes), folder)
    return sum(math.prod(size) for size in hf_shapes(read_shape(folder)).values())


@contextmanager
def replicas(model_dir: Path, folder: Path, *changes: dict[str, Any]) -> Iterator[list[MeasurementReplica]]:
    """Processes of the model, one for each set of changes of `WorkerConfig`."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "bfloat16"},
            "slurm": {"device": "cpu"},
            "train": {"tp": 1, "pp": 1, "threads": 1},
        }
    )
    found: list[MeasurementReplica] = []
    try:
        for i, change in enumerate(changes):
            own = folder / f"replica-{i}"
            own.mkdir(parents=True)
            found.append(MeasurementReplica(config, own, **change))
        yield found
    finally:
        for replica in found:
            replica.end()


OWNER: dict[str, Any] = {"core_dp": 1}
WITHOUT_OPTIMIZER: dict[str, Any] = {"core_dp": 1, "elastic": True, "random_weights": False}


def measure(model_dir: Path, folder: Path, rounds: int, tokens: int) -> dict[str, list[Round]]:
    """A core that owns the state, and a replica without."""
    with replicas(model_dir, folder, OWNER, WITHOUT_OPTIMIZER) as (stays, moves):
        pair = Pair(stays, moves, folder, tokens)
        # By turns: the machine's load is that of both.
        pairs = [(pair.round(local=True), pair.round(local=False)) for _ in range(rounds)]
        return {"local": [a for a, _ in pairs], "owners": [b for _, b in pairs]}


def empty_memory(folder: Path) -> int:
    """Bytes that a process has of its own with a tiny model."""
    model = folder / "model"
    write_model(model, 0)
    with replicas(model, folder / "empty", {}) as (replica,):
        replica.answer(EngineState)
        replica.ask(Join(1, 0, 1, ""), Joined)
        replica.ask(TrainStep(1, 1, (random_samples(1, 64, VOCAB),), (63,)), StepDone)
        return own_memory(replica)


def medians(rounds: list[Round], parameters: int, empty: int) -> dict[str, float]:
    """The rows of one way."""
    middle = {name: median([one[name] for one in rounds]) for name in rounds[0]}
    # Of medians: a ratio of two single steps has the noise of both.
    middle[FIRST] = (middle[WAIT] + middle[FIRST]) / middle[SECOND]
    return middle | {name: (middle[name] - empty) / parameters for name in MEMORY}


def table(found: dict[str, dict[str, float]]) -> list[list[str]]:
    """A line for each row, with one column for each way."""
    return [[name, *(f"{max(0.0, way[name]):.2f}" for way in found.values())] for name in found["local"]]


def main() -> None:
    """Command line."""
    given = options("moves", __doc__, parameters=220e6, rounds=3, tokens=128)
    with tempfile.TemporaryDirectory(prefix="libra-moves-", dir=SHARED if SHARED.is_dir() else None) as name:
        folder = Path(name)
        empty = empty_memory(folder)
        model_dir = folder / "measured"
        parameters = write_model(model_dir, given.parameters)
        progress(f"{parameters / 1e6:.0f} M parameters ...")
        rounds = measure(model_dir, folder / "runs", given.rounds, given.tokens)
    found = {way: medians(each, parameters, empty) for way, each in rounds.items()}
    raw = {"parameters": parameters, "empty_bytes": empty, "rounds": rounds, "medians": found}
    notes = [f"medians of {given.rounds} moves there and back; steps of {given.tokens} tokens a process"]
    title = f"A node moves: {parameters / 1e6:.0f} M parameters, bfloat16"
    report(given, title, columns=["", *found], rows=table(found), notes=notes, raw=raw)


if __name__ == "__main__":
    main()
