"""What is found of the boxes of a node: which kinds work, what they cost, and one sentence for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.boxes import box_probe
from libra_hpc.boxes.box_probe import TriedBox, tried, tried_all
from libra_hpc.boxes.providers import OTHERS
from libra_hpc.config.job import EnvSection
from libra_hpc.config.load import with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.preflight import checked_run


def stub(folder: Path, script: str) -> EnvSection:
    """A program in the place of Apptainer."""
    program = folder / "apptainer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return EnvSection(box=[str(program), "exec", "image.sif"])


def test_every_kind_is_tried_and_what_works_has_its_costs(tmp_path: Path) -> None:
    found = [TriedBox(*one) for one in tried_all(stub(tmp_path, 'shift 2; exec "$@"'))]
    assert [(one.sandbox, one.why) for one in found] == [("bwrap", ""), ("apptainer", ""), ("none", "")]
    assert all(0.0 < one.command_s < box_probe.LIMIT_S > one.start_s > 0.0 for one in found)
    assert tried(EnvSection()).sandbox == "bwrap"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo FATAL: no image.sif >&2; exit 255", "The box did not start: FATAL: no image.sif"),
        ('shift 2; "$@"; echo lost; exit 3', "A command that does nothing ended with 3: lost."),
        ("sleep 60", "A command that does nothing took longer than 0.5 s."),
    ],
)
def test_a_box_that_does_not_work_has_a_sentence(
    tmp_path: Path, script: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_probe, "LIMIT_S", 0.5)
    assert tried(stub(tmp_path, script)) == TriedBox("apptainer", why)


def test_programs_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = EnvSection(box=["/nowhere/apptainer"])
    assert tried(nowhere).why.startswith("env.box = '/nowhere/apptainer': no such program on this node; valid:")
    monkeypatch.setattr("libra_hpc.boxes.providers.bwrap_program", lambda: None)
    monkeypatch.setenv("PATH", "/nowhere")
    bwrap, apptainer, none = tried_all(EnvSection())
    assert bwrap[:2] == ("bwrap", str(invalid("env.sandbox", "bwrap", "bubblewrap is not on this node", OTHERS)))
    assert apptainer[:2] == ("apptainer", "Apptainer is not on this node.")
    assert none[0] == "none"


def test_check_tries_the_box_of_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = with_values(RunConfig(), {"task.command": ["mini"], "task.data": "d.jsonl"})
    (box,) = checked_run._boxes(program)
    assert (box.sandbox, box.why) == ("bwrap", "")
    assert checked_run._boxes(RunConfig()) == []
