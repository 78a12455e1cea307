"""Write the policy of one process, load a state of any layout, or a reference policy: a frozen model of any shape.

Weights have Hugging Face names. The policy of a world comes from its offers (`libra_hpc.weights.image`). Contents of a
state's folder: `libra_hpc.state.state_folders`; how one is written: `libra_hpc.trainer.saved.state_writer`.

The reference policy is in host memory: the processes of a world with the same parameters share one copy, a piece each.
For a pass its weights are on the device, where the activations of training are before and after. Parallelism and packs
are those of the policy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from libra_hpc.models.architecture import Entry, hf_shapes, read_shape
from libra_hpc.models.published import text_parts
from libra_hpc.models.supported import in_float32
from libra_hpc.process.retry import patiently
from libra_hpc.state import state_folders as folders
from libra_hpc.state.state_folders import WEIGHTS_FILE
from libra_hpc.state.store import resolve
from libra_hpc.trainer.packed_model import PackedModel
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.blocks import from_hf, to_hf
from libra_hpc.weights.names import own_entries, trained_entries
from libra_hpc.weights.safetensors_writer import TYPES, write_safetensors
from libra_hpc.weights.weightfile import PLAIN, tensor_bytes, wrapped_file

from .host_weights import host_weights
from .shard_files import ShardFiles, opened

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files copied with the weights: configuration, tokenizer, chat template."""


def write_policy(engine: TrainEngine, model_dir: Path, folder: Path) -> None:
    """Fill ``folder`` with a Hugging Face model: the weights, and the configuration and tokenizer of ``model_dir``.

    Of a world of one process. Raises `OSError` when there is no room.
    """
    entries, parameters = own_entries(engine.shape, engine.split), dict(engine.named_parameters())
    shapes = hf_shapes(engine.shape)
    folders.check_room(folder, tensor_bytes(shapes, TYPES[engine.dtype]))
    write_companions(model_dir, folder, engine.dtype)
    tensors = (
        pair
        for name, entry in entries.items()
        for pair in zip(entry.hf, to_hf(entry, [parameters[name].detach()], engine.shape, shapes), strict=True)
    )
    # Rename: ``folder`` may be the one from which the weights were read.
    partial = folder / f".{WEIGHTS_FILE}{folders.TEMPORARY}"
    wrapped = wrapped_file(model_dir, shapes, TYPES[engine.dtype]) if engine.shape.wrapper else PLAIN
    write_safetensors(partial, engine.dtype, shapes, tensors, wrapped.header)
    with partial.open("ab") as file:
        file.writelines(wrapped.others())
    os.replace(partial, folder / WEIGHTS_FILE)


