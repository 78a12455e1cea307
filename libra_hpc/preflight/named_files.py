"""Checks of the files in a run file: the policy's folder, the run directory, the task."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.learn import AGENT, GYM, INITIAL, MIXTURE, VERIFIERS, NamedTask, TaskSection, TaskTable
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, error_text, invalid, nearest
from libra_hpc.facts.columns import COLUMNS
from libra_hpc.models.architecture import TIED_HEAD, hf_shapes, predicts_ahead, read_shape, tensor_fault
from libra_hpc.models.devices import device, devices
from libra_hpc.models.published import text_parts, text_shapes
from libra_hpc.models.shapes import model_shape, read_config, shape_from_config
from libra_hpc.models.supported import refusals
from libra_hpc.tasks.base import GYM_TASK, TASKS, unknown_task
from libra_hpc.user_file import FORM, FUNCTION_FORM
from libra_hpc.weights.weightfile import LENGTH, WeightFileError, folder_shapes

DATA_FORM = "a JSONL or Parquet file, or a folder of one split"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODEL_FILES = {"config.json": ["config.json"], "tokenizer": ["tokenizer.json"], "safetensors": ["*.safetensors"]}
"""Parts of a policy folder, and file patterns of which at least one must match."""


def read_model_config(config: RunConfig) -> dict[str, Any]:
    """Read the policy's config.json; raises `UserError` when the folder is not a complete Hugging Face model."""
    path, folder = config.model.path, Path(config.model.path)
    if not path or not folder.is_dir():
        why, valid = "no such folder" if path else "not given", "config.json, safetensors and a tokenizer"
        raise invalid("model.path", path, why, f"a Hugging Face folder with {valid}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise invalid("model.path", path, "Permission denied", "a folder that you may read")
    for what, patterns in MODEL_FILES.items():
        if not any(file.is_file() for pattern in patterns for file in folder.glob(pattern)):
            valid = f"a folder with {' or '.join(patterns)}"
            if what == "tokenizer" and (folder / "tokenizer.model").exists():
                valid += ", which transformers writes: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            raise invalid("model.path", path, f"the folder has no {what}", valid)
    return read_config(folder / "config.json", "model.path", path)


def check_vocabulary(folder: str, model: Mapping[str, Any]) -> None:
    """Raise `UserError` for a tokenizer with ids beyond the vocabulary of ``model``, the config.json."""
    last, rows = max(vocabulary(Path(folder) / "tokenizer.json").values(), default=-1), model.get("vocab_size")
    if isinstance(rows, int) and last >= rows:
        what = f"its tokenizer has ids up to {last:,}, and its config.json a vocab_size of {rows:,}"
        raise invalid("model.path", folder, what, "a tokenizer within the model's vocabulary")


def vocabulary(path: Path) -> dict[str, int]:
    """Ids by token of a ``tokenizer.json``; empty where its form is unknown."""
    try:
        content = json.loads(path.read_bytes())
        known = content["model"]["vocab"]
        # Unigram models have a list of tokens with their scores.
        ids = known if isinstance(known, dict) else {token: number for number, (token, _) in enumerate(known)}
        return ids | {token["content"]: int(token["id"]) for token in content.get("added_tokens", ())}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def check_run_dir(config: RunConfig) -> None:
    """Raise `UserError` when run directories cannot be made below ``run.dir``; writes nothing."""
    parent = Path(config.run.dir).absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "writable" if parent.is_dir() else "a folder"
        valid = "a writable folder on a file system all nodes share"
        raise invalid("run.dir", config.run.dir, f"{parent} is not {why}", valid)


def check_function(field: str, name: str, known: Iterable[str]) -> None:
    """Raise `UserError` unless ``name`` is in ``known``, or ``file.py:function``; the file is parsed, never run."""
    if name in known:
        return
    path, separator, wanted = name.rpartition(":")
    if not separator:
        raise invalid(field, name, "unknown", [*known, FUNCTION_FORM])
    functions = [node.name for node in _parsed(field, name, path, FUNCTION_FORM).body if isinstance(node, FUNCTIONS)]
    if wanted not in functions:
        raise invalid(field, name, f"{path} has no function {wanted!r}", functions or FUNCTION_FORM)


def _parsed(field: str, name: str, path: str, form: str = FORM) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise invalid(field, name, f"{path} cannot be read ({error.strerror})", form) from error
    except (SyntaxError, ValueError) as error:
        raise invalid(field, name, f"{path} is not valid Python ({error})", form) from error


def check_planner_files(config: RunConfig) -> None:
    """Raise `UserError` for what ``[planner]`` names and is not there; with an explicit split nothing else reads it."""
    own = config.planner
    named = {"planner.train_speed": own.train_speed, "planner.devices": own.devices, **_traces(config)}
    for field, path in named.items():
        if path and not os.path.exists(path):
            raise invalid(field, path, "no such file", "a file, or a run directory")
    if config.run.engine == "real":
        with naming(config):
            if own.device or own.devices:
                device(own.device or next(iter(devices())), own.devices or None)
            if own.model:
                model_shape(own.model)


def check_tasks(task: TaskSection) -> None:
    """Raise `UserError` unless each task is there, its constructor takes the options, and its data are there.

    Files of Python are parsed, never run: their imports need not be installed where runs are submitted.
    """
    if task.train and (task.name != MIXTURE or task.own_arguments):
        given = next(iter(task.own_arguments), "name")
        raise invalid(f"task.{given}", getattr(task, given), "is beside [[task.train]]", "keys of [[task.train]] alone")
    _check_names(task)
    for key, (name, table) in task.tables.items():
        check_task(key, name, table)


def _check_names(task: TaskSection) -> None:
    """Raise `UserError` unless all have names of their own, and evaluations rows of their own."""
    names = set[str]()
    trained = {os.path.realpath(one.data) for one in (task, *task.train) if one.data}
    sections: dict[str, Sequence[NamedTask]] = {"train": task.train, "eval": task.eval}
    for section, parts in sections.items():
        for place, one in enumerate(parts):
            key = f"task.{section}.{place}"
            if not one.name or one.name in names:
                raise invalid(f"{key}.name", one.name, "is not unique" if one.name else "not given", "a name")
            if section == "eval" and one.name in {column.name for column in COLUMNS}:
                raise invalid(f"{key}.name", one.name, "a column of metrics.jsonl has this name", "another name")
            names.add(one.name)
            if section == "eval" and one.data and os.path.realpath(one.data) in trained:
                raise invalid(f"{key}.data", one.data, "these rows are trained on", "rows of its own")


def check_task(key: str, name: str, task: TaskTable) -> None:
    """Raise `UserError` for mistakes of one task; ``key`` names its class, ``name``."""
    section, found = key.rpartition(".")[0], class_text(key, name)
    taken = _constructor_options(found)
    for option in task.own_arguments:
        if taken is not None and option not in taken:
            field = f"{section}.options" if option in task.options else section
            raise invalid(field, option, f"{found.name} has no such option", taken)
    _check_data(section, name, task)


def class_text(key: str, name: str) -> ast.ClassDef:
    """Parse the class of the task ``name``; raises `UserError` where there is none."""
    path, separator, wanted = name.rpartition(":")
    if not separator or path == GYM:
        if not separator and name not in TASKS:
            raise unknown_task(key, name)
        module, wanted = TASKS.get(name, GYM_TASK)
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        path = spec.origin
    classes = {node.name: node for node in _parsed(key, name, path).body if isinstance(node, ast.ClassDef)}
    if wanted not in classes:
        known = f"valid: {', '.join(classes)}{nearest(wanted, classes)}" if classes else "it defines none"
        raise UserError(f"{key} = {name!r}: {path} defines no class {wanted!r}; {known}.")
    return classes[wanted]


def _check_data(section: str, name: str, task: TaskTable) -> None:
    for field, given, form in (("data", task.data, DATA_FORM), ("reward", task.reward, FUNCTION_FORM)):
        if name in ("data", AGENT) and not given:
            raise invalid(f"{section or 'task'}.{field}", given, "not given", form)
    python = str(task.verifiers.get("python", ""))
    if name == VERIFIERS and not os.access(python, os.X_OK):
        why, valid = "no such program" if python else "not given", "an environment with envs/verifiers.txt"
        raise invalid(f"{section or 'task'}.verifiers.python", python, why, valid)
    if task.data and not Path(task.data).exists():
        raise invalid(f"{section}.data", task.data, "no such file or folder", DATA_FORM)
    for field, function in (("reward", task.reward), ("agent", task.agent)):
        if function:
            check_function(f"{section}.{field}", function, ())


def _constructor_options(task: ast.ClassDef) -> list[str] | None:
    """Argument names of a task's constructor after the tokenizer; None where the class text does not show them."""
    for node in task.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and node.args.kwarg is None:
            return [argument.arg for argument in (*node.args.args[2:], *node.args.kwonlyargs)]
    return None


@contextmanager
def reading(field: str, path: str) -> Iterator[None]:
    """What the file system refuses is a mistake in ``field``."""
    try:
        yield
    except OSError as error:
        raise invalid(field, path, error_text(error), "a path that you may read") from error


@contextmanager
def naming(config: RunConfig) -> Iterator[None]:
    """``device = 'a80': ...`` becomes ``planner.device = 'a80': ...``, and a trace's path ``task.work.trace = ...``."""
    try:
        yield
    except UserError as error:
        text, keys = str(error), _keys(config)
        kind, mark, rest = text.partition(" = ")
        if mark and kind in keys:
            raise UserError(f"{keys[kind]} = {rest}") from error
        for key, path in _traces(config).items():
            if path and text.startswith(path):
                raise UserError(f"{key} = {path!r}: {text.removeprefix(path).lstrip(': ,')}") from error
        raise


def _traces(config: RunConfig) -> dict[str, str]:
    """Recorded work by the key that names it."""
    return {f"{field}.trace": work.trace for field, (_, _, work) in config.task.works.items()}


def _keys(config: RunConfig) -> dict[str, str]:
    """Key of a run file by what the other rooms call its value."""
    return {
        "device": "planner.device" if config.planner.device else "components.*.gpu_type",
        "device file": "planner.devices",
        "model": "planner.model" if config.planner.model else "model.path",
        "calibration file": "simulated.calibration",
        "preset": "simulated.presets",
        "max_context": "rollout.max_model_len",
    }


INDEX = "model.safetensors.index.json"
REFERENCE = "algorithm.reference"
EMBEDDING = "model.embed_tokens.weight"
VALID = "a folder whose *.safetensors are the weights of its config.json"


def check_reference(path: str, policy: str) -> None:
    """Raise `UserError` unless ``algorithm.reference`` has a model that scores the tokens of ``policy``."""
    if not Path(path).is_dir():
        raise invalid(REFERENCE, path, "no such folder", f"{INITIAL}, or {VALID}")
    for refusal in refusals(model := read_config(Path(path) / "config.json", REFERENCE, path)):
        raise refusal.error(REFERENCE)
    rows = shape_from_config(model, REFERENCE).vocab
    own, other = (vocabulary(Path(folder) / "tokenizer.json") for folder in (path, policy))
    if any(number >= rows or own.get(token, number) != number for token, number in other.items()):
        raise invalid(REFERENCE, path, "its tokens are not those of model.path", "a model with the same tokenizer")
    check_weights(path, REFERENCE)


def check_weights(path: str, field: str = "model.path") -> None:
    """Raise `UserError` unless the weight files of ``path`` are whole and those of its config.json."""
    folder = Path(path)
    missing = [name for name in _indexed(field, folder / INDEX) if not (folder / name).is_file()]
    if missing:
        raise invalid(field, path, f"{INDEX} names {missing[0]}, which is not there", VALID)
    try:
        found = folder_shapes(folder)
    except WeightFileError as error:
        raise invalid(field, path, str(error).removeprefix(f"{folder}/").rstrip("."), VALID) from error
    shape = read_shape(folder)
    files, found = found, text_shapes(found) if shape.wrapper else found
    if shape.kind.sigmoid_router or shape.delta_net:
        found = {name: size for name, size in found.items() if not predicts_ahead(name, shape.layers)}
    # A layer has tensors: with more layers than there are tensors some are missing anyway.
    wanted = hf_shapes(msgspec.structs.replace(shape, layers=min(shape.layers, len(found))))
    if fault := tensor_fault(found, wanted, shape.tied_embeddings):
        keys = f"num_hidden_layers = {shape.layers}, hidden_size = {shape.hidden}, vocab_size = {shape.vocab}"
        raise invalid(field, path, f"by its config.json ({keys}) {fault}", VALID)

    if shape.tied_embeddings and TIED_HEAD in found:
        _check_head(path, field, [name for name in files if name.endswith((TIED_HEAD, EMBEDDING.split(".", 1)[1]))])


def _check_head(path: str, field: str, names: Iterable[str]) -> None:
    stored = {part: name for name in names for part in text_parts(name, ())}
    if _data(Path(path), stored[TIED_HEAD]) != _data(Path(path), stored[EMBEDDING]):
        why = f"{TIED_HEAD} is not {EMBEDDING}, and config.json has tie_word_embeddings = true"
        raise invalid(field, path, why, "tie_word_embeddings = false there, if both are to be trained")


def _data(folder: Path, name: str) -> memoryview:
    """The bytes of a tensor that some file of the folder has."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            whole = mmap(file.fileno(), 0, access=ACCESS_READ)
        start = LENGTH + int.from_bytes(whole[:LENGTH], "little")
        if entry := msgspec.json.decode(whole[LENGTH:start]).get(name):
            begin, end = entry["data_offsets"]
            return memoryview(whole)[start + begin : start + end]
    raise WeightFileError(f"{folder}: no file has {name}.")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """Tensor -> file."""


_index = msgspec.json.Decoder(_Index)


def _indexed(field: str, index: Path) -> list[str]:
    """Files that an index names, in order; none without an index. Raises `UserError` for a malformed one."""
    try:
        return sorted(set(_index.decode(index.read_bytes()).weight_map.values()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(field, str(index.parent), f"its {INDEX} cannot be read ({error_text(error)})") from error
