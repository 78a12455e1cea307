"""Slurm commands that fail, played by small scripts on a private PATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.slurm.queue import command
from libra_hpc.slurm.queue.query import JobState, job, job_script
from tests.slurm.scripts import program


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "FIRST_PAUSE_S", 0.01)
    return tmp_path


def install(folder: Path, name: str, body: str) -> Mapping[str, str]:
    program(folder / name, body)
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}


def failing(sentence: str, tries: int = 99) -> str:
    """A program that fails with a sentence, but for its last try."""
    return f'echo x >>"$HOME/calls"; [ $(wc -l <"$HOME/calls") -ge {tries} ] && echo done && exit; {sentence}; exit 1'


def test_a_transient_failure_is_retried(fake: Path) -> None:
    env = install(fake, "sinfo", failing('echo "sinfo: error: Socket timed out" >&2', 3))
    assert command.call(["sinfo"], env) == "done\n"


AWAY = 'echo "slurm_load_partitions: Unable to contact slurm controller (connect failure)" >&2'
REFUSES = "for why in a b a; do echo sbatch: error: $why >&2; done"


@pytest.mark.parametrize(
    ("sentence", "error", "match", "tries"),
    [
        (AWAY, SlurmUnreachable, r"Unable to contact .*Slurm module.*libra-hpc cluster up", command.TRIES),
        (REFUSES, command.SlurmRefused, r"^a; b$", 1),
    ],
)
def test_a_controller_that_stays_away_is_asked_again_and_a_refusal_is_not(
    fake: Path, sentence: str, error: type[Exception], match: str, tries: int
) -> None:
    with pytest.raises(error, match=match):
        command.call(["sbatch"], install(fake, "sbatch", failing(sentence)))
    assert (fake / "calls").read_text().count("x") == tries


@pytest.mark.parametrize(
    ("sacct", "state"),
    [
        ('echo "Slurm accounting storage is disabled" >&2; exit 1', JobState.UNKNOWN),
        ('echo "7|TIMEOUT|0:15|2026-11-20T08:18:37|a"', JobState.TIMEOUT),
    ],
)
def test_a_job_that_the_controller_has_no_record_of_is_read_from_the_accounts(
    fake: Path, sacct: str, state: JobState
) -> None:
    env = install(fake, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    install(fake, "sacct", sacct)
    assert job(env, "7").state is state


def test_a_missing_command(fake: Path) -> None:
    with pytest.raises(SlurmUnreachable, match="sinfo was not found"):
        command.call(["sinfo"], {"PATH": str(fake)})


def test_site_slurm_is_preferred(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = install(
        fake, "scontrol", 'echo "Slurmctld(primary) at head is DOWN"; echo "Slurmctld(backup) at head2 is UP"'
    )
    others = {"SLURM_JOB_ID": "5", "SQUEUE_FORMAT": "%i", "SBATCH_PARTITION": "x", "PMI_RANK": "0"}
    for name, value in {"PATH": env["PATH"], "SLURM_CONF": "/etc/x.conf", **others}.items():
        monkeypatch.setenv(name, value)
    found = command.slurm_environment(fake / "none")
    assert found["SLURM_CONF"] == "/etc/x.conf"
    assert not others.keys() & found.keys()


def test_a_dead_controller_of_slurm_conf_is_named_and_no_other_slurm_is_used(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = install(fake, "scontrol", 'echo "Slurmctld(primary) at head is DOWN"; exit 1')
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setenv("SLURM_CONF", "/etc/x.conf")
    monkeypatch.setattr(command, "embedded_environment", lambda *_: pytest.fail("the embedded Slurm was looked for"))
    with pytest.raises(SlurmUnreachable, match=r"SLURM_CONF = '/etc/x\.conf': no Slurm controller answers there"):
        command.slurm_environment(fake / "none")


def test_the_script_of_a_job_is_read_from_the_controller_or_from_the_accounts(fake: Path) -> None:
    env = install(fake, "scontrol", 'echo "JobId=7 JobState=RUNNING Command=/r/a-001/job.sbatch WorkDir=/r"')
    assert job_script(env, "7") == Path("/r/a-001/job.sbatch")
    install(fake, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    install(fake, "sacct", 'echo "/usr/bin/sbatch --parsable /r/b-001/job.sbatch"')
    assert job_script(env, "7") == Path("/r/b-001/job.sbatch")
    install(fake, "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert job_script(env, "7") is None


def test_no_slurm_at_all_names_both_ways_out(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = install(fake, "scontrol", 'echo "Slurmctld(primary) at head is DOWN"; exit 1')
    monkeypatch.setenv("PATH", env["PATH"])
    with pytest.raises(SlurmUnreachable, match=r"Slurm module.*libra-hpc cluster up"):
        command.slurm_environment(fake / "none")
