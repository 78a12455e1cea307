"""What moving a node between training and rollout costs, and what it costs those that stay in training.

    python -m bench.moves [--parameters 220e6] [--rounds 3] [--tokens 128] [--json]

Two training processes, one thread each, random bfloat16 weights, a tiny vocabulary. One stays; the other goes to
standby and comes back, after a step without it. Two ways:

- ``local``: who stays owns the optimizer state; who joins reads the weights that its node has for rollout.
- ``owners``: as ``local``, but who joins has no weights and takes them from their owner.

The rows are explained at `Round`. Memory is what a process has of its own, less that of a process with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import machine, median, report
from libra_hpc.config.run import RunConfig
from libra_hpc.models.architecture import read_shape
from libra_hpc.protocol.trainer import (
    Export,
    Exported,
    ExportFailed,
    Join,
    Joined,
    Standby,
    StepDone,
    TrainStep,
    WorkerReady,
)
from libra_hpc.trainer.measure import MeasurementReplica, random_samples
from libra_hpc.weights.names import hf_shapes

LAYERS, HEAD, VOCAB = 16, 64, 64
PAUSE_S = 0.5
"""Before every order, so that both processes are idle."""
SHARED = Path("/dev/shm")
"""Where a node keeps the weights of its rollout engines."""


class Round(msgspec.Struct, frozen=True):
    """One move to rollout and back; seconds from the orders to the answers."""

    to_training_s: float
    """Both have the order to join -> both are in the new generation."""
    to_training_cpu_s: float
    """Processor time of both meanwhile."""
    received: int
    """Bytes that the joining process received from the other one."""
    wait_s: float
    """Of the move to training, until the one that stayed can begin its next step."""
    first_s: float
    """The first step of both."""
    second_s: float
    """The second one."""
    to_rollout_s: float
    """The one that stays has the order for a generation without the other -> the other has given its memory back.

    In this order, as in a run: the leaving process gets its order when the generation without it exists.
    """
    to_rollout_cpu_s: float
    free_s: float
    """Of the move to rollout, from the order to the leaving process to its next answer."""
    training_bytes: int
    """Memory of the leaving process in training."""
    standby_bytes: int


class Pair:
    """The process that stays and the one that moves, by turns alone and together."""

    def __init__(self, stays: MeasurementReplica, moves: MeasurementReplica, folder: Path, tokens: int) -> None:
        self._stays, self._moves, self._folder, self._tokens = stays, moves, folder, tokens
        self._generation = self._step = 0
        for replica in (stays, moves):
            replica.answer(WorkerReady)
        self.round(local=False)

    def round(self, local: bool) -> Round:
        """To rollout, a step without the node, to training, two steps with it."""
        training, cpu, begin = own_memory(self._moves), self._cpu(), self._idle()
        self._form(self._stays)
        self._stays.answer(Joined)
        ordered = time.monotonic()
        self._moves.send(Standby())
        # A standby has no answer. There is no such version to export, so the refusal comes right after the standby.
        self._moves.ask(Export("", -2), ExportFailed)
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
        return Round(
            to_training_s=joined - joining,
            to_training_cpu_s=to_training_cpu,
            received=received,
            wait_s=waited - joining,
            first_s=self._run(self._stays, self._moves),
            second_s=self._run(self._stays, self._moves),
            to_rollout_s=freed - begin,
            to_rollout_cpu_s=to_rollout_cpu,
            free_s=freed - ordered,
            training_bytes=training,
            standby_bytes=standby,
        )

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


def own_memory(replica: MeasurementReplica) -> int:
    """Bytes of anonymous memory of the first process: without what it shares with others."""
    for line in Path(f"/proc/{replica.pids[0]}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not tell a process's anonymous memory")


def write_model(folder: Path, parameters: float) -> int:
    """Write the configuration of a model of about ``parameters`` weights; returns their number."""
    # A layer has 4 h^2 weights of attention and 9 h^2 of the MLP.
    hidden = max(1, round(math.sqrt(parameters / (13 * LAYERS)) / HEAD)) * HEAD
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(math.prod(size) for size in hf_shapes(read_shape(folder)).values())


@contextmanager
def replicas(model_dir: Path, folder: Path, *changes: dict[str, Any]) -> Iterator[list[MeasurementReplica]]:
    """Processes of the model, one for each set of changes of `WorkerConfig`."""
    base = RunConfig()
    config = base.model_copy(
        update={
            "model": base.model.model_copy(update={"path": str(model_dir), "dtype": "bfloat16"}),
            "slurm": base.slurm.model_copy(update={"device": "cpu"}),
            "train": base.train.model_copy(update={"tp": 1, "pp": 1, "threads": 1}),
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
        replica.answer(WorkerReady)
        replica.ask(Join(1, 0, 1, ""), Joined)
        replica.ask(TrainStep(1, 1, (random_samples(1, 64, VOCAB),), (63,)), StepDone)
        return own_memory(replica)


def medians(rounds: list[Round], parameters: int, empty: int) -> dict[str, float]:
    """The rows of one way."""

    def middle(value: Callable[[Round], float]) -> float:
        return median([value(one) for one in rounds])

    wait_s, second_s = middle(lambda r: r.wait_s), middle(lambda r: r.second_s)
    # Of medians: a ratio of two single steps has the noise of both.
    first = (wait_s + middle(lambda r: r.first_s)) / second_s
    return {
        "to training, s": middle(lambda r: r.to_training_s),
        "to training, processor s": middle(lambda r: r.to_training_cpu_s),
        "  received, MB": middle(lambda r: r.received / 1e6),
        "  the other waits, s": wait_s,
        "a later step of both, s": second_s,
        "  the first, with the wait, x": first,
        "to rollout, s": middle(lambda r: r.to_rollout_s),
        "to rollout, processor s": middle(lambda r: r.to_rollout_cpu_s),
        "  of it memory given back, s": middle(lambda r: r.free_s),
        "in training, bytes/parameter": middle(lambda r: (r.training_bytes - empty) / parameters),
        "in standby, bytes/parameter": middle(lambda r: (r.standby_bytes - empty) / parameters),
    }


def table(found: dict[str, dict[str, float]]) -> list[list[str]]:
    """A line for each row, with one column for each way."""
    return [[name, *(f"{max(0.0, way[name]):.2f}" for way in found.values())] for name in found["local"]]


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=220e6, help="about as many weights")
    parser.add_argument("--rounds", type=int, default=3, help="moves there and back of which medians are taken")
    parser.add_argument("--tokens", type=int, default=128, help="of a step of one process")
    parser.add_argument("--json", action="store_true", help="print every round instead of the table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="libra-moves-", dir=SHARED if SHARED.is_dir() else None) as name:
        folder = Path(name)
        empty = empty_memory(folder)
        model_dir = folder / "measured"
        parameters = write_model(model_dir, options.parameters)
        print(f"{parameters / 1e6:.0f} M parameters ...", file=sys.stderr, flush=True)
        rounds = measure(model_dir, folder / "runs", options.rounds, options.tokens)
    found = {way: medians(each, parameters, empty) for way, each in rounds.items()}
    raw = {
        "parameters": parameters,
        "empty_bytes": empty,
        "rounds": {way: [msgspec.to_builtins(one) for one in each] for way, each in rounds.items()},
        "medians": found,
        "machine": machine(),
    }
    if options.json:
        print(json.dumps(raw))
        return
    notes = [f"medians of {options.rounds} moves there and back; steps of {options.tokens} tokens a process"]
    show(found, f"A node moves: {parameters / 1e6:.0f} M parameters, bfloat16", notes, raw)


def show(found: dict[str, dict[str, float]], title: str, notes: Sequence[str], raw: Any = None) -> None:
    report("moves", title, columns=["", *found], rows=table(found), notes=notes, raw=raw)


if __name__ == "__main__":
    main()
