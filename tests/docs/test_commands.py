"""Commands of the pages above which no marker stands: each runs by night, or `ELSEWHERE` has the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .blocks import BLOCK, PAGES, make_folder, output

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PROGRAM = re.compile(r"(\S*/)?(libra-hpc|make|python3?|srun|scp|ss|curl|pip|apptainer|bash|tail|grep|ls|du) ")
ELSEWHERE = {
    r"make |\S*python3? (envs|-m (bench|venv))|bash|apptainer|\S*pip|libra-hpc env ": "builds, installs or measures",
    r"srun|scp|ss |curl|\S*libra-hpc (init|doctor|lend|join)": "needs a site, another cluster or a running job",
    r"\S*libra-hpc (cluster|make-policy|cancel|calibrate|eval|sweep)": "tests/cluster has it, in jobs",
    r"libra-hpc (submit --resume|show|plan run.toml -o planner.train)": "tests/cli has it, with such runs",
    r"\.venv/bin/libra-hpc submit examples": "plans for minutes: tests/cluster/test_two_environments",
    r"libra-hpc (check|submit) examples/quickstart.toml": "needs its policy: tests/cluster",
}
"""Beginnings of commands that are not run here, and why."""
STAND_INS = {
    r"^\.venv/bin/|  +#.*$| --(wait|watch|follow)\b| \[.*": "",
    r"\bsubmit\b": "submit --dry-run",
    r"(?<=-C runs )RUN": "quickstart-001",
    r"\$RUN\b|\bRUN\.toml\b": "run.toml",
    r"\bRUN\b": "runs/quickstart-001",
    r"(?<=compare )\S+": "runs/earlier-001",
    "entropy": "reward",
    r"16\.\.128": "16..24",
    r"\$?\bMODEL\b": "Qwen3-14B",
    r"work\.jsonl\.gz": "runs/earlier-001/trajectories.jsonl",
}
"""What stands in for parts of a command, in this order: a job is checked and not queued."""
SET_UP = f"""
cp -r runs/quickstart-001 runs/earlier-001
cd runs/quickstart-001; mkdir -p logs/attempt-1; echo "{{}}" | tee decisions.jsonl > logs/attempt-1/rank0.log; cd ../..
sed '/^```toml/,/^```/!d; /^```/d; s|/shared/models/Qwen3-4B|Qwen3-14B|; s|{{ tp = 2|{{ max_model_len = 16384, tp = 2|
    ' {PAGES[0]} > run.toml
"""
"""A second run, what a synthetic run lacks, and README's run file with room for simulated trajectories."""


def commands() -> list[str]:
    """All commands of the pages, as they stand there."""
    fences = [fence for page in PAGES for fence in FENCE.findall(BLOCK.sub("", page.read_text()))]
    shells = [text.replace("\\\n", "") for language, text in fences if language in ("", "sh", "console")]
    lines = [line.removeprefix("$ ") for line in "".join(shells).splitlines()]
    return [line for line in dict.fromkeys(lines) if PROGRAM.match(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    make_folder(made)
    output(SET_UP, made)
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("command", [one for one in commands() if not any(re.match(start, one) for start in ELSEWHERE)])
def test_a_command_of_a_page_runs(command: str, folder: Path) -> None:
    for part, stand_in in STAND_INS.items():
        command = re.sub(part, stand_in, command)
    assert output(f"{{ {command}; }} > printed 2>&1 || tail printed", folder).strip() == ""


def test_every_exception_is_of_a_command() -> None:
    assert [start for start in ELSEWHERE if not any(re.match(start, command) for command in commands())] == []
