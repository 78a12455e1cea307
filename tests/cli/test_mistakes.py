"""Every user mistake: exit code 2, one sentence on stderr that names field and value, nothing queued, nothing
written."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import encode_status
from libra_hpc.files import write_atomic
from libra_hpc.preflight import checked_run
from libra_hpc.slurm.queue.command import WAYS_OUT
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic
from tests.preflight.test_checks import MODEL

from .conftest import Outcome, Queue

GPU_NODES = ["-o", "slurm.device=cuda"] + [
    word
    for name in ("train", "hybrid", "rollout")
    for key in ("gpus=8", "gpu_type=a800", "cpus=8", "mem=64G")
    for word in ("-o", f"components.{name}.{key}")
]
SIMULATED = ["--engine", "simulated", "-o", "simulated.model=qwen3-14b", "-o", "simulated.device=a800"] + [
    word for name in ("train", "hybrid", "rollout") for word in ("-o", f"components.{name}.gpus=8")
]
CASES = {
    "unknown key": (["-o", "algorithm.etta=1"], "algorithm.etta = 1: unknown key in [algorithm]"),
    "unknown section": (["-o", "algoritm.eta=1"], "[algoritm]: unknown section"),
    "malformed override": (["-o", "eta=1"], "override = 'eta=1': malformed"),
    "negative eta": (["-o", "algorithm.eta=-1"], "algorithm.eta = -1: out of range; valid: an integer >= 0."),
    "group of one": (
        ["-o", "algorithm.group_size=1"],
        "algorithm.group_size = 1: out of range; valid: an integer >= 2.",
    ),
    "text for a number": (["-o", "optimizer.lr=fast"], "optimizer.lr = 'fast': wrong type; valid: a number > 0."),
    "unknown device": (["-o", "slurm.device=gpu"], "slurm.device = 'gpu': unknown value; valid: cpu, cuda"),
    "unknown executor": (
        ["--executor", "slrum"],
        "slurm.executor = 'slrum': unknown value; valid: auto, slurm, local (did you mean 'slurm'?).",
    ),
    "bad run name": (["-o", "run.name=a/b"], "run.name = 'a/b': malformed"),
    "bad memory": (["-o", "components.train.mem=2GB"], "components.train.mem = '2GB': malformed"),
    "too many minibatches": (
        ["-o", "algorithm.minibatches=65"],
        "algorithm.minibatches = 65: a global batch has 64 trajectories; valid: 1 to 64.",
    ),
    "two planners": (["-o", "components.planner.nodes=2"], "components.planner.nodes = 2: rank 0 is the one planner"),
    "no training node": (["-o", "components.train.nodes=0"], "components.train.nodes = 0"),
    "no rollout node": (["-o", "components.rollout.nodes=0"], "components.rollout.nodes = 0"),
    "unknown policy": (["-o", "rollout.policy=cmlqf"], "rollout.policy = 'cmlqf': unknown policy (other"),
    "missing policy file": (["-o", "rollout.policy=absent.py:Mine"], "no file '"),
    "policy file without the class": (
        ["-o", "rollout.policy=good.py:Mine"],
        "good.py has no such class with name, key, route, finished and forget.",
    ),
    "a class that is no policy": (["-o", "rollout.policy=good.py:Task"], "rollout.policy = 'Task': "),
    "unknown task": (["-o", "task.name=keychian"], "task.name = 'keychian': unknown task"),
    "missing task file": (["-o", "task.name=absent.py:Task"], "absent.py cannot be read (No such file or directory)"),
    "missing model": (["-o", "model.path=nowhere"], "nowhere': no such folder"),
    "no model": (["-o", "model.path="], "model.path = '': not given"),
    "incomplete model": (["-o", "model.path=."], "the folder has no config.json"),
    "train tp": (
        ["-o", "train.tp=3"],
        "train.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8.",
    ),
    "train pp": (["-o", "train.pp=7"], "train.pp = 7: the model has only 6 layers; valid: 1 to 6."),
    "rollout tp": (["-o", "rollout.tp=5"], "rollout.tp = 5: does not divide the model's num_attention_heads = 8"),
    "context too long": (
        ["-o", "rollout.max_model_len=9000"],
        "rollout.max_model_len = 9000: the model's max_position_embeddings is 8192",
    ),
    "engines without GPUs": (
        ["-o", "slurm.device=cuda"],
        "components.train.gpus = 0: training needs one; valid: an integer >= 1.",
    ),
    "a CPU for eight engines": (
        [*GPU_NODES, "-o", "components.train.cpus=7"],
        "components.train.cpus = 7: a node with 8 GPUs",
    ),
    "too little memory": (
        [*GPU_NODES, "-o", "components.hybrid.mem=2G"],
        "components.hybrid.mem = '2G': a hybrid node needs ",
    ),
    "malformed time": (["-o", "slurm.time_limit=1h"], "slurm.time_limit = '1h': malformed"),
    "time above the partition's": (["-o", "slurm.time_limit=2-00:00:00"], "slurm.time_limit = '2-00:00:00': "),
    "unknown partition": (
        ["-o", "components.train.partition=a80"],
        "components.train.partition = 'a80': no such partition",
    ),
    "too many nodes": (["-o", "components.hybrid.nodes=5"], "components.hybrid.nodes = 5: partition a800 has 4 nodes"),
    "too many GPUs": (["-o", "components.train.gpus=9"], "components.train.gpus = 9: "),
    "wrong GPU": (
        ["-o", "components.train.gpus=1", "-o", "components.train.gpu_type=h100"],
        "components.train.gpu_type = 'h100': ",
    ),
    "too many CPUs": (["-o", "components.train.cpus=65"], "components.train.cpus = 65: "),
    "too much memory": (["-o", "components.rollout.mem=2T"], "components.rollout.mem = '2T': "),
    "run folder below a file": (["-o", "run.dir=run.toml/runs"], "run.toml is not a folder"),
    "unknown MPI plugin": (["-o", "slurm.mpi=openmpi"], "slurm.mpi = 'openmpi': no Slurm has such an MPI plugin"),
    "nearly an MPI plugin": (["-o", "slurm.mpi=pmi_2"], "(did you mean 'pmi2'?)"),
    "unknown interpreter": (["-o", "compute.python=pyhton3"], "compute.python = 'pyhton3': no such program on PATH"),
    "an interpreter without engines": (
        ["-o", "compute.python=./login"],
        "it lacks libra_hpc, mpi4py, vllm, megatron and torch",
    ),
    "the same on a dry run": (
        ["--dry-run", "-o", "compute.python=./login"],
        "it lacks libra_hpc, mpi4py, vllm, megatron and torch",
    ),
    "no such option": (["--wiat"], "No such option: --wiat (Possible options: --wait)."),
    "an option without its value": (["-o"], "Option '-o' requires an argument."),
    "override below a value": (["-o", "run.name.x=3"], "override = 'run.name.x=3': run.name is a value, not a table."),
    "override without value": (["-o", "optimizer.lr="], "optimizer.lr = '': wrong type; valid: a number > 0."),
    "several values": (["-o", "optimizer.lr=1e-6,2e-6"], "optimizer.lr = '1e-6,2e-6': wrong type"),
    "number beyond 64 bits": (
        ["-o", "run.steps=99999999999999999999"],
        "run.steps = 99999999999999999999: more than 64 bits; valid: an integer of at most 9223372036854775807.",
    ),
    "unknown engine": (["--engine", "fake"], "run.engine = 'fake': unknown value; valid: real, simulated."),
    "no run folder": (["-o", "run.dir="], "run.dir = '': not given; valid: a writable folder"),
    "a variable that is not set": (["-o", "run.dir=$NOWHERE/x"], "run.dir = '$NOWHERE/x': a variable in it is not set"),
    "no time": (["-o", "slurm.time_limit=0"], "slurm.time_limit = '0': no time at all; valid: minutes, "),
    "time below the notice": (
        ["-o", "slurm.time_limit=1", "-o", "slurm.notice_s=120"],
        "begins to save slurm.notice_s = 120 s before it",
    ),
    "short notice": (
        ["-o", "slurm.notice_s=5"],
        "slurm.notice_s = 5.0: too short to save anything; valid: 0, or a number >= 30.",
    ),
    "sbatch option with a space": (
        ["-o", "slurm.extra=['--nice 10']"],
        "slurm.extra[0] = '--nice 10': it has a space; valid: --nice=VALUE.",
    ),
    "no sbatch option": (["-o", "slurm.extra=['exclusive']"], "slurm.extra[0] = 'exclusive': not an sbatch option"),
    "reserved sbatch option": (
        ["-o", "components.train.extra=['-Q', '--time=3']"],
        "components.train.extra[1] = '--time=3': libra-hpc sets --time itself; valid: slurm.time_limit.",
    ),
    "sbatch option behind dashes": (["--", "exclusive"], "slurm.extra[0] = 'exclusive': not an sbatch option"),
    "mail address with spaces": (["-o", "slurm.mail=me at site"], "slurm.mail = 'me at site': not usable"),
    "unknown mail event": (
        ["-o", "slurm.mail_on=['DONE']"],
        "slurm.mail_on.0 = 'DONE': unknown value; valid: BEGIN, END, FAIL, REQUEUE, TIME_LIMIT, ALL.",
    ),
    "GPU option without a number": (
        ["-o", "slurm.gpu_option=--gres=gpu"],
        "slurm.gpu_option = '--gres=gpu': malformed",
    ),
    "account with a quote": (["-o", 'slurm.account=a"b'], "slurm.account = 'a\"b': not usable in an sbatch option"),
    "constraint with a space": (["-o", "components.train.constraint=a b"], "components.train.constraint = 'a b'"),
    "interface with a space": (["-o", "slurm.interface=ib 0"], "slurm.interface = 'ib 0': malformed"),
    "relative local folder": (["-o", "compute.local_dir=scratch"], "compute.local_dir = 'scratch': malformed"),
    "container without an image": (
        ["-o", "compute.container=apptainer"],
        "compute.image = '': compute.container is 'apptainer'; valid: a container image.",
    ),
    "unknown container": (
        ["-o", "compute.container=docker"],
        "'docker': unknown value; valid: none, apptainer, pyxis.",
    ),
    "an interpreter that is a folder": (
        ["-o", "compute.python=/tmp"],
        "compute.python = '/tmp': not an executable file",
    ),
    "no GPU in the partition": (
        ["-o", "components.train.partition=cpu", "-o", "components.train.gpus=1"],
        "components.train.gpus = 1: nodes of partition cpu have 0 GPUs; valid: 0.",
    ),
    "one node is too small": (
        [
            "-o",
            "components.one_node=true",
            "-o",
            "components.train.cpus=60",
            "-o",
            "components.hybrid.cpus=60",
            "-o",
            "components.rollout.cpus=1",
        ],
        "components.train.cpus = 121: nodes of partition a800 have 64 CPUs",
    ),
    "a list of the wrong length": (
        ["-o", "rollout.tp=[1,1,1]"],
        "rollout.tp = [1, 1, 1]: a list has one entry for each",
    ),
    "task file that is no Python": (["-o", "task.name=bad.py:Task"], "bad.py is not valid Python"),
    "task file without the class": (["-o", "task.name=good.py:Tsak"], "defines no class 'Tsak'; valid: Task (did you"),
    "task file without a class name": (["-o", "task.name=good.py"], "task.name = 'good.py': unknown task; valid: "),
    "unknown task option": (
        ["-o", "task.name=good.py:Task", "-o", "task.options={size=1, colour='red'}"],
        "task.options = 'colour': Task has no such option; valid: size.",
    ),
    "model without tokenizer": (
        ["-o", "model.path=no-tokenizer"],
        "no-tokenizer': the folder has no tokenizer; valid: ",
    ),
    "model without weights": (["-o", "model.path=no-weights"], "no-weights': the folder has no safetensors; valid: "),
    "model with a torn config": (["-o", "model.path=torn"], "torn': its config.json is not valid JSON"),
    "unsupported architecture": (
        ["-o", "model.path=gpt2"],
        "model.path: model_type = 'gpt2': this version cannot train this architecture; valid: glm4, llama, mistral,",
    ),
    "mixture of experts": (["-o", "model.path=moe"], "model_type = 'mixtral': a mixture of experts"),
    "model too large for its GPUs": (
        [*GPU_NODES, "-o", "model.path=huge", "-o", "components.train.mem=0"],
        "train.tp = 1: training huge with TP1 PP1 needs ",
    ),
    "missing warm start": (
        ["-o", "rollout.warm_start=nowhere"],
        "nowhere does not exist; valid: a run directory, or a",
    ),
    "unknown planner device": (
        [*GPU_NODES, "-o", "planner.device=a80"],
        "planner.device = 'a80': unknown device; valid: a100, a800, ",
    ),
    "missing device file": (
        [*GPU_NODES, "-o", "planner.devices=no.toml"],
        "no.toml': no such file; valid: a TOML file",
    ),
    "a split for CPU nodes": (["-o", "components.split=auto"], "components.split = 'auto': slurm.device is 'cpu'"),
    "missing trace of the planner": (
        ["-o", "components.split=auto", "-o", "planner.device=a800", "-o", "planner.trace=/nowhere"],
        "planner.trace = '/nowhere': cannot be read (No such file or directory).",
    ),
    "unknown simulated device": (
        [*SIMULATED, "-o", "simulated.device=a80"],
        "simulated.device = 'a80': unknown device; valid: a100, a800, ",
    ),
    "unknown simulated model": (
        [*SIMULATED, "-o", "simulated.model=qwen3-14"],
        "simulated.model = 'qwen3-14': neither a",
    ),
    "unknown preset": (
        [*SIMULATED, "-o", "simulated.presets=['chess']"],
        "simulated.presets = 'chess': unknown preset",
    ),
    "no preset": ([*SIMULATED, "-o", "simulated.presets=[]"], "simulated.presets = []: too short; valid: a list of"),
    "a simulated trace of no format": (
        [*SIMULATED, "-o", "simulated.trace=good.py"],
        "good.py': of no known format; valid: libra, kv-cache-tester, mooncake, azure (name one with --format).",
    ),
    "a calibration file that is none": (
        [*SIMULATED, "-o", "simulated.calibration=run.toml"],
        "run.toml': Expected `object`, got `array`; valid: a JSON file of format",
    ),
}
MODELS: dict[str, Mapping[str, object]] = {
    "no-tokenizer": MODEL,
    "no-weights": MODEL,
    "torn": MODEL,
    "gpt2": {**MODEL, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "moe": {**MODEL, "model_type": "mixtral", "num_local_experts": 8},
    "huge": {**MODEL, "hidden_size": 8192, "intermediate_size": 49152, "num_hidden_layers": 120},
}
"""config.json of model folders beside the good one."""
LACKS = {"no-tokenizer": "tokenizer.json", "no-weights": "model.safetensors"}


@pytest.fixture
def files(site: Path) -> Path:
    """The site with folders and files that mistakes name."""
    (site / "login").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    (site / "login").chmod(0o755)
    (site / "bad.py").write_text("class Task(:\n")
    (site / "good.py").write_text("class Task:\n    def __init__(self, tokenizer, size=1):\n        pass\n")
    for name, config in MODELS.items():
        (site / name).mkdir()
        parts = {"config.json": json.dumps(config), "tokenizer.json": "{}", "model.safetensors": ""}
        for file, text in parts.items():
            if LACKS.get(name) != file:
                (site / name / file).write_text(text[:-1] if (name, file) == ("torn", "config.json") else text)
    return site


def one_line(outcome: Outcome) -> str:
    """The one sentence of a mistake."""
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert not re.search(r"[a-z]\. [A-Z]", line), "more than one sentence"
    return line


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_the_run_file(case: str, files: Path, queue: Queue, cli: Callable[..., Outcome]) -> None:
    arguments, sentence = CASES[case]
    before = sorted(files.rglob("*"))
    outcome = cli("submit", "run.toml", *arguments)
    assert sentence in one_line(outcome)
    assert queue.submitted == []
    assert sorted(files.rglob("*")) == before


FILES: dict[str, tuple[bytes, str]] = {
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
    "an unknown key of a component": (b"[components.train]\ngpu = 8\n", "reservation (did you mean 'gpus'?)."),
    "a list for text": (b"[slurm]\nextra = '--exclusive'\n", "slurm.extra = '--exclusive': wrong type; valid: a list"),
    "a number as a variable": (b"[compute.env]\nA = 1\n", "compute.env.A = 1: wrong type; valid: a table of variables"),
    "a variable's name": (b"[compute.env]\n'A-B' = '1'\n", "compute.env = 'A-B': malformed name; valid: a table of"),
    "lines as one text": (b"[compute]\nsetup = 'module load a'\n", "compute.setup = 'module load a': wrong type"),
    "nothing": (b"", "model.path = '': not given; valid: a Hugging Face folder"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_mistake_in_the_text_of_a_run_file(case: str, site: Path, queue: Queue, cli: Callable[..., Outcome]) -> None:
    content, sentence = FILES[case]
    (site / "bad.toml").write_bytes(content)
    assert sentence in one_line(cli("submit", "bad.toml"))
    assert queue.submitted == []
    assert not (site / "runs").exists()


PROFILES = {
    "another fact": ("[algorithm]\neta = 1\n", "algorithm.eta: not a fact of a site; valid sections: "),
    "nodes": ("[components.train]\nnodes = 3\n", "components.train.nodes: not a fact of a site; valid in "),
    "a wrong type": ("[slurm]\nmpi = 3\n", "slurm.mpi = 3: wrong type; valid: a string."),
    "an unknown key": ("[compute]\nimg = 'x'\n", "compute.img = 'x': unknown key in [compute]; valid: "),
    "no TOML": ("[slurm\n", "site.toml:1: not valid TOML"),
    "an unknown partition": ("[components.train]\npartition = 'a80'\n", "components.train.partition = 'a80': no such"),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_mistake_in_a_site_profile(
    case: str, site: Path, queue: Queue, cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sentence = PROFILES[case]
    (site / "site.toml").write_text(text)
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site / "site.toml"))
    assert sentence in one_line(cli("submit", "run.toml"))
    assert queue.submitted == []
    assert not (site / "runs").exists()


def test_a_site_profile_that_is_missing_or_a_folder(
    site: Path, cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site / "absent.toml"))
    assert "absent.toml': there is no such file; valid: a site profile, or 'none'." in one_line(
        cli("check", "run.toml")
    )
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site / "model"))
    assert "model: the site profile cannot be read: Is a directory." in one_line(cli("check", "run.toml"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit"], "either a run file or --resume"),
        (["submit", "run.toml", "--resume", "quick-001"], "either a run file or --resume"),
        (["submit", "absent.toml"], "absent.toml: the run file cannot be read"),
        (["status"], "There is no run below runs/"),
        (["status", "quick-007"], "RUN = 'quick-007': no run of that name"),
        (["submti"], "No such command 'submti' (did you mean 'submit'?)."),
        (["config", "shwo"], "No such command 'shwo' (did you mean 'show'?)."),
        (["check", "absent.toml"], "absent.toml: the run file cannot be read: No such file or directory."),
        (["check", "model"], "model: the run file cannot be read: Is a directory."),
        (["config", "show", "absent"], "RUN = 'absent': no run of that name, folder or job id below runs/"),
        (["config", "explain", "trian.tp"], "KEY = 'trian.tp': no such section or key (did you mean 'train.tp'?)."),
        (["logs", "--rank", "x"], "--rank = 'x': input should be a valid integer"),
        (["logs", "--tail=-1"], "--tail = '-1': input should be greater than or equal to 0."),
        (["cancel", "quick-007"], "RUN = 'quick-007': no run of that name, folder or job id"),
        (["summary", "quick-007"], "RUN = 'quick-007': no run of that name, folder or job id"),
        (["submit", "--resume", "quick-007"], "RUN = 'quick-007': no run of that name, folder or job id"),
        (["plan", "run.toml"], "components.train.gpus = 0: no GPUs to plan for; valid: a number of GPUs"),
        (
            ["plan", "run.toml", "--gpus", "x", "--device", "a800"],
            "--gpus = 'x': malformed; valid: a number such as 48",
        ),
        (
            ["plan", "run.toml", "--gpus", "7", "--device", "a800"],
            "gpus = 7: nodes have 8 of them and each stage needs",
        ),
        (["simulate", "empty.jsonl"], "empty.jsonl: the trace is empty."),
        (["simulate", "garbage.jsonl"], "garbage.jsonl: of no known format; valid: libra, "),
        (["simulate", "torn.jsonl.gz"], "torn.jsonl.gz: the gzip file is damaged"),
        (["simulate", "absent.jsonl"], "absent.jsonl cannot be read (No such file or directory)."),
        (["simulate", "empty.jsonl", "--policy", "cmflq"], "--policy = 'cmflq': unknown policy ("),
        (["simulate", "empty.jsonl", "--buckets", "4TP1"], "--buckets = '4TP1': '4TP1' is not a bucket; valid: "),
        (["simulate", "empty.jsonl", "--eta", "1"], "--eta = 1: without --batch-groups"),
        (["trace", "inspect", "garbage.jsonl"], "garbage.jsonl: of no known format; valid: libra, "),
        (["trace", "inspect", "model"], "model"),
        (["trace", "generate", "absent/x.jsonl"], "absent/x.jsonl cannot be written (No such file or directory)."),
        (["calibrate", "engine"], "Missing argument 'OUT'."),
        (
            ["simulate", "trace", "--calibration", "absent"],
            "calibration file = 'absent': No such file or directory; valid: ",
        ),
        (["plan", "run.toml", "--best", "0"], "--best"),
        (["submit", "run.toml", "-o", f"run.name={'x' * 5000}"], f"run.name = '{'x' * 119}...: too long; valid: "),
        (["repartition", "quick-001"], "KEY=VALUE"),
        (["repartition", "train.tp=2", "rollout.tp=2"], "RUN = 'train.tp=2': no run of that name"),
        (["make-policy", "model"], "OUT = 'model': exists already"),
        (["make-policy", "new", "--task", "chess"], "--task = 'chess': unknown task; valid: arithmetic, keychain"),
    ],
)
def test_a_mistake_in_the_command_line(
    arguments: list[str], sentence: str, site: Path, queue: Queue, cli: Callable[..., Outcome]
) -> None:
    (site / "empty.jsonl").write_text("")
    (site / "garbage.jsonl").write_bytes(b"\x00\xff garbage\n{\n")
    (site / "torn.jsonl.gz").write_bytes(b"\x1f\x8bxxxx")
    before = sorted(site.rglob("*"))
    assert sentence in one_line(cli(*arguments))
    assert queue.submitted == []
    assert sorted(site.rglob("*")) == before


LAYOUTS = {
    "not part of a layout": (
        "running",
        ["algorithm.eta=2"],
        "KEY = 'algorithm.eta': not part of a layout; valid: components.train.nodes, ",
    ),
    "nearly a key": ("running", ["rolout.tp=2"], "(did you mean 'rollout.tp'?)."),
    "no value": (
        "running",
        ["train.tp"],
        "override = 'train.tp': malformed; valid: section.key=value, for instance train.tp=2.",
    ),
    "unknown value": (
        "running",
        ["train.recompute=yes"],
        "train.recompute = 'yes': unknown value; valid: none, selective, full.",
    ),
    "more nodes than the job": ("running", ["components.train.nodes=2"], "components.*.nodes = '2 + 1 + 1': "),
    "heads": ("running", ["train.tp=3"], "train.tp = 3: does not divide the model's num_attention_heads = 8"),
    "the present one": (
        "running",
        ["rollout.tp=[1,1]"],
        "rollout.tp = [1, 1]: the run has this layout already (1 node trains with TP1, ",
    ),
    "ended": (
        "completed",
        ["train.tp=2"],
        "RUN = 'quick-001': it is over (job 4711 is completed); valid: a run whose job is running",
    ),
    "starting": ("starting", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is starting)"),
    "starting again": ("restarting", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is starting)"),
    "killed": ("job failed", ["train.tp=2"], "RUN = 'quick-001': it is over (job 4711 is failed ("),
    "queued": ("job pending", ["train.tp=2"], "RUN = 'quick-001': it does not run (job 4711 is pending)"),
    "ordered": ("ordered", ["train.tp=2"], "RUN = 'quick-001': another layout is ordered already"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_mistake_in_an_order_for_another_layout(
    case: str, site: Path, queue: Queue, cli: Callable[..., Outcome]
) -> None:
    state, arguments, sentence = LAYOUTS[case]
    cli("submit", "run.toml")
    run = RunDir(site / "runs" / "quick-001")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    if state.startswith("job "):
        queue.answer = JobInfo("4711", JobState[state.removeprefix("job ").upper()])
    if state != "job pending":
        known = state if state in ("completed", "starting", "restarting") else "running"
        status = msgspec.structs.replace(synthetic.make_status(run, state=known), updated_at=time.time())
        write_atomic(run.status, encode_status(status))
        if known == "completed":
            run.write_json(run.result, {"state": known, "t": time.time()})
    if state == "ordered":
        run.order.write_text("{}")
    before = sorted(site.rglob("*"))
    outcome = cli("repartition", "quick-001", *arguments)
    assert sentence in one_line(outcome)
    assert sorted(site.rglob("*")) == before


def test_check_finds_the_same_mistakes_and_prints_the_layout(site: Path, cli: Callable[..., Outcome]) -> None:
    layout = "core: 1 node x 1 process, TP1 PP1, 1 replica; hybrid: 1 node x 1 process, 1 replica"
    assert cli("check", "run.toml") == Outcome(0, f"{layout}\nrun.toml is good\n", "")
    facts = json.loads(cli("check", "run.toml", "--json").out)
    expected = {"checked_against_slurm": True, "warnings": [], "expected_start": None, "split": None, "memory": []}
    expected |= {"layout": layout}
    assert facts == {"run_file": "run.toml", "good": True, **expected}
    outcome = cli("check", "run.toml", "-o", "components.train.partition=a80")
    assert "no such partition" in one_line(outcome)


RESUMED = {
    "running": ([], "--resume = 'quick-001': its job 4711 is starting; valid: a run that has ended"),
    "pending": ([], "--resume = 'quick-001': its job 4711 is pending; valid: a run that has ended"),
    "another name": (["-o", "run.name=x"], "--resume = 'quick-001': a resumed run keeps its run.name and run.dir."),
    "another split": (
        ["-o", "components.split=auto"],
        "components.split = 'auto': a resumed run keeps the split it has",
    ),
    "complete": ([], "run.steps = 100: the run is complete at step 100; valid: a larger number"),
    "a torn configuration": ([], "config.json"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_mistake_in_a_resume(case: str, site: Path, queue: Queue, cli: Callable[..., Outcome]) -> None:
    arguments, sentence = RESUMED[case]
    cli("submit", "run.toml")
    queue.submitted.clear()
    run = RunDir(site / "runs" / "quick-001")
    queue.answer = JobInfo(
        "4711", {"running": JobState.RUNNING, "pending": JobState.PENDING}.get(case, JobState.FAILED)
    )
    if case == "complete":
        folder = run.path / "checkpoints" / "step-000100"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        run.write_json(run.result, {"state": "completed", "message": "step 100 is saved"})
    if case == "a torn configuration":
        run.config.write_text(run.config.read_text()[:100])
    assert sentence in one_line(cli("submit", "--resume", "quick-001", *arguments))
    assert queue.submitted == []


def test_without_slurm_the_way_out_is_one_that_can_work(
    site: Path, queue: Queue, cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> dict[str, str]:
        raise SlurmUnreachable(f"No Slurm controller answers; {WAYS_OUT}.")

    monkeypatch.undo()
    monkeypatch.chdir(site)
    monkeypatch.setattr(checked_run, "slurm_environment", unreachable)
    monkeypatch.setattr(checked_run, "gpus_here", lambda: 0)
    small = cli("submit", "run.toml")
    assert (small.code, small.out) == (3, "")
    assert "`libra-hpc cluster up`, or run without Slurm with `--executor local`." in small.err
    large = cli("submit", "run.toml", *GPU_NODES, "-o", "components.train.mem=0")
    assert (large.code, large.out) == (3, "")
    assert large.err == (
        "error: No Slurm controller answers; submit where `sinfo` answers: the run needs 24 GPUs, and this machine has"
        " 0.\n"
    )
    assert not (site / "runs").exists()


@pytest.mark.cluster
def test_what_only_sbatch_knows_names_its_field_and_leaves_nothing(
    site: Path, slurm_env: dict[str, str], cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(site)
    refused = {
        "--exclusiv-nodes": "slurm.extra[1] = '--exclusiv-nodes': Slurm refuses it (unrecognized option",
        "--begin=yesterdays": "slurm.extra[1] = '--begin=yesterdays': Slurm refuses it (",
    }
    small = ["-o", "components.hybrid.nodes=0", "-o", "slurm.executor=slurm"]
    for option, sentence in refused.items():
        outcome = cli("submit", "run.toml", *small, "-o", f"slurm.extra=['--nice=1', '{option}']")
        assert sentence in one_line(outcome)
        assert not any((site / "runs").glob("*"))
