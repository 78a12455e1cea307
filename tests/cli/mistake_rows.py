"""Users' mistakes as rows: what is changed in a good run file or command line, and words of its one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.preflight.test_checks import MODEL, write_model
from tests.preflight.test_task_trial import GOOD

from .folder_rows import ON_SIMULATED_ENGINES, TASKS, WEIGHTS, Damage, file
from .run_file_rows import GPU_NODES, ON_GPU_NODES, RUN_FILE, SIMULATED, overrides

MODELS: dict[str, Mapping[str, object]] = {
    "model": MODEL,
    "player": {**MODEL, "vocab_size": 2048},
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
    "nothing": (b"", "task.name = '': neither a task nor rows (task.data) are given; valid: data,"),
}
PROFILES = {
    "another fact": ("[algorithm]\neta = 1\n", "algorithm.eta: not a fact of a site; valid sections: "),
    "nodes": ("[components.train]\nnodes = 3\n", "components.train.nodes: not a fact of a site; valid in "),
    "a wrong type": ("[slurm]\nmpi = 3\n", "slurm.mpi = 3: wrong type; valid: a string."),
    "an unknown key": ("[compute]\nimg = 'x'\n", "compute.img = 'x': unknown key in [compute]; valid: "),
    "no TOML": ("[slurm\n", "site.toml:1: not valid TOML"),
    "a bind of two": ("[compute]\nbinds = ['a,b']\n", "compute.binds.0 = 'a,b': malformed"),
    "a variable's name": ("[compute.env]\n'A B' = 'x'\n", "compute.env = 'A B': malformed name; valid: a table of"),
    "an unknown partition": ("[components.train]\npartition = 'a80'\n", "components.train.partition = 'a80': no such"),
}
COMMANDS = [
    ("submit run.toml --executor slrum", "slurm.executor = 'slrum': unknown value; valid: auto, slurm, local (did"),
    ("submit run.toml --dry-run -o compute.python=./login", "it lacks libra_hpc, mpi4py, vllm, megatron and torch"),
    ("lend serve --runs model -- python server.py", "--slo = '': not given; valid: ttft=TIME,tpot=TIME, such as"),
    (
        "lend serve --slo ttft=500,tpot=1s --runs model -- python x",
        "--slo = 'ttft=500,tpot=1s': ttft has no unit of time; valid: ",
    ),
    ("lend serve --slo ttft=500ms --runs model -- python x", "--slo = 'ttft=500ms': tpot is missing; valid: "),
    ("lend serve --slo ttl=1s --runs model -- python x", "--slo = 'ttl=1s': 'ttl' is no limit of a server; valid: "),
    (
        "lend serve --slo ttft=1s,tpot=1s --give al --runs model -- python",
        "--give = 'al': unknown value; valid: idle, slack.",
    ),
    (
        "lend serve --slo ttft=1s,tpot=1s --hours 8-25 --runs model -- python",
        "--hours = '8-25': no such time of day; valid:",
    ),
    (
        "lend serve --slo ttft=1s,tpot=1s --memory 30 --runs model -- python",
        "--memory = '30': no unit; valid: a size with MiB",
    ),
    (
        "lend serve --slo ttft=1s,tpot=1s --runs absent -- python",
        "--runs = 'absent': no such folder; valid: the folder of",
    ),
    ("lend serve --slo ttft=1s,tpot=1s --runs model", "COMMAND = '': not given; valid: the server's command after --."),
    (
        "lend serve --slo ttft=1s,tpot=1s --runs model -- vlm serve x",
        "COMMAND = 'vlm': no such program; valid: the server's",
    ),
    ("lend revoke node7-1", "NAME = 'node7-1': no such lender; valid: there are none."),
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
    ("simulate garbage.jsonl", "garbage.jsonl, line 1: not JSON ("),
    ("simulate torn.jsonl.gz", "torn.jsonl.gz: the gzip file is damaged"),
    ("simulate absent.jsonl", "absent.jsonl cannot be read (No such file or directory)."),
    ("simulate empty.jsonl --policy cmflq", "--policy = 'cmflq': unknown policy ("),
    ("simulate empty.jsonl --buckets 4TP1", "--buckets = '4TP1': '4TP1' is not a bucket; valid: "),
    ("simulate empty.jsonl --eta 1", "--eta = 1: without --batch-groups"),
    ("trace inspect garbage.jsonl", "garbage.jsonl, line 1: not JSON ("),
    ("trace inspect model", "model"),
    ("trace generate absent/x.jsonl", "absent/x.jsonl cannot be written (No such file or directory)."),
    ("calibrate engine", "Missing argument 'OUT'."),
    ("simulate trace --calibration absent", "calibration file = 'absent': No such file or directory; valid: "),
    ("plan run.toml --best 0", "--best"),
    (f"submit run.toml -o run.name={'x' * 5000}", f"run.name = '{'x' * 119}...: too long; valid: "),
    ("repartition quick-001", "KEY=VALUE"),
    ("repartition train.tp=2 rollout.tp=2", "RUN = 'train.tp=2': no run of that name"),
    ("make-policy model --task good.py:Task", "OUT = 'model': exists already"),
    ("make-policy new --task chess", "--task = 'chess': unknown task; valid: data"),
    ("submit run.toml --from-step 5", "--from-step = 5: a new run starts at step 0; valid: only with --resume RUN."),
    ("submit run.toml --from-step x", "--from-step = 'x': input should be a valid integer, unable to parse string as"),
    ("submit run.toml -o =2", "override = '=2': malformed; valid: section.key=value, for instance algorithm.eta=2."),
    ("submit run.toml -o algorithm..eta=2", "override = 'algorithm..eta=2': malformed; valid: section.key=value, for"),
    ("check run.toml --jsn", "No such option: --jsn (Possible options: --json)."),
    ("check run.toml extra", "Got unexpected extra argument(s) (extra)."),
    ("check good.py", "good.py:1: not valid TOML: expected '=' after a key in a key/value pair (column 7)."),
    ("check secret/run.toml", "secret/run.toml: the run file cannot be read: No such file or directory."),
    ("status model", "RUN = 'model': no run of that name, folder or job id below runs/"),
    ("status absent --runs nowhere", "RUN = 'absent': no run of that name, folder or job id below nowhere/; there are"),
    ("logs --attempt 0", "--attempt = '0': input should be greater than or equal to 1."),
    ("compare", "compare needs either two or more runs or --sweep NAME, and not both."),
    ("compare --sweep nothing", "--sweep = 'nothing': no sweep of that name has runs below runs/; there are none."),
    ("sweep run.toml", "Missing option '--over'."),
    ("sweep run.toml --over run.seed", "--over = 'run.seed': malformed; valid: section.key=value,value, for instance"),
    ("sweep run.toml --over run.seed=1,1", "--over = 'run.seed=1,1': the value 1 occurs twice."),
    ("sweep run.toml --over run.name=a,b", "--over = 'run.name=a,b': the runs of a sweep have the run.name of the run"),
    ("sweep run.toml --over sed=1,2", "override = 'sed=1': malformed; valid: section.key=value, for instance"),
    ("sweep run.toml --over run.sed=1,2", "run.sed = 1: unknown key in [run]; valid: dir, engine, name, seed, share,"),
    ("sweep run.toml --over run.seed=1,x", "With run.seed=x: run.seed = 'x': wrong type; valid: an integer >= 0."),
    ("sweep run.toml --over run.seed=1,2 --over run.seed=3", "--over run.seed: the key occurs twice; give all its"),
    ("sweep run.toml --over run.seed=1,2 --name a/b", "--name = 'a/b': malformed; valid: letters, digits"),
    ("sweep run.toml --over optimizer.lr=1e-6,-1", "With optimizer.lr=-1: optimizer.lr = -1: out of range; valid: a"),
    ("config explain x", "KEY = 'x': no such section or key."),
    ("config show run.toml -o x", "override = 'x': malformed; valid: section.key=value, for instance algorithm.eta=2."),
    ("config show run.toml --json --toml", "--toml and --json are two forms of one output; give one of them."),
    ("plan run.toml --model qwen3-14 --gpus 16 --device a800", "model = 'qwen3-14': neither a known short name nor a"),
    ("plan run.toml --gpus 16 --device a80", "device = 'a80': unknown device; valid: a100, a800, h100, h200, h800"),
    ("plan run.toml --gpus 0 --device a800", "--gpus = '0': an empty range; valid: a range from fewer to more GPUs,"),
    ("plan run.toml --gpus 16 --device a800 --trace nowhere", "nowhere cannot be read (No such file or directory)."),
    ("plan run.toml --gpus 16 --device a800 --train-speed nowhere", "planner.train_speed = 'nowhere': No such file"),
    ("plan run.toml --gpus 16 --device a800 --layouts some", "--layouts = 'some': unknown value; valid: any, node."),
    ("plan run.toml --gpus 16 --device a800 --write absent/x.toml", "--write = 'absent/x.toml': no such folder;"),
    ("simulate empty.jsonl --device a80", "device = 'a80': unknown device; valid: a100, a800, h100, h200, h800 (did"),
    ("simulate empty.jsonl --model qwen3-14", "model = 'qwen3-14': neither a known short name nor a folder or file"),
    ("simulate empty.jsonl --gpus 3", "--buckets = '4xTP1,2xTP2,2xTP4': it has 16 GPUs, more than --gpus = 3; valid:"),
    ("simulate empty.jsonl --policy good.py:Task", "--policy = 'Task': good.py has no such class with name, key,"),
    ("simulate empty.jsonl --devices nowhere.toml", "device file = 'nowhere.toml': No such file or directory; valid:"),
    ("simulate empty.jsonl --limit 0", "limit = 0: out of range; valid: an integer >= 1."),
    ("simulate empty.jsonl --train-s inf", "--train-s = inf: not a finite number; valid: a number >= 0."),
    ("trace inspekt x", "No such command 'inspekt' (did you mean 'inspect'?)."),
    ("trace convert garbage.jsonl out.jsonl --from mooncake", "garbage.jsonl, line 1: not JSON ("),
    ("trace generate x.jsonl --preset chess", "preset = 'chess': unknown preset; valid: r2e, search, math, documents."),
    ("trace generate x.jsonl --trajectories 7 --group 8", "trajectories = 7: not a whole number of groups; valid: a"),
    ("trace generate x.jsonl --sibling 2", "sibling = 2.0: out of range; valid: a number from 0 to 1."),
    ("trace generate x.jsonl --turns -1", "turns = -1.0: out of range; valid: a number >= 1."),
    ("trace generate x.jsonl --max-context 0", "max_context = 0: the longest prompt leaves no room for an answer;"),
    ("calibrate engine x --device a80", "--model, --run = '-, -': the source of the steps must be given once; valid:"),
    ("calibrate train", "Missing option '--model'."),
    ("make-policy new --task good.py:Task --seed -1", "--seed = '-1': input should be greater than or equal to 0."),
    ("init --partition nope", "No such option: --partition (Possible options: --print, --python)."),
    ("doctor --nodes 0", "--nodes = '0': input should be greater than or equal to 1."),
    ("cluster upp", "No such command 'upp' (did you mean 'up'?)."),
    ("report --share public", "--share = 'public': unknown value; valid: private, group, all."),
    ("list extra", "Got unexpected extra argument(s) (extra)."),
    ("list --runs run.toml", "--runs = 'run.toml': Not a directory; valid: a folder that you may read."),
    ("simulate empty.jsonl --buckets 999999999xTP1", "--buckets = '999999999xTP1': '999999999xTP1' is not a bucket;"),
    ("make-policy /proc/x --task good.py:Task", "/proc/.x.job: no folder can be made there (No such file or directo"),
    ("make-policy new --task data", "task.data = '': not given; valid: a JSONL or Parquet file, or a folder of one s"),
    ("cancel --nwo", "No such option: --nwo (Possible options: --now)."),
]
FUNCTIONS = [
    ("advantage", "def f(rewards, group): return rewards", "it fails for a group (TypeError: f() missing 1 required"),
    ("advantage", "def f(rewards): return rewards[:-1]", "it fails for a group (ValueError: "),
    ("advantage", "def f(rewards): raise BaseException('no')", "it fails for a group (BaseException: no); task.tri"),
    ("advantage", "def f(rewards): exit(0)", "it fails for a group (SystemExit: 0); task.trial = false skips this"),
    ("loss", "def f(tokens, low, high): raise SystemExit", "it fails for three tokens (SystemExit: ); task.trial = fa"),
    ("loss", "def f(tokens): return tokens.logprobs", "it fails for three tokens (TypeError: f() takes 1 positional"),
    (
        "loss",
        "def f(tokens, low, high): return -tokens.logprobs.sum(), tokens.logprobs > 0",
        "it made shapes ((), (3,))",
    ),
    ("loss", "def f(t, low, high): return t.advantages, t.advantages > 0", "it fails for three tokens (RuntimeError: "),
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
    ("run.steps=3", "Job violates accounting/QOS policy (job submit limit)", "slurm.qos = '': Slurm refuses it (Job "),
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
        "components.train.gpus = '1': Slurm re",
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
    ("check run.toml -o rollout.warm_start=secret/x", "rollout.warm_start = 'secret/x': "),
    ("check run.toml -o rollout.policy=secret/x.py:Mine", "rollout.policy = 'secret/x.py:Mine': no file 'secret/x.py'"),
    ("check run.toml -o task.name=secret/x.py:Task", "secret/x.py cannot be read (Permission denied)"),
    ("check run.toml -o planner.trace=secret/x", "planner.trace = 'secret/x': no such file"),
    ("check run.toml -o model.path=secret", "model.path = 'secret': Permission denied; valid: a folder that you may"),
    ("check secret/run.toml", "secret/run.toml: the run file cannot be read: Permission denied."),
    ("list --runs secret", "--runs = 'secret': path 'secret' is not readable."),
    ("status --runs secret/x", "--runs = 'secret/x': Permission denied; valid: a folder that you may read."),
    ("status secret", "RUN = 'secret': this folder is private to its owner"),
    ("config show secret/x", "RUN = 'secret/x': no run of that name"),
    ("simulate secret/x", "secret/x cannot be read (Permission denied)"),
    ("simulate secret", "FILE: path 'secret' is not readable."),
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
