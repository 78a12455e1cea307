"""Every user mistake: exit code 2, one sentence on stderr that names field and value, nothing queued, nothing
written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.preflight.test_checks import MODEL, write_model

from .conftest import Cli, Queue, one_line, write_status


def overrides(text: str) -> list[str]:
    """The words of ``-o`` for overrides that are apart by semicolons."""
    return [word for one in text.split("; ") for word in ("-o", one)]


GPU_NODES = overrides("slurm.device=cuda") + [
    word
    for name in ("train", "hybrid", "rollout")
    for key in ("gpus=8", "gpu_type=a800", "cpus=8", "mem=64G")
    for word in ("-o", f"components.{name}.{key}")
]
SIMULATED = ["--engine", "simulated", *overrides("simulated.model=qwen3-14b; simulated.device=a800")] + [
    word for name in ("train", "hybrid", "rollout") for word in ("-o", f"components.{name}.gpus=8")
]
CASES = [
    ("algorithm.etta=1", "algorithm.etta = 1: unknown key in [algorithm]"),
    ("algoritm.eta=1", "[algoritm]: unknown section"),
    ("eta=1", "override = 'eta=1': malformed"),
    ("algorithm.eta=-1", "algorithm.eta = -1: out of range; valid: an integer >= 0."),
    ("algorithm.group_size=1", "algorithm.group_size = 1: out of range; valid: an integer >= 2."),
    ("optimizer.lr=fast", "optimizer.lr = 'fast': wrong type; valid: a number > 0."),
    ("slurm.device=gpu", "slurm.device = 'gpu': unknown value; valid: cpu, cuda"),
    ("run.name=a/b", "run.name = 'a/b': malformed"),
    ("components.train.mem=2GB", "components.train.mem = '2GB': malformed"),
    ("algorithm.minibatches=65", "algorithm.minibatches = 65: a global batch has 64 trajectories; valid: 1 to 64."),
    ("components.planner.nodes=2", "planner.nodes = 2: rank 0 is the one planner; valid: 0 or 1."),
    ("components.train.nodes=0", "components.train.nodes = 0"),
    ("components.rollout.nodes=0", "components.rollout.nodes = 0"),
    ("rollout.policy=cmlqf", "rollout.policy = 'cmlqf': unknown policy (other"),
    ("rollout.policy=absent.py:Mine", "no file '"),
    ("rollout.policy=good.py:Mine", "good.py has no such class with name, key, route, finished and forget."),
    ("rollout.policy=good.py:Task", "rollout.policy = 'Task': "),
    ("task.name=keychian", "task.name = 'keychian': unknown task"),
    ("task.name=absent.py:Task", "absent.py cannot be read (No such file or directory)"),
    ("model.path=nowhere", "nowhere': no such folder"),
    ("model.path=", "model.path = '': not given"),
    ("model.path=.", "the folder has no config.json"),
    ("train.tp=3", "train.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8."),
    ("train.pp=7", "train.pp = 7: the model has only 6 layers; valid: 1 to 6."),
    ("rollout.tp=5", "rollout.tp = 5: does not divide the model's num_attention_heads = 8"),
    ("rollout.max_model_len=9000", "rollout.max_model_len = 9000: the model's max_position_embeddings is 8192"),
    ("slurm.device=cuda", "components.train.gpus = 0: training needs one; valid: an integer >= 1."),
    ("slurm.time_limit=1h", "slurm.time_limit = '1h': malformed"),
    ("slurm.time_limit=2-00:00:00", "slurm.time_limit = '2-00:00:00': "),
    ("components.train.partition=a80", "components.train.partition = 'a80': no such partition"),
    ("components.hybrid.nodes=5", "components.hybrid.nodes = 5: partition a800 has 4 nodes"),
    ("components.train.gpus=9", "components.train.gpus = 9: "),
    ("components.train.gpus=1; components.train.gpu_type=h100", "components.train.gpu_type = 'h100': "),
    ("components.train.cpus=65", "components.train.cpus = 65: "),
    ("components.rollout.mem=2T", "components.rollout.mem = '2T': "),
    ("run.dir=run.toml/runs", "run.toml is not a folder"),
    ("slurm.mpi=openmpi", "slurm.mpi = 'openmpi': no Slurm has such an MPI plugin"),
    ("slurm.mpi=pmi_2", "(did you mean 'pmi2'?)"),
    ("compute.python=pyhton3", "compute.python = 'pyhton3': no such program on PATH"),
    ("compute.python=./login", "it lacks libra_hpc, mpi4py, vllm, megatron and torch"),
    ("run.name.x=3", "override = 'run.name.x=3': run.name is a value, not a table."),
    ("optimizer.lr=", "optimizer.lr = '': wrong type; valid: a number > 0."),
    ("optimizer.lr=1e-6,2e-6", "optimizer.lr = '1e-6,2e-6': wrong type"),
    ("run.steps=99999999999999999999", "more than 64 bits; valid: an integer of at most 9223372036854775807."),
    ("run.dir=", "run.dir = '': not given; valid: a writable folder"),
    ("run.dir=$NOWHERE/x", "run.dir = '$NOWHERE/x': a variable in it is not set"),
    ("slurm.time_limit=0", "slurm.time_limit = '0': no time at all; valid: minutes, "),
    ("slurm.time_limit=1; slurm.notice_s=120", "begins to save slurm.notice_s = 120 s before it"),
    ("slurm.notice_s=5", "slurm.notice_s = 5.0: too short to save anything; valid: 0, or a number >= 30."),
    ("slurm.extra=['--nice 10']", "slurm.extra[0] = '--nice 10': it has a space; valid: --nice=VALUE."),
    ("slurm.extra=['exclusive']", "slurm.extra[0] = 'exclusive': not an sbatch option"),
    ("slurm.extra=['=x']", "slurm.extra[0] = '=x': not an sbatch option"),
    *((f"{key}=a\nb", f"{key} = 'a\\nb': ") for key in ("slurm.account", "slurm.qos", "slurm.mail", "slurm.mpi")),
    *((f"{key}=a\nb", f"{key} = 'a\\nb': ") for key in ("slurm.time_limit", "components.train.partition", "run.name")),
    ("components.train.constraint=a\x1bb", r"components.train.constraint = 'a\x1bb': a control character cannot stand"),
    ("compute.image=a\nb", r"compute.image = 'a\nb': a control character cannot stand in a batch script; valid: one"),
    ("run.dir=a\nb", r"/a\nb': a control character cannot stand in a batch script; valid: one line of text."),
    ("slurm.gpu_option=--gres={gpus}\nb", r"slurm.gpu_option = '--gres={gpus}\nb': malformed"),
    (r'slurm.extra=["--a=b\nc"]', r"slurm.extra[0] = '--a=b\nc': "),
    (r'components.train.extra=["--a=b\nc"]', r"components.train.extra[0] = '--a=b\nc': "),
    (r'compute.setup=["a\nb"]', r"compute.setup.0 = 'a\nb': malformed; valid: a list of shell lines."),
    (r'compute.setup=["a\u001b[2K"]', r"compute.setup[0] = 'a\x1b[2K': a control character cannot stand"),
    (r'compute.binds=["/a\nb"]', r"compute.binds.0 = '/a\nb': malformed"),
    (r'compute.env={A="a\nb"}', r"compute.env.A = 'a\nb': malformed"),
    (
        "components.train.extra=['-Q', '--time=3']",
        "components.train.extra[1] = '--time=3': libra-hpc sets --time itself; valid: slurm.time_limit.",
    ),
    *(
        (f"slurm.extra=['{word}']", f"slurm.extra[0] = '{word}': {why}; valid: {key}.")
        for word, why, key in (
            ("-t10", "libra-hpc sets -t itself", "slurm.time_limit"),
            ("-Jname", "libra-hpc sets -J itself", "run.name"),
            ("-c4", "libra-hpc sets -c itself", "components.*.cpus"),
            ("-Qvt10", "libra-hpc sets -t itself", "slurm.time_limit"),
            ("--sig=B:TERM", "short for --signal, and libra-hpc sets --signal itself", "no such option"),
            ("--outp=x", "short for --output, and libra-hpc sets --output itself", "no such option"),
            ("--tim=3", "short for --time, and libra-hpc sets --time itself", "slurm.time_limit"),
            ("--help", "libra-hpc sets --help itself", "no such option"),
        )
    ),
    ("slurm.extra=['-Q', 'x']", "slurm.extra[1] = 'x': not an sbatch option"),
    ("slurm.extra=['--exclusive', 'x']", "slurm.extra[1] = 'x': not an sbatch option"),
    ("slurm.mail=me at site", "slurm.mail = 'me at site': not usable"),
    ("slurm.mail_on=['DONE']", "mail_on.0 = 'DONE': unknown value; valid: BEGIN, END, FAIL, REQUEUE, TIME_LIMIT, ALL."),
    ("slurm.gpu_option=--gres=gpu", "slurm.gpu_option = '--gres=gpu': malformed"),
    ('slurm.account=a"b', "slurm.account = 'a\"b': not usable in an sbatch option"),
    ("components.train.constraint=a b", "components.train.constraint = 'a b'"),
    ("slurm.interface=ib 0", "slurm.interface = 'ib 0': malformed"),
    ("compute.local_dir=scratch", "compute.local_dir = 'scratch': malformed"),
    ("compute.container=apptainer", "compute.image = '': compute.container is 'apptainer'; valid: a container image."),
    ("compute.container=apptainer; compute.image=absent.sif", " is here and has no 'absent.sif'; valid: a file or "),
    ("compute.container=apptainer; compute.image=run.toml", "compute.container = 'apptainer': it is not on PATH here"),
    ("compute.container=docker", "'docker': unknown value; valid: none, apptainer, pyxis."),
    ("compute.python=/tmp", "compute.python = '/tmp': not an executable file"),
    (
        "components.train.partition=cpu; components.train.gpus=1",
        "components.train.gpus = 1: nodes of partition cpu have 0 GPUs; valid: 0.",
    ),
    (
        "components.one_node=true; components.train.cpus=60; components.hybrid.cpus=60; components.rollout.cpus=1",
        "components.train.cpus = 121: nodes of partition a800 have 64 CPUs",
    ),
    ("rollout.tp=[1,1,1]", "rollout.tp = [1, 1, 1]: a list has one entry for each"),
    ("task.name=bad.py:Task", "bad.py is not valid Python"),
    ("task.name=good.py:Tsak", "defines no class 'Tsak'; valid: Task (did you"),
    ("task.name=good.py", "task.name = 'good.py': unknown task; valid: "),
    ("task.name=good.py:Task; task.options={size=1, colour='red'}", "'colour': Task has no such option; valid: size."),
    ("model.path=no-tokenizer", "no-tokenizer': the folder has no tokenizer; valid: a folder with tokenizer.json."),
    ("model.path=slow", "slow': the folder has no tokenizer; valid: a folder with tokenizer.json, which transformers"),
    ("model.path=wide", "wide': its tokenizer has ids up to 1,000,000, and its config.json a vocab_size of "),
    ("model.path=no-weights", "no-weights': the folder has no safetensors; valid: "),
    ("model.path=torn", "torn': its config.json is not valid JSON"),
    ("model.path=gpt2", "model_type = 'gpt2': this version cannot train this architecture; valid: glm4, llama,"),
    ("model.path=moe", "model_type = 'mixtral': a mixture of experts"),
    ("rollout.warm_start=nowhere", "nowhere does not exist; valid: a run directory, or a"),
    # The job: sizes beyond sane bounds, set-up lines, variables.
    ("slurm.time_limit=0:05", "slurm.time_limit = '0:05': 5 s, and Slurm looks at limits twice a minute; valid: min"),
    ("components.train.mem=1M", "components.train.mem = '1M': an agent alone takes 100 MB; valid: a size such as 16G"),
    ("components.train.nodes=1000000000", "train.nodes = 1000000000: more than any cluster has; valid: 0 to 10000."),
    ("algorithm.prompts_per_step=1000000000", "= 1000000000: a step would have 8,000,000,000 trajectories; valid: at"),
    ("algorithm.group_size=1000000000", "algorithm.group_size = 1000000000: a step would have 8,000,000,000 trajec"),
    ("rollout.kv_cache_mb=1", "rollout.kv_cache_mb = 1: one trajectory of rollout.max_model_len = 4096 tokens needs "),
    ("rollout.kv_cache_mb=1000000000", "rollout.kv_cache_mb = 1000000000: more than any device has; valid: 0 ("),
    ("rollout.kv_cache_mb=9000; components.rollout.mem=4G", "9000: components.rollout.mem = '4G' is less; valid: at m"),
    (f"model.path={'x' * 5000}", "...: too long for a path; valid: at most 4000 bytes, and 255 for each of its names."),
    (f"model.path={'x/' * 2500}", "...: too long for a path; valid: at most 4000 bytes, and 255 for each of its names"),
    (f"task.name={'x' * 300}.py:Task", "...: too long for a path; valid: "),
    ("compute.setup=['true', 'fi']", "compute.setup[1] = 'fi': syntax error near unexpected token 'fi'; valid: lines"),
    ("""compute.setup=['echo "a']""", "compute.setup[0] = 'echo \"a': unexpected EOF while looking for matching '\"'"),
    ("compute.setup=['if true', 'then true']", "compute.setup[1] = 'then true': syntax error: unexpected end of file"),
    ("compute.setup=['cat <<E']", "compute.setup[0] = 'cat <<E': here-document at line 1 delimited by end-of-file"),
    (r"compute.setup=['module load \']", "its last backslash would join it with the script's next line"),
    ("compute.env={SLURM_PROCID='0'}", "compute.env.SLURM_PROCID = '0': Slurm, MPI and libra-hpc set variables of th"),
    ("compute.env={LIBRA_HPC_START='{}'}", "compute.env.LIBRA_HPC_START = '{}': Slurm, MPI and libra-hpc set vari"),
    ("compute.env={PMI_RANK='0'}", "compute.env.PMI_RANK = '0': Slurm, MPI and libra-hpc set variables of this name"),
    ("compute.env={TMPDIR='/x'}", "compute.env.TMPDIR = '/x': the job sets it itself; valid: compute.local_dir."),
    ("slurm.mpi=none", "slurm.mpi = 'none': "),
    ("slurm.mpi=pmix", "has PyPI's mpich, which needs 'pmi2': each rank would become a world of its own; valid: pmi2,"),
    ("components.split=auto", "components.split = 'auto': slurm.device is 'cpu'"),
    (
        "components.split=auto; planner.device=a800; planner.trace=/nowhere",
        "trace = '/nowhere': cannot be read (No such file or directory).",
    ),
]
ON_GPU_NODES = [
    ("components.train.cpus=7", "components.train.cpus = 7: a node with 8 GPUs"),
    ("components.hybrid.mem=2G", "components.hybrid.mem = '2G': a hybrid node needs "),
    ("model.path=huge; components.train.mem=0", "train.tp = 1: training huge with TP1 PP1 needs "),
    ("planner.device=a80", "planner.device = 'a80': unknown device; valid: a100, a800, "),
    ("planner.devices=no.toml", "no.toml': no such file; valid: a TOML file"),
]
ON_SIMULATED_ENGINES = [
    ("simulated.device=a80", "simulated.device = 'a80': unknown device; valid: a100, a800, "),
    ("simulated.model=qwen3-14", "simulated.model = 'qwen3-14': neither a"),
    ("simulated.presets=['chess']", "simulated.presets = 'chess': unknown preset"),
    ("simulated.presets=[]", "simulated.presets = []: too short; valid: a list of"),
    (
        "simulated.trace=good.py",
        "of no known format; valid: libra, kv-cache-tester, mooncake, azure (name one with --format).",
    ),
    ("simulated.calibration=run.toml", "run.toml': Expected `object`, got `array`; valid: a JSON file of format"),
]
MODELS: dict[str, Mapping[str, object]] = {
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


@pytest.fixture
def files(site: Path) -> Path:
    """The site with folders and files that mistakes name."""
    (site / "login").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    (site / "login").chmod(0o755)
    (site / "bad.py").write_text("class Task(:\n")
    (site / "good.py").write_text("class Task:\n    def __init__(self, tokenizer, size=1):\n        pass\n")
    for name, config in MODELS.items():
        write_model(site / name, config, LACKS.get(name, ""))
    (site / "torn" / "config.json").write_text("{")
    (site / "slow" / "tokenizer.model").touch()
    wide = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1_000_000}]}
    (site / "wide" / "tokenizer.json").write_text(json.dumps(wide))
    return site


@pytest.mark.parametrize(
    ("below", "changed", "sentence"),
    [
        *(([], *case) for case in CASES),
        *((GPU_NODES, *case) for case in ON_GPU_NODES),
        *((SIMULATED, *case) for case in ON_SIMULATED_ENGINES),
    ],
)
def test_a_mistake_in_the_run_file(
    below: list[str], changed: str, sentence: str, files: Path, queue: Queue, cli: Cli
) -> None:
    before = sorted(files.rglob("*"))
    assert sentence in one_line(cli("submit", "run.toml", *below, *overrides(changed)))
    assert queue.submitted == []
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "submit run.toml --executor slrum",
            "slurm.executor = 'slrum': unknown value; valid: auto, slurm, local (did you mean 'slurm'?).",
        ),
        ("submit run.toml --dry-run -o compute.python=./login", "it lacks libra_hpc, mpi4py, vllm, megatron and torch"),
        ("submit run.toml --wiat", "No such option: --wiat (Possible options: --wait)."),
        ("submit run.toml -o", "Option '-o' requires an argument."),
        ("submit run.toml --engine fake", "run.engine = 'fake': unknown value; valid: real, simulated."),
        ("submit run.toml -- -t 10", "slurm.extra[0] = '-t': libra-hpc sets -t itself; valid: slurm.time_limit."),
        ("submit run.toml -- exclusive", "slurm.extra[0] = 'exclusive': not an sbatch option"),
        ("submit", "either a run file or --resume"),
        ("submit run.toml --resume quick-001", "either a run file or --resume"),
        ("submit absent.toml", "absent.toml: the run file cannot be read"),
        ("status", "There is no run below runs/"),
        ("status quick-007", "RUN = 'quick-007': no run of that name"),
        ("submti", "No such command 'submti' (did you mean 'submit'?)."),
        ("config shwo", "No such command 'shwo' (did you mean 'show'?)."),
        ("check absent.toml", "absent.toml: the run file cannot be read: No such file or directory."),
        ("check model", "model: the run file cannot be read: Is a directory."),
        ("config show absent", "RUN = 'absent': no run of that name, folder or job id below runs/"),
        ("config explain trian.tp", "KEY = 'trian.tp': no such section or key (did you mean 'train.tp'?)."),
        ("logs --rank x", "--rank = 'x': input should be a valid integer"),
        ("logs --tail=-1", "--tail = '-1': input should be greater than or equal to 0."),
        ("cancel quick-007", "RUN = 'quick-007': no run of that name, folder or job id"),
        ("summary quick-007", "RUN = 'quick-007': no run of that name, folder or job id"),
        ("submit --resume quick-007", "RUN = 'quick-007': no run of that name, folder or job id"),
        ("plan run.toml", "components.train.gpus = 0: no GPUs to plan for; valid: a number of GPUs"),
        ("plan run.toml --gpus x --device a800", "--gpus = 'x': malformed; valid: a number such as 48"),
        ("plan run.toml --gpus 7 --device a800", "gpus = 7: nodes have 8 of them and each stage needs"),
        ("simulate empty.jsonl", "empty.jsonl: the trace is empty."),
        ("simulate garbage.jsonl", "garbage.jsonl: of no known format; valid: libra, "),
        ("simulate torn.jsonl.gz", "torn.jsonl.gz: the gzip file is damaged"),
        ("simulate absent.jsonl", "absent.jsonl cannot be read (No such file or directory)."),
        ("simulate empty.jsonl --policy cmflq", "--policy = 'cmflq': unknown policy ("),
        ("simulate empty.jsonl --buckets 4TP1", "--buckets = '4TP1': '4TP1' is not a bucket; valid: "),
        ("simulate empty.jsonl --eta 1", "--eta = 1: without --batch-groups"),
        ("trace inspect garbage.jsonl", "garbage.jsonl: of no known format; valid: libra, "),
        ("trace inspect model", "model"),
        ("trace generate absent/x.jsonl", "absent/x.jsonl cannot be written (No such file or directory)."),
        ("calibrate engine", "Missing argument 'OUT'."),
        ("simulate trace --calibration absent", "calibration file = 'absent': No such file or directory; valid: "),
        ("plan run.toml --best 0", "--best"),
        (f"submit run.toml -o run.name={'x' * 5000}", f"run.name = '{'x' * 119}...: too long; valid: "),
        ("repartition quick-001", "KEY=VALUE"),
        ("repartition train.tp=2 rollout.tp=2", "RUN = 'train.tp=2': no run of that name"),
        ("make-policy model", "OUT = 'model': exists already"),
        ("make-policy new --task chess", "--task = 'chess': unknown task; valid: arithmetic, keychain"),
    ],
)
def test_a_mistake_in_the_command_line(command: str, sentence: str, files: Path, queue: Queue, cli: Cli) -> None:
    (files / "empty.jsonl").write_text("")
    (files / "garbage.jsonl").write_bytes(b"\x00\xff garbage\n{\n")
    (files / "torn.jsonl.gz").write_bytes(b"\x1f\x8bxxxx")
    before = sorted(files.rglob("*"))
    assert sentence in one_line(cli(*command.split()))
    assert queue.submitted == []
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize(
    ("state", "change", "sentence"),
    [
        ("running", "algorithm.eta=2", "KEY = 'algorithm.eta': not part of a layout; valid: components.train.nodes, "),
        ("running", "rolout.tp=2", "(did you mean 'rollout.tp'?)."),
        ("running", "train.tp", "override = 'train.tp': malformed; valid: section.key=value, for instance train.tp=2."),
        ("running", "train.recompute=yes", "train.recompute = 'yes': unknown value; valid: none, selective, full."),
        ("running", "components.train.nodes=2", "components.*.nodes = '2 + 1 + 1': "),
        ("running", "train.tp=3", "train.tp = 3: does not divide the model's num_attention_heads = 8"),
        ("running", "rollout.tp=[1,1]", "[1, 1]: the run has this layout already (1 node trains with TP1, "),
        ("completed", "train.tp=2", "'quick-001': it is over (job 4711 is completed); valid: a run whose job is"),
        ("starting", "train.tp=2", "RUN = 'quick-001': it does not run (job 4711 is starting)"),
        ("restarting", "train.tp=2", "RUN = 'quick-001': it does not run (job 4711 is starting)"),
        ("job failed", "train.tp=2", "RUN = 'quick-001': it is over (job 4711 is failed ("),
        ("job pending", "train.tp=2", "RUN = 'quick-001': it does not run (job 4711 is pending)"),
        ("ordered", "train.tp=2", "RUN = 'quick-001': another layout is ordered already"),
    ],
)
def test_a_mistake_in_an_order_for_another_layout(
    state: str, change: str, sentence: str, submitted: RunDir, site: Path, queue: Queue, cli: Cli
) -> None:
    job = state.removeprefix("job ").upper() if state.startswith("job ") else "RUNNING"
    queue.answer = JobInfo("4711", JobState[job])
    if state != "job pending":
        write_status(submitted, state if state in ("completed", "starting", "restarting") else "running")
    if state == "ordered":
        submitted.order.write_text("{}")
    before = sorted(site.rglob("*"))
    assert sentence in one_line(cli("repartition", "quick-001", change))
    assert sorted(site.rglob("*")) == before


@pytest.mark.parametrize(
    ("job", "change", "sentence"),
    [
        ("RUNNING", [], "--resume = 'quick-001': its job 4711 is starting; valid: a run that has ended"),
        ("PENDING", [], "--resume = 'quick-001': its job 4711 is pending; valid: a run that has ended"),
        ("FAILED", ["-o", "run.name=x"], "'quick-001': a resumed run keeps its run.name and run.dir."),
        ("FAILED", ["-o", "components.split=auto"], "split = 'auto': a resumed run keeps the split it has"),
    ],
)
def test_a_mistake_in_a_resume(
    job: str, change: list[str], sentence: str, submitted: RunDir, queue: Queue, cli: Cli
) -> None:
    queue.answer = JobInfo("4711", JobState[job])
    assert sentence in one_line(cli("submit", "--resume", "quick-001", *change))
    assert queue.submitted == [("quick-001", 1)]


def test_a_complete_run_is_resumed_only_for_more_steps(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    folder = submitted.checkpoints / "step-000100"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    submitted.write_json(submitted.result, {"state": "completed", "message": "step 100 is saved"})
    queue.answer = JobInfo("4711", JobState.COMPLETED)
    refused = one_line(cli("submit", "--resume", "quick-001"))
    assert "run.steps = 100: the run is complete at step 100; valid: a larger number" in refused
    assert cli("submit", "--resume", "quick-001", "-o", "run.steps=120").code == 0
