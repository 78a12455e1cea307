"""Agents inside an image name the difference to the code that submitted them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner.rank_links import RankLinks
from libra_hpc.process.code_stamp import STAMP, code_stamp, other_code
from libra_hpc.process.owner_link import LINK
from libra_hpc.slurm.queue.command import clean_environment


def test_a_stamp_changes_with_any_source_and_with_nothing_else(tmp_path: Path) -> None:
    def stamp(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        code_stamp.cache_clear()
        return code_stamp(tmp_path)

    first = stamp("a.py", "x = 1")
    assert first.startswith("0.1.0+")
    assert stamp("notes.txt", "") == first
    assert len({first, stamp("a.py", "x = 2"), stamp("b.py", "")}) == 3


def test_an_agent_of_other_code_ends_with_that_cause(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run-001")
    run.logs(1).mkdir(parents=True)
    command = [sys.executable, "-m", "libra_hpc.agent.agent", "--run", str(run.path), "--attempt", "1"]
    owner = RankLinks(1)
    theirs, link = owner.born(0)
    environment = {**clean_environment(os.environ), STAMP: "0.0.9+abc", LINK: link}
    with theirs, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as agent:
        while agent.poll() is None:
            owner.wait(0.1)
    owner.close()
    assert agent.returncode != 0
    assert "and the run was submitted with 0.0.9+abc: " in run.read_json(run.ended(1))["sentence"]


def test_an_image_of_other_code_is_named_with_both_versions() -> None:
    assert other_code({}) == "", "no container"
    assert other_code({STAMP: code_stamp()}) == ""
    sentence = other_code({STAMP: "0.0.9+abc"})
    assert f"compute.image has libra-hpc {code_stamp()}, and the run was submitted with 0.0.9+abc: " in sentence
