"""The set-up part of a batch script, executed by bash: what fails is named, and nothing passes for completed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.agent_folders import COMPILED
from libra_hpc.slurm.queue.cause import SET_UP_ENDED, with_cause
from libra_hpc.slurm.writer import expanded, set_up_lines, shell_text
from tests.slurm.scripts import executed

SRUN = """env >"$RUN/environment"
echo '{"why": "completed", "sentence": "step 9 is saved", "step": 9}' >"$RUN/logs/attempt-1/ended.json"
"""
MODULE = """module() {
  inner() { [ "$1" != absent ]; }
  for name in $MODULES_OF_NOBODY; do echo "$name"; done
  inner "$2"
}
"""
"""As module functions are: inner commands, and variables that are not set."""


def start(folder: Path, compute: dict[str, Any], **environ: str) -> tuple[RunDir, subprocess.CompletedProcess[str]]:
    """Execute the script of a run with an ``srun`` that completes it."""
    (folder / "module.sh").write_text(MODULE)
    return executed(folder, {"compute": compute}, {"srun": SRUN}, HERE=str(folder), **environ)


def environment(folder: Path, compute: dict[str, Any], **environ: str) -> list[str]:
    """The variables of such a run's ranks, ``NAME=value``."""
    _, done = start(folder, compute, **environ)
    assert done.returncode == 0, done.stderr
    return (folder / "a run" / "environment").read_text().splitlines()


@pytest.mark.parametrize(
    ("setup", "command", "code"),
    [
        (["true", "exit 0", "true"], "exit 0", 0),
        (["exit 3"], "exit 3", 3),
        (["module load cuda"], "module load cuda", 127),
        (['. "$HERE/module.sh"', "module load cuda", "module load absent"], "module load absent", 1),
        (["cd /nowhere", "true"], "cd /nowhere", 1),
        (["if true; then", "  false", "fi"], "false", 1),
        (["false | cat"], "cat", 1),
        (["A=$(false)"], "A=$(false)", 1),
        (["set -u", "echo $NOT_SET"], "echo $NOT_SET", 1),
    ],
)
def test_the_first_command_that_fails_ends_the_start_and_is_the_cause(
    setup: list[str], command: str, code: int, tmp_path: Path
) -> None:
    run, done = start(tmp_path, {"setup": setup})
    cause = f"{SET_UP_ENDED} '{command}' with exit code {code} (compute.setup, compute.env)"
    assert done.returncode == 1
    assert cause in done.stderr.splitlines()
    result = run.read_json(run.result)
    assert (result["state"], result["message"]) == ("failed", cause)
    assert not (run.path / "environment").exists()


