"""Save and load a replica's state under Hugging Face names, for any tensor- and pipeline-parallel split.

Saving is collective: rank 0 of the replica gathers and writes. Loading is not. Layout:
`libra_hpc.train.state_folders`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from libra_hpc.train import state_folders as folders
from libra_hpc.weights.checksum import file_crc32
from libra_hpc.weights.names import gather, gathered, hf_shapes, load
from libra_hpc.weights.safetensors_writer import write_safetensors

from .train_engine import TrainEngine

WEIGHTS_FILE = "model.safetensors"
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files copied with the weights: configuration, tokenizer, chat template."""


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Full weights by Hugging Face name on the replica's rank 0, elsewhere empty; collective."""
    return gather(dict(engine.named_parameters()), engine.shape, engine.split)


def export(engine: TrainEngine, path: Path) -> tuple[int, int]:
    """Write the weights as one safetensors file (atomic rename); returns crc32 and bytes, (0, 0) on other ranks.

    Collective. Raises `OSError` in all processes of the replica when there is no room; nothing is left behind.
    """
    parameters = dict(engine.named_parameters())
    tensors = gathered(parameters, engine.shape, engine.split)
    found, failure = (0, 0), None
    if not engine.split.tp_rank and not engine.split.pp_rank:
        try:
            found = _write_export(path, next(iter(parameters.values())).dtype, hf_shapes(engine.shape), tensors)
        except OSError as error:
            failure = error
    # Gathering is collective: the others need this process also when it cannot write.
    for _ in tensors:
        pass
    _agree(engine, failure)
    return found


def _write_export(
    path: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[int, int]:
    partial = path.with_name(f".{path.name}{folders.TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.check_room(path.parent, dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes.values()))
        write_safetensors(partial, dtype, shapes, tensors)
        found = file_crc32(partial), partial.stat().st_size
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return found


def _agree(engine: TrainEngine, failure: OSError | None) -> None:
    """Raise `OSError` in all processes of the replica when the writing one failed."""
    if not engine.agree(failure is None):
        raise failure or OSError("the process of this replica that writes could not")


def write_policy(tensors: dict[str, torch.Tensor], model_dir: Path, folder: Path, dtype: torch.dtype) -> None:
    """Fill ``folder`` with a Hugging Face model: ``tensors``, and the configuration and tokenizer of ``model_dir``."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for source in model_dir.glob(pattern):
            target = folder / source.name
            if not source.name.endswith(".safetensors.index.json") and source.resolve() != target.resolve():
                shutil.copyfile(source, target)
    config = json.loads((folder / "config.json").read_text())
    # The key depends on the transformers version; a stale value would make a loader convert the weights.
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Rename: ``folder`` may be the one from which the weights were read.
    partial = folder / f".{WEIGHTS_FILE}{folders.TEMPORARY}"
    _save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS_FILE)


def _save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        # safetensors wraps the operating system's error.
        raise OSError(f"{path}: {error}") from error


def save(engine: TrainEngine, model_dir: Path, folder: Path) -> None:
    """Write the state as ``folder`` (atomic rename).

    Collective. Raises `OSError` in all processes of the replica when that fails; nothing is left behind.
    """
    state = engine.state
    policy = weights(engine)
    optimizer: dict[str, torch.Tensor] = {}
    kinds = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    if state.mixed:
        kinds["master"] = state.master
    for kind, tensors in kinds.items():
        for name, tensor in gather(tensors, engine.shape, engine.split).items():
            optimizer[f"{kind}/{name}"] = tensor
    failure = None
    if policy:
        try:
            _write_state(engine, policy, optimizer, model_dir=model_dir, folder=folder)
        except OSError as error:
            failure = error
    _agree(engine, failure)


def _write_state(
    engine: TrainEngine,
    policy: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    *,
    model_dir: Path,
    folder: Path,
) -> None:

    state = folders.TrainerState(engine.state.step, engine.state.updates)
    partial = folder.with_name(f"{folder.name}{folders.TEMPORARY}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        folders.check_room(folder, sum(tensor.nbytes for tensor in (*policy.values(), *optimizer.values())))
        partial.mkdir(parents=True)
        write_policy(policy, model_dir, partial / folders.POLICY_DIR, next(iter(policy.values())).dtype)
        _save_file(optimizer, partial / folders.OPTIMIZER_FILE)
        (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(state))
        folders.publish(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class TensorFiles:
    """Lazy reader of the tensors in a safetensors file or a Hugging Face folder; a context manager."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._where: dict[str, Callable[[str], torch.Tensor]] = {}
        index = path / f"{WEIGHTS_FILE}.index.json"
        if path.is_file():
            files = [path]
        elif index.is_file():
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            files = [path / WEIGHTS_FILE]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"no weights at {file}")
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            self._where.update(dict.fromkeys(handle.keys(), handle.get_tensor))

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        return list(self._where)

    def __call__(self, name: str) -> torch.Tensor:
        return self._where[name](name)


@torch.no_grad()
def load_policy(engine: TrainEngine, folder: Path) -> None:
    """Load the weights of a Hugging Face folder: step 0, empty optimizer."""
    state = engine.state
    with TensorFiles(folder) as files:
        load({name: t.data for name, t in state.master.items()}, files, engine.shape, engine.split)
    for moment in (state.exp_avg, state.exp_avg_sq):
        for tensor in moment.values():
            tensor.zero_()
    state.commit(0, 0)


@torch.no_grad()
def randomize(engine: TrainEngine) -> None:
    """Random matrices and norms of 1 at step 0, for a measurement of speed."""
    state = engine.state
    for tensor in state.master.values():
        tensor.normal_(0.0, 0.02) if tensor.dim() > 1 else tensor.fill_(1.0)
    for moment in (state.exp_avg, state.exp_avg_sq):
        for tensor in moment.values():
            tensor.zero_()
    state.commit(0, 0)


@torch.no_grad()
def load_state(engine: TrainEngine, folder: Path) -> None:
    """Replace the state by ``folder`` or by the newest state under it; not collective."""
    folder = folders.resolve(folder)
    saved, state = folders.read_state(folder), engine.state

    def fill(tensors: dict[str, torch.Tensor], read: TensorFiles, prefix: str) -> None:
        load(
            {name: t.data for name, t in tensors.items()}, lambda name: read(prefix + name), engine.shape, engine.split
        )

    with TensorFiles(folder / folders.POLICY_DIR) as policy, TensorFiles(folder / folders.OPTIMIZER_FILE) as optimizer:
        fill(state.exp_avg, optimizer, "exp_avg/")
        fill(state.exp_avg_sq, optimizer, "exp_avg_sq/")
        # Saved masters are the exact weights; a float32 checkpoint has none beside its policy.
        exact = any(name.startswith("master/") for name in optimizer.names())
        fill(state.master, optimizer if exact else policy, "master/" if exact else "")
    state.commit(saved.step, saved.updates)


def start(engine: TrainEngine, model_dir: Path, start_dir: str) -> None:
    """Load ``start_dir`` if given, else the weights of ``model_dir``."""
    if start_dir:
        load_state(engine, Path(start_dir))
    else:
        load_policy(engine, model_dir)