def write_companions(model_dir: Path, folder: Path, dtype: torch.dtype) -> list[Path]:
    """Fill ``folder`` with all of a Hugging Face model but its weights, which have this type; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "config.json"]
    for pattern in COMPANIONS:
        for source in model_dir.glob(pattern):
            target = folder / source.name
            if not source.name.endswith(".safetensors.index.json") and source.resolve() != target.resolve():
                shutil.copyfile(source, target)
                written += [target] if target not in written else []
    config = json.loads((folder / "config.json").read_text())
    # The key depends on the transformers version; a stale value would make a loader convert the weights.
    for section in (config, config.get("text_config") or {}):
        for key in section.keys() & {"dtype", "torch_dtype"}:
            section[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return written


class TensorFiles:
    """Lazy reader of the tensors in a safetensors file or a Hugging Face folder; a context manager."""

    def __init__(self, path: Path, wrapper: str = "") -> None:
        """``wrapper``: the text model's tensors alone are there, under its names."""
        self._stack = ExitStack()
        self._where: dict[str, tuple[Any, str, int, int]] = {}
        """File, name there, and which part of how many."""
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
            handle = self._stack.enter_context(opened(file))
            for name in list(handle.keys()):
                parts = text_parts(name, handle.get_slice(name).get_shape()) if wrapper else (name,)
                self._where |= {part: (handle, name, i, len(parts)) for i, part in enumerate(parts)}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        return list(self._where)

    def __call__(self, name: str) -> torch.Tensor:
        file, stored, number, parts = self._where[name]
        if parts == 1:
            return cast(torch.Tensor, file.get_tensor(stored))
        experts = file.get_slice(stored)
        each = parts // experts.get_shape()[0]
        return cast(torch.Tensor, experts[number // each].chunk(each)[number % each])


def load_policy(engine: TrainEngine, folder: Path) -> None:
    """Load the weights of a Hugging Face folder: step 0, empty optimizer."""
    with TensorFiles(folder, engine.shape.wrapper) as files:
        _load_weights(engine, files)
    engine.adapters.start(engine.state)
    engine.state.clear_moments()
    engine.state.commit(0, 0)


def load_untrained(engine: TrainEngine, folder: Path) -> None:
    """Load from the model what no state has, because nothing trains it (`Family.float32`)."""
    own = own_entries(engine.shape, engine.split)
    if untrained := {name: entry for name, entry in own.items() if in_float32(entry.hf[0])}:
        with TensorFiles(folder, engine.shape.wrapper) as files:
            _load_weights(engine, files, untrained)


def _load_weights(engine: TrainEngine, files: TensorFiles, entries: Mapping[str, Entry] | None = None) -> None:
    for name, entry in (entries or own_entries(engine.shape, engine.split)).items():
        engine.state.set_weight(name, from_hf(entry, files, engine.shape, engine.split))


@torch.no_grad()
def randomize(engine: TrainEngine) -> None:
    """Random matrices and norms of 1 at step 0, for a measurement of speed."""
    for name, parameter in engine.state.parameters.items():
        drawn = torch.empty_like(parameter)
        engine.state.set_weight(name, drawn.normal_(0.0, 0.02) if drawn.dim() > 1 else drawn.fill_(1.0))
    engine.adapters.start(engine.state)
    engine.state.clear_moments()
    engine.state.commit(0, 0)


@torch.no_grad()
def load_state(engine: TrainEngine, folder: Path) -> None:
    """Replace the state by ``folder`` or by the newest state under it, whatever layout wrote it; collective.

    With adapters, which need their bases before.
    """
    folder = patiently(lambda: resolve(folder))
    saved, state = patiently(lambda: folders.read_state(folder)), engine.state
    entries = trained_entries(engine.shape, engine.split)
    with ShardFiles(folder, engine.shape) as files:
        # Saved masters are the exact weights; a float32 checkpoint has none beside its policy.
        exact = files.has("master")
        if not exact:
            with TensorFiles(folder / folders.POLICY_DIR, engine.shape.wrapper) as policy:
                _load_weights(engine, policy)
        for name, shard in state.shards.items():
            for kind, tensor in shard.kinds().items():
                if exact or kind != "master":
                    tensor.data.copy_(files.read(kind, entries[name], engine.split, shard.begin, shard.end))
    state.commit(saved.step, saved.updates)
    if exact:
        state.refresh()


class ReferencePolicy:
    """Has the parallelism of ``policy``."""

    def __init__(self, policy: PackedModel, folder: Path, replays: bool = True) -> None:
        """``replays``: as of `PackedModel`. Raises `OSError` when the weights cannot be read; collective over the
        world."""
        model = PackedModel(read_shape(folder), policy.device, policy.dtype, policy.split)
        model.replays = replays
        parameters = model.named_parameters()
        with torch.no_grad(), TensorFiles(folder, model.shape.wrapper) as files:
            for name, entry in own_entries(model.shape, model.split).items():
                parameters[name].copy_(from_hf(entry, files, model.shape, model.split))
        self._model, self._shared = model, host_weights(parameters.values())

    @contextmanager
    def model(self) -> Iterator[PackedModel]:
        """The model while it has its weights; collective over the copies of a parameter."""
        for one in self._shared:
            one.fetch()
        try:
            yield self._model
        finally:
            for one in self._shared:
                one.drop()
