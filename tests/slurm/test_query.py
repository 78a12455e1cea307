"""Slurm's text, as several releases write it, into our types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_hpc.slurm.queue.query import (
    JobState,
    Partition,
    answered_job,
    cluster_in,
    gpus_of,
    job_state,
    parse_accounts,
    parse_job,
    parse_partitions,
    parse_queue,
    slurm_seconds,
)

SINFO = """\
a800*|up|infinite|idle|64|1000000|gpu:a800:8(S:0-1)
a800*|up|infinite|mixed-|64+|512000+|gpu:a800:8(S:0-1),shard:4
a800*|up|infinite|idle*|128|512000|gpu:a800:4,gpu:h100:2
cpu|down|1-12:00:00|idle~|32|256000|(null)
"""
HET = (
    "JobId=41 HetJobId=41 HetJobOffset=0 JobName=x HetJobIdSet=41-42 JobState={0} Reason={1} Restarts=2 ExitCode={2} "
    "StartTime=2026-11-20T08:18:37 ReqNodeList=(null) ExcNodeList=(null) NodeList=cpu-0 TRES=cpu=1,mem=1G\n"
    "JobId=42 HetJobId=41 HetJobOffset=1 JobName=x HetJobIdSet=41-42 JobState=RUNNING Reason=None ExitCode=0:0 "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=a800-[0-1]\n"
)


def test_a_partition_has_an_entry_for_each_kind_of_its_nodes() -> None:
    a800 = Partition("a800", True, "up", 1, 1, 64, 1_000_000, {"a800": 8}, None)
    small = replace(a800, idle=0, memory_mb=512_000)
    mixed = Partition("a800", True, "up", 1, 0, 128, 512_000, {"a800": 4, "h100": 2}, None)
    cpu = Partition("cpu", False, "down", 1, 1, 32, 256_000, {}, 129_600)
    assert parse_partitions(SINFO) == [a800, small, mixed, cpu]


def test_what_cannot_be_read_is_not_known() -> None:
    (odd,) = parse_partitions("gpu|up|n/a|idle|N/A||gpu:a800:8(S:0-1)\n\nCLUSTER: west\n")
    assert (odd.cpus, odd.memory_mb, odd.max_seconds, odd.gpus) == (0, 0, None, {"a800": 8})
    info = parse_job("41", "JobId=41 HetJobOffset=N/A JobState=RUNNING Restarts=? ExitCode=x StartTime=Unknown")
    assert (info.state, info.restarts, info.start_time, info.components) == (JobState.RUNNING, 0, None, ())
    (job,) = parse_queue("41+N/A|ODD|?|n/a|??|a|(null)|b\n42|RUNNING|None|n/a|??|a|(null)|b\n").values()
    assert (job.job_id, job.start_time) == ("42", None)


@pytest.mark.parametrize(
    ("answer", "job"),
    [
        ("4242\n", ("4242", "")),
        ("4242;west\n", ("4242", "west")),
        ("Submitted batch job 4242\n", ("4242", "")),
        ("hello\nSubmitted batch job 4242 on cluster west\n", ("4242", "west")),
        ("12 jobs wait\n", ("", "")),
    ],
)
def test_what_sbatch_answers(answer: str, job: tuple[str, str]) -> None:
    assert answered_job(answer) == job


@pytest.mark.parametrize(
    ("options", "cluster"),
    [(["--clusters=west"], "west"), (["-Mwest"], "west"), (["--nice", "--cluster=a,b"], "a,b"), (["--nice"], "")],
)
def test_the_cluster_that_options_name(options: list[str], cluster: str) -> None:
    assert cluster_in(options) == cluster


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("01:30", 90),
        ("02:00:00", 7200),
        ("1-12", 129600),
        ("1-00:30", 88200),
        ("2-00:00:05", 172805),
        ("UNLIMITED", None),
    ],
)
def test_times(text: str, seconds: int | None) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "-5", "1 hour"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm time"):
        slurm_seconds(text)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a800:8(S:0-1)", {"a800": 8}),
        ("gpu:a100_3g.20gb:2,gpu:4,craynetwork:1", {"a100_3g.20gb": 2, "": 4}),
    ],
)
def test_gpus(text: str, gpus: dict[str, int]) -> None:
    assert gpus_of(text) == gpus


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("RUNNING,COMPLETING", JobState.RUNNING),
        ("OUT_OF_MEMORY", JobState.FAILED),
        ("BOOT_FAIL", JobState.NODE_FAIL),
        ("REQUEUE_HOLD", JobState.PENDING),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_states(text: str, state: JobState) -> None:
    assert job_state(text) is state


def test_running_heterogeneous_job() -> None:
    info = parse_job("41", HET.format("RUNNING", "None", "0:0"))
    assert (info.state, info.reason, info.exit_code, info.restarts) == (JobState.RUNNING, "", None, 2)
    assert [(c.offset, c.job_id, c.nodes) for c in info.components] == [(0, "41", "cpu-0"), (1, "42", "a800-[0-1]")]
    assert info.start_time is not None


def test_ended_job_has_an_exit_code() -> None:
    assert parse_job("41", HET.format("FAILED", "NonZeroExitCode", "3:0")).exit_code == 3
    assert parse_job("41", HET.format("FAILED", "NonZeroExitCode", "0:9")).exit_code == 137


def test_pending_job_has_no_start_and_a_reason() -> None:
    info = parse_job("41", HET.format("PENDING", "Resources", "0:0"))
    assert (info.state, info.reason, info.start_time) == (JobState.PENDING, "Resources", None)


def test_unknown_job_is_not_failed() -> None:
    assert parse_job("7", "").state is JobState.UNKNOWN
    assert parse_accounts("7", "8|COMPLETED|0:0|2026-11-20T08:18:37|a\n").state is JobState.UNKNOWN


def test_accounts_of_a_requeued_heterogeneous_job() -> None:
    text = (
        "12+0|PREEMPTED|0:0|2026-11-20T08:00:00|a\n12+1|PREEMPTED|0:0|2026-11-20T08:00:00|a\n"
        "12+0|COMPLETED|0:0|2026-11-20T08:10:00|a|b\n"
    )
    assert parse_accounts("12", text).state is JobState.COMPLETED


def test_one_question_gives_every_job_of_this_user() -> None:
    text = (
        "41+0|PENDING|Priority|2026-11-20T08:00:00|N/A|a|x|y,libra-hpc:1\x85|/runs/a-001/job.sbatch\n"
        "41+1|PENDING|Priority|N/A|N/A|a|libra-hpc:1\x85|/runs/a-001/job.sbatch\n"
        "40|RUNNING|None|2026-11-20T08:18:37|2026-11-21T08:18:37|b||/my runs|now/b-001/job.sbatch\n"
        "39|TIMEOUT|TimeLimit|2026-11-20T08:18:37|2026-11-20T09:18:37|wrap|(null)|(null)\n\n"
    )
    found = parse_queue(text)
    assert {name: (job.state.value, job.reason, job.script) for name, job in found.items()} == {
        "41": ("PENDING", "Priority", "/runs/a-001/job.sbatch"),
        "40": ("RUNNING", "", "/my runs|now/b-001/job.sbatch"),
        "39": ("TIMEOUT", "TimeLimit", ""),
    }
    assert found["41"].mark == "libra-hpc:1"
    assert [job.start_time is None for job in found.values()] == [True, False, False]
    assert [job.end_time is None for job in found.values()] == [True, True, False]


def test_a_job_s_script_and_comment_may_have_blanks() -> None:
    line = "JobId=41 JobName=a JobState=RUNNING Command=/my runs/a-001/job.sbatch WorkDir=/my runs"
    info = parse_job("41", f"{line} Comment=b c=d,libra-hpc:1  StdErr=/x")
    assert (info.script, info.name, info.mark) == ("/my runs/a-001/job.sbatch", "a", "libra-hpc:1")


@pytest.mark.parametrize(
    ("nodes", "lost"),
    [
        ("a800-[0-4]", False),
        ("a800-[1-4]", True),
        ("a800-[1-3,10],b7", True),
        ("b7,a800-[00-04]", True),
        ("a800-0", False),
    ],
)
def test_a_job_that_runs_without_the_node_of_its_script_is_known_by_its_nodes(nodes: str, lost: bool) -> None:
    line = f"JobId=41 JobName=t JobState=RUNNING Reason=None NodeList={nodes} BatchHost=a800-0 NumNodes=5"
    assert parse_job("41", line).script_lost is lost
    assert not parse_job("41", line.replace("RUNNING", "PENDING")).script_lost