def test_without_an_interpreter_slurms_output_still_has_the_cause(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = set_up_lines(validate({"compute": {"setup": ["cd /nowhere"]}}), {}, "exec /no/python")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    (logs / "slurm.out").write_text(done.stderr)
    assert done.returncode == 127
    assert f"{SET_UP_ENDED} 'cd /nowhere' with exit code 1" in with_cause("exit code 127", logs)


def test_what_sites_do_is_no_failure(tmp_path: Path) -> None:
    known = ['. "$HERE/module.sh"', "module load cuda", "false || true", "if false; then", "  exit 1", "fi"]
    assert "A=[]" in environment(tmp_path, {"setup": [*known, 'export A="[$NOT_SET]"']})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_ends_the_set_up_is_no_fault_of_its_lines(number: signal.Signals, tmp_path: Path) -> None:
    # One process touches and sleeps: a signal between two commands would find no command to end.
    wait = f"sh -c 'touch {tmp_path}/there; exec sleep 60'"
    lines = set_up_lines(validate({"compute": {"setup": [wait]}}), {}, f"touch {tmp_path}/blamed")
    process = subprocess.Popen(["bash", "-c", "\n".join(lines)], start_new_session=True)
    while not (tmp_path / "there").exists():
        time.sleep(0.02)
    # Slurm signals the processes of the batch step, as a signal to the group does.
    os.killpg(process.pid, number)
    assert process.wait(30) == 128 + number
    assert not (tmp_path / "blamed").exists()


def test_variables_in_values_are_those_of_the_node(tmp_path: Path) -> None:
    env = {"HF_HOME": "/lustre/$USER/hf", "PATH_2": "${HF_HOME}:$TMPDIR", "PRICE": '5$ "`$$x`" \\ 100% $(id)'}
    compute = {"env": env, "local_dir": "/scratch/$USER/$SLURM_JOB_ID", "setup": ["SLURM_JOB_ID=17"]}
    found = dict(line.split("=", 1) for line in environment(tmp_path, compute, USER="ada") if "=" in line)
    assert found["HF_HOME"] == "/lustre/ada/hf"
    assert found["PATH_2"] == "/lustre/ada/hf:/scratch/ada/17"
    assert found["PRICE"] == '5$ "`$x`" \\ 100% $(id)'


def test_caches_of_compilers_are_on_the_nodes_disk_unless_they_have_a_place(tmp_path: Path) -> None:
    compute = {"env": {"VLLM_CACHE_ROOT": "/lustre/vllm"}, "local_dir": "/scratch/$USER"}
    found = environment(tmp_path, compute, USER="ada", CUDA_CACHE_PATH="/home/cuda")
    inductor, triton = (f"/scratch/ada/cache-{os.getuid()}/{name}" for name in ("inductor", "triton"))
    wanted = {f"TORCHINDUCTOR_CACHE_DIR={inductor}", f"TRITON_CACHE_DIR={triton}"}
    assert {*wanted, "VLLM_CACHE_ROOT=/lustre/vllm", "CUDA_CACHE_PATH=/home/cuda"} <= set(found)


def test_caches_that_outlive_the_job_are_apart_from_temporary_files(tmp_path: Path) -> None:
    compute = {"cache_dir": "/lustre/$USER/c", "local_dir": "/scratch/$SLURM_JOB_ID", "setup": ["SLURM_JOB_ID=17"]}
    found = environment(tmp_path, compute, USER="ada", CUDA_CACHE_PATH="/home/cuda")
    wanted = {f"{COMPILED}=/lustre/ada/c", "VLLM_CACHE_ROOT=/lustre/ada/c/vllm", "CUDA_CACHE_PATH=/home/cuda"}
    assert {*wanted, "TMPDIR=/scratch/17"} <= set(found)


def test_a_login_shell_reads_the_profile_of_the_site(tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("module() { echo module $1; }\n")
    config = {"slurm": {"login_shell": True}, "compute": {"setup": ['module "$1"']}}
    script = tmp_path / "script"
    script.write_text("\n".join(set_up_lines(validate(config), {})))
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", script, "load"], env=home, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "module load\n"), done.stderr


def test_a_variable_that_is_not_set_ends_the_start(tmp_path: Path) -> None:
    run, done = start(tmp_path, {"env": {"HF_HOME": "/lustre/$NOBODY/hf"}})
    assert done.returncode == 1
    assert "NOBODY: unbound variable" in done.stderr
    assert 'export HF_HOME="/lustre/${NOBODY}/hf"' in run.read_json(run.result)["message"]


def test_a_start_without_a_script_expands_alike() -> None:
    env = {"HF_HOME": "/lustre/$USER/hf", "NEXT": "${HF_HOME}/x", "PRICE": "5$ $$x $(id)"}
    wanted = {"HF_HOME": "/lustre/ada/hf", "NEXT": "/lustre/ada/hf/x", "PRICE": "5$ $x $(id)"}
    assert expanded(env, {"USER": "ada", "OTHER": "x"}) == wanted
    with pytest.raises(UserError, match=r"compute\.env\.A = '\$NOBODY': \$NOBODY is not set here"):
        expanded({"A": "$NOBODY"}, {})
    assert shell_text("it's") == "'it'\"'\"'s'"
