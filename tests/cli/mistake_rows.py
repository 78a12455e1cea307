"""Users' mistakes as rows: what is changed in a good run file or command line, and words of its one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.preflight.test_checks import MODEL, write_model
from tests.preflight.test_task_trial import GOOD

from .command_rows import COMMANDS
from .folder_rows import ON_SIMULATED_ENGINES, TASKS, WEIGHTS, Damage, file
from .run_file_rows import RUN_FILE, SIMULATED, overrides

MODELS: dict[str, Mapping[str, object]] = {
    "model": MODEL,
    "player": {**MODEL, "vocab_size": 2048},
    "brief": {**MODEL, "max_position_embeddings": 64},
    "no-tokenizer": MODEL,
    "no-weights": MODEL,
    "slow": MODEL,
    "wide": MODEL,
    "torn": MODEL,
    "gpt2": {**MODEL, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "moe": {**MODEL, "model_type": "mixtral", "num_local_experts": 8},
    "huge": {**MODEL, "hidden_size": 8192, "intermediate_size": 49152, "num_hidden_layers": 120},
}
"""config.json of model folders beside the good one."""
LACKS = {"no-tokenizer": "tokenizer.json", "slow": "tokenizer.json", "no-weights": "model.safetensors"}


TEXTS: dict[str, tuple[bytes, str]] = {
    "another encoding": (b'[run]\nname = "\xfc"\n', "bad.toml: not valid TOML: byte 14 is not UTF-8."),
    "UTF-16 of an editor": ('[run]\nname = "a"\n'.encode("utf-16"), "bad.toml: not valid TOML: byte 0 is not UTF-8."),
    "a byte order mark and a mistake": (b"\xef\xbb\xbf[run]\nsteps = 0\n", "run.steps = 0: out of range; valid: "),
    "a zero byte": (b'[run]\nname = "a\x00b"\n', "bad.toml:2: not valid TOML: illegal character"),
    "text without quotes": (b"[run]\nname = quick\n", "bad.toml:2: not valid TOML: invalid value"),
    "JSON": (b'{"run": {}}', "bad.toml:1: not valid TOML: invalid statement (column 1)."),
    "a key twice": (b"[run]\nname = 'a'\nname = 'b'\n", "bad.toml:3: not valid TOML: cannot overwrite a value"),
    "a section twice": (b"[run]\n[run]\n", "bad.toml:2: not valid TOML: cannot declare ('run',) twice"),
    "an open bracket": (b"[run\n", "bad.toml:1: not valid TOML: expected ']'"),
    "a time without quotes": (b"[slurm]\ntime_limit = 01:00:00\n", "'01:00:00': a date or time must be in quotes."),
    "a date for a task": (
        b"[task.options]\nday = 2026-01-01\n",
        "task.options.day = '2026-01-01': a date or time must",
    ),
    "not a number": (b"[optimizer]\nlr = nan\n", "optimizer.lr = nan: not a finite number."),
    "half a step": (b"[run]\nsteps = 1.5\n", "run.steps = 1.5: wrong type; valid: an integer >= 1."),
    "a number in quotes": (b"[run]\nsteps = '5'\n", "run.steps = '5': wrong type; valid: an integer >= 1."),
    "a truth for a number": (b"[run]\nsteps = true\n", "run.steps = True: wrong type"),
    "a section that is a value": (b"run = 'x'\n", "run = 'x': wrong type; valid: a table."),
    "a list of sections": (b"[[run]]\n", "run = [{}]: wrong type; valid: a table."),
    "a key outside of sections": (b"steps = 3\n", "steps = 3: unknown key in the run file; valid: algorithm, "),
    "an unknown component": (b"[components.judge]\nnodes = 1\n", "[components.judge]: unknown section in [components]"),
    "an unknown key of a component": (b"[components.train]\ngpu = 8\n", "roll_out (did you mean 'gpus'?)."),
    "a list for text": (b"[slurm]\nextra = '--exclusive'\n", "slurm.extra = '--exclusive': wrong type; valid: a list"),
    "a number as a variable": (b"[compute.env]\nA = 1\n", "compute.env.A = 1: wrong type; valid: a table of variables"),
    "a variable's name": (b"[compute.env]\n'A-B' = '1'\n", "compute.env = 'A-B': malformed name; valid: a table of"),
    "lines as one text": (b"[compute]\nsetup = 'module load a'\n", "compute.setup = 'module load a': wrong type"),
    "a component's name": (b"[components.trian]\nnodes = 1\n", "(did you mean 'train'?)"),
    "a list of numbers for text": (
        b"[slurm]\nextra = [1]\n",
        "slurm.extra.0 = 1: wrong type; valid: a list of strings.",
    ),
    "an infinite number": (b"[optimizer]\nlr = inf\n", "optimizer.lr = inf: not a finite number."),
    "no engine": (b"[rollout]\ntp = [1, 0]\n", "rollout.tp.1 = 0: out of range"),
    "engines in quotes": (b"[rollout]\nengines_per_node = ['1']\n", "rollout.engines_per_node.0 = '1': wrong type"),
    "a space in a name": (b"[run]\nname = 'a b'\n", "run.name = 'a b': malformed; valid: letters, digits"),
    "an unknown key and a wrong value": (b"[algorithm]\neta = -1\nclp = 0.2\n", "algorithm.clp = 0.2: unknown key"),
    "nothing": (b"", "task.name = '': neither a task nor rows (task.data) are given; valid: data,"),
}
PROFILES = {
    "another fact": ("[algorithm]\neta = 1\n", "algorithm.eta: not a fact of a site; valid sections: "),
    "nodes": ("[components.train]\nnodes = 3\n", "components.train.nodes: not a fact of a site; valid in "),
    "a wrong type": ("[slurm]\nmail = 3\n", "slurm.mail = 3: wrong type; valid: a string."),
    "an unknown key": ("[compute]\nimg = 'x'\n", "compute.img = 'x': unknown key in [compute]; valid: "),
    "no TOML": ("[slurm\n", "site.toml:1: not valid TOML"),
    "a bind of two": ("[compute]\nbinds = ['a,b']\n", "compute.binds.0 = 'a,b': malformed"),
    "a variable's name": ("[compute.env]\n'A B' = 'x'\n", "compute.env = 'A B': malformed name; valid: a table of"),
}
GPU_NODES = overrides("slurm.device=cuda") + [
    word
    for name in ("train", "hybrid", "rollout")
    for key in ("gpus=8", "gpu_type=a800", "cpus=8", "mem=64G")
    for word in ("-o", f"components.{name}.{key}")
]
ON_GPU_NODES = [
    ("components.train.cpus=7", "components.train.cpus = 7: a node with 8 GPUs"),
    ("components.hybrid.mem=2G", "components.hybrid.mem = '2G': a hybrid node needs "),
    ("model.path=huge; components.train.mem=0", "train.tp = 1: training huge with TP1 PP1 needs "),
    ("planner.device=a80", "planner.device = 'a80': unknown device; valid: a100, a800, "),
    ("planner.devices=no.toml", "planner.devices = 'no.toml': no such file; valid: a file"),
    (
        "components.train.nodes=3; train.tp=8; train.pp=2",
        "train.tp * train.pp = 16: 3 nodes x 8 training processes are 24, no whole number of replicas of 16 processes;",
    ),
    (
        "components.train.nodes=2; train.tp=8; train.pp=2",
        "components.hybrid.nodes_per_replica = 1: a replica of TP8 PP2 needs 16 processes, and a hybrid node has 8;",
    ),
    ("train.tp=16", "train.tp = 16: tensor ranks share a node, and it does not divide the 8 training processes of a"),
    ("rollout.tp=16", "rollout.tp = 16: rollout.tp * rollout.engines_per_node needs 16 GPUs and components.hybrid"),
    ("train.processes=9", "train.processes = 9: each of them needs a GPU, and components.train has 8 per node;"),
    ("components.split=auto; task.work.trace=good.py", "task.work.trace = 'good.py': line 1: not JSON ("),
    ("components.split=auto; planner.train_speed=garbage.json", "planner.train_speed = 'garbage.json': Input data was"),
    ("rollout.kv_cache_mb=200000", "rollout.tp = 1: an engine of model needs 213 GB a GPU for its weights, its"),
    ("rollout.block_size=24", "rollout.block_size = 24: vLLM has other blocks; valid: multiples of 16."),
]
FUNCTIONS = [
    ("advantage", "def f(rewards, turns, group): return rewards", "it fails for a group (TypeError: f() missing 1"),
    ("advantage", "def f(rewards): return rewards[:-1]", "it fails for a group (ValueError: "),
    ("advantage", "def f(rewards): raise BaseException('no')", "it fails for a group (BaseException: no); task.tri"),
    ("advantage", "def f(rewards): exit(0)", "it fails for a group (SystemExit: 0); task.trial = false skips this"),
    ("loss", "def f(tokens): return tokens.logprobs", "it fails for three tokens (TypeError: f() takes 1 positional"),
    (
        "loss",
        "def f(tokens, low, high): return -tokens.logprobs.sum(), tokens.logprobs > 0",
        "it made shapes ((), (3,))",
    ),
]
"""Key of ``[algorithm]``, a file's only line, and the sentence."""
TEMPLATES = {
    "nothing": (
        "#!/bin/bash\necho hello\n",
        "its script does not begin with '#!', or does not start {{ owner }}; valid",
    ),
    "no shell": ("{{ owner }}\n", "its script does not begin with '#!', or does not start {{ owner }}; valid: a copy"),
    "a calculation": ("#!/bin/bash\n{{ 1 / 0 }}\n", "slurm.template = 'case/t.j2': division by zero; valid: a copy of"),
}
SCORES = {
    "syntax": (
        "def score(row, text)",
        "case/r.py is not valid Python (expected ':' (r.py, line 1)); valid: path/to/file.py:f",
    ),
    "a judge that fails": (
        "async def score(row, text): return 1 / 0",
        "it fails (ZeroDivisionError: division by zero) ",
    ),
}
REFUSED = [
    ("components.train.gpus=9", "Requested node configuration", "components.train.gpus = 9: nodes of partition a800"),
    ("components.train.partition=a80", "Invalid partition name specified", "components.train.partition = 'a80': no su"),
    ("borrow.spot.nodes=1", "Invalid partition name specified", "[borrow.spot]: Slurm refuses its jobs (Invalid"),
    (
        "components.rollout.constraint=nvlink",
        "Invalid feature specification",
        "components.rollout.constraint = 'nvlink'",
    ),
    ("slurm.extra=['-Cfast']", "Invalid feature specification", "slurm.extra[0] = '-Cfast': Slurm refuses it (Invalid"),
    ("components.train.reservation=nope", "Requested reservation is invalid", "components.train.reservation = 'nope'"),
    ("slurm.extra=['--licenses=matlab']", "Invalid license specification", "slurm.extra[0] = '--licenses=matlab': "),
    ("slurm.extra=['-Lmatlab']", "Invalid license specification", "slurm.extra[0] = '-Lmatlab': Slurm refuses it ("),
    ("slurm.extra=['--exclusve']", "unrecognized option '--exclusve'", "slurm.extra[0] = '--exclusve': Slurm refuses"),
    ("components.train.reservation=a", "Access denied to requested reservation", "components.train.reservation = 'a'"),
    ("slurm.extra=['-d', 'afterok:x']", "Job dependency problem", "slurm.extra[0] = '-d': Slurm refuses it"),
    ("slurm.account=guest", "Invalid account or account/partition combination specified", "slurm.account = 'guest': S"),
    ("components.train.account=guest", "Invalid account or account/partition combination", "components.train.account"),
    (
        "slurm.qos=fast",
        "Invalid qos specification",
        "slurm.qos = 'fast': Slurm refuses it (Invalid qos specification).",
    ),
    (
        "run.steps=3",
        "Requested time limit is invalid (exceeds some limit)",
        "slurm.time_limit = '01:00:00': Slurm refus",
    ),
    (
        "components.train.partition=a800",
        "User's group not permitted to use this partition",
        "components.train.partition",
    ),
    (
        "components.train.gpus=1",
        "Invalid generic resource (gres) specification",
        "components.train.gpus = 1: Slurm refuses it (Invalid generic",
    ),
    (
        "slurm.extra=['-wnode9']",
        "Requested node configuration is not available",
        "slurm.extra[0] = '-wnode9': Slurm re",
    ),
]
"""Overrides, words of sbatch, and the sentence for both."""
PRIVATE = [
    ("check run.toml -o model.path=secret/x", "model.path = 'secret/x': "),
    ("check run.toml -o run.dir=secret/x", "run.dir = 'secret/x': "),
    ("check run.toml -o rollout.policy=secret/x.py:Mine", "rollout.policy = 'secret/x.py:Mine': no file 'secret/x.py'"),
    ("check run.toml -o task.name=secret/x.py:Task", "secret/x.py cannot be read (Permission denied)"),
    ("check run.toml -o task.work.trace=secret/x", "task.work.trace = 'secret/x': no such file"),
    ("check run.toml -o model.path=secret", "model.path = 'secret': Permission denied; valid: a folder that you may"),
    ("check secret/run.toml", "secret/run.toml: the run file cannot be read: Permission denied."),
    ("list --runs secret", "--runs = 'secret': Permission denied; valid: a folder that you may read."),
    ("status --runs secret/x", "--runs = 'secret/x': Permission denied; valid: a folder that you may read."),
    ("status secret", "RUN = 'secret': this folder is private to its owner"),
    ("config show secret/x", "RUN = 'secret/x': no run of that name"),
    ("simulate secret/x", "secret/x cannot be read (Permission denied)"),
    ("simulate secret", "secret cannot be read (Permission denied)"),
]
"""Command lines that name the folder ``secret`` of another user."""


