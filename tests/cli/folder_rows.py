"""Rows of the table of mistakes: what is wrong in the folder of a model, in a task, or in a dry run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libra_hpc.preflight.named_files import INDEX
from tests.preflight.test_checks import MODEL, write_weights

Damage = Callable[[Path], object]


def configure(**changes: Any) -> Damage:
    """Another config.json beside the same weights."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))


def file(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def weights(content: bytes) -> Damage:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def index(text: str) -> Damage:
    return lambda folder: (folder / INDEX).write_text(text)


def other_type(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F8_E"', 1))


def longer_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape": [128, 64]', b'"shape": [228, 64]', 1))


def foreign(folder: Path) -> None:
    write_weights(folder / "consolidated.safetensors", {"tok_embeddings.weight": (128, 64)})


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945426872\n"
WEIGHTS: dict[str, tuple[Damage, str]] = {
    "empty": (weights(b""), "model.safetensors: the file is empty"),
    "a pointer of git-lfs": (weights(POINTER), "a pointer of git-lfs, not the weights; `git lfs pull` brings them"),
    "truncated": (cut, "bytes, and "),
    "truncated in its header": (cut_header, "no whole safetensors file (its 100 bytes end within its header)"),
    "no safetensors": (weights(b"PK\x03\x04" + bytes(5000)), "(its 5,004 bytes end within its header)"),
    "a nested header": (weights(b"\x40\x0d\x03\x00\x00\x00\x00\x00" + b"[" * 200_000), "no whole safetensors file"),
    "quantised": (other_type, "has type F8_E, not a floating-point type"),
    "bytes that do not fit": (longer_tensor, "other bytes than its shape needs"),
    "an index of absent files": (
        index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        f"{INDEX} names model-00001-of-00002.safetensors, which is not there",
    ),
    "an index that is no index": (index('{"weight_map": {"a": 1}}'), f"its {INDEX} cannot be read"),
    "another vocabulary": (configure(vocab_size=256), "vocab_size = 256) 2 tensors have a wrong shape: "),
    "more layers": (configure(num_hidden_layers=8), "num_hidden_layers = 8, "),
    "fewer layers": (configure(num_hidden_layers=4), "tensors are not the model's: model.layers.4."),
    "no finite epsilon": (configure(rms_norm_eps=float("nan")), "rms_norm_eps = nan: is no size; valid: a number > 0."),
    "another family": (configure(model_type="llama"), "tensors are not the model's: "),
    "a second set of weights": (foreign, "1 tensors are not the model's: tok_embeddings.weight"),
    "another activation": (configure(hidden_act="gelu"), "hidden_act = 'gelu': the trainer has no such activation"),
    "no vocabulary": (
        configure(vocab_size=None),
        "the model's config has no 'vocab_size'; valid: an integer from 1 to",
    ),
    "layers as text": (configure(num_hidden_layers="six"), "num_hidden_layers = 'six': is no count; valid: an integer"),
    "far too many layers": (configure(num_hidden_layers=10**7), "(num_hidden_layers = 10000000, hidden_size = 64"),
    "no number of layers": (configure(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000: is no count"),
    "no heads": (configure(num_attention_heads=0), "num_attention_heads = 0: is no count; valid: an integer from 1"),
    "no positions": (configure(max_position_embeddings=None), "max_position_embeddings = None: is no size; valid: a"),
    "positions as text": (configure(max_position_embeddings="8192"), "max_position_embeddings = '8192': is no size"),
    "an epsilon as text": (configure(rms_norm_eps="x"), "rms_norm_eps = 'x': is no size; valid: a number > 0."),
    "a rotary base as text": (configure(rope_theta="x"), "rope_theta = 'x': the default rotary embedding needs a n"),
    "a rotary embedding": (configure(rope_scaling={"type": "dynamic"}), "type = 'dynamic': the trainer has no such ro"),
    "a window": (configure(use_sliding_window=True, sliding_window=9), "sliding_window = 9: the trainer has no slid"),
    "quantisation": (configure(quantization_config={"bits": 4}), "quantization_config = {'bits': 4}: the trainer read"),
    "a config.json that is a list": (file("config.json", "[]"), "its config.json is not a JSON object"),
    "an empty config.json": (file("config.json", ""), "its config.json is not valid JSON (Expecting value"),
    "a nested config.json": (file("config.json", "[" * 100_000), "its config.json is nested too deeply"),
}
"""What is done to the folder of ``model.path``."""
TASKS = {
    "an import": (
        "class Play",
        "import no_such_package\nclass Play",
        "does not import (ModuleNotFoundError: No module",
    ),
    "an exit at import": ("class Play", "raise SystemExit('no data')\nclass Play", "does not import (SystemExit: no"),
    "an end at import": (
        "class Play",
        "import os; os._exit(0)\nclass Play",
        "its file ended the process that tried it",
    ),
    "a key of the terminal": (
        "class Play",
        "raise KeyboardInterrupt\nclass Play",
        "cannot be built (KeyboardInterrupt",
    ),
    "a bare exception": ("return Play()", "raise BaseException('no')", "its open fails (BaseException: no); task.tria"),
    "a foreign token": ("[1, 2]", "[1, 2048]", "its start fails (BadAnswer: token 2048 is outside of the policy's voc"),
    "a foreign answer": ("Turn([1])", "Turn([2048])", "its step fails (BadAnswer: token 2048 is outside of the policy"),
    "a tool that is awaited": (
        "def double(number",
        "async def double(number",
        "nobody awaits it in a tool process; va",
    ),
    "no task": ("class Mine(Task)", "class Mine", "has no such Task class"),
    "no open": ("    def open", "    def opne", "'Mine' does not define open"),
    "no step": ("async def step", "async def stpe", "its open fails (TypeError: Can't instantiate abstract class Play"),
    "its constructor": ("        super()", "        open('absent')\n        super()", "(FileNotFoundError: [Errno 2] "),
    "a constructor without options": ("self, tokenizer, *, seed=0, size=1", "self", "task.options = {}: Mine does not"),
    "an option that must be given": ("size=1", "size", "missing 1 required keyword-only argument: 'size'"),
    "its open": ("        return Play()", "        return 1 / 0", "its open fails (ZeroDivisionError: division"),
    "an open without an episode": ("return Play()", "return None", "its open fails (TypeError: open returned a None"),
    "an open that is async": (
        "    def open",
        "    async def open",
        "its open fails (TypeError: open returned a coroutine",
    ),
    "an empty prompt": ("[1, 2]", "[]", "its start fails (BadAnswer: prompt is empty"),
    "a prompt without room": (
        "[1, 2]",
        "[1] * 12_000",
        "rollout.max_model_len = 4096: the first prompt of 'case/mine.py",
    ),
    "a prompt as text": ("[1, 2]", "'hello'", "its start fails (BadAnswer: prompt is 'hello', not a list of token ids"),
    "no room for an answer": ("[1, 2], 4", "[1, 2], 0", "its start fails (BadAnswer: max_tokens is 0, not an integer"),
    "a plain step": (
        "async def step",
        "step = print\n    async def other",
        "is no coroutine function; valid: `async def ",
    ),
    "a step that answers nothing": ("return Turn([1])", "return None", "its step fails (BadAnswer: step returned None"),
    "an answer of words": ("Turn([1])", "Turn(['one'])", "its step fails (BadAnswer: tokens = ['one'] holds something"),
    "a reward as text": ("reward=1.0", "reward='high'", "its step fails (BadReward: reward is 'high', not a finite"),
    "tools as a list": ('{"double": double}', "[double]", "its tools are no table of functions (AttributeError"),
    "a tool that is no function": (
        '{"double": double}',
        '{"double": 5}',
        "tools['double'] = 5: cannot be run in a tool",
    ),
}
"""What is replaced in the task `tests.preflight.test_task_trial.GOOD`, by what."""

ON_SIMULATED_ENGINES = [
    ("planner.device=a80", "planner.device = 'a80': unknown device; valid: a100, a800, "),
    ("planner.model=qwen3-14", "planner.model = 'qwen3-14': neither a"),
    ("simulated.presets=['chess']", "simulated.presets = 'chess': unknown preset"),
    ("task.work.trace=good.py", "task.work.trace = 'good.py': line 1: not JSON ("),
    ("simulated.calibration=run.toml", "run.toml': Expected `object`, got `array`; valid: a file of libra-hpc"),
    ("planner.device=", "planner.device = '': components.train has no gpu_type either; valid: a device such as"),
    ("planner.devices=garbage.toml", "planner.devices = 'garbage.toml': Expected ']' at the end of a table"),
    ("planner.devices=other.toml", "planner.devices = 'other.toml': device 'x': Object contains unknown field"),
    (
        "planner.devices=nowhere.toml",
        "planner.devices = 'nowhere.toml': no such file; valid: a file, or a run directory.",
    ),
    ("planner.model=torn", "planner.model = 'torn': its config.json is not valid JSON ("),
    ("simulated.calibration=nowhere", "simulated.calibration = 'nowhere': No such file or directory; valid: a file of"),
    ("task.work.trace=nowhere", "task.work.trace = 'nowhere': no such file; valid: a file, or a run directory."),
    ("task.work.trace=empty.jsonl", "task.work.trace = 'empty.jsonl': the trace is empty."),
    ("train.pp=1000", "train.pp = 1000: 1 node x 8 training processes are 8, no whole number of replicas of 1000"),
    ("train.ep=2", "train.ep = 2: the model has no experts"),
    ("simulated.presets=['documents']", "rollout.max_model_len = 4096: the longest prompt leaves no room for an"),
    ("task.work.prompt_tokens=4096", "8 turns of them and a prompt of 4,096 are more than rollout.max_model_l"),
    ("task.work.turn=2", "task.work.turn = 2: unknown key in [task.work]; valid: "),
]
