"""Users' mistakes as rows: what is changed in a good run file or command line, and words of its one sentence."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from libra_hpc.preflight.weight_files import INDEX
from tests.preflight.test_checks import MODEL, write_model, write_weights
from tests.preflight.test_task_trial import GOOD


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
RUN_FILE = [
    ("algorithm.etta=1", "algorithm.etta = 1: unknown key in [algorithm]"),
    ("algoritm.eta=1", "[algoritm]: unknown section"),
    ("eta=1", "override = 'eta=1': malformed"),
    ("algorithm.eta=-1", "algorithm.eta = -1: out of range; valid: an integer >= 0."),
    ("algorithm.group_size=1", "algorithm.group_size = 1: out of range; valid: an integer >= 2."),
    ("optimizer.lr=fast", "optimizer.lr = 'fast': wrong type; valid: a number > 0 and <= 1."),
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
    ("optimizer.lr=", "optimizer.lr = '': wrong type; valid: a number > 0 and <= 1."),
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
    ("run.dir=a\nb", r"run.dir = 'a\nb': a control character cannot stand in a batch script; valid: one line of text."),
    ("slurm.gpu_option=--gres={gpus}\nb", r"slurm.gpu_option = '--gres={gpus}\nb': malformed"),
    (r'slurm.extra=["--a=b\nc"]', r"slurm.extra[0] = '--a=b\nc': "),
    (r'components.train.extra=["--a=b\nc"]', r"components.train.extra[0] = '--a=b\nc': "),
    (r'compute.setup=["a\nb"]', r"compute.setup.0 = 'a\nb': malformed; valid: a list of shell lines."),
    (r'compute.setup=["a\u001b[2K"]', r"compute.setup[0] = 'a\x1b[2K': a control character cannot stand"),
    (r'compute.binds=["/a\nb"]', r"compute.binds.0 = '/a\nb': malformed"),
    (r'compute.env={A="a\nb"}', r"compute.env.A = 'a\nb': malformed"),
    ("components.train.extra=['-Q', '--time=3']", "components.train.extra[1] = '--time=3': libra-hpc sets --time"),
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
    ("compute.container=docker", "'docker': unknown value; valid: none, apptainer, pyxis."),
    ("compute.python=/tmp", "compute.python = '/tmp': not an executable file"),
    ("components.train.partition=cpu; components.train.gpus=1", "components.train.gpus = 1: nodes of partition cpu"),
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
    (
        "components.train.nodes=1000000000",
        "train.nodes = 1000000000: out of range; valid: an integer >= 0 and <= 10000.",
    ),
    ("algorithm.prompts_per_step=1000000000", "= 1000000000: a step would have 8,000,000,000 trajectories; valid: at"),
    ("algorithm.group_size=1000000000", "algorithm.group_size = 1000000000: a step would have 8,000,000,000 trajec"),
    ("rollout.kv_cache_mb=1", "rollout.kv_cache_mb = 1: one trajectory of rollout.max_model_len = 4096 tokens needs "),
    (
        "rollout.kv_cache_mb=1000000000",
        "rollout.kv_cache_mb = 1000000000: out of range; valid: an integer >= 0 and <= 10",
    ),
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
    ("components.split=auto; planner.device=a800; planner.trace=/nowhere", "planner.trace = '/nowhere': no such file"),
    (
        "run.stepz=3",
        "run.stepz = 3: unknown key in [run]; valid: dir, engine, name, seed, share, steps, transcripts_gb (did you",
    ),
    ("slurm.tme_limit=1", "slurm.tme_limit = 1: unknown key in [slurm]; valid: account, device, executor, extra,"),
    ("compute.pyton=x", "compute.pyton = 'x': unknown key in [compute]; valid: binds, container, env, image,"),
    ("components.train.node=1", "components.train.node = 1: unknown key in [components.train]; valid: account,"),
    ("components.splt=auto", "components.splt = 'auto': unknown key in [components]; valid: hybrid, one_node,"),
    ("model.pth=model", "model.pth = 'model': unknown key in [model]; valid: dtype, path (did you mean 'path'?)."),
    (
        "task.nme=x",
        "task.nme = 'x': unknown key in [task]; valid: data, failed_patience_s, hosts, max_failed_share, name,",
    ),
    ("optimizer.lrr=1", "optimizer.lrr = 1: unknown key in [optimizer]; valid: beta1, beta2, eps, grad_clip, lr,"),
    ("train.tpp=1", "train.tpp = 1: unknown key in [train]; valid: cp, ep, etp, micro_tokens, pp, processes,"),
    ("rollout.tpp=1", "rollout.tpp = 1: unknown key in [rollout]; valid: block_size, engines_per_node, kv_cache_mb,"),
    ("planner.enable=true", "planner.enable = True: unknown key in [planner]; valid: device, devices, enabled,"),
    ("checkpoint.evry=3", "checkpoint.evry = 3: unknown key in [checkpoint]; valid: every, experience, keep (did you"),
    ("deadlines.flor_s=3", "deadlines.flor_s = 3: unknown key in [deadlines]; valid: factor, first_s, floor_s,"),
    ("simulated.spedup=3", "simulated.spedup = 3: unknown key in [simulated]; valid: calibration, device, devices,"),
    ("roll_out.tp=1", "[roll_out]: unknown section in the run file; valid: algorithm, chat, checkpoint, components,"),
    ("run.share=grp", "run.share = 'grp': unknown value; valid: private, group, all (did you mean 'group'?)."),
    ("run.engine=sim", "run.engine = 'sim': unknown value; valid: real, simulated."),
    ("slurm.preempted=reque", "slurm.preempted = 'reque': unknown value; valid: requeue, stop (did you mean"),
    ("model.dtype=bf16", "model.dtype = 'bf16': unknown value; valid: float32, bfloat16 (did you mean 'bfloat16'?)."),
    ("algorithm.batch_order=finished", "algorithm.batch_order = 'finished': unknown value; valid: data, finish (did"),
    ("algorithm.guard=of", "algorithm.guard = 'of': unknown value; valid: off, notice, pause, stop (did you mean"),
    ("train.recompute=partial", "train.recompute = 'partial': unknown value; valid: none, selective, full."),
    ("planner.hybrid_start=rolout", "planner.hybrid_start = 'rolout': unknown value; valid: rollout, train (did you"),
    ("planner.repartition=advice", "planner.repartition = 'advice': unknown value; valid: advise, carry_out (did you"),
    ("simulated.source=table", "simulated.source = 'table': unknown value; valid: auto, tables, roofline (did you"),
    ("components.split=atuo", "components.split = 'atuo': unknown value; valid: explicit, auto (did you mean"),
    ("components.one_node=yes", "components.one_node = 'yes': wrong type; valid: true or false."),
    ("run.seed=-1", "run.seed = -1: out of range; valid: an integer >= 0."),
    ("run.name=-x", "run.name = '-x': malformed; valid: a string matching ^[A-Za-z0-9][A-Za-z0-9_.-]*$ of at most 64"),
    ("slurm.grace_s=-1", "slurm.grace_s = -1: out of range; valid: a number >= 0."),
    ("slurm.requeues=-1", "slurm.requeues = -1: out of range; valid: an integer >= 0."),
    ("slurm.interface=abcdefghijklmnopqrst", "slurm.interface = 'abcdefghijklmnopqrst': too long; valid: a string"),
    ("slurm.time_limit=99:99:99:99", "slurm.time_limit = '99:99:99:99': malformed; valid: minutes, minutes:seconds,"),
    ("compute.shm_share=1.5", "compute.shm_share = 1.5: out of range; valid: a number > 0 and <= 1."),
    ("compute.local_dir=~/x", "compute.local_dir = '~/x': malformed; valid: a string matching"),
    ("compute.env={PATH=''}", "compute.env.PATH = '': malformed; valid: a table of variables, NAME = 'text'."),
    ("compute.env={SRUN_DEBUG='x'}", "compute.env.SRUN_DEBUG = 'x': Slurm, MPI and libra-hpc set variables of this"),
    ("compute.env={PMIX_RANK='0'}", "compute.env.PMIX_RANK = '0': Slurm, MPI and libra-hpc set variables of this"),
    ("components.train.gpus=-1", "components.train.gpus = -1: out of range; valid: an integer >= 0."),
    ("components.train.mem=16GB", "components.train.mem = '16GB': malformed; valid: a string matching"),
    ("components.train.nodes_per_replica=2", "components.train.nodes_per_replica = 2: unknown key in"),
    ("components.hybrid.nodes_per_replica=2", "components.hybrid.nodes_per_replica = 2: so many hybrid nodes move"),
    ("components.planner.mem=100T", "components.planner.mem = '100T': nodes of partition a800 have 1000000 MB; valid:"),
    ("slurm.extra=['--cpus-per=3']", "slurm.extra[0] = '--cpus-per=3': short for --cpus-per-task, and libra-hpc sets"),
    ("slurm.extra=['-N4']", "slurm.extra[0] = '-N4': libra-hpc sets -N itself; valid: components.*.nodes."),
    ("slurm.extra=['--partition=cpu']", "slurm.extra[0] = '--partition=cpu': libra-hpc sets --partition itself;"),
    ("slurm.extra=['-a1-3']", "slurm.extra[0] = '-a1-3': libra-hpc sets -a itself; valid: no such option."),
    ("slurm.extra=['--wrap=hostname']", "slurm.extra[0] = '--wrap=hostname': libra-hpc sets --wrap itself; valid: no"),
    ("slurm.extra=['--gpus-per-node=8']", "slurm.extra[0] = '--gpus-per-node=8': libra-hpc sets --gpus-per-node"),
    ("slurm.extra=['-G8']", "slurm.extra[0] = '-G8': libra-hpc sets -G itself; valid: components.*.gpus."),
    ("slurm.extra=['']", "slurm.extra[0] = '': not an sbatch option; valid: one option such as '--exclusive'."),
    ("slurm.mpi=PMI2", "slurm.mpi = 'PMI2': no Slurm has such an MPI plugin (PyPI's mpich needs pmi2, Open MPI pmix);"),
    ("notify.command=['no-such-program']", "notify.command = 'no-such-program': no such command; valid: a list: an"),
    ("notify.command=['./run.toml']", "run.toml': no executable file"),
    ("notify.on=['paused']", "notify.on.0 = 'paused': unknown value; valid: completed, failed, guard, stalled."),
    ("slurm.mpi=pmix_v3", f"slurm.mpi = 'pmix_v3': {sys.executable} has PyPI's mpich, which needs 'pmi2':"),
    ("slurm.gpu_option=--gres=gpu:{typ}:{gpus}", "slurm.gpu_option = '--gres=gpu:{typ}:{gpus}': malformed; valid: a"),
    ("slurm.gpu_option=gres=gpu:{gpus}", "slurm.gpu_option = 'gres=gpu:{gpus}': malformed; valid: a string matching"),
    ("slurm.requeues=3; slurm.preempted=stop", "slurm.preempted = 'stop': Slurm queues the job again for"),
    ("slurm.notice_s=7200", "slurm.time_limit = '01:00:00': the run begins to save slurm.notice_s = 7200 s before it;"),
    ("task.options=5", "task.options = 5: wrong type; valid: a table."),
    ("task.options.depht=3", "task.options = 'depht': KeyChain has no such option; valid: seed, p_more, max_hops,"),
    ("task.tool_memory_mb=1", "task.tool_memory_mb = 1: out of range; valid: an integer >= 16."),
    ("task.hosts=1000000000", "task.hosts = 1000000000: out of range; valid: an integer >= 1 and <= 1024."),
    ("task.tool_processes=1000000000", "task.tool_processes = 1000000000: out of range; valid: an integer >= 1 and <="),
    ("task.max_failed_share=1", "task.max_failed_share = 1: out of range; valid: a number > 0 and < 1."),
    ("task.trial=maybe", "task.trial = 'maybe': wrong type; valid: true or false."),
    ("task.name=:Task", "mistakes0 cannot be read (Is a directory); valid: path/to/file.py:ClassName."),
    ("algorithm.clip=1", "algorithm.clip = 1: out of range; valid: a number > 0 and < 1"),
    ("algorithm.is_truncation=0.5", "algorithm.is_truncation = 0.5: out of range; valid: a number >= 1."),
    ("algorithm.kl_coef=-1", "algorithm.kl_coef = -1: out of range; valid: a number >= 0."),
    ("algorithm.skip_zero_advantage=1", "algorithm.skip_zero_advantage = 1: wrong type; valid: true or false."),
    ("optimizer.lr=100", "optimizer.lr = 100: out of range; valid: a number > 0 and <= 1."),
    ("optimizer.beta1=1", "optimizer.beta1 = 1: out of range; valid: a number >= 0 and < 1."),
    ("optimizer.grad_clip=0", "optimizer.grad_clip = 0: out of range; valid: a number > 0."),
    ("train.cp=1000000000", "train.cp = 1000000000: 2000000000 pieces for 1 tensor ranks need 2000000000 tokens, and"),
    ("train.ep=2", "train.ep = 2: the model has no experts; valid: 1."),
    ("train.etp=2", "train.etp = 2: the model has no experts; valid: 0 or 1."),
    ("train.tp=2; train.processes=3", "train.tp = 2: tensor ranks share a node, and it does not divide the 3 training"),
    ("train.processes=1000000000", "train.processes = 1000000000: out of range; valid: an integer >= 0 and <= 1024."),
    ("train.micro_tokens=100000000000", "train.micro_tokens = 100000000000: out of range; valid: an integer >= 64 and"),
    ("train.threads=1000000000", "train.threads = 1000000000: out of range; valid: an integer >= 1 and <= 1024."),
    ("rollout.tp=two", "rollout.tp = 'two': wrong type; valid: an integer from 1 to 1024, or a list of them with one"),
    ("rollout.engines_per_node=1000000000", "rollout.engines_per_node = 1000000000: out of range; valid: an integer"),
    ("rollout.temperature=0", "rollout.temperature = 0: out of range; valid: a number > 0 and <= 100."),
    ("rollout.temperature=1000", "rollout.temperature = 1000: out of range; valid: a number > 0 and <= 100."),
    ("rollout.max_model_len=1e6", "rollout.max_model_len = 1000000.0: wrong type; valid: an integer >= 16."),
    ("rollout.max_num_seqs=1000000000", "rollout.max_num_seqs = 1000000000: out of range; valid: an integer >= 1 and"),
    ("rollout.max_inflight=1000000000", "rollout.max_inflight = 1000000000: out of range; valid: an integer >= 1 and"),
    ("rollout.kv_host_gb_per_gpu=8", 'rollout.kv_host_gb_per_gpu = 8.0: with slurm.device = "cpu" the KV cache is in'),
    ("rollout.block_size=1", "rollout.block_size = 1: out of range; valid: an integer >= 8."),
    ("rollout.threads=1000000000", "rollout.threads = 1000000000: out of range; valid: an integer >= 1 and <= 1024."),
    ("rollout.record_steps=1", "rollout.record_steps = 1: wrong type; valid: true or false."),
    ("rollout.warm_start=model", "rollout.warm_start = 'model': model/trajectories.jsonl does not exist; valid: a run"),
    ("rollout.warm_start=good.py", "rollout.warm_start = 'good.py': no line of good.py is a trajectory with"),
    ("rollout.max_trajectories=4", "rollout.max_trajectories = 4: a prompt alone has algorithm.group_size = 8; valid:"),
    ("rollout.policy=", "rollout.policy = '': unknown policy (other published rules are files in bench/policies of"),
    ("rollout.policy=raises.py:Mine", "rollout.policy = 'raises.py:Mine': raises.py does not import"),
    ("rollout.policy=policy.py:Raises", "rollout.policy = 'policy.py:Raises': Raises cannot be made without arguments"),
    ("rollout.policy=policy.py:Asks", "rollout.policy = 'policy.py:Asks': Asks cannot be made without arguments"),
    ("rollout.policy=policy.py:Rasies", "rollout.policy = 'Rasies': policy.py has no such class with name, key,"),
    ("planner.interval_s=0", "planner.interval_s = 0: out of range; valid: a number > 0."),
    ("planner.margin=0.5", "planner.margin = 0.5: out of range; valid: a number >= 1."),
    ("planner.moves_per_hour=0", "planner.moves_per_hour = 0: out of range; valid: an integer >= 1."),
    ("planner.trace=nowhere", "planner.trace = 'nowhere': no such file; valid: a file, or a run directory."),
    ("planner.train_speed=nowhere", "planner.train_speed = 'nowhere': no such file; valid: a file, or a run"),
    ("planner.devices=nowhere.toml", "planner.devices = 'nowhere.toml': no such file; valid: a file, or a run"),
    ("planner.model=qwen3-14", "planner.model = 'qwen3-14': neither a known short name nor a folder or file with a"),
    ("planner.device=a80", "planner.device = 'a80': unknown device; valid: a100, a800, h100, h200, h800 (did you mean"),
    ("checkpoint.keep=0", "checkpoint.keep = 0: out of range; valid: an integer >= 1."),
    ("checkpoint.experience=1", "checkpoint.experience = 1: wrong type; valid: true or false."),
    ("deadlines.factor=1", "deadlines.factor = 1: out of range; valid: a number > 1."),
    ("deadlines.restarts=0", "deadlines.restarts = 0: out of range; valid: an integer >= 1."),
    ("simulated.mfu=2", "simulated.mfu = 2: out of range; valid: a number > 0 and <= 1."),
    ("simulated.sibling=2", "simulated.sibling = 2: out of range; valid: a number >= 0 and <= 1."),
    ("model.path=run.toml", "model.path = 'run.toml': no such folder; valid: a Hugging Face folder with config.json,"),
    ("model.path=loop", "model.path = 'loop': no such folder; valid: a Hugging Face folder with config.json,"),
    ("model.path=a\\u0000b", "model.path = 'a\\\\u0000b': no such folder; valid: a Hugging Face folder with"),
]
ON_GPU_NODES = [
    ("components.train.cpus=7", "components.train.cpus = 7: a node with 8 GPUs"),
    ("components.hybrid.mem=2G", "components.hybrid.mem = '2G': a hybrid node needs "),
    ("model.path=huge; components.train.mem=0", "train.tp = 1: training huge with TP1 PP1 needs "),
    ("planner.device=a80", "planner.device = 'a80': unknown device; valid: a100, a800, "),
    ("planner.devices=no.toml", "planner.devices = 'no.toml': no such file; valid: a file"),
    ("train.tp=16", "train.tp = 16: tensor ranks share a node, and it does not divide the 8 training processes of a"),
    ("rollout.tp=16", "rollout.tp = 16: rollout.tp * rollout.engines_per_node needs 16 GPUs and components.hybrid"),
    ("train.processes=9", "train.processes = 9: each of them needs a GPU, and components.train has 8 per node;"),
    ("components.split=auto; planner.trace=good.py", "planner.trace = 'good.py': of no known format; valid: libra,"),
    ("components.split=auto; planner.train_speed=garbage.json", "planner.train_speed = 'garbage.json': Input data was"),
    ("rollout.kv_host_gb_per_gpu=1e9", "components.hybrid.mem = '64G': a hybrid node needs 8,589,934,596 GB of host"),
    ("rollout.kv_cache_mb=200000", "rollout.tp = 1: an engine of model needs 213 GB a GPU for its weights, its"),
    ("components.train.gpu_type=A800", "components.train.gpu_type = 'A800': nodes of partition a800 have none; valid:"),
    ("rollout.block_size=24", "rollout.block_size = 24: vLLM's attention on GPUs has other blocks; valid: multiples"),
]
ON_SIMULATED_ENGINES = [
    ("simulated.device=a80", "simulated.device = 'a80': unknown device; valid: a100, a800, "),
    ("simulated.model=qwen3-14", "simulated.model = 'qwen3-14': neither a"),
    ("simulated.presets=['chess']", "simulated.presets = 'chess': unknown preset"),
    ("simulated.presets=[]", "simulated.presets = []: too short; valid: a list of"),
    ("simulated.trace=good.py", "of no known format; valid: libra, kv-cache-tester, mooncake, azure (name one with"),
    ("simulated.calibration=run.toml", "run.toml': Expected `object`, got `array`; valid: a JSON file of format"),
    ("simulated.device=", "simulated.device = '': components.train has no gpu_type either; valid: a device such as"),
    ("simulated.devices=garbage.toml", "simulated.devices = 'garbage.toml': Expected ']' at the end of a table"),
    ("simulated.devices=other.toml", "simulated.devices = 'other.toml': device 'x': Object contains unknown field"),
    ("simulated.devices=nowhere.toml", "simulated.devices = 'nowhere.toml': No such file or directory; valid: a TOML"),
    ("simulated.model=torn", "simulated.model = 'torn': cannot be read: Expecting property name enclosed in double"),
    ("simulated.calibration=nowhere", "simulated.calibration = 'nowhere': No such file or directory; valid: a JSON"),
    ("simulated.trace=nowhere", "simulated.trace = 'nowhere': cannot be read (No such file or directory)."),
    ("simulated.trace=empty.jsonl", "simulated.trace = 'empty.jsonl': the trace is empty."),
    ("train.pp=1000", "train.pp = 1000: 1 node x 8 training processes are 8, no whole number of replicas of 1000"),
    ("train.ep=2", "rollout.max_model_len = 4096: the longest prompt leaves no room for an answer; valid: an integer"),
    ("simulated.presets=['documents']", "rollout.max_model_len = 4096: the longest prompt leaves no room for an"),
    ("rollout.max_model_len=512", "rollout.max_model_len = 512: the longest prompt leaves no room for an answer;"),
]
MODELS: dict[str, Mapping[str, object]] = {
    "model": MODEL,
    "player": {**MODEL, "vocab_size": 300},
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
    "an unknown key of a component": (b"[components.train]\ngpu = 8\n", "reservation (did you mean 'gpus'?)."),
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
    "a space in a name": (b"[run]\nname = 'a b'\n", "run.name = 'a b': malformed; valid: a string matching"),
    "nothing": (b"", "model.path = '': not given; valid: a Hugging Face folder"),
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
    ("sweep run.toml --over run.seed=1,2 --name a/b", "--name = 'a/b': malformed; valid: at most 64 letters, digits"),
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
    ("simulate empty.jsonl --format mooncak", "format = 'mooncak': unknown format; valid: auto, libra,"),
    ("simulate empty.jsonl --limit 0", "limit = 0: out of range; valid: an integer >= 1."),
    ("simulate empty.jsonl --train-s inf", "--train-s = inf: not a finite number; valid: a number >= 0."),
    ("trace inspekt x", "No such command 'inspekt' (did you mean 'inspect'?)."),
    ("trace convert garbage.jsonl out.jsonl", "garbage.jsonl: of no known format; valid: libra, kv-cache-tester,"),
    ("trace generate x.jsonl --preset chess", "preset = 'chess': unknown preset; valid: r2e, search, math, documents."),
    ("trace generate x.jsonl --trajectories 7 --group 8", "trajectories = 7: not a whole number of groups; valid: a"),
    ("trace generate x.jsonl --sibling 2", "sibling = 2.0: out of range; valid: a number from 0 to 1."),
    ("trace generate x.jsonl --turns -1", "turns = -1.0: out of range; valid: a number >= 1."),
    ("trace generate x.jsonl --max-context 0", "max_context = 0: the longest prompt leaves no room for an answer;"),
    ("calibrate engine x --device a80", "--model, --run = '-, -': the source of the steps must be given once; valid:"),
    ("calibrate train", "Missing option '--model'."),
    ("make-policy new --seed -1", "--seed = '-1': input should be greater than or equal to 0."),
    ("init --partition nope", "No such option: --partition (Possible options: --print, --python)."),
    ("doctor --nodes 0", "--nodes = '0': input should be greater than or equal to 1."),
    ("cluster upp", "No such command 'upp' (did you mean 'up'?)."),
    ("report --share public", "--share = 'public': unknown value; valid: private, group, all."),
    ("list extra", "Got unexpected extra argument(s) (extra)."),
    ("cancel --nwo", "No such option: --nwo (Possible options: --now)."),
]
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
    "an exit at import": ("class Play", "raise SystemExit('no data')\nclass Play", "cannot be built (SystemExit: no"),
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
    for changed, refusal, sentence in REFUSED:
        yield Mistake(["check", "run.toml", *overrides(changed)], sentence, refusal=refusal)
    for command, sentence in PRIVATE:
        yield Mistake(command.split(), sentence, private=True)


def damaged(damage: Damage) -> Damage:
    """A model folder in ``case``, and what is done to it."""
    return lambda case: damage(write_model(case / "model"))