class Mistake(NamedTuple):
    """One row of the table."""

    words: Sequence[str]
    """Of the command line."""
    sentence: str
    """A part of what is printed, with paths below the working folder."""
    prepare: Callable[[Path], object] = id
    """Makes what the words name in an empty folder ``case``."""
    site: str = "none"
    """Of ``LIBRA_HPC_SITE``."""
    refusal: str = ""
    """What sbatch answers; empty: nothing."""
    plays: bool = False
    """Whether the task is tried."""
    private: bool = False
    """Whether the folder ``secret`` is another user's."""


def table() -> Iterator[Mistake]:
    """Every mistake."""
    for below, rows in (([], RUN_FILE), (GPU_NODES, ON_GPU_NODES), (SIMULATED, ON_SIMULATED_ENGINES)):
        for changed, sentence in rows:
            yield Mistake(["submit", "run.toml", *below, *overrides(changed)], sentence)
    for command, sentence in COMMANDS:
        yield Mistake(command.split(), sentence)
    for content, sentence in TEXTS.values():
        yield Mistake(["submit", "case/bad.toml"], sentence, file("bad.toml", content))
    for text, sentence in PROFILES.values():
        yield Mistake(["submit", "run.toml"], sentence, file("site.toml", text), site="case/site.toml")
    yield Mistake(
        ["check", "run.toml"], "absent.toml': there is no such file; valid: a site profile", site="absent.toml"
    )
    yield Mistake(["check", "run.toml"], "model: the site profile cannot be read: Is a directory.", site="model")
    for damage, sentence in WEIGHTS.values():
        yield Mistake(["submit", "run.toml", "-o", "model.path=case/model"], sentence, damaged(damage))
    own = overrides("model.path=player; task.name=case/mine.py:Mine")
    for old, new, sentence in TASKS.values():
        mine = GOOD.replace(old, new, 1)
        yield Mistake(["submit", "run.toml", *own], sentence, file("mine.py", mine), plays=True)
    for key, line, sentence in FUNCTIONS:
        named = [*own[:2], "-o", f"algorithm.{key}=case/mine.py:f", *overrides("task.name=case/task.py:Mine")]
        made = both(file("mine.py", line), file("task.py", GOOD))
        yield Mistake(["submit", "run.toml", *named], sentence, made, plays=True)
    for text, sentence in TEMPLATES.values():
        yield Mistake(["submit", "run.toml", "-o", "slurm.template=case/t.j2"], sentence, file("t.j2", text))
    rows = overrides("model.path=player; task.name=data; task.data=case/rows.jsonl; task.reward=case/r.py:score")
    for line, sentence in SCORES.values():
        made = both(file("r.py", line), file("rows.jsonl", '{"prompt": "a"}'))
        yield Mistake(["submit", "run.toml", *rows], sentence, made, plays=True)
    wrong = overrides("task.name=case/mine.py:Mine; task.options.size=big")
    typed = file("mine.py", GOOD.replace("size=1", "size: int = 1"))
    yield Mistake(
        ["submit", "run.toml", *own[:2], *wrong], "task.options.size = 'big': Mine takes int; ", typed, plays=True
    )
    for changed, refusal, sentence in REFUSED:
        yield Mistake(["check", "run.toml", *overrides(changed)], sentence, refusal=refusal)
    for command, sentence in PRIVATE:
        yield Mistake(command.split(), sentence, private=True)


def both(*prepare: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda case: [one(case) for one in prepare]


def damaged(damage: Damage) -> Damage:
    """A model folder in ``case``, and what is done to it."""
    return lambda case: damage(write_model(case / "model"))
