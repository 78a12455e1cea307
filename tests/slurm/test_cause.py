"""Why a run failed, from the logs that the parts of a job leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.slurm.queue.cause import LONGEST, telling_line, with_cause

SLURM = "srun: error: a800-0: task 1: Exited with exit code 1\nsrun: Terminating StepId=12.0\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\nValueError: no model\n'
CASES = {
    "python": ({"slurm.out": SLURM, "agent-1.log": TRACEBACK}, "agent-1: ValueError: no model"),
    "module": (
        {"agent-0.log": "/usr/bin/python3: No module named libra_hpc\n"},
        "agent-0: /usr/bin/python3: No module named libra_hpc",
    ),
    "memory": (
        {
            "slurm.out": "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\nsrun: error: task 1: Killed\n",
            "agent-1.log": TRACEBACK,
        },
        "slurm: Detected 1 oom_kill event in StepId=12.0.",
    ),
    "agent": (
        {"agent-0.log": "2026-11-20 08:00:00,123 ERROR libra_hpc.agent: MPI world has 1 ranks\nbye\n"},
        "agent-0: MPI world has 1 ranks",
    ),
    "interpreter": (
        {"slurm.out": "bash: line 1: /x/python: No such file or directory\n" + SLURM},
        "slurm: bash: line 1: /x/python: No such file or directory",
    ),
    "node": (
        {"slurm.out": "slurmstepd: error: *** JOB 12 ON a CANCELLED AT 2026-11-20 DUE TO NODE FAILURE ***\n"},
        "slurm: *** JOB 12 ON a CANCELLED AT 2026-11-20 DUE TO NODE FAILURE ***",
    ),
    "validation": (
        {
            "agent-1.log": "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, no such model [type=value_error, input_value=ArgsKwargs((),), input_type=ArgsKwargs]\n"
            "    For further information visit https://errors.pydantic.dev/2.12/v/value_error\n"
        },
        "agent-1: Value error, no such model",
    ),
    "plugin": ({"slurm.out": "srun: error: Couldn't find the plugin\n" + SLURM}, "slurm: Couldn't find the plugin"),
    "killed": (
        {
            "slurm.out": "srun: error: cpu-0: task 0: Killed\n" + SLURM,
            "agent-1.log": "2026-11-20 08:00:00,123 ERROR libra_hpc.agent: the coordinator's process ended: leaving\n",
        },
        "slurm: cpu-0: task 0: Killed",
    ),
    "nothing": ({"slurm.out": SLURM, "agent-0.log": "hello\n"}, ""),
    "own words": ({"slurm.out": "the run failed: node 1: CUDAError: No such file or directory\n"}, ""),
    "no logs": ({}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_in_the_logs(case: str, tmp_path: Path) -> None:
    files, cause = CASES[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert with_cause("exit code 1", tmp_path) == (f"exit code 1; {cause}" if cause else "exit code 1")
    assert with_cause("", tmp_path) == cause


def test_a_sentence_that_has_the_cause_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "agent-0.log").write_text(TRACEBACK)
    for sentence in ("node 1: gradients were not finite in 3 steps in a row", "node 0: ValueError: no model; see x"):
        assert with_cause(sentence, tmp_path) == sentence


def test_the_log_that_a_sentence_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "agent-0.log").write_text(TRACEBACK)
    named = tmp_path / "r3.0.log"
    named.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    sentence = f"engine r3.0 ended 3 times before it was ready; see {named}"
    assert with_cause(sentence, tmp_path) == f"{sentence}; r3.0: torch.OutOfMemoryError: CUDA out of memory"


def test_a_long_line_is_cut() -> None:
    assert len(telling_line([("a", ["KeyError: " + 1000 * "x"])])) < LONGEST + 10
