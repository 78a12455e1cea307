"""Habits of other people's sites, from public reports, played by small programs in the place of Slurm's commands.

Each row says where the habit was reported.  Whatever it is, a run can be checked, queued, looked at and cancelled, or
one sentence names what the site wants.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.task_trial import TaskTrial
from libra_hpc.process.agent_folders import removal
from libra_hpc.slurm.queue import command
from libra_hpc.slurm.queue.job_record import JobRecord, read_job, write_job
from tests.preflight.test_checks import write_model
from tests.slurm.scripts import program

from .conftest import RUN, Cli, one_line, write_status

QUEUE = '[ ! -e "$SITE/job" ] || echo "4711|PENDING|Priority|N/A|N/A|$(cat "$SITE/job")"'
QUEUED = (
    'for script; do :; done; option() { sed -n "s/#SBATCH --$1=//p" "$script" | head -n 1; };'
    ' echo "$(option job-name)|$(option comment)|$script" >"$SITE/job"; echo 4711'
)
TESTED = 'case "$*" in *--test-only*) echo "sbatch: Job 4711 to start at 2030-01-01T00:00:00" >&2; exit;; esac; '
NODES = 'for node in 1 2 3 4; do echo "a800*|up|1-00:00:00|idle|64|1000000|gpu:a800:8"; done'
CONFIG = "ClusterName = east\\nSchedulerType = sched/backfill\\nAccountingStorageType = accounting_storage/slurmdbd\\n"
FAILED = "error: Batch job submission failed"
UNKNOWN_ID = '{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }'
SHOWN = (
    'IFS="|" read -r name comment script <"$SITE/job"; printf "JobId=4711 JobName=$name JobState=PENDING'
    ' Reason=Priority Command=$script WorkDir=/ Comment=$comment  StdErr=/x\\n"'
)


def fails(*sentences: str) -> str:
    """A program that fails with these lines on stderr."""
    return "".join(f'echo "sbatch: {sentence}" >&2; ' for sentence in sentences) + "exit 1"


def refuses(pattern: str, words: str) -> str:
    """An sbatch that refuses scripts and options in which grep finds a pattern."""
    asked = '{ for script; do :; done; cat "$script"; echo "$*"; } 2>/dev/null'
    refused = f'{{ echo "sbatch: error: {words}" >&2; exit 1; }}'
    return f'{asked} | grep -qE "(SBATCH|only).* {pattern}" && {refused}; {TESTED}{QUEUED}'


def sinfo(nodes: str) -> str:
    return f'[ "$1" = --version ] && echo "slurm 23.11.4" && exit; {nodes}'


def scontrol(config: str = f'printf "{CONFIG}"') -> str:
    shown = f'[ -e "$SITE/job" ] || {UNKNOWN_ID}; {SHOWN}'
    return f'case "$*" in ping) echo "Slurmctld(primary) at h is UP";; "show config") {config};; *) {shown};; esac'


QUIET = {
    "sbatch": TESTED + QUEUED,
    "squeue": QUEUE,
    "scontrol": scontrol(),
    "sinfo": sinfo(NODES),
    "sacct": 'case "$*" in *JobID*) echo "4000|TIMEOUT|0:0|2026-11-20T08:18:37|old";; esac',
    "scancel": 'echo "$*" >"$SITE/cancelled"; rm "$SITE/job"',
    "srun": "exit 1",
}


class Site(NamedTuple):
    """What is different there."""

    programs: Mapping[str, str | None]
    """None: the site has no such command."""
    environ: Mapping[str, str] = {}
    refused: str = ""
    """What the one sentence of `submit` has; empty where the run is queued."""
    found: str = ""
    """What `doctor` has to say about it."""
    overrides: tuple[str, ...] = ()
    old: str = "time_limit"
    """State of an earlier run, whose job has left the queue."""
    cancelled: str = "4711\n"
    """What scancel gets."""


SITES: dict[str, Site] = {
    # https://github.com/nipy/nipype/pull/613, and the pages of TACC: a filter greets on stdout before and after the id.
    "a greeting": Site(
        {
            "sbatch": f'{TESTED}echo "---- Welcome to the Lonestar6 Supercomputer ----"; echo; echo "No reservation for'
            f' this job"; echo "--> Verifying valid ssh keys...OK"; echo "--> Quota: 12 of 10240 MB"; {QUEUED}; echo'
        }
    ),
    # https://github.com/jupyterhub/batchspawner/issues/148: Kerberos messages of a SPANK plugin come before the id.
    "a plugin that logs to stdout": Site(
        {"sbatch": f'{TESTED}echo "Sun Jul  7 03:08:22 2019 [INFO4] auks_api: cred added"; {QUEUED}'}
    ),
    # https://github.com/easybuilders/easybuild-framework/issues/4061 and
    # https://github.com/mlr-org/batchtools/issues/243: job_submit.lua talks on stderr, and the job is queued.
    "a submit plugin that talks": Site(
        {"sbatch": f'{TESTED}echo "sbatch: lua: This job will be charged to account 4712" >&2; {QUEUED}'}
    ),
    # https://github.com/sampsyo/clusterfutures/pull/24 and https://github.com/Parsl/parsl/pull/2636 (VSC): a module
    # sets SLURM_CLUSTERS, and every answer names the cluster.
    "several clusters": Site(
        {
            "sbatch": f'{TESTED}{QUEUED}";$SLURM_CLUSTERS"',
            "squeue": f'echo "CLUSTER: $SLURM_CLUSTERS"; {QUEUE}',
            "sinfo": sinfo(f'echo "CLUSTER: $SLURM_CLUSTERS"; {NODES}'),
        },
        environ={"SLURM_CLUSTERS": "slaking"},
        cancelled="-M slaking 4711\n",
    ),
    # https://slurm.schedmd.com/multi_cluster.html: of a job on another cluster the own one knows nothing.
    "another cluster": Site(
        {name: f'case "$*" in *"-M west "*) {QUIET[name]};; esac' for name in ("squeue", "scancel")}
        | {
            "sbatch": f'{TESTED}{QUEUED}";west"',
            "scontrol": f'case "$*" in "show job"*) {UNKNOWN_ID};; esac; {scontrol()}',
        },
        overrides=("slurm.extra=['--clusters=west']",),
        cancelled="-M west 4711\n",
    ),
    # https://github.com/dask/dask-jobqueue/issues/209: sbatch is a script that passes on no option but its own.
    "a wrapper that drops --parsable": Site({"sbatch": f'{TESTED}{QUEUED} | sed "s/^/Submitted batch job /"'}),
    # https://github.com/basnijholt/slurm-usage/issues/11: fields that nobody can read.
    "fields that cannot be read": Site(
        {
            "sinfo": sinfo('echo "a800*|up|n/a|idle|N/A|?|gpu:a800:8"; echo "a800*|up|1:0:0:0:0|idle|64|1000000|gpu"'),
            "scontrol": scontrol().replace("JobId=4711", "JobId=4711 Restarts=? HetJobOffset=N/A"),
        }
    ),
    # https://github.com/Parsl/parsl/pull/2293, https://github.com/llnl/maestrowf/pull/431 and
    # https://github.com/NordicHPC/slurm2sql/pull/19: login scripts set formats for people.
    "formats in the environment": Site(
        {
            "squeue": f'[ -z "$SQUEUE_FORMAT$SQUEUE_STATES$SLURM_TIME_FORMAT" ] || {{ echo "JOBID"; exit; }}; {QUEUE}',
            "sinfo": sinfo(f'[ -z "$SINFO_FORMAT" ] || {{ echo "a800* up"; exit; }}; {NODES}'),
            "sbatch": f'{TESTED}[ -z "$SBATCH_PARTITION" ] || exit 1; {QUEUED}',
        },
        environ={
            "SQUEUE_FORMAT": "%.18i %.9P",
            "SQUEUE_STATES": "RUNNING",
            "SLURM_TIME_FORMAT": "relative",
            "SINFO_FORMAT": "%P %a",
            "SBATCH_PARTITION": "debug",
        },
    ),
    # https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/38: no accounting database.
    "no accounting": Site(
        {
            "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1',
            "scontrol": scontrol(f'printf "{CONFIG}" | sed "s/accounting_storage.slurmdbd/(null)/"'),
        },
        found="none: Slurm drops a job 300 sec after its end",
        old="unknown",
    ),
    # https://github.com/snakemake/snakemake/issues/2411 and
    # https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/331: the database goes away for a while.
    "a database that is down": Site(
        {"sacct": 'echo "sacct: error: Problem talking to the database: No route to host" >&2; exit 1'}, old="unknown"
    ),
    # https://github.com/bio-phys/asyncmd/issues/14: users have no sacct.
    "no sacct": Site({"sacct": None}, old="unknown"),
    # https://github.com/lanl/PyBNF/issues/179: scontrol does not answer where the verbs run, squeue and sbatch do.
    "no scontrol": Site({"scontrol": None}, refused="scontrol is not on PATH", found="scontrol not on PATH"),
    # https://github.com/nextflow-io/nextflow/issues/312 and https://github.com/eth-cscs/firecrest-v2/pull/84: a project
    # has a hidden partition, which sinfo and squeue have with --all alone.
    "a hidden partition": Site(
        {
            "sinfo": sinfo(f'{NODES}; case "$*" in *--all*) {NODES}| sed "s/a800./ours/";; esac'),
            "squeue": f'case "$*" in *--all*) {QUEUE};; esac',
        },
        overrides=("components.hybrid.partition=ours", "components.train.partition=ours"),
    ),
    # https://github.com/basnijholt/slurm-usage/issues/11 and https://github.com/silx-kit/jupyterhub_moss/issues/104:
    # GPUs with sockets, two types on a node, and slices of MIG; a node that is planned, or drains.
    "GPUs with types, sockets and slices": Site(
        {
            "sinfo": sinfo(
                "for state in idle mixed- planned draining* idle~ allocated@; do"
                ' echo "a800*|up|infinite|$state|64+|1000000+|gpu:a800:8(S:0-1),gpu:1g.10gb:28(S:0-1),shard:8"; done'
            )
        },
        found="6 x 8 a800",
    ),
    # https://github.com/aidenlab/juicer/issues/106 and https://github.com/rwth-i6/sisyphus/issues/241: the submit
    # plugin wants a project, in words of its own.
    "a project is required": Site(
        {"sbatch": fails("error: lua: You must specify an account: sbatch -A PROJECT", f"{FAILED}: Unspecified error")},
        refused="slurm.account",
    ),
    # https://github.com/vatlab/sos/issues/598: a limit of the account, with a hint about time that is not meant.
    "a limit of the account": Site(
        {
            "sbatch": fails(
                "error: AssocMaxSubmitJobLimit",
                f"{FAILED}: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            )
        },
        refused="error: Slurm refuses the job of run 'quick': AssocMaxSubmitJobLimit; Batch job submission failed",
    ),
    # https://slurm.schedmd.com/resource_limits.html: the sentence names three limits, the line before it the one.
    "a limit of the time": Site(
        {"sbatch": fails("error: QOSMaxWallDurationPerJobLimit", f"{FAILED}: Job violates accounting/QOS policy")},
        refused="slurm.time_limit = ",
    ),
    # https://github.com/mlr-org/batchtools/issues/303: commands fail now and then, and work at once after that.
    "a configuration that is not there for a moment": Site(
        {
            "squeue": '[ -e "$SITE/failed" ] || { touch "$SITE/failed"; echo "squeue: fatal: Unable to process'
            f' configuration file" >&2; exit 1; }}; {QUEUE}'
        }
    ),
    # https://github.com/amq92/simple_slurm/issues/44 and https://github.com/xenon-middleware/xenon/issues/672: the user
    # has job arrays, with or without a range, and a heterogeneous job.
    "arrays in the queue": Site(
        {
            "squeue": "for id in 90_[5-100%2] 91_[60-89,91-94] 92_3 93+0 93+1; do"
            f' echo "$id|PENDING|JobArrayTaskLimit|N/A|2030-01-01T00:00:00|a||/x/a|b.sh"; done; {QUEUE}'
        }
    ),
    # https://github.com/dask/dask-jobqueue/issues/209 (NIH): sbatch is a script that passes the id on by itself, and
    # warns on stdout in the same breath.
    "a wrapper": Site({"sbatch": f'{TESTED}echo "sbatch: Setting --time to 4711 minutes"; {QUEUED}'}),
}


SHARES = {"sbatch": refuses("--mem=", "lua: memory is given by the CPU: use --mem-per-cpu")}
WHOLE = {
    "sbatch": refuses("--gres=gpu", "Batch job submission failed: Invalid generic resource (gres) specification"),
    "sinfo": sinfo(NODES.replace("gpu:a800:8", "(null)")),
}
ROUTED = {
    "sbatch": refuses("--partition", "lua: please do not name a partition"),
    "sinfo": sinfo(f'{NODES} | sed "s/[*]//"; echo "cpu|up|1-00:00:00|idle|64|1000000|(null)"'),
}
GPUS = tuple(f"components.{name}.gpus=4" for name in ("train", "hybrid", "rollout"))
SITES |= {
    # https://doc.dhpc.tudelft.nl/delftblue/Slurm-scheduler, and seven more that want or refuse a spelling of memory.
    "memory by the CPU": Site(SHARES, refused="slurm.mem_option = '--mem': Slurm refuses it (lua: memory"),
    "memory by the CPU, spelled": Site(
        SHARES, found="lua: memory is given by the CPU", overrides=("slurm.mem_option=--mem-per-cpu",)
    ),
    # https://docs.tacc.utexas.edu/hpc/frontera: no GRES, a job has its nodes alone.
    "whole nodes": Site(WHOLE, refused="slurm.gpu_option = '--gres=gpu:{type}:{gpus}': no node of", overrides=GPUS),
    "whole nodes, spelled": Site(WHOLE, overrides=(*GPUS, "slurm.gpu_option=none")),
    # https://docs.nersc.gov/jobs/policy: a plugin chooses the partition by constraint and QOS, and none is the default.
    "a partition is chosen": Site(ROUTED, overrides=(*GPUS, "components.train.constraint=gpu")),
    "a partition is named": Site(
        ROUTED,
        refused="components.train.partition = 'cpu': Slurm refuses",
        overrides=("components.train.partition=cpu",),
    ),
}


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run file on a site without habits."""
    monkeypatch.setattr(command, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(checked_run, "try_task", lambda config: nullcontext(lambda: TaskTrial([], [])))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SITE", str(tmp_path))
    monkeypatch.setenv("LIBRA_HPC_CLUSTER", str(tmp_path / "embedded"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "bin").mkdir()
    for name, text in QUIET.items():
        program(tmp_path / "bin" / name, text)
    return tmp_path


@pytest.mark.parametrize("habit", ["none", *SITES])
def test_a_run_is_queued_and_found_again_whatever_the_site_s_habits(
    habit: str, other: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SITES.get(habit, Site({}))
    for name, value in there.environ.items():
        monkeypatch.setenv(name, value)
    for name, text in there.programs.items():
        (other / "bin" / name).unlink() if text is None else program(other / "bin" / name, text)
    old = RunDir.create(other / "runs", "old")
    old.write_config(RunConfig().as_data())
    write_job(old, JobRecord("slurm", "4000", 1, 1.0))
    options = [word for one in there.overrides for word in ("-o", one)]
    findings = json.loads(cli("doctor", "--json").out)["findings"]
    assert there.found in " ".join(f"{finding['found']}" for finding in findings)
    checked, submitted = cli("check", "run.toml", *options), cli("submit", "run.toml", *options)
    if there.refused:
        assert there.refused in submitted.err
        assert submitted.code > 0
        assert not (other / "runs" / "quick-001").exists()
        return
    assert (checked.code, "run.toml is good" in checked.out) == (0, True), checked.err
    assert (submitted.code, submitted.out.split()[1]) == (0, "4711"), submitted.err
    listed = {row["run"]: row for row in json.loads(cli("list", "--json").out)}
    assert listed["old-001"]["state"] == there.old
    for facts in (json.loads(cli("status", "quick-001", "--json").out), listed["quick-001"]):
        assert (facts["job_id"], facts["state"], facts["reason"]) == ("4711", "pending", "other jobs come first")
    assert "job 4711 cancelled" in cli("cancel", "quick-001").out
    assert (other / "cancelled").read_text() == there.cancelled


@pytest.mark.parametrize("name", ["quick-001", "4711"])
def test_the_job_of_a_removed_run_is_cancelled_by_its_name_or_id(name: str, other: Path, cli: Cli) -> None:
    assert cli("submit", "run.toml").code == 0
    assert "no run of that name" in one_line(cli("cancel", "quick-002"))
    shutil.move(other / "runs" / "quick-001", other / "moved")
    assert cli("cancel", name).out == f"{name}: job 4711 cancelled; its folder had been removed\n"
    assert (other / "cancelled").read_text() == "4711\n"
    assert "no run of that name" in one_line(cli("cancel", name))


def test_a_sweep_is_cancelled_though_one_of_its_jobs_cannot_be_read(other: Path, cli: Cli) -> None:
    assert cli("sweep", "run.toml", "--over", "run.seed=0,1").code == 0
    damaged = other / "runs" / "quick-seed1-001" / "job.json"
    one, queued = read_job(RunDir(other / "runs" / "quick-seed0-001")), (other / "job").read_text()
    (other / "job").write_text(
        queued.replace("seed1", "seed0").replace(read_job(RunDir(damaged.parent)).mark, one.mark)
    )
    damaged.write_text("{")
    outcome = cli("cancel", "--sweep", "quick")
    assert f"quick-seed1-001 is not cancelled: {damaged} is damaged" in outcome.err
    assert outcome.out.startswith("quick-seed0-001: job 4711 cancelled")
    assert str(damaged) in one_line(cli("cancel", "quick-seed1-001"))


OTHER = "libra-hpc:0123456789abcdef"


@pytest.mark.parametrize(
    ("job", "own"),
    [
        ("quick|{mark}|/moved/quick-001/job.sbatch", True),
        ("quick|caf\\351 of a site,{mark}|", True),
        ("quick|charged to 7|{script}", True),
        ("slow|{mark}|{script}", False),
        (f"quick|{OTHER}|{{script}}", False),
        ("quick||/x/slow-001/job.sbatch", False),
        ("quick|(null)|(null)", False),
        ("wrap|(null)|", False),
    ],
)
def test_a_job_that_has_the_number_of_a_run_s_is_touched_where_name_and_mark_agree(
    job: str, own: bool, other: Path, cli: Cli
) -> None:
    """Ids begin again after a reset; times do not tell, as Slurm writes others when it queues a job again."""
    assert cli("submit", "run.toml").code == 0
    run = RunDir(other / "runs" / "quick-001")
    (other / "job").write_text(job.format(mark=read_job(run).mark, script=run.script) + "\n")
    (listed,) = json.loads(cli("list", "--json").out)
    state = json.loads(cli("status", "quick-001", "--json").out)["state"]
    assert listed["state"] == state == ("pending" if own else "unknown")
    assert ("job 4711 cancelled" in cli("cancel", "quick-001").out) == own
    assert (other / "cancelled").exists() == own


OPTIONS = ("-o", "components.train.nodes=2", "-o", "components.hybrid.nodes=0", "-o", "slurm.account=red")
LISTS = 'printf "%s\\n" "$@" >>"$SITE/queued"; echo 4712'
FREES, STAYS = "a small job a node frees the memory that its snapshots have on a1, a2; ", "snapshots may stay in memory"


@pytest.mark.parametrize(
    ("ended", "sbatch", "found", "jobs"),
    [
        ("", LISTS, FREES, 2),
        ('{"why":"time_limit","sentence":"","step":9}', LISTS, "", 0),
        ("", LISTS + fails("error: Job violates accounting/QOS policy"), STAYS, 1),
    ],
)
def test_the_memory_of_a_run_that_is_cancelled_while_it_was_queued_again_is_freed(
    ended: str, sbatch: str, found: str, jobs: int, other: Path, cli: Cli
) -> None:
    assert cli("submit", "run.toml", *OPTIONS).code == 0
    run, queued = RunDir(other / "runs" / "quick-001"), other / "queued"
    write_status(run, "cancelled", message="node a2 was lost")
    hosts = enumerate(("c1", "a2", "a1", "a3"))
    joined = [json.dumps({"kind": "agent_joined", "rank": rank, "host": node}) for rank, node in hosts]
    run.events.write_text("\n".join([*joined, ""]))
    run.ended(1).write_text(ended)
    program(other / "bin" / "sbatch", sbatch)
    outcome = cli("cancel", "quick-001")
    assert (outcome.code, "quick-001: job 4711 cancelled; " in outcome.out) == (0, True)
    assert found in outcome.out + outcome.err
    assert ("memory" in outcome.out + outcome.err) == bool(found)
    options = queued.read_text().splitlines() if queued.exists() else []
    assert [one for one in options if "nodelist" in one] == ["--nodelist=a1", "--nodelist=a2"][:jobs]
    assert options.count(f"--wrap={removal(run.path)}") == options.count("--account=red") == jobs
    assert not any("gpu" in one for one in options)
